"""`ffmem train` as a user types it, with a small size put in the place of `small`."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from ffmem.cli.app import main
from ffmem.training import recipe, train
from tests.cli.test_app import call as call_main
from tests.tiny import some_text
from tests.training.small import RECIPE, card_of

PROCESS = f"""
import torch
torch.set_num_threads(1)
from ffmem.training import recipe
from ffmem.training.recipe import Recipe
recipe.SIZES["small"] = {RECIPE!r}
from ffmem.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(some_text(300), "utf-8")
    return path


@pytest.fixture
def call(capsys, monkeypatch):
    """Gives exit code, standard output and standard error of a command."""
    monkeypatch.setitem(recipe.SIZES, "small", RECIPE)

    return partial(call_main, capsys)


@pytest.mark.slow
def test_a_training_by_steps_tells_its_perplexity_and_what_comes_next(call, text, tmp_path):
    out = tmp_path / "model"
    code, page, notes = call("train", text, "-o", out, "--size", "small", "--steps", 12, "--device", "cpu")
    assert (code, page) == (0, "")
    found = card_of(out)["perplexity"]
    assert f"{out}: 12 steps, 1,152 tokens, perplexity {found['windows']:.1f} in running text" in notes
    assert f"Next: ffmem index {out} TEXT -o RUN" in notes
    assert call("index", out, text, "-o", tmp_path / "run", "--top", 3, "-q")[0] == 0


def test_every_option_reaches_the_training(text, tmp_path, monkeypatch):
    given = {}

    def caught(corpus, **settings):
        given.update(settings, corpus=[source.name for source in corpus])
        (tmp_path / "training.json").write_text(
            json.dumps({"step": 1, "tokens": 1, "perplexity": {"windows": 1, "sentences": 1}})
        )

    monkeypatch.setattr(train, "train", caught)
    options = "--size paper --minutes 2.5 --min-count 7 --seed 4 --device cpu --checkpoint-minutes 1 --column body "
    options += "--max-record 2MB"
    command = [
        "train",
        str(text),
        str(text),
        "-o",
        str(tmp_path),
        *options.split(),
        "--valid",
        str(text),
        "--overwrite",
        "-q",
    ]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert not ended.value.code
    assert [source.name for source in given.pop("valid")] == [str(text)]
    assert given == {
        "corpus": [str(text), str(text)],
        "out": str(tmp_path),
        "size": "paper",
        "minutes": 2.5,
        "steps": None,
        "min_count": 7,
        "seed": 4,
        "device": "cpu",
        "checkpoint_minutes": 1,
        "column": "body",
        "max_record": "2MB",
        "overwrite": True,
        "quiet": True,
    }


def test_the_same_command_again_finds_it_finished_and_overwrite_trains_again(call, text, tmp_path):
    command = ["train", text, "-o", tmp_path / "model", "--size", "small", "--device", "cpu"]
    assert call(*command, "--steps", 3, "-q") == (0, "", "")
    first = card_of(tmp_path / "model")
    assert "3 steps" in call(*command, "--steps", 3)[2]
    assert card_of(tmp_path / "model") == first
    code, _, notes = call(*command, "--steps", 4)
    assert code == 1
    assert "was begun with steps 3, found 4; give the same command, another folder, or --overwrite" in notes
    assert call(*command, "--steps", 4, "--overwrite", "-q") == (0, "", "")
    assert card_of(tmp_path / "model")["step"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{text}", "--size", "huge"], "expected size small, medium, paper, found 'huge'"),
        (["{text}", "--minutes", "3", "--steps", "3"], "one of the two, found minutes 3.0 and steps 3"),
        (["{text}", "--minutes", "0"], "expected minutes or steps above 0"),
        (["{text}", "--steps", "0"], "expected steps from 1 to"),
        (["{text}", "--minutes", "inf"], "expected minutes from 0 to"),
        (["{text}", "--checkpoint-minutes=-1"], "expected checkpoint-minutes from 0 to"),
        (["{text}", "--min-count", "0"], "expected min-count from 1"),
        (["{text}", "--seed=-1"], "expected seed from 0"),
        (["{text}", "--device", "quantum"], "expected a device such as cpu"),
        (["{text}", "--valid", "{tmp}/none.txt"], "none.txt: no such file"),
        (["{tmp}/none.txt"], "none.txt: no such file"),
        (["{tmp}"], "is a folder: give its files"),
    ],
)
@pytest.mark.slow
def test_bad_input_gets_one_clear_line_and_exit_code_one_and_leaves_nothing(call, text, tmp_path, arguments, message):
    filled = [argument.format(text=text, tmp=tmp_path) for argument in arguments]
    code, out, err = call("train", *filled, "-o", tmp_path / "model")
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("ffmem: error: ")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_help_teaches_what_it_trains_how_to_continue_and_what_to_do_next(call):
    code, page, _ = call("train", "--help")
    assert code == 0
    words = " ".join(page.replace("│", " ").split())
    for part in ("Usage: ffmem train", "like the paper's", "the same command continues", "a model for ffmem index"):
        assert part in words
    for option in ("--size", "--minutes", "--steps", "--valid", "--min-count", "--seed", "--device", "--overwrite"):
        assert option in words


@pytest.mark.slow
def test_ctrl_c_keeps_the_training_exits_130_and_the_same_command_continues(text, tmp_path):
    out = tmp_path / "model"
    command = [sys.executable, "-c", PROCESS, "train", str(text), "-o", str(out), "--size", "small", "--device", "cpu"]
    command += ["--steps", "300"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out / "log.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, notes = process.communicate(timeout=60)
    assert process.returncode == 130, notes
    assert f"stopped; the training is kept in {out}. Give the same command again to continue." in notes
    assert "Traceback" not in notes
    assert (out / "work" / "state.safetensors").exists()
    steps = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert steps[-1] < 300

    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True)
    assert "300 steps, 28,800 tokens" in done.stderr
    found = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert found[: len(steps)] == steps
    assert found == sorted({*steps, *range(50, 301, 50)})
