"""Whatever ends a command: its exit code, and one line."""

import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from ffmem.cli.ending import LONGEST, Stop, ended, kept
from ffmem.errors import FfmemError

BOTH = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)


def end(capsys, run):
    """Exit code and standard error."""
    with pytest.raises(SystemExit) as exit:
        ended(run)
    return exit.value.code, capsys.readouterr().err


def send(number):
    os.kill(os.getpid(), number)


def throw(error):
    raise error


@BOTH
def test_a_signal_interrupts_cleans_up_and_ends_with_one_line(capsys, tmp_path, number, code):
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]

    def run():
        try:
            (tmp_path / "half.tmp").touch()
            send(number)
            time.sleep(10)
        finally:
            (tmp_path / "half.tmp").unlink()

    assert end(capsys, run) == (code, "ffmem: stopped\n")
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)] == handlers


@BOTH
def test_a_second_signal_does_not_cut_short_what_is_cleaned_up(capsys, number, code):
    cleaned = []

    def generated():
        try:
            yield send(number)
        finally:
            for other in (signal.SIGTERM, signal.SIGINT):
                with suppress(ValueError):
                    send(other)
                    raise ValueError
                send(other)
            time.sleep(0.3)  # through which the first one comes again and again
            cleaned.append(1)

    assert end(capsys, lambda: list(generated())) == (code, "ffmem: stopped\n")
    assert cleaned == [1]


def test_a_generator_that_an_interrupt_leaves_is_closed_undisturbed(capfd):
    cleaned = []

    def generated():
        try:
            yield 1
        finally:
            time.sleep(0.3)  # through which the signal comes again
            cleaned.append(1)

    def run():
        for _ in generated():
            send(signal.SIGTERM)

    assert end(capfd, run) == (143, "ffmem: stopped\n")
    assert cleaned == [1]


def test_an_interrupt_that_is_lost_where_nothing_can_be_raised_is_not_told_and_comes_again(capfd):
    class Left:
        def __del__(self):
            send(signal.SIGINT)

    hook = sys.unraisablehook

    def run():
        Left()
        time.sleep(10)

    assert end(capfd, run) == (130, "ffmem: stopped\n")
    assert sys.unraisablehook is hook


def test_an_interrupt_that_is_lost_comes_again(capsys):
    def run():
        with suppress(BaseException):  # as some modules do with what they could not import
            send(signal.SIGTERM)
        for _ in range(500):
            time.sleep(0.01)

    assert end(capsys, run) == (143, "ffmem: stopped\n")


def test_an_import_is_not_cut_short_where_it_holds_the_lock_of_all_imports(capsys):
    """Other threads would wait for that lock for ever, and whoever ends waits for those threads."""
    went_on: list[float] = []
    names = {"kill": os.kill, "own": os.getpid(), "number": signal.SIGTERM, "on": went_on.append, "now": time.monotonic}
    code = "def locked():\n    kill(own, number)\n    on(now())\n"
    exec(compile(code, "<frozen importlib._bootstrap>", "exec"), names)

    def run():
        names["locked"]()
        time.sleep(10)

    began = time.monotonic()
    assert end(capsys, run) == (143, "ffmem: stopped\n")
    assert len(went_on) == 1
    assert time.monotonic() - began < 5


