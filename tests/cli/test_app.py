"""The command line, end to end, in this process and in one of its own."""

import inspect
import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from ffmem.cli.app import app, main
from ffmem.errors import FfmemError
from tests.tiny import some_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(some_text(60), "utf-8")
    return path


@pytest.fixture(scope="module")
def run(gpt2_folder, text, tmp_path_factory):
    """A run made by the commands a user types."""
    out = tmp_path_factory.mktemp("runs") / "run"
    for command in (
        ["index", str(gpt2_folder), str(text), "-o", str(out), "--top", "5"],
        ["values", str(out), "--top", "15"],
    ):
        printed, notes = io.StringIO(), io.StringIO()
        with redirect_stdout(printed), redirect_stderr(notes), pytest.raises(SystemExit) as end:
            main(command)
        assert (end.value.code, printed.getvalue()) == (0, ""), notes.getvalue()
        if command[0] == "index":
            assert "384 cells; about" in notes.getvalue()
            assert "Next: ffmem values" in notes.getvalue()
    return out


@pytest.mark.slow
def test_the_commands_are_a_program_of_their_own(gpt2_folder, text, tmp_path):
    command = [sys.executable, "-m", "ffmem", "index", str(gpt2_folder), str(text), "-o", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "384 cells; about" in done.stderr


def call(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    found = capsys.readouterr()
    return code, found.out, found.err


def test_show_prints_value_statistics_and_triggers(run, capsys):
    code, out, _ = call(capsys, "show", run, "L2D7")
    assert code == 0
    assert out.startswith("L2D7 of ")
    for part in ("promotes", "suppresses", "active", "triggers (5)", "▸"):
        assert part in out


def test_show_as_json_holds_the_same(run, capsys):
    _, out, _ = call(capsys, "show", run, "L2D7", "--json")
    found = json.loads(out)
    assert (found["cell"], found["layer"], found["index"]) == ("L2D7", 2, 7)
    assert [trigger["rank"] for trigger in found["triggers"]] == [1, 2, 3, 4, 5]
    assert len(found["value"]["promoted"]) == len(found["value"]["suppressed"]) == 10
    assert found["stats"]["measured_tokens"] > 0


def test_show_takes_several_cells_and_a_number_of_tokens_and_triggers(run, capsys):
    _, out, err = call(capsys, "show", run, "L2D7", "L1D0", "--top", "3")
    one, other = out.split("\n\n")
    assert (one.split()[0], other.split()[0]) == ("L2D7", "L1D0")
    assert "triggers (3 of 5)" in one
    assert one.count("▸") == 3
    assert one.count(" z ") == 6
    assert err == ""
    _, out, err = call(capsys, "show", run, "L2D7", "--top", "20")
    assert out.count(" z ") == 30
    assert "15 tokens of each value are kept; to have more: ffmem values" in err
    _, out, _ = call(capsys, "show", run, "L2D7", "L1D0", "--top", "3", "--json")
    found = json.loads(out)
    assert [cell["cell"] for cell in found] == ["L2D7", "L1D0"]
    assert len(found[0]["triggers"]) == len(found[0]["value"]["suppressed"]) == 3
    assert found[0]["value"]["promoted"][0]["z"] > 1
    assert call(capsys, "show", run, "L2D7", "--top", "0")[2].endswith("expected top from 1 to 10,000, found 0\n")


@pytest.mark.slow
def test_show_asks_the_model_itself_before_values_are_stored(gpt2_folder, text, tmp_path, capsys):
    out = tmp_path / "run"
    assert call(capsys, "index", gpt2_folder, text, "-o", out, "-q")[0] == 0
    code, page, note = call(capsys, "show", out, "L1D3")
    assert "promotes" not in page
    assert "ffmem values" in note
    code, page, note = call(capsys, "show", out, "L1D3", "--model", gpt2_folder)
    assert code == 0
    assert "promotes" in page
    assert call(capsys, "values", out, "--top", "3", "-q")[0] == 0
    assert call(capsys, "show", out, "L1D3")[1].count("“") >= 6


def test_info_tells_what_was_read_and_skipped(run, capsys):
    code, out, _ = call(capsys, "info", run)
    assert code == 0
    for part in ("60 sentences", "15 blank lines, 1 headings", "family gpt2", "384 in layers 1, 2, 3", "disk"):
        assert part in out
    assert "15 tokens promoted and suppressed, bare, without the final norm, in float32" in out
    assert "{" not in out
    _, out, _ = call(capsys, "info", run, "--json")
    found = json.loads(out)
    assert found["counts"]["cells"] == 384
    assert found["disk_bytes"] > 1000


def test_export_prints_lines_that_a_pipe_can_cut(run):
    command = f"{sys.executable} -m ffmem export {run} triggers | head -n 2"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [json.loads(line)["rank"] for line in done.stdout.splitlines()] == [1, 2]


def test_the_same_index_command_again_finds_it_complete(run, gpt2_folder, text, capsys):
    before = (run / "manifest.json").read_bytes()
    code, _, _ = call(capsys, "index", gpt2_folder, text, "-o", run, "--top", "5")
    assert code == 0
    assert (run / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "{run}", "L9D0"], "this run has layers 1 to 3, found layer 9"),
        (["show", "{run}", "king"], "expected a cell such as L3D17"),
        (["show", "{tmp}/none", "L1D0"], "found nothing; make one with ffmem index"),
        (["info", "{tmp}"], "expected a run folder"),
        (["export", "{run}", "cats"], "expected triggers, cells, sentences"),
        (["values", "{run}", "--model", "{tmp}/none"], "found nothing at"),
        (["values", "{run}", "--device", "quantum"], "expected a device such as cpu"),
        (["index", "{tmp}/none", "{text}", "-o", "{tmp}/r"], "expected a model folder or a .gguf file, found nothing at"),
        (["index", "{model}", "{tmp}/none.txt", "-o", "{tmp}/r"], "none.txt: no such file"),
        (["index", "{model}", "{tmp}", "-o", "{tmp}/r"], "is a folder: give its files"),
        (["index", "{model}", "{text}", "-o", "{tmp}/r", "--top", "0"], "expected top from 1"),
        (["index", "{model}", "{text}", "-o", "{tmp}/r", "--layers", "4"], "layers from 1 to 3, found layer 4"),
        (["index", "{model}", "{text}", "-o", "{tmp}/r", "--dtype", "int8"], "expected dtype auto"),
        (["index", "{model}", "{text}", "-o", "{run}", "--top", "6"], "was made with top 5, now it is 6"),
        (["index", "{model}", "{text}", "-o", "{text}"], "found a file"),
    ],
)
def test_bad_input_gets_one_clear_line_and_exit_code_one(run, text, gpt2_folder, tmp_path, capsys, arguments, message):
    names = {"run": run, "text": text, "model": gpt2_folder, "tmp": tmp_path}
    code, out, err = call(capsys, *(argument.format(**names) for argument in arguments))
    assert code == 1
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("ffmem: error:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["index", "M", "T", "-o", "R", "--top", "0"], 1, "expected top from 1 to 10,000, found 0"),
        (["index", "M", "T", "-o", "R", "--top", "9" * 5000], 1, "expected top from 1 to 10,000, found 999"),
        (["index", "M", "T", "-o", "R", "--top", "ten"], 2, "expected a number such as 10000 or 1e4, found 'ten'"),
        (["index", "M", "T", "-o", "R", "--layers", "0"], 1, "found layer 0"),
        (["index", "M", "T", "-o", "R", "--layers=-1"], 1, "expected layers such as 1-4,16, found '-1'"),
        (["index", "M", "T", "-o", "R", "--limit-tokens", "0"], 1, "expected limit-tokens from 1"),
        (["index", "M", "T", "-o", "R", "--batch-tokens", "0"], 1, "expected batch-tokens from 1"),
        (["index", "M", "T", "-o", "R", "--shard-tokens", "all"], 2, "expected a number such as"),
        (["index", "M", "T", "-o", "R", "--workers", "0"], 1, "expected workers from 1"),
        (["index", "M", "T", "-o", ""], 1, "expected a folder or a URL for the run, found an empty name"),
        (["show", "", "L1D0"], 1, "expected a run, found an empty name"),
        (["show", "\udcff", "L1D0"], 1, "expected a run with a name in UTF-8, found \\udcff"),
        (["values", "R", "--top", "0"], 1, "expected top from 1"),
        (["experiments", "R", "--seed=-1"], 1, "expected seed from 0"),
        (["experiments", "R", "--examples", "0"], 1, "expected examples from 1"),
        (["plan", "gpt2", "--tokens", "0"], 1, "expected tokens from 1"),
        (["plan", "gpt2", "--tokens", "1.5"], 1, "expected tokens as a whole number"),
        (["plan", "gpt2", "--tokens", "9", "--gpu-memory", "nan"], 2, "expected a number"),
        (["plan", "gpt2", "--tokens", "9", "--gpu-memory", "inf"], 1, "expected gpu-memory from 1"),
        (["export", "R", "triggers", "-o", ""], 1, "expected a file to write, found an empty name"),
        (["info", "R", "--colour\x1b[31m\u202e"], 2, "No such option"),
        (["paint"], 2, "No such command 'paint'"),
        (["show", "R"], 2, "Missing argument"),
    ],
)
def test_options_are_refused_in_one_line_before_anything_is_loaded(capsys, monkeypatch, arguments, code, message):
    monkeypatch.setattr("ffmem.indexing.build.build_index", None)
    monkeypatch.setattr("ffmem.corpus.sources.open_source", None)
    found, out, err = call(capsys, *arguments)
    assert (found, out) == (code, "")
    assert err.startswith("ffmem: error: ")
    assert message in err
    assert err[:-1].isprintable()
    assert len(err) <= 600


