"""Tokens removed from triggers: against every shortened prefix run alone, and keys whose answer is known."""

import json
from dataclasses import replace
from math import isnan

import numpy as np
import pytest
import torch

from ffmem import build_index, load_model
from ffmem.errors import FfmemError, ModelError, RunError
from ffmem.experiments.questions.removal import KINDS, Drawn, Removed, draw_triggers, removal, remove_tokens
from ffmem.indexing.request import BATCH_TOKENS
from ffmem.run.results import load_result
from tests.tiny import WORDS, silent_gpt2, some_sentences, tiny_model

ALL = 10**6
CLOSE = {"rel": 1e-4, "abs": 1e-6}


def coefficient_alone(model, layer, cell, ids):
    """The definition: one sequence, one forward of the whole model, the last position."""
    kept = []
    hook = model.value_modules[layer - 1].register_forward_pre_hook(lambda _, args: kept.append(args[0].detach().clone()))
    try:
        with torch.no_grad():
            model.model(input_ids=torch.tensor([ids]))
    finally:
        hook.remove()
    return float(kept[0].reshape(len(ids), -1)[-1, cell])


def tokens_of(index, drawn, at):
    """The prefix of one drawn trigger, from the run's sentences."""
    row = int(drawn.row[at])
    return index.sentences([row])[row]["tokens"][: int(drawn.position[at])]


def planted_model(tokenizer, *, past=False):
    """One ReLU layer: cell 0 knows `king`, cell 1 `war`, cells 2 and 3 nothing; positions are silent.

    Without `past` attention is silent too, so a cell sees only the last word; with it, attention adds the mean of all
    words so far, so that a cell sees its word anywhere. A word that is not there is below zero behind the LayerNorm.
    """
    size = len(tokenizer)
    model = silent_gpt2(size)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.eye(size))
        block = model.transformer.h[0]
        for norm in (block.ln_1, block.ln_2, model.transformer.ln_f):
            norm.weight.fill_(1)
        block.mlp.c_fc.weight[tokenizer.convert_tokens_to_ids("king"), 0] = 1.0
        block.mlp.c_fc.weight[tokenizer.convert_tokens_to_ids("war"), 1] = 2.0
        block.mlp.c_proj.weight.fill_(0.1)
        if past:
            block.attn.c_attn.weight[:, 2 * size :].copy_(torch.eye(size))
            block.attn.c_proj.weight.copy_(torch.eye(size))
    return load_model(model, tokenizer=tokenizer)


def by_kind(result, layer=1):
    return {row["kind"]: row for row in result.rows if row["layer"] == layer}


@pytest.mark.parametrize("variant", ["gpt2", "gpt2-relu", "llama", "phi3", "adaptive_lm", "opt-post-norm-projected"])
@pytest.mark.parametrize("bos", ["on", "off"])
@pytest.mark.slow
def test_every_coefficient_is_that_of_the_shortened_prefix_run_alone(variant, bos, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 50)
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    sentences = some_sentences(14, seed=1, longest=8)
    index = build_index(model, sentences, out=tmp_path / "run", top=4, unit="line", bos=bos, quiet=True)
    start = [model.bos] if bos == "on" else []
    for layer in (1, model.layers):
        chance = np.random.default_rng(5)
        drawn = draw_triggers(index, layer, cells=6, triggers=3, chance=chance)
        [found], _ = remove_tokens(model, index, [drawn], seed=5)
        assert len(found.kept)
        for number, at in enumerate(found.kept):
            ids, random = tokens_of(index, drawn, at), int(found.at[number])
            shortened = {"first": ids[1:], "last": ids[:-1], "random": ids[:random] + ids[random + 1 :]}
            cell = int(drawn.cell[at])
            assert found.m[number] == pytest.approx(coefficient_alone(model, layer, cell, start + ids), **CLOSE)
            assert found.m[number] == pytest.approx(drawn.stored[at], **CLOSE)
            for kind, left in shortened.items():
                expected = coefficient_alone(model, layer, cell, start + left)
                assert found.without[kind][number] == pytest.approx(expected, **CLOSE), (kind, ids, random)