def test_a_library_that_puts_the_default_handler_back_does_not_end_the_program_on_the_spot(capsys):
    cleaned = []

    def run():
        try:
            send(signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as some do that were asked to shut down
            time.sleep(0.3)
            cleaned.append(True)
            raise

    assert end(capsys, run) == (143, "ffmem: stopped\n")
    assert cleaned


def test_whoever_holds_a_signal_back_holds_back_the_one_that_comes_again(capsys):
    from ffmem.training.state import uninterrupted

    done = []

    def run():
        with suppress(BaseException):
            send(signal.SIGINT)
        with uninterrupted():
            time.sleep(0.3)
            done.append(1)
        done.append(2)

    assert end(capsys, run) == (130, "ffmem: stopped\n")
    assert done == [1]


def test_an_error_in_the_place_of_an_interrupt_is_a_stop_and_one_of_what_was_to_be_kept_is_told(capsys):
    def replaced():
        try:
            send(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("a part of a library") from None

    def full():
        try:
            send(signal.SIGINT)
        finally:
            raise FfmemError("state: cannot be written")

    assert end(capsys, replaced) == (130, "ffmem: stopped\n")
    assert end(capsys, full) == (130, "ffmem: stopped; error: state: cannot be written\n")


def test_what_is_kept_is_told(capsys):
    def run():
        with kept("all shards are kept"):
            send(signal.SIGTERM)

    line = "ffmem: stopped; all shards are kept. Give the same command again to continue.\n"
    assert end(capsys, run) == (143, line)


def test_a_signal_that_is_ignored_stays_so(capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert end(capsys, lambda: send(signal.SIGINT)) == (0, "")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert end(capsys, lambda: send(signal.SIGTERM)) == (143, "ffmem: stopped\n")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_runs_a_command_without_signals(capsys):
    codes = []

    def run():
        with pytest.raises(SystemExit) as exit:
            ended(lambda: throw(FfmemError("as told")))
        codes.append(exit.value.code)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert codes == [1]
    assert capsys.readouterr().err == "ffmem: error: as told\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FfmemError("expected this"), "ffmem: error: expected this"),
        (FfmemError("a\x1b[2J\u202eb\nc\udc80"), "ffmem: error: a␛[2J\\u202eb⏎c\\udc80"),
        (OSError(28, "No space left on device", "/x"), "ffmem: error: /x: No space left on device"),
        (MemoryError(), "ffmem: error: out of memory"),
        (
            ZeroDivisionError("by\n  zero"),
            "ffmem: error: unexpected ZeroDivisionError: by zero; "
            "please report this, FFMEM_DEBUG=1 shows where it comes from",
        ),
        (BrokenPipeError(32, "Broken pipe", "/x"), "ffmem: error: /x: Broken pipe"),
    ],
)
def test_an_error_is_one_line(capfd, monkeypatch, error, line):
    monkeypatch.delenv("FFMEM_DEBUG", raising=False)
    assert end(capfd, lambda: throw(error)) == (1, f"{line}\n")


def test_a_long_error_keeps_its_beginning_and_its_end(capsys):
    code, err = end(capsys, lambda: throw(FfmemError(f"expected {'9' * 5000} in this run")))
    assert code == 1
    assert len(err) <= LONGEST
    assert err.startswith("ffmem: error: expected 999")
    assert err.endswith("999 in this run\n")


def test_where_an_error_comes_from_is_shown_if_that_is_asked_for(capsys, monkeypatch):
    monkeypatch.setenv("FFMEM_DEBUG", "1")
    code, err = end(capsys, lambda: throw(ZeroDivisionError()))
    assert code == 1
    assert "in throw" in err
    assert "error: unexpected ZeroDivisionError" in err.splitlines()[-1]


def test_a_stop_is_an_interrupt_for_whoever_catches_those():
    assert issubclass(Stop, KeyboardInterrupt)


PROGRAM = "import sys; from ffmem.cli.ending import ended; ended(lambda: {}, for_good=True)"


def spawned(code, **others):
    program = [sys.executable, "-c", PROGRAM.format(code)]
    return subprocess.run(program, capture_output=True, text=True, check=False, **others)


def test_an_interrupt_that_passes_through_exec_does_not_end_python_by_the_signal():
    done = spawned("exec('import os; os.kill(os.getpid(), 2)')")
    assert (done.returncode, done.stderr) == (130, "ffmem: stopped\n")


def test_what_the_terminal_s_encoding_lacks_is_written_out():
    done = spawned("print('é東\\udc80')", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xe9\\u6771\\udc80\n", "")


def test_a_reader_that_has_seen_enough_is_quiet_and_a_full_disk_is_told():
    program = f'{sys.executable} -c "{PROGRAM}" | true'
    for code in ("print('a')", "[print('a' * 999) for _ in range(999)]"):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", program.format(f"(__import__('time').sleep(0.2), {code})")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM.format("print('a')")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=buffered)
    assert (done.returncode, done.stderr) == (1, "ffmem: error: standard output: No space left on device\n")


@BOTH
def test_the_program_can_be_stopped_while_it_is_imported(tmp_path, number, code):
    """Torch takes seconds: this one takes for ever, and loses a first interrupt."""
    (tmp_path / "torch.py").write_text(
        "import time\ntry:\n    print('importing', flush=True)\n    time.sleep(60)\nexcept:\n    pass\ntime.sleep(60)\n"
    )
    where = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "ffmem", "values", str(tmp_path), "-q"]
    process = subprocess.Popen(command, env=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (code, "ffmem: stopped\n")


def test_the_program_listens_before_anything_slow_is_imported():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"ffmem": "ffmem.__main__:main"}
    code = "import ffmem.__main__, sys; print(*{'typer', 'rich', 'json', 'torch', 'ffmem.cli.app'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
