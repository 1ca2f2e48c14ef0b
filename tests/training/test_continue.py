"""Stopped or killed anywhere, a training continues and ends with the same weights and one log."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch

from ffmem.errors import RunError
from ffmem.training import train as room
from ffmem.training import trainer
from tests.training.small import STEPS, Crash, card_of, content, fit, log_of, stream_of

STATE = "work/state.safetensors"


def dying(monkeypatch, at, error, *, behind=False):
    """Raise an error before (or behind) the step that has `at` steps before it."""
    step = room.Trainer.step

    def deadly(trainer, batches, rate):
        if trainer.counters.step == at and not behind:
            raise error
        loss = step(trainer, batches, rate)
        if trainer.counters.step == at + 1 and behind:
            raise error
        return loss

    monkeypatch.setattr(room.Trainer, "step", deadly)


def stop(monkeypatch, text, out, at, error=KeyboardInterrupt, *, behind=False, **others):
    """A training that ends at a step by an error."""
    with monkeypatch.context() as patch:
        dying(patch, at, error, behind=behind)
        with pytest.raises(error):
            fit(text, out, **others)


def same_end(out, whole):
    """Equal weights, equal counters, and no step twice in the log; a stop may have added a line of its own."""
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for name in ("step", "tokens", "perplexity"):
        assert card_of(out)[name] == card_of(whole)[name]
    lines = log_of(out)
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert {line["step"] for line in log_of(whole)} <= set(steps)
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    return True


@pytest.mark.parametrize("at", [0, 7, STEPS - 1])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.slow
def test_a_training_stopped_at_any_step_ends_with_the_same_weights(text, whole, tmp_path, monkeypatch, at, behind):
    stop(monkeypatch, text, tmp_path / "model", at, behind=behind)
    assert (tmp_path / "model" / STATE).exists()
    fit(text, tmp_path / "model")
    assert same_end(tmp_path / "model", whole)


def test_a_training_stopped_again_and_again_ends_with_the_same_weights_and_reads_each_step_once(
    text, whole, tmp_path, monkeypatch
):
    for at in (2, 3, 7, 11):
        stop(monkeypatch, text, tmp_path / "model", at)
    taken = []
    step = room.Trainer.step
    monkeypatch.setattr(
        room.Trainer, "step", lambda trainer, *rest: taken.append(trainer.counters.step) or step(trainer, *rest)
    )
    fit(text, tmp_path / "model")
    assert taken == [11]
    assert same_end(tmp_path / "model", whole)


def test_a_training_killed_behind_a_checkpoint_continues_from_it(text, whole, tmp_path, monkeypatch):
    stop(monkeypatch, text, tmp_path / "model", 5, Crash, checkpoint_minutes=0)
    fit(text, tmp_path / "model")
    assert same_end(tmp_path / "model", whole)


def test_a_training_killed_before_its_first_checkpoint_begins_again_with_an_empty_log(text, whole, tmp_path, monkeypatch):
    stop(monkeypatch, text, tmp_path / "model", 7, Crash)
    assert len(log_of(tmp_path / "model")) == 3
    fit(text, tmp_path / "model")
    assert same_end(tmp_path / "model", whole)


def test_lines_of_the_log_behind_the_last_checkpoint_are_written_anew(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "model"
    stop(monkeypatch, text, out, 5, Crash, checkpoint_minutes=0)
    stop(monkeypatch, text, out, 11, Crash)
    assert [line["step"] for line in log_of(out)] == [2, 4, 6, 8, 10]
    with (out / "log.jsonl").open("a") as log:
        log.write('{"step": 12, "tok')  # cut by the kill
    fit(text, out)
    assert same_end(out, whole)


def test_a_kill_while_the_checkpoint_is_written_leaves_the_one_before(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "model"
    stop(monkeypatch, text, out, 4)

    def torn(path, *_):
        path.write_bytes(b"half of a sta")
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_state", torn)
        with pytest.raises(Crash):
            fit(text, out, checkpoint_minutes=0)
    fit(text, out)
    assert same_end(out, whole)


needs_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread only"
)


@needs_main_thread
@pytest.mark.parametrize(("number", "at"), [(signal.SIGINT, 1), (signal.SIGINT, 8), (signal.SIGTERM, 8)])
def test_a_signal_in_the_middle_of_an_update_does_not_leave_half_of_it_in_the_state(
    text, whole, tmp_path, monkeypatch, number, at
):
    """Ctrl-C, or a scheduler's SIGTERM, comes when some weights have moved and others not."""
    update = torch.optim.AdamW.step
    calls = 0

    def interrupted(optimiser, closure=None):
        nonlocal calls
        calls += 1
        if calls != at:
            return update(optimiser, closure)
        first, *_ = optimiser.param_groups
        moved = {"params": first["params"]}
        others = [group["params"] for group in optimiser.param_groups[1:]]
        grads = [[parameter.grad for parameter in group] for group in others]
        for group in others:
            for parameter in group:
                parameter.grad = None
        update(optimiser, closure)  # moves the first group alone
        os.kill(os.getpid(), number)
        for group, stored in zip(others, grads, strict=True):
            for parameter, grad in zip(group, stored, strict=True):
                parameter.grad = grad
        for parameter in moved["params"]:
            parameter.grad = None
        return update(optimiser, closure)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command line has it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.AdamW, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fit(text, tmp_path / "model")
        assert {signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)} == {signal.default_int_handler}
    finally:
        signal.signal(signal.SIGTERM, before)
    fit(text, tmp_path / "model")
    assert same_end(tmp_path / "model", whole)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Crash])