def test_rows_are_the_means_over_all_triggers_of_the_cells(llama, tmp_path):
    index = build_index(llama, some_sentences(12, seed=3, longest=6), out=tmp_path / "run", top=2, unit="line", quiet=True)
    result = removal(llama, index, cells=ALL, triggers=1, quiet=True)
    assert [(row["layer"], row["kind"]) for row in result.rows] == [(n, kind) for n in (1, 2, 3) for kind in KINDS]
    columns = (index.table("sentences").column(name).to_pylist() for name in ("sentence", "tokens"))
    tokens = dict(zip(*columns, strict=True))
    first, last = [], []
    for view in index:
        if view.cell.layer != 2 or not view.triggers:
            continue
        ids = tokens[view.triggers[0].sentence][: view.triggers[0].position]
        if len(ids) < 2:
            continue
        m, without_first, without_last = (
            coefficient_alone(llama, 2, view.cell.index, [llama.bos, *left]) for left in (ids, ids[1:], ids[:-1])
        )
        first.append((without_first - m) / m)
        last.append((without_last - m) / m)
    rows = by_kind(result, 2)
    assert rows["first"]["mean"] == pytest.approx(np.mean(first), rel=1e-3)
    assert rows["last"]["mean"] == pytest.approx(np.mean(last), rel=1e-3)
    assert rows["last"]["median"] == pytest.approx(np.median(last), rel=1e-3)
    assert rows["first"]["n"] == rows["random"]["n"] == len(first)
    assert all(row["low"] < row["mean"] < row["high"] for row in result.rows)
    # In a gated layer a coefficient may turn over, which is more than -100%.
    assert min(last) < -1
    assert result.facts["coefficients_may_be_negative"] is True
    assert result.facts["negative_triggers_used"] == 0


def test_a_key_for_the_last_word_loses_all_without_it_and_nothing_without_the_first(tokenizer, tmp_path):
    model = planted_model(tokenizer)
    sentences = ["the king", "the old king left", "a great old king", "in a war", "it was a war .", "the new king !"]
    index = build_index(model, sentences, out=tmp_path / "run", top=5, unit="line", quiet=True)
    result = removal(model, index, quiet=True)
    rows = by_kind(result)
    assert rows["last"] | {"layer": 1} == {
        "layer": 1, "kind": "last", "mean": -1.0, "low": -1.0, "high": -1.0, "median": -1.0, "n": 6, "cells": 2
    }  # fmt: skip
    assert rows["first"]["mean"] == rows["first"]["low"] == rows["first"]["high"] == 0.0
    # Positions are silent, so a random token matters only where it is the last one.
    assert 0 < result.facts["random_hit_last"] < 6
    assert rows["random"]["mean"] == pytest.approx(-result.facts["random_hit_last"] / 6)
    assert result.facts["largest_difference_from_index"] < 1e-5


def test_a_word_that_stands_twice_at_the_end_is_not_missed(tokenizer, tmp_path):
    model = planted_model(tokenizer)
    # Distinct prefixes: "war war" is offered at its first position, a one-token prefix; "the war war" at its second.
    index = build_index(
        model, ["the war war", "war war"], out=tmp_path / "run", top=5, unit="line", distinct="none", quiet=True
    )
    result = removal(model, index, quiet=True)
    # Of cell 1: "the war" (-1), "the war war" (0), "war" (left out), "war war" (0).
    assert result.facts["one_token_prefixes"] == 1
    assert by_kind(result)["last"]["n"] == 3
    assert by_kind(result)["last"]["mean"] == pytest.approx(-1 / 3)


def test_a_key_for_a_word_anywhere_misses_the_word_and_not_the_last_token(tokenizer, tmp_path):
    model = planted_model(tokenizer, past=True)
    # `king` itself fires the cell most, so its best prefix is asked for behind the first position by every prefix.
    index = build_index(
        model, ["king was old and great"], out=tmp_path / "run", top=5, unit="line", distinct="none", quiet=True
    )
    result = removal(model, index, quiet=True)
    assert result.facts["triggers_drawn"] == 5
    assert result.facts["one_token_prefixes"] == 1
    rows = by_kind(result)
    assert rows["first"]["mean"] == -1.0
    assert rows["last"]["mean"] > 0  # the king's share of what is left is larger
    assert rows["first"]["n"] == 4


