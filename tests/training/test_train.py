"""A whole training: its loss, its log, its budget, its validation text and the folder it leaves."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ffmem
from ffmem.corpus.sources import open_sources
from ffmem.errors import CorpusError, FfmemError, ModelError, RunError
from ffmem.training import train as room
from ffmem.training import trainer
from ffmem.training.perplexity import perplexity
from ffmem.training.stream import MARK, read_stream
from tests.tiny import some_sentences
from tests.training.small import RECIPE, STEPS, card_of, fit, log_of, stream_of


def test_the_loss_falls_on_a_tiny_text(text, tmp_path):
    losses = [line["loss"] for line in log_of(fit(text, tmp_path / "model", steps=40, log_every=8))]
    assert losses == pytest.approx(sorted(losses, reverse=True), abs=0.2)
    # The words are chosen by chance from 69: log 69 = 4.2 for one who knows the words alone.
    assert losses[0] > 5
    assert losses[-1] < 4


def test_the_log_tells_step_tokens_seconds_loss_and_rate_and_now_and_then_the_perplexity(text, tmp_path):
    lines = log_of(fit(text, tmp_path / "model", steps=21, log_every=1))
    assert [line["step"] for line in lines] == list(range(1, 22))
    assert [line["tokens"] for line in lines] == [96 * step for step in range(1, 22)]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    # A climb over 5 steps, times a straight line to nothing over all 21.
    climb = [min(1, (step + 1) / 5) * (1 - step / 21) for step in range(21)]
    assert [line["rate"] for line in lines] == pytest.approx([1e-2 * part for part in climb], abs=1e-7)
    assert [line["step"] for line in lines if "valid_perplexity" in line] == [10, 20]
    assert {*lines[0]} == {"step", "tokens", "seconds", "loss", "rate"}


def test_the_last_step_is_logged_though_it_falls_between_two_lines(text, tmp_path):
    assert [line["step"] for line in log_of(fit(text, tmp_path / "model", steps=5, log_every=3))] == [3, 5]


def test_a_logged_loss_is_the_mean_of_the_steps_since_the_line_before(text, tmp_path):
    single = [line["loss"] for line in log_of(fit(text, tmp_path / "one", steps=6, log_every=1))]
    triple = [line["loss"] for line in log_of(fit(text, tmp_path / "two", steps=6, log_every=3))]
    assert triple == pytest.approx([sum(single[:3]) / 3, sum(single[3:]) / 3], abs=2e-4)


def test_the_first_loss_is_the_mean_over_all_windows_of_both_lengths(text, whole, tmp_path):
    """One step by hand: the same model, the same windows, one word after another from the logits."""
    first = log_of(fit(text, tmp_path / "model", steps=1))[0]["loss"]
    reader, model = seen_by_the_first_step(text, tmp_path)
    total, count = 0.0, 0
    for length, rows in RECIPE.windows:
        windows = reader.windows(0, length, rows)
        with torch.no_grad():
            logits = model(input_ids=windows.ids).logits
        for row, targets in zip(logits, windows.targets.view(rows, length), strict=True):
            total -= sum(float(row[at, target]) for at, target in enumerate(targets.tolist()))
            count += length
    assert first == pytest.approx(total / count, abs=1e-3)


def seen_by_the_first_step(text, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        caught = []

        def caught_run(trainer, reader, *_):
            caught.append((reader, trainer.model))
            raise RunError("seen")

        patch.setattr(room.Trainer, "run", caught_run)
        with pytest.raises(RunError, match="seen"):
            fit(text, tmp_path / "seen")
    return caught[0]


def test_weights_of_the_blocks_decay_and_words_norms_and_biases_do_not(text, tmp_path):
    _, model = seen_by_the_first_step(text, tmp_path)
    decays = {}
    for group in trainer._optimiser(model, RECIPE, fused=False).param_groups:
        decays |= {id(parameter): group["weight_decay"] for parameter in group["params"]}
    named = {name: decays.pop(id(parameter)) for name, parameter in model.named_parameters()}
    assert not decays
    assert {name for name, decay in named.items() if decay} == {
        f"model.layers.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in ("fc1", "fc2", *(f"self_attn.{kind}_proj" for kind in ("q", "k", "v", "out")))
    }
    assert set(named.values()) == {0.0, RECIPE.decay}


# ---- the folder


def test_the_folder_holds_a_model_without_a_pickle_or_a_trace_of_the_work(whole):
    assert {path.name for path in whole.rglob("*")} == {
        "config.json",
        "generation_config.json",
        "log.jsonl",
        "model.safetensors",
        "plan.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }


@pytest.mark.slow
def test_the_folder_loads_as_a_model_and_can_be_indexed(whole, text, tmp_path):
    model = ffmem.load_model(whole, device="cpu")
    assert str(model).endswith("64 cells in 2 layers, torch.float32 on cpu)")
    index = ffmem.build_index(model, text, out=tmp_path / "run", top=3, quiet=True)
    assert index.counts.cells == 64
    assert index.counts.triggers > 64


def test_the_card_tells_how_the_model_was_made_and_its_perplexity_is_that_of_the_loaded_model(whole, text):
    card = card_of(whole)
    assert (card["step"], card["tokens"], card["vocabulary"], card["seed"]) == (STEPS, STEPS * 96, 73, 0)
    assert card["recipe"]["d"] == 16
    assert card["corpus"] == [str(text)]
    assert card["seconds"] > 0
    loaded = ffmem.load_model(whole, device="cpu")
    stream = read_stream(open_sources(text, headings=True), loaded.tokenizer)
    held, _ = room._hold_out(stream)
    found = perplexity(loaded.model, held)
    assert card["perplexity"]["windows"] == pytest.approx(found.windows, rel=1e-5)
    assert card["perplexity"]["sentences"] == pytest.approx(found.sentences, rel=1e-5)
    assert card["perplexity"]["tokens"] == len(held)
    assert card["parameters"] == sum(parameter.numel() for parameter in loaded.model.parameters())


def test_the_same_seed_gives_the_same_weights_and_another_one_others(text, whole, tmp_path):
    weights = [(folder / "model.safetensors").read_bytes() for folder in (whole, fit(text, tmp_path / "same"))]
    assert weights[0] == weights[1]
    assert (fit(text, tmp_path / "other", seed=1) / "model.safetensors").read_bytes() != weights[0]


@pytest.mark.parametrize("words", [1, 5, 30])
def test_a_vocabulary_smaller_than_the_first_cutoff_trains_too(words, tmp_path):
    lines = [" ".join(f"w{(at + word) % words}" for word in range(4)) for at in range(60)]
    assert card_of(fit(lines, tmp_path / "model", steps=2))["vocabulary"] == 4 + words


def test_a_recipe_without_a_climb_begins_at_its_rate(text, tmp_path):
    recipe = replace(RECIPE, warmup=0)
    assert log_of(fit(text, tmp_path / "model", size=recipe, steps=1))[0]["rate"] == RECIPE.rate


# ---- the budget


@pytest.fixture
def clock(monkeypatch):
    """A clock by which a step takes a second and all else no time; `clock.stop_before` is a step it is stopped at."""
    found = SimpleNamespace(now=1000.0, stop_before=None)
    step = room.Trainer.step

    def timed(trainer, batches, rate):
        if trainer.counters.step == found.stop_before:
            raise KeyboardInterrupt
        assert trainer.counters.step < 100, "the budget has no end"
        found.now += 1
        return step(trainer, batches, rate)

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(room.Trainer, "step", timed)
    return found


def test_a_budget_of_half_a_minute_is_thirty_steps_of_a_second_and_the_rate_goes_to_zero(text, clock, tmp_path):
    out = fit(text, tmp_path / "model", minutes=0.5, log_every=1)
    rates = [line["rate"] for line in log_of(out)]
    assert rates[5:] == pytest.approx([1e-2 * (1 - step / 30) for step in range(5, 30)], abs=1e-7)
    assert (card_of(out)["step"], card_of(out)["seconds"]) == (30, 30)


@pytest.mark.parametrize("checkpoint_minutes", [0, 0.1, 5])
@pytest.mark.slow
def test_time_before_a_stop_counts_and_time_between_two_sessions_does_not(text, clock, tmp_path, checkpoint_minutes):
    settings = {"minutes": 0.5, "log_every": 1, "checkpoint_minutes": checkpoint_minutes}
    for clock.stop_before in (10, 17):
        with pytest.raises(KeyboardInterrupt):
            fit(text, tmp_path / "model", **settings)
        clock.now += 3600
    clock.stop_before = None
    out = fit(text, tmp_path / "model", **settings)
    assert (card_of(out)["step"], card_of(out)["seconds"]) == (30, 30)
    assert [line["seconds"] for line in log_of(out)] == list(range(1, 31))


def test_the_last_steps_of_a_budget_are_logged(text, clock, tmp_path):
    assert [line["step"] for line in log_of(fit(text, tmp_path / "model", minutes=0.5, log_every=8))] == [8, 16, 24, 30]


def test_a_real_budget_ends_near_its_end(text, tmp_path):
    out = fit(text, tmp_path / "model", minutes=0.01, log_every=1)
    assert 0.6 <= card_of(out)["seconds"] < 1.5
    assert log_of(out)[-1]["rate"] < 0.3 * RECIPE.rate
    assert len(log_of(out)) == card_of(out)["step"]


# ---- the validation text


sentence_lengths = st.lists(st.integers(1, 30), min_size=1, max_size=60)


@given(sentence_lengths)
def test_the_end_of_the_stream_is_held_out_from_a_sentence_on(lengths):
    stream = stream_of(*([7] * length for length in lengths))
    held, rest = room._hold_out(stream)
    assert np.concatenate([rest, held]).tolist() == stream.tolist()
    # The sentence at nine tenths is the first of the held-out ones.
    assert held[0] == MARK
    assert len(held) >= len(stream) // 10
    assert MARK not in held[1 : len(held) - len(stream) // 10 + 1] or len(held) == len(stream) // 10


def words_trained_on(text, out, monkeypatch, **others):
    """Every word that the windows of a training held, and its validation text."""
    seen, held = set(), []
    step, measure = room.Trainer.step, room.perplexity

    def spied(trainer, batches, rate):
        for windows in batches:
            seen.update(windows.ids.flatten().tolist(), windows.targets.tolist())
        return step(trainer, batches, rate)

    monkeypatch.setattr(room.Trainer, "step", spied)
    monkeypatch.setattr(room, "perplexity", lambda model, stream: held.append(stream) or measure(model, stream))
    tokenizer = ffmem.load_model(fit(text, out, steps=30, **others), device="cpu").tokenizer
    return set(tokenizer.convert_ids_to_tokens(sorted(seen))), tokenizer.convert_ids_to_tokens(held[0].tolist())


@pytest.fixture
def two_halves(tmp_path):
    """Nine tenths speak of cats, the last tenth of dogs."""
    path = tmp_path / "text.txt"
    path.write_text("a cat sat here\n" * 180 + "one dog ran there\n" * 20, "utf-8")
    return path


def test_the_corpus_s_end_is_for_validation_and_never_trained_on(two_halves, tmp_path, monkeypatch):
    seen, held = words_trained_on(two_halves, tmp_path / "model", monkeypatch)
    assert seen == {"</s>", "a", "cat", "sat", "here"}
    assert held == ["</s>", "one", "dog", "ran", "there"] * 20


def test_a_validation_text_is_used_instead_and_the_whole_corpus_is_trained_on(two_halves, tmp_path, monkeypatch):
    (tmp_path / "valid.txt").write_text("a dog sat\n\na bird\n", "utf-8")
    seen, held = words_trained_on(two_halves, tmp_path / "model", monkeypatch, valid=tmp_path / "valid.txt")
    assert {"cat", "dog"} < seen
    assert held == ["</s>", "a", "dog", "sat", "</s>", "a", "<unk>"]
    found = card_of(tmp_path / "model")["perplexity"]
    assert (found["tokens"], found["unknown"]) == (7, 1 / 5)


# ---- what is refused


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ({"minutes": 3, "steps": 5}, FfmemError, "one of the two, found minutes 3 and steps 5"),
        ({"minutes": 0}, FfmemError, "expected minutes or steps above 0"),
        ({"minutes": -1}, FfmemError, "found minutes -1 and steps None"),
        ({"minutes": float("nan")}, FfmemError, "found minutes nan"),
        ({"minutes": float("inf")}, FfmemError, "found minutes inf"),
        ({"steps": 0}, FfmemError, "found minutes None and steps 0"),
        ({"size": "huge"}, FfmemError, "expected size small, medium, paper, found 'huge'"),
        ({"device": "quantum"}, ModelError, "expected a device such as cpu"),
        ({"min_count": -1}, FfmemError, "min_count"),
        ({"seed": -1}, FfmemError, "seed"),
        ({"log_every": 0}, FfmemError, "log_every"),
        ({"checkpoint_minutes": -1}, FfmemError, "checkpoint_minutes"),
    ],
)
def test_numbers_and_names_that_make_no_sense_are_refused_before_anything_is_written(text, tmp_path, others, error, message):
    with pytest.raises(error, match=message):
        fit(text, tmp_path / "model", **others)
    assert not (tmp_path / "model").exists()


def test_texts_that_are_not_there_are_refused_before_anything_is_written(text, tmp_path):
    for corpus, valid in ((tmp_path / "none.txt", None), (text, tmp_path / "none.txt")):
        with pytest.raises(CorpusError, match=r"none\.txt: no such file"):
            fit(corpus, tmp_path / "model", valid=valid)
        assert not (tmp_path / "model").exists()


def test_too_little_text_is_told_and_more_text_under_the_same_name_is_then_read(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a cat sat here\n" * 8, "utf-8")
    with pytest.raises(CorpusError, match="expected a corpus of many windows, found 35 tokens; give more text"):
        fit(path, tmp_path / "model")
    path.write_text("a cat sat here\n" * 80, "utf-8")
    assert card_of(fit(path, tmp_path / "model"))["step"] == STEPS


def test_a_text_of_rare_words_only_is_told(tmp_path):
    with pytest.raises(CorpusError, match="expected words that occur 3 times or more, found none"):
        fit(["one two three"], tmp_path / "model", min_count=3)


def test_an_iterable_that_can_be_read_only_once_is_told_to_be_a_list(tmp_path):
    lines = some_sentences(200)
    with pytest.raises(CorpusError, match="twice"):
        fit(iter(lines), tmp_path / "model")
    assert card_of(fit(lines, tmp_path / "model"))["step"] == STEPS


def test_an_empty_validation_text_is_told(text, tmp_path):
    (tmp_path / "valid.txt").write_text("\n", "utf-8")
    with pytest.raises(CorpusError, match=r"expected text, found none in .*valid\.txt"):
        fit(text, tmp_path / "model", valid=tmp_path / "valid.txt")


def test_a_training_of_jsonl_and_of_several_files_reads_them_in_order(tmp_path, monkeypatch):
    for name, word in (("one", "cat"), ("two", "dog")):
        lines = (json.dumps({"body": f"a {word} sat here"}) + "\n" for _ in range(60))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    seen, held = words_trained_on(files, tmp_path / "model", monkeypatch, column="body")
    assert {"cat", "dog"} < seen
    assert set(held) == {"</s>", "a", "dog", "sat", "here"}
    assert card_of(tmp_path / "model")["corpus"] == [str(path) for path in files]


def test_progress_is_shown_unless_quiet(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ffmem.progress.PATIENCE", 0.0)
    monkeypatch.setattr("ffmem.progress.PLAIN_EVERY", 0.0)
    fit(text, tmp_path / "quiet")
    assert capsys.readouterr().err == ""
    fit(text, tmp_path / "model", quiet=False)
    shown = capsys.readouterr().err
    for part in ("reading the corpus: ", "counting words", "numbering words", "training: 50%", "step 10, loss "):
        assert part in shown


def test_ffmem_train_is_this_function():
    assert ffmem.train is room.train