@pytest.mark.parametrize("where", ["perplexity", "_save"])
def test_a_stop_behind_the_last_step_costs_no_step(text, whole, tmp_path, monkeypatch, error, where):
    def deadly(*_):
        raise error

    def unwanted(*_):
        raise AssertionError("a step too many")

    with monkeypatch.context() as patch:
        patch.setattr(room, where, deadly)
        with pytest.raises(error):
            fit(text, tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(room.Trainer, "step", unwanted)
        fit(text, tmp_path / "model")
    assert same_end(tmp_path / "model", whole)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_stop_while_the_corpus_is_numbered_leaves_no_half_of_it(text, whole, tmp_path, monkeypatch, error):
    def deadly(*_, **__):
        yield stream_of([3, 4])
        raise error

    out = tmp_path / "model"
    with monkeypatch.context() as patch:
        patch.setattr("ffmem.training.stream.encoded", deadly)
        with pytest.raises(
            (KeyboardInterrupt, RunError), match=r"^$|work/stream\.i32: cannot be written: No space left on device"
        ):
            fit(text, out)
    assert not (out / "work" / "stream.i32").exists()
    assert not list(out.rglob("*.tmp"))
    fit(text, out)
    assert same_end(out, whole)


def test_a_full_disk_is_told_with_the_file_and_the_checkpoint_before_is_continued(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "model"
    stop(monkeypatch, text, out, 4)

    def full(*_):
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(RunError, match=r"work/state\.safetensors: cannot be written: No space left.*; make room"):
            fit(text, out, checkpoint_minutes=0)
    fit(text, out)
    assert same_end(out, whole)


@needs_main_thread
def test_a_signal_between_a_line_of_the_log_and_the_next_step_does_not_write_the_line_twice(
    text, whole, tmp_path, monkeypatch
):
    def set_losses(trainer, losses):
        if trainer.counters.step == 4 and not losses:
            os.kill(os.getpid(), signal.SIGINT)
        vars(trainer)["of the last steps"] = losses

    with monkeypatch.context() as patch:
        losses = property(lambda trainer: vars(trainer)["of the last steps"], set_losses)
        patch.setattr(room.Trainer, "losses", losses, raising=False)
        with pytest.raises(KeyboardInterrupt):
            fit(text, tmp_path / "model")
    assert [line["step"] for line in log_of(tmp_path / "model")] == [2, 4]
    fit(text, tmp_path / "model")
    assert same_end(tmp_path / "model", whole)


@pytest.mark.parametrize("where", ["vocabulary", "write_stream"])
def test_a_stop_while_the_corpus_is_read_begins_again(text, whole, tmp_path, monkeypatch, where):
    def deadly(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(room, where, deadly)
        with pytest.raises(KeyboardInterrupt):
            fit(text, tmp_path / "model")
    fit(text, tmp_path / "model")
    assert same_end(tmp_path / "model", whole)


def test_the_corpus_is_read_once(text, tmp_path, monkeypatch):
    stop(monkeypatch, text, tmp_path / "model", 3)

    def unwanted(*_, **__):
        raise AssertionError("read again")

    monkeypatch.setattr(room, "vocabulary", unwanted)
    monkeypatch.setattr(room, "write_stream", unwanted)
    fit(text, tmp_path / "model")


def test_a_damaged_state_is_named(text, tmp_path, monkeypatch):
    stop(monkeypatch, text, tmp_path / "model", 3)
    state = tmp_path / "model" / STATE
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(RunError, match=r"state\.safetensors: damaged"):
        fit(text, tmp_path / "model")


# ---- a loss that is no number


def poisoned(monkeypatch, at):
    """From this step on the loss, and so the gradient, is no number."""
    loss = room.Trainer._loss

    def bad(trainer, windows):
        return loss(trainer, windows) * (float("nan") if trainer.counters.step >= at else 1.0)

    monkeypatch.setattr(room.Trainer, "_loss", bad)


@pytest.mark.parametrize("checkpoint_minutes", [0, 5])
def test_a_loss_that_is_no_number_is_an_error_and_never_reaches_the_state(
    text, whole, tmp_path, monkeypatch, checkpoint_minutes
):
    out = tmp_path / "model"
    stop(monkeypatch, text, out, 3)
    with monkeypatch.context() as patch:
        poisoned(patch, 6)  # the log looks at step 8
        with pytest.raises(RunError, match=r"the loss .* is nan; continue from the last checkpoint or start over"):
            fit(text, out, checkpoint_minutes=checkpoint_minutes)
    for tensor in safetensors.torch.load_file(out / STATE).values():
        assert tensor.isfinite().all()
    assert not (out / "training.json").exists()
    fit(text, out)
    assert same_end(out, whole)


def test_a_loss_that_is_no_number_when_the_user_stops_is_not_kept(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "model"
    stop(monkeypatch, text, out, 3)
    before = (out / STATE).read_bytes()
    with monkeypatch.context() as patch:
        poisoned(patch, 4)
        dying(patch, 5, KeyboardInterrupt)
        with pytest.raises((RunError, KeyboardInterrupt)):
            fit(text, out)
    assert (out / STATE).read_bytes() == before


def test_the_last_steps_of_a_budget_are_looked_at_too(text, tmp_path, monkeypatch):
    poisoned(monkeypatch, 2)
    with pytest.raises(RunError, match="is nan"):
        fit(text, tmp_path / "model", minutes=0.005, log_every=100000)
    assert not (tmp_path / "model" / "model.safetensors").exists()


# ---- the folder


def test_the_same_call_again_returns_at_once_and_changes_nothing(text, tmp_path, monkeypatch):
    out = fit(text, tmp_path / "model")
    before = content(out), sorted(path.name for path in out.iterdir())

    def unwanted(*_, **__):
        raise AssertionError("trained again")

    monkeypatch.setattr(room, "Trainer", unwanted)
    assert fit(text, out) == out
    assert (content(out), sorted(path.name for path in out.iterdir())) == before


def dying_behind(name):
    """Writing, with a kill as soon as this file is there."""

    @contextmanager
    def writing(folder, wanted, write=room.RunFolder.writing):
        with write(folder, wanted) as path:
            yield path
        if wanted == name:
            raise Crash

    return writing


def test_work_that_a_kill_left_beside_a_finished_model_is_cleared(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(room.RunFolder, "writing", dying_behind("training.json"))
        with pytest.raises(Crash):
            fit(text, tmp_path / "model")
    assert (tmp_path / "model" / "work").exists()
    fit(text, tmp_path / "model")
    assert not (tmp_path / "model" / "work").exists()


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """A training stopped behind three steps. Tests must not change it."""
    out = tmp_path_factory.mktemp("stopped") / "model"
    stop(pytest.MonkeyPatch(), text, out, 3)
    return out


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"steps": 13}, "was begun with steps 12, found 13; give the same command, another folder, or --overwrite"),
        ({"minutes": 1}, "was begun with minutes None, found 1"),
        ({"seed": 1}, "was begun with seed 0, found 1"),
        ({"min_count": 3}, "was begun with min_count 2, found 3"),
        ({"size": "small"}, "was begun with recipe "),
        ({"column": "body"}, "was begun with column text, found body"),
        ({"valid": True}, r"was begun with valid None, found .*text\.txt"),
    ],
)
@pytest.mark.parametrize("which", ["whole", "stopped"])
def test_other_settings_in_the_same_folder_are_refused_in_one_line(text, request, others, message, which):
    out = request.getfixturevalue(which)
    before = content(out)
    if "valid" in others:
        others = {"valid": text}
    with pytest.raises(RunError, match=message) as found:
        fit(text, out, **others)
    assert "\n" not in str(found.value)
    assert content(out) == before


def test_another_corpus_in_the_same_folder_is_refused(text, tmp_path, monkeypatch):
    mine = tmp_path / "text.txt"
    mine.write_bytes(text.read_bytes())
    stop(monkeypatch, mine, tmp_path / "model", 3)
    with pytest.raises(RunError, match="was begun with corpus"):
        fit(text, tmp_path / "model")
    mine.write_bytes(text.read_bytes() + b"One more sentence .\n")
    with pytest.raises(RunError, match=r"was begun with .*; give the same command, another folder, or --overwrite"):
        fit(mine, tmp_path / "model")


def test_overwrite_starts_anew_and_deletes_the_earlier_model_but_nothing_foreign(text, whole, tmp_path, monkeypatch):
    out = fit(text, tmp_path / "model", seed=1)
    (out / "notes.txt").write_text("mine")
    (out / "figures").mkdir()
    (out / "figures" / "loss.png").write_text("mine too")
    stop(monkeypatch, text, out, 3, overwrite=True)
    assert {path.name for path in out.iterdir()} == {"plan.json", "log.jsonl", "work", "notes.txt", "figures"}
    fit(text, out)
    assert same_end(out, whole)
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "figures" / "loss.png").read_text() == "mine too"