@pytest.mark.slow
def test_names_that_would_move_a_cursor_are_kept_as_they_are_and_shown_as_they_can_be(gpt2_folder, text, tmp_path, capsys):
    named, out = (tmp_path / name for name in ("\u202e\x1b[31m.txt", "run\x1b[2J"))
    named.write_bytes(text.read_bytes())
    assert call(capsys, "index", gpt2_folder, named, "-o", out, "--top", "2", "--stats", "full")[0] == 0
    assert call(capsys, "index", gpt2_folder, named, "-o", out, "--top", "2", "--stats", "full")[0] == 0
    assert call(capsys, "experiments", out, "activity", "--examples", "3", "--eval", named)[0] == 0
    code, page, _ = call(capsys, "info", out)
    assert code == 0
    assert f"corpus     {tmp_path}/\\u202e␛[31m.txt" in page
    assert f"run        {tmp_path}/run␛[2J\n" in page
    found = json.loads(call(capsys, "info", out, "--json")[1])
    assert found["corpus"]["sources"] == [str(named)]
    assert call(capsys, "report", out)[0] == 0
    code, _, err = call(capsys, "show", out, "L9D0")
    assert code == 1
    assert len(err.splitlines()) == 1


def test_a_number_may_be_written_with_an_exponent(gpt2_folder, text, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--limit-tokens", "1e2", "--batch-tokens", "1_000", "--shard-tokens", "1e6", "--top", "2e0"]
    assert call(capsys, "index", gpt2_folder, text, "-o", out, *options, "-q") == (0, "", "")
    settings = json.loads((out / "manifest.json").read_text())["settings"]
    assert [settings[name] for name in ("limit_tokens", "batch_tokens", "shard_tokens", "top")] == [100, 1000, 10**6, 2]


def test_nothing_given_is_a_page_of_help(capsys):
    code, out, err = call(capsys)
    assert (code, err) == (0, "")
    assert "Usage: ffmem" in out


def test_help_teaches_every_verb(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for verb in ("index", "show", "info", "values", "export", "demo"):
        assert verb in out
        code, page, _ = call(capsys, verb, "--help")
        assert code == 0
        assert "Usage: ffmem" in page


def test_the_version_is_the_package_s(capsys):
    import ffmem

    assert call(capsys, "--version")[1] == f"ffmem {ffmem.__version__}\n"


@pytest.mark.parametrize(
    ("command", "called"),
    [
        (["index", "MODEL", "pocket", "-o", "out"], "ffmem.indexing.build.build_index"),
        (["values", "RUN"], "ffmem.indexing.values.values"),
        (["experiments", "RUN", "--eval", "pocket"], "ffmem.experiments.run.each_experiment"),
        (["trace", "MODEL", "The king"], "ffmem.live.trace.trace"),
        (["trace", "MODEL", "The king", "--run", "RUN"], "ffmem.live.trace.trace"),
        (["compare", "MODEL", "The king", "--edit", "L1D1=0"], "ffmem.live.comparison.compare"),
        (["intervene", "MODEL", "The king", "--edit", "L1D1=0"], "ffmem.live.comparison.compare"),
        (["intervene", "MODEL", "The king", "--edit", "L1D1=0", "--export"], "ffmem.live.recipe.recipe"),
        (["causal", "RUN", "L1D1", "--eval", "pocket"], "ffmem.live.causal.causal"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.slow
def test_code_of_a_model_is_trusted_by_every_command_that_is_told_so(capsys, run, monkeypatch, command, called, trusted):
    given = []

    def stop(*_, **settings):
        given.append(settings["trust_remote_code"])
        raise FfmemError("stopped here")

    monkeypatch.setattr(called, stop)
    arguments = [str(run) if part == "RUN" else part for part in command] + ["--trust-remote-code"] * trusted
    code, _, err = call(capsys, *arguments)
    assert (code, given) == (1, [trusted])
    assert "stopped here" in err


def test_every_command_that_takes_a_dtype_can_be_told_to_trust_code():
    commands = [command.callback for command in app.registered_commands]
    loading = {command.__name__ for command in commands if "dtype" in inspect.signature(command).parameters}
    trusting = {command.__name__ for command in commands if "trust_remote_code" in inspect.signature(command).parameters}
    assert loading == trusting == {"index", "show", "values", "experiments", "trace", "compare", "causal"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["index", "TEXT", "wiki16", "-o", "out"], "wiki16 is a model and TEXT a text: the other way round?"),
        (["trace", "The king left", "wiki16"], "wiki16 is a model and The king left a text: the other way round?"),
    ],
)
def test_arguments_in_the_wrong_order_are_told(capsys, text, command, said):
    code, _, err = call(capsys, *[str(text) if part == "TEXT" else part for part in command])
    assert code == 1
    assert said.replace("TEXT", str(text)) in err
