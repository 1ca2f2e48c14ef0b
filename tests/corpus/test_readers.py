"""Processes that read: results in order, errors told, nobody left behind, and the same shards as in one process."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ffmem.corpus import readers, record
from ffmem.corpus.files import TextFile
from ffmem.corpus.readers import CAN_FORK, Readers, getting_ready, shared
from ffmem.corpus.tokens import Encoder
from ffmem.errors import CorpusError
from tests.tiny import some_text

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="needs processes that can be forked")

NUMBERS = [str(number) for number in range(40)]
ONE_AND_TWO = [1, pytest.param(2, marks=pytest.mark.slow)]
"""The same test in this process, and with processes that start for seconds."""


def doubled(factor: int, number: str) -> int:
    return factor * int(number)


def gone(_: int, number: str) -> int:
    if number == "7":
        os._exit(9)
    return int(number)


def large(size: int, item: bytes) -> bytes:
    return item[:1] * size


def environment(name: str, _: str) -> str:
    return os.environ.get(name, "nothing")


class StrangeError(Exception):
    """An error that cannot be unpacked."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def strange(_: int, number: str) -> None:
    raise StrangeError(number, os.getpid())


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(record, "CHUNK", 500)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 40])
@pytest.mark.parametrize("workers", ONE_AND_TWO)
def test_results_come_in_the_order_of_the_items(count, workers):
    assert list(shared(doubled, 2, NUMBERS[:count], workers=workers)) == [2 * number for number in range(count)]


@pytest.mark.parametrize("workers", ONE_AND_TWO)
def test_an_error_in_the_work_reaches_the_caller(workers):
    with pytest.raises(ValueError, match="invalid literal"):
        list(shared(doubled, 2, [*NUMBERS[:20], "six"], workers=workers))


@pytest.mark.slow
def test_an_error_that_cannot_be_sent_comes_with_its_name():
    with pytest.raises(RuntimeError, match=r"in a process that reads the text: StrangeError: 0 and \d+") as caught:
        list(shared(strange, 2, NUMBERS, workers=2))
    assert str(os.getpid()) not in str(caught.value)


@pytest.mark.slow
def test_a_process_that_was_ended_is_an_error_and_not_a_wait():
    with pytest.raises(CorpusError, match="was ended from outside"):
        list(shared(gone, 2, NUMBERS, workers=2))


def test_processes_that_are_gone_can_be_closed():
    """As where SIGCHLD is ignored, which a child inherits: the system forgets at once what was not waited for."""
    made = Readers(doubled, 1, 2)
    assert list(made.map(NUMBERS)) == list(range(40))
    os.killpg(made.processes.pid, signal.SIGKILL)
    os.waitpid(made.processes.pid, 0)
    assert_ends(made.processes)
    deadline = time.monotonic() + 20
    while is_group(made.processes.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    made.close()
    assert made.is_closed


def is_group(pid):
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_items_and_results_may_be_larger_than_a_pipe():
    items = [bytes([number]) * 2_000_000 for number in range(10)]
    assert [one[:2] for one in shared(large, 3_000_000, items, workers=2)] == [item[:2] for item in items]


@pytest.mark.slow
def test_items_are_read_only_a_little_ahead():
    read = 0

    def items():
        nonlocal read
        for number in NUMBERS:
            read += 1
            yield number

    results = shared(doubled, 2, items(), workers=2)
    next(results)
    assert read < 25
    results.close()


@pytest.mark.parametrize("workers", ONE_AND_TWO)
@pytest.mark.parametrize("good", [2, 20])
def test_an_error_of_the_items_comes_behind_the_results_before_it(workers, good):
    def items():
        yield from NUMBERS[:good]
        raise OSError("the disk is gone")

    results = shared(doubled, 1, items(), workers=workers)
    assert [next(results) for _ in range(good)] == list(range(good))
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


@pytest.mark.slow
def test_processes_that_are_ready_have_todays_environment(monkeypatch):
    with getting_ready(2):
        (ready,) = readers._ready
        monkeypatch.setenv("FFMEM_TEST_WORD", "the king")
        made = Readers(environment, "FFMEM_TEST_WORD", 2)
        assert made.processes is ready
        assert not readers._ready
    for _ in range(2):
        assert list(made.map(NUMBERS)) == ["the king"] * 40, "they stay for more"
    made.close()


def test_processes_that_were_ready_for_nothing_are_ended():
    with getting_ready(2):
        (ready,) = readers._ready
        assert len(group(ready)) == 1
    assert not readers._ready
    assert not group(ready)


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from ffmem.corpus.readers import shared\n"
        "print('here')\n"
        "print(list(shared(str.join, '-', [['a', 'b']] * 20, workers=2)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"here\n{['a-b'] * 20}\n", "")


def table(shards):
    """Everything a shard says, to compare."""
    names = ("text", "sizes", "ids", "lengths", "ends")
    return [
        (
            *(shard.part, shard.number, shard.since, shard.after, shard.last, shard.full),
            *(getattr(shard.sentences, name).tolist() for name in names),
            shard.documents.tolist(),
            [rows.tolist() for rows in shard.planned(64, 1)],
        )
        for shard in shards
    ]


@pytest.fixture
def text(file):
    return file("a.txt", (some_text(200) + "the river and the city " * 40).encode())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    ("unit", "limit_tokens"),
    [("sentence", None), *(pytest.param(*one, marks=pytest.mark.slow) for one in [("line", 1500), ("window:5", None)])],
)
def test_processes_give_the_shards_that_a_thread_gives(corpus_of, text, unit, limit_tokens):
    options = {"unit": unit, "shard_tokens": 300, "limit": 24, "limit_tokens": limit_tokens, "part_shards": 3}
    corpus = corpus_of([text, text], **options)
    expected = table(corpus.stream())
    assert expected[-1][0] > 0, "several parts"
    corpus = corpus_of([text, text], workers=2, **options)
    found = list(corpus.stream(planned=(64, 1)))
    assert corpus._readers is not None
    assert all((64, 1) in shard._planned for shard in found)
    assert table(found) == expected
    one_by_one = [shard for part in corpus.parts() for shard in corpus.stream([part])]
    assert limit_tokens or table(one_by_one) == expected
    corpus.close()


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_what_is_done_is_left_out_and_a_change_is_noticed(corpus_of, text):
    corpus = corpus_of(text, shard_tokens=300, workers=2)
    shards = list(corpus.stream())
    done = {0: {shard.number: shard.span for shard in shards[:2]}}
    assert table(corpus.stream(done=done)) == table(shards[2:])
    text.write_text(text.read_text().replace("the", "a"))
    with pytest.raises(CorpusError, match="the corpus has changed"):
        list(corpus.stream(done=done))


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_an_error_in_the_text_comes_behind_the_shards_before_it(corpus_of, file):
    path = file("a.txt", some_text(300).encode() + b"\xff\n")
    corpus = corpus_of(path, shard_tokens=500, workers=2)
    found = []
    with pytest.raises(CorpusError, match=r"a.txt:\d+: expected UTF-8, found byte 0xff"):
        found.extend(corpus.stream())
    assert len(found) >= 1