def test_overwrite_of_an_unfinished_training_starts_anew(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "model"
    stop(monkeypatch, text, out, 5, seed=1)
    fit(text, out, overwrite=True)
    assert same_end(out, whole)


def test_overwrite_of_nothing_is_a_training(text, whole, tmp_path):
    (tmp_path / "model").mkdir()
    fit(text, tmp_path / "model", overwrite=True)
    assert same_end(tmp_path / "model", whole)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"config.json": "{}", "model.safetensors": "another model"},
        {"plan.json": "my own plans", "log.jsonl": "my log", "training.json": "my card"},
        {"plan.json": '{"plan": "world"}', "work": None},
        {"plan.json": "[1, 2]"},
        {"plan.json": '{"recipe": "pancakes"}', "config.json": "{}", "work": None},
        {"plan.json": '{"recipe": {"d": 1}, "steps": ["flour", "milk"]}', "log.jsonl": "monday"},
    ],
)
def test_a_folder_of_other_things_is_refused_and_left_alone(text, tmp_path, overwrite, files):
    out = tmp_path / "model"
    out.mkdir()
    for name, words in files.items():
        if words is None:
            (out / name).mkdir()
            (out / name / "thesis.txt").write_text("years of work")
        else:
            (out / name).write_text(words)
    before = content(out)
    with pytest.raises(RunError, match=r"model.* is no training: choose another folder"):
        fit(text, out, overwrite=overwrite)
    assert content(out) == before