def test_one_token_prefixes_are_left_out_and_counted(tokenizer, tmp_path):
    model = planted_model(tokenizer)
    index = build_index(model, ["king", "war ."], out=tmp_path / "run", unit="line", quiet=True)
    result = removal(model, index, quiet=True)
    assert result.facts["triggers_drawn"] == result.facts["one_token_prefixes"] == 2
    assert result.facts["triggers_used"] == result.facts["sequences_run"] == 0
    assert all(row["n"] == 0 and isnan(row["mean"]) and isnan(row["low"]) for row in result.rows)
    assert load_result(index, "removal").rows[0]["mean"] is None


def test_cells_without_a_trigger_are_never_drawn_and_too_few_cells_are_told(tokenizer, tmp_path):
    model = planted_model(tokenizer)
    sentences = ["the king left", "the war"]
    index = build_index(model, sentences, out=tmp_path / "run", unit="line", quiet=True)
    facts = removal(model, index, quiet=True).facts
    assert facts["cells"] == 2  # of four
    assert facts["layers_with_fewer_cells"] == {"1": 2}
    assert facts["cells_with_fewer_triggers"] == 2
    enough = removal(model, index, cells=2, triggers=1, quiet=True).facts
    assert enough["layers_with_fewer_cells"] == {}
    assert enough["cells_with_fewer_triggers"] == 0
    one = draw_triggers(index, 1, cells=1, triggers=9, chance=np.random.default_rng(0))
    assert one.cells == 1
    assert set(one.cell.tolist()) < {0, 1}


def test_equal_sequences_are_run_once_whatever_the_cells_and_removals_that_want_them(tokenizer, tmp_path, monkeypatch):
    model = planted_model(tokenizer)
    with torch.no_grad():  # cells 2 and 3 know `king` too
        model.model.transformer.h[0].mlp.c_fc.weight[tokenizer.convert_tokens_to_ids("king"), 2:] = 1.0
    index = build_index(model, ["the king"], out=tmp_path / "run", unit="line", quiet=True)
    result = removal(model, index, quiet=True)
    assert result.facts["triggers_used"] == 3
    assert result.facts["sequences_run"] == 2  # "the king" and "king"


def test_triggers_are_a_cells_best_by_rank(gpt2, tmp_path):
    index = build_index(gpt2, some_sentences(30, seed=4), out=tmp_path / "run", top=7, unit="line", quiet=True)
    drawn = draw_triggers(index, 2, cells=ALL, triggers=3, chance=np.random.default_rng(0))
    places = {}
    for at, cell in enumerate(drawn.cell.tolist()):
        places.setdefault(cell, []).append((float(drawn.stored[at]), int(drawn.position[at])))
    for view in (index["L2D0"], index["L2D64"], index["L2D127"]):
        assert places[view.cell.index] == [(trigger.coefficient, trigger.position) for trigger in view.triggers[:3]]