def group(processes):
    """The processes of a reader that are alive."""
    found = subprocess.run(["ps", "-e", "-o", "pgid=,stat="], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if int(line.split()[0]) == processes.pid and "Z" not in line.split()[1]]


def assert_ends(processes):
    deadline = time.monotonic() + 20
    while group(processes) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group(processes)


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_an_abandoned_reading_ends_its_processes_and_what_was_given_stays(corpus_of, text):
    corpus = corpus_of([text] * 20, shard_tokens=50, workers=2)
    shards = corpus.stream()
    shard = next(shards)
    kept = shard.sentences.ids.copy()
    processes = corpus._readers.processes
    assert len(group(processes)) == 2
    began = time.monotonic()
    shards.close()
    assert time.monotonic() - began < 3
    assert_ends(processes)
    assert np.array_equal(shard.sentences.ids, kept)
    assert next(corpus.stream()).tokens == shard.tokens, "it can be read again"
    corpus.close()


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_a_corpus_that_nobody_has_any_more_ends_its_processes(corpus_of, text):
    corpus = corpus_of(text, shard_tokens=300, workers=2)
    list(corpus.stream())
    processes = corpus._readers.processes
    pid = processes.pid
    assert len(group(processes)) == 2
    del processes, corpus
    gc.collect()
    assert_ends(SimpleNamespace(pid=pid))


SCRIPT = """
import os, signal, sys
from pathlib import Path
from ffmem.corpus import record
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder
from tests.tiny import word_tokenizer

record.CHUNK = 500
corpus = Corpus(open_sources(Path(sys.argv[1])), Encoder(word_tokenizer(), 50), Unit("sentence"), "en", 50, workers=2)
shards = corpus.stream()
print(next(shards).tokens > 0, corpus._readers.processes.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["left", "killed", "interrupted"])
def test_a_program_that_ends_in_the_middle_leaves_nobody_behind(text, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, str(script), str(text), how], capture_output=True, text=True, env=environment, timeout=60
    )
    said, pid = done.stdout.split()
    assert said == "True"
    assert "Traceback" not in done.stderr.replace("Traceback", "", int(how == "interrupted")), "nothing but Ctrl-C's own"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(int(pid), 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("somebody is left")


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_ctrl_c_is_left_to_the_parent(corpus_of, text):
    corpus = corpus_of(text, shard_tokens=300, workers=2)
    list(corpus.stream())
    assert os.getpgid(corpus._readers.processes.pid) != os.getpgrp(), "a terminal sends it to the parent's group alone"
    corpus.close()


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_lists_are_read_by_processes_too_but_not_what_a_script_defines(corpus_of):
    texts = [f"the river {number}" for number in range(500)]
    expected = table(corpus_of(texts).stream())
    corpus = corpus_of(texts, workers=2)
    assert table(corpus.stream()) == expected
    assert corpus._readers is not None
    corpus.close()
    corpus.sources = [type("Other", (TextFile,), {"__module__": "__main__"})(Path("a.txt"))]
    assert not corpus.is_portable


@pytest.mark.usefixtures("small_chunks")
def test_a_tokenizer_of_the_callers_script_stays_in_this_process(corpus_of, text):
    class Slow:
        is_fast = False

        def __call__(self, texts, **_):
            return {"input_ids": [[len(word) for word in text.split()] for text in texts]}

    Slow.__module__ = "__main__"
    corpus = corpus_of(text, workers=2)
    corpus.encoder = Encoder(Slow(), 50)
    assert not corpus.is_portable
    assert next(corpus.stream()).tokens > 0
    assert corpus._readers is None


def test_little_text_needs_no_processes(corpus_of, text):
    corpus = corpus_of(text, workers=2)
    assert list(corpus.stream())
    assert corpus._readers is None


def test_no_thread_stays():
    assert not [thread for thread in threading.enumerate() if thread.name == "ffmem-corpus"]
    assert signal.getsignal(signal.SIGINT) is not None
