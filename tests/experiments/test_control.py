"""The control: fresh weights in the same shape, a small index that does not stay, results that are not made twice."""

import sys
import tempfile
from dataclasses import replace

import pytest
import torch

from ffmem import build_index
from ffmem.errors import RunError
from ffmem.experiments import agreement, run_experiments
from ffmem.experiments.control import control_index, random_model
from ffmem.run.registry import all_experiments
from ffmem.run.results import load_result, saved_results
from tests.tiny import some_sentences

CONTROL = sys.modules[random_model.__module__]
SMALL = {"control": "random", "examples": 8, "cells": 3, "quiet": True}


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where temporary folders are made: nothing may be left in it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def controls(monkeypatch):
    """What models with random weights were made with."""
    asked = []
    monkeypatch.setattr(CONTROL, "random_model", lambda *args: asked.append(args) or random_model(*args))
    return asked


def ran(made, kind):
    """A run of its own, so that no other test has kept a control in it."""
    model, index, text = made(kind)
    return model, build_index(model, text, out=index.path.parent / "controlled", top=4, overwrite=True, quiet=True)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "adaptive_lm"])
@pytest.mark.slow
def test_every_experiment_is_asked_of_random_weights_and_kept_beside_the_run_s_own(kind, made, controls):
    model, index = ran(made, kind)
    own = agreement(model, index, quiet=True)
    results = run_experiments(index, model=model, **SMALL)
    assert (
        [result.experiment for result in results]
        == list(all_experiments())
        == sorted(saved_results(index, "random"), key=list(all_experiments()).index)
    )
    assert saved_results(index) == ["agreement"]
    assert load_result(index, "agreement").as_dict() == own.as_dict()
    for result in results:
        assert result.control == "random"
        assert len(result.resamples) == 200
        assert {row["layer"] for row in result.rows} == set(index.layers)
        assert load_result(index, result.experiment, "random").as_dict() == result.as_dict()
    by_name = {result.experiment: result for result in results}
    assert by_name["activity"].settings["examples"] == 8
    assert by_name["removal"].settings["cells"] == 3
    chance = by_name["agreement"].facts["baselines"]
    assert chance["uniform"] == 1 / model.vocabulary.size
    assert all(row["shuffled"] is not None for row in chance["by_layer"])
    assert by_name["agreement"].rows != own.rows
    assert len(controls) == 1


@pytest.mark.slow
def test_nothing_is_computed_again_while_nothing_differs(made, controls, monkeypatch):
    model, index = ran(made, "gpt2")
    names = ["activity", "agreement"]
    first = run_experiments(index, names, model=model, **SMALL)
    assert len(controls) == 1
    with monkeypatch.context() as nothing:
        nothing.setattr("ffmem.run.model.model_of", lambda *_, **__: pytest.fail("a model was loaded"))
        again = run_experiments(index, names, **SMALL)
    assert [one.as_dict() for one in again] == [one.as_dict() for one in first]
    for count, other in enumerate(({"seed": 1}, {"examples": 9, "seed": 1}, {"cells": 2, "seed": 1}), 2):
        run_experiments(index, ["activity"], model=model, **SMALL | other)
        assert len(controls) == count
    run_experiments(index, ["activity", "composition"], model=model, **SMALL | other)  # one of them is there
    assert len(controls) == 5
    monkeypatch.setattr(CONTROL, "_code", lambda: "another")
    run_experiments(index, ["activity"], model=model, **SMALL | other)
    assert len(controls) == 6


@pytest.mark.slow
def test_a_text_that_changes_or_lies_in_memory_is_read_again(made, controls, tmp_path):
    model, index = ran(made, "gpt2")
    text = tmp_path / "eval.txt"
    for lines in (5, 5, 6):
        text.write_text("the king left the city .\n" * lines, "utf-8")
        run_experiments(index, ["activity"], model=model, eval=text, **SMALL)
    count = len(controls)
    assert count >= 2
    run_experiments(index, ["activity"], model=model, eval=text, **SMALL)
    assert len(controls) == count
    for number in (1, 2):
        run_experiments(index, ["activity"], model=model, eval=["the king left .", "the sea ."], **SMALL)
        assert len(controls) == count + number


def test_stopped_in_the_middle_it_leaves_nothing(made, monkeypatch):
    model, index = ran(made, "gpt2")

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setitem(all_experiments(), "agreement", replace(all_experiments()["agreement"], run=stop))
    with pytest.raises(KeyboardInterrupt):
        run_experiments(index, model=model, **SMALL)
    assert saved_results(index, "random") == []
    with pytest.raises(RunError, match=r"has no result removal: make it with ffmem experiments .* removal --control random"):
        load_result(index, "removal", "random")


@pytest.mark.slow
def test_a_damaged_control_is_made_again(made, controls):
    model, index = ran(made, "gpt2")
    run_experiments(index, ["activity"], model=model, **SMALL)
    (index.path / "results" / "random" / "activity.json").write_text("{")
    run_experiments(index, ["activity"], model=model, **SMALL)
    assert len(controls) == 2
    assert load_result(index, "activity", "random").control == "random"


@pytest.mark.parametrize("kind", ["gpt2-relu", "adaptive_lm"])
def test_random_weights_are_fresh_of_the_same_shape_and_those_of_their_seed(kind, made):
    model, _, _ = made(kind)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    one, same, other = (random_model(model, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), wanted)  # a caller's random numbers are left alone
    assert one.fingerprint() == same.fingerprint() != other.fingerprint() != model.fingerprint()
    assert type(one.model) is type(model.model)
    shapes = [{name: tuple(part.shape) for name, part in which.model.named_parameters()} for which in (one, model)]
    assert shapes[0] == shapes[1]
    assert (one.tokenizer, one.dtype, one.device, one.family) == (model.tokenizer, model.dtype, model.device, model.family)
    # As a training begins, not shaken as the tiny model is.
    assert all(not part.any() for name, part in one.model.named_parameters() if name.endswith("bias"))


def test_where_the_corpus_is_gone_the_control_reads_the_sentences_that_the_run_kept(gpt2, tmp_path):
    texts = some_sentences(12, seed=2)
    index = build_index(gpt2, texts, out=tmp_path / "run", layers=[1, 3], unit="line", top=3, distinct="none", quiet=True)
    with control_index(index, random_model(gpt2, 0), quiet=True) as small:
        assert small.layers == [1, 3]
        assert set(small.table("sentences").column("text").to_pylist()) <= set(texts)
        for name in ("top", "distinct", "bos", "negative"):
            assert getattr(small.manifest.settings, name) == getattr(index.manifest.settings, name)


def test_a_control_reads_no_more_of_the_corpus_than_it_needs(made, monkeypatch):
    model, index, _ = made("gpt2")
    monkeypatch.setattr(CONTROL, "CONTROL_TOKENS", 60)
    with control_index(index, random_model(model, 0), quiet=True) as small:
        assert small.counts.tokens < 100 < index.counts.tokens