def test_negative_triggers_are_never_drawn(llama, tmp_path):
    index = build_index(llama, some_sentences(20, seed=5), out=tmp_path / "run", top=3, unit="line", quiet=True)
    assert any(view.negative_triggers for view in index)
    for layer in index.layers:
        assert (draw_triggers(index, layer, cells=ALL, triggers=50, chance=np.random.default_rng(0)).stored > 0).all()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_other_cells(gpt2, tmp_path):
    index = build_index(gpt2, some_sentences(20, seed=6), out=tmp_path / "run", top=4, unit="line", quiet=True)
    texts = [json.dumps(removal(gpt2, index, cells=5, triggers=3, seed=seed, quiet=True).as_dict()) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    result = removal(gpt2, index, cells=5, triggers=3, seed=1, quiet=True)
    assert load_result(index, "removal").as_dict() == result.as_dict()
    assert result.table.num_rows == 3 * gpt2.layers


def test_batching_changes_nothing_but_the_last_digits(gpt2, tmp_path, monkeypatch):
    index = build_index(gpt2, some_sentences(20, seed=7), out=tmp_path / "run", top=4, unit="line", quiet=True)
    whole = removal(gpt2, index, cells=9, triggers=4, quiet=True)
    monkeypatch.setitem(BATCH_TOKENS, "cpu", 1)
    alone = removal(gpt2, index, cells=9, triggers=4, quiet=True)
    for one, other in zip(whole.rows, alone.rows, strict=True):
        assert one.pop("kind") == other.pop("kind")
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_layers_of_a_partial_run_and_its_own_model_when_none_is_given(gpt2, tmp_path):
    sentences = some_sentences(10, seed=8)
    index = build_index(gpt2, sentences, out=tmp_path / "run", top=3, unit="line", layers=[1, 3], quiet=True)
    result = removal(None, index, cells=4, quiet=True)
    assert [row["layer"] for row in result.rows[::3]] == [1, 3]
    whole = build_index(gpt2, sentences, out=tmp_path / "whole", top=3, unit="line", quiet=True)
    for row, same in zip(
        result.rows, (r for r in removal(gpt2, whole, cells=4, quiet=True).rows if r["layer"] != 2), strict=True
    ):
        assert row.pop("kind") == same.pop("kind")
        assert row == pytest.approx(same, rel=1e-4)  # batches, and with them the last digits, differ


def test_another_model_than_the_runs_is_refused(gpt2, tokenizer, tmp_path):
    index = build_index(gpt2, ["the king left ."], out=tmp_path / "run", quiet=True)
    with pytest.raises(RunError, match="was made with model"):
        removal(load_model(tiny_model("gpt2", seed=1), tokenizer=tokenizer), index, quiet=True)


@pytest.mark.parametrize("wrong", [{"cells": 0}, {"triggers": -1}])
def test_counts_below_one_are_refused(wrong, gpt2, tmp_path):
    index = build_index(gpt2, ["the king left ."], out=tmp_path / "run", quiet=True)
    with pytest.raises(FfmemError, match="of at least 1"):
        removal(gpt2, index, **wrong, quiet=True)


def test_a_coefficient_that_is_not_finite_is_an_error_and_leaves_no_hook(gpt2, tmp_path):
    index = build_index(gpt2, ["the king left the city ."], out=tmp_path / "run", quiet=True)
    poisoned = gpt2.value_modules[1].register_forward_pre_hook(lambda _, args: (args[0] * float("nan"),))
    try:
        with pytest.raises(ModelError, match="layer 2 gives coefficients that are not finite"):
            removal(gpt2, index, cells=2, quiet=True)
    finally:
        poisoned.remove()
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in gpt2.model.modules())


def test_a_trigger_that_is_no_longer_above_zero_is_left_out_of_the_changes():
    drawn = Drawn(
        layer=1,
        cells=2,
        cell=np.array([0, 0, 1]),
        stored=np.array([4.0, 1e-9, 2.0]),
        position=np.array([3, 3, 2]),
        row=np.array([0, 1, 2]),
    )
    without = {kind: np.array([1.0, 1.0, 2.0]) for kind in KINDS}
    found = Removed(drawn, np.arange(3), np.array([0, 1, 1]), np.array([2.0, 0.0, 2.0]), without)
    assert found.changes("last").tolist() == [-0.5, 0.0]
    assert found.differences.tolist() == [0.5, 1.0, 0.0]
    assert replace(found, m=np.array([4.0, 1.0, 2.0])).changes("first").tolist() == [-0.75, 0.0, 0.0]


def test_every_cell_and_every_token_has_its_chance(tokenizer, tmp_path):
    assert {"king", "war"} <= set(WORDS)
    model = planted_model(tokenizer)
    index = build_index(model, ["the old king", "in the war"], out=tmp_path / "run", unit="line", quiet=True)
    cells, tokens = [], []
    for seed in range(60):
        chance = np.random.default_rng(seed)
        drawn = draw_triggers(index, 1, cells=1, triggers=1, chance=chance)
        cells += drawn.cell.tolist()
        tokens += remove_tokens(model, index, [drawn], seed=seed)[0][0].at.tolist()
    assert 15 < cells.count(0) < 45
    assert min(tokens.count(at) for at in range(3)) > 8
    assert set(tokens) == {0, 1, 2}