def test_an_overwrite_that_is_killed_midway_can_be_given_again(text, whole, tmp_path, monkeypatch):
    out = fit(text, tmp_path / "model", seed=1)
    (out / "notes.txt").write_text("mine")
    unlink = type(out).unlink

    def deadly(path, missing_ok=False):
        unlink(path, missing_ok=missing_ok)
        if path.name == "log.jsonl":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(type(out), "unlink", deadly)
        with pytest.raises(Crash):
            fit(text, out, overwrite=True)
    with monkeypatch.context() as patch:  # and once more, as soon as the new one has begun
        patch.setattr(room.RunFolder, "writing", dying_behind("work/words.txt"))
        with pytest.raises(Crash):
            fit(text, out, overwrite=True)
    fit(text, out, overwrite=True)
    assert same_end(out, whole)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_kill_while_the_plan_is_written_leaves_a_folder_that_can_begin(text, whole, tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    left = out / ".plan.json.0123456789abcdef.ffmem-tmp"
    left.mkdir()
    (left / "plan.json").write_text('{"rec')
    fit(text, out)
    assert same_end(out, whole)
    assert not left.exists()


def test_a_second_writer_is_refused(text, tmp_path):
    folder = room.RunFolder(tmp_path / "model")
    with folder.locked(), pytest.raises(RunError, match="another process is writing"):
        fit(text, tmp_path / "model")


def test_no_file_of_an_unfinished_training_is_a_pickle(stopped):
    assert set(content(stopped)) == {"plan.json", "log.jsonl", "work/words.txt", "work/stream.i32", STATE}
    with safetensors.safe_open(stopped / STATE, "pt") as file:
        assert set(file.metadata()) == {"facts", "sha256"}


def test_a_file_of_somebody_elses_in_the_work_of_a_training_stays(text, whole, tmp_path, monkeypatch):
    out = tmp_path / "model"
    stop(monkeypatch, text, out, 3)
    (out / "work" / "thesis.txt").write_text("years of work")
    fit(text, out)
    fit(text, out)
    assert [path.name for path in (out / "work").iterdir()] == ["thesis.txt"]
    fit(text, out, overwrite=True)
    assert same_end(out, whole)
    assert (out / "work" / "thesis.txt").read_text() == "years of work"
