"""Baseline and edited side by side: numbers against a slow reference, controls, words."""

import json
from dataclasses import replace
from html import escape

import numpy as np
import pytest
import torch

from ffmem import Cell, FfmemError, build_index, load_model
from ffmem.live.comparison import compare, divergence
from ffmem.live.control import draw_controls
from ffmem.live.edits import parse_edits
from ffmem.live.intervene import intervene
from tests.tiny import silent_gpt2, some_sentences, tiny_model

PROMPT = "the king left the city"


def slow(model, ids, *edits, at="all"):
    """Log-probabilities behind the last of some ids, by the model's own logits."""
    if not edits:
        return model.logits(torch.tensor([ids]))[0, -1].double().log_softmax(-1)
    with intervene(model, *edits, at=at):
        return slow(model, ids)


def ids_of(model, text=PROMPT):
    return [model.bos, *model.tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("variant", ["gpt2", "llama", "gemma2", "opt-post-norm-projected", "adaptive_lm"])
def test_divergence_and_changes_equal_a_slow_reference(variant, tokenizer):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    edits = ("L1D3=4", "L2D5,L2D6*-3")
    found = compare(model, PROMPT, *edits, tokens=["Oslo", 7], generate=3, control=2)
    ids = ids_of(model)
    p, q = slow(model, ids), slow(model, ids, *edits)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3)
    assert found.kl > 1e-5
    compared = found.tokens_compared
    assert [one.id for one in compared][:2] == [tokenizer.convert_tokens_to_ids("Oslo"), 7]
    assert {one.id for one in compared[2:]} | {7} >= {*p.topk(5).indices.tolist(), *q.topk(5).indices.tolist()}
    for one in compared:
        assert one.baseline_log_prob == pytest.approx(float(p[one.id]), abs=1e-4)
        assert one.edited_log_prob == pytest.approx(float(q[one.id]), abs=1e-4)
        assert one.change == pytest.approx(float(q[one.id] - p[one.id]), abs=1e-4)
    assert [one.id for one in found.baseline.top] == p.topk(5).indices.tolist()
    assert [one.id for one in found.edited.top] == q.topk(5).indices.tolist()
    others = []
    for control in found.control.each:
        first, *rest = control.cells
        others.append(slow(model, ids, f"{first}=4", (rest, "*-3")))
        assert control.kl == pytest.approx(divergence(p, others[-1]), rel=1e-3, abs=1e-7)
    assert len(others) == 2
    for one in compared:
        changes = [float(other[one.id] - p[one.id]) for other in others]
        assert one.control_mean == pytest.approx(np.mean(changes), abs=1e-4)
        assert one.control_spread == pytest.approx(np.std(changes, ddof=1), abs=1e-4)
    for side, some in ((found.baseline, ()), (found.edited, edits)):
        text = list(ids)
        for _ in range(3):
            text.append(int(slow(model, text, *some).argmax()))
            if text[-1] == 0:
                break
        assert side.generated == text[len(ids) :]


def cells_of(edits):
    """The cells of some edits, each once."""
    return list(dict.fromkeys(cell for edit in edits for cell in edit.cells))


def test_divergence_of_two_small_distributions_worked_out_by_hand():
    p, q = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.25, 0.5, 0.25]).log()
    assert divergence(p, q) == pytest.approx(0.5 * np.log(2))
    assert divergence(p, p) == 0


def test_predictions_are_compared_behind_any_token_of_the_prompt(gpt2):
    found = compare(gpt2, PROMPT, "L1D3=4", position=1, generate=0, control=0)
    ids = ids_of(gpt2)[:3]
    assert found.behind == "king"
    assert found.kl == pytest.approx(divergence(slow(gpt2, ids), slow(gpt2, ids, "L1D3=4")), rel=1e-3)
    assert found.verdict == "no controls"
    assert found.baseline.generated == []


def test_an_edit_of_generated_tokens_is_compared_behind_the_first_of_them(gpt2):
    found = compare(gpt2, PROMPT, "L1D3=4", at="generated", generate=4, control=1)
    ids = ids_of(gpt2)
    first = int(slow(gpt2, ids).argmax())
    p, q = slow(gpt2, [*ids, first]), slow(gpt2, [*ids, first], "L1D3=4", at="-1")
    assert found.position == len(ids) - 1
    assert found.kl == pytest.approx(divergence(p, q), rel=1e-3)
    assert found.edited.generated[:2] == [first, int(q.argmax())]


def test_controls_are_other_cells_of_the_same_layers_the_nearest_in_size_and_the_same_for_a_seed(gpt2):
    ids = torch.tensor([ids_of(gpt2)])
    edits = parse_edits(["L2D5,L2D6*3", "L1D0=0"])
    columns, last = [1, 2, 3, 4, 5], 5
    drawn = [draw_controls(gpt2, edits, ids, columns, last, count=3, seed=seed) for seed in (0, 0, 1)]
    cells = [[cells_of(others) for others, _ in found] for _, found in drawn]
    assert cells[0] == cells[1] != cells[2]
    record = gpt2.record(ids)
    size = {
        layer: record.m[layer - 1][0, 1:].abs().mean(0) * gpt2.values(layer).norm(dim=1) * (2 if layer == 2 else 1)
        for layer in (1, 2)
    }
    for others, drawn_size in drawn[0][1]:
        chosen = cells_of(others)
        assert [cell.layer for cell in chosen] == [2, 2, 1]
        assert len(set(chosen)) == 3
        assert not {Cell(2, 5), Cell(2, 6), Cell(1, 0)} & set(chosen)
        assert [str(edit.operation) for edit in others] == ["*3", "=0"]
        assert drawn_size == pytest.approx(float(np.mean([size[cell.layer][cell.index] for cell in chosen])), rel=1e-4)
        for cell, own in zip(chosen, (Cell(2, 5), Cell(2, 6), Cell(1, 0)), strict=True):
            apart = (size[own.layer] - size[own.layer][own.index]).abs()
            # Of the ten nearest that are free; others may be taken by the set, its neighbour and draws before.
            assert (apart < apart[cell.index]).sum() < 10 + 2 + 3 * 2
    assert len({chosen[2] for chosen in cells[0]}) == 3


def test_a_control_of_a_value_that_is_set_matches_the_change_and_not_the_coefficient(gpt2):
    ids = torch.tensor([ids_of(gpt2)])
    _, [(others, size)] = draw_controls(gpt2, parse_edits(["L1D0=5"]), ids, [5], 5, count=1)
    [cell] = cells_of(others)
    change = (5 - gpt2.record(ids).m[0][0, 5]).abs() * gpt2.values(1).norm(dim=1)
    assert size == pytest.approx(float(change[cell.index]), rel=1e-4)
    assert (change - change[0]).abs().argsort().tolist().index(cell.index) <= 10


def test_a_control_of_a_quantile_is_in_its_own_cells_units(gpt2, tmp_path):
    run = build_index(gpt2, some_sentences(20), out=tmp_path / "run", top=1, quiet=True)
    found = compare(gpt2, PROMPT, "L2D5~q0.9*3", run=run, generate=0, control=2)
    p = slow(gpt2, ids_of(gpt2))
    for control in found.control.each:
        amount = 3 * run[control.cells[0]].stats.quantile(0.9)
        other = slow(gpt2, ids_of(gpt2), f"{control.cells[0]}={amount!r}")
        assert control.kl == pytest.approx(divergence(p, other), rel=1e-3)


def test_in_the_last_layer_only_the_compared_position_has_a_size(gpt2):
    ids = torch.tensor([ids_of(gpt2)])
    size, _ = draw_controls(gpt2, parse_edits(["L3D0=0"]), ids, [1, 2, 5], 5, count=0)
    assert size == pytest.approx(float(gpt2.record(ids).m[2][0, 5, 0].abs() * gpt2.values(3)[0].norm()), rel=1e-4)
    found = compare(gpt2, PROMPT, "L3D0=9", at="1:3", generate=0, control=1)
    assert found.size == found.kl == 0
    assert found.verdict == "nothing that this prediction depends on is changed"


def test_a_cell_that_matters_more_than_any_of_its_size_is_told_in_words(tokenizer):
    # All four cells are at 1 with values of length 1; but three values are the same for all words, which the norm takes out.
    model, size = silent_gpt2(len(tokenizer)), len(tokenizer)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.eye(size))
        model.transformer.ln_f.weight.fill_(1)
        mlp = model.transformer.h[0].mlp
        mlp.c_fc.bias.fill_(1)
        mlp.c_proj.weight.fill_(size**-0.5)
        mlp.c_proj.weight[0] = torch.eye(size)[tokenizer.convert_tokens_to_ids("army")]
    model = load_model(model, tokenizer=tokenizer)
    found = compare(model, PROMPT, "L1D0=0", tokens=["army"], generate=2, control=3)
    assert found.size == pytest.approx(1)
    assert [control.size for control in found.control.each] == pytest.approx([1, 1, 1])
    assert found.tokens_compared[0].change < -1
    assert found.tokens_compared[0].control_mean == pytest.approx(0, abs=1e-4)
    assert found.tokens_compared[0].control_spread == pytest.approx(0, abs=1e-4)
    assert found.verdict == "larger than 3 of 3 controls"
    assert f"KL(baseline‖edited) {found.kl:.4g}: larger than 3 of 3 controls" in found.lines()
    assert compare(model, PROMPT, "L1D1=0", generate=0, control=3).larger_than < 3
    with torch.no_grad():
        mlp.c_fc.bias[0] = 2
    alone = compare(model, PROMPT, "L1D0=0", generate=0, control=3)
    assert alone.verdict == "larger than 3 of 3 controls, whose size is 50% of the edit's"


def test_a_layer_edited_whole_has_no_controls_and_says_so(gpt2):
    every = [Cell(1, index) for index in range(gpt2.cells[0])]
    found = compare(gpt2, PROMPT, (every, "=0"), generate=0)
    assert found.control.each == []
    assert found.verdict == "no controls: the layer has no other cells to draw"
    half = compare(gpt2, PROMPT, (every[:-3], "=0"), generate=0)
    assert half.control.each == []
    few = compare(gpt2, PROMPT, ([*every[:1], Cell(2, 0)], "=0"), generate=0, control=200)
    assert len(few.control.each) == 127
    assert "of 127 controls (200 asked, the layer has too few other cells)" in few.verdict


def test_text_fits_the_width_and_json_is_plain(gpt2):
    found = compare(gpt2, PROMPT * 3, "L2D5*2", ([Cell(1, index) for index in range(40)], "+1"), tokens=["Oslo"], control=2)
    assert max(map(len, found.lines(80))) <= 80
    assert str(found) == "\n".join(found.lines())
    assert "\n" not in repr(found)
    assert found.verdict in repr(found)
    page = replace(found, prompt="<b>\n" * 200 + "its end", behind="<i>")._repr_html_()
    for part in ("its end<br>", "“&lt;i&gt;”", "baseline", "Δ log p", "of controls", escape(found.verdict)):
        assert part in page
    assert "<i>" not in page
    assert "\n" not in page
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert told["edits"][0] == "L2D5*2"
    assert set(told) == {
        *("model", "prompt", "tokens", "bos", "edits", "at", "position", "behind", "baseline", "edited"),
        *("tokens_compared", "kl", "size", "control", "verdict"),
    }
    assert told["tokens_compared"][0]["token"] == "Oslo"
    assert set(told["tokens_compared"][0]) == {
        *("token", "id", "baseline_log_prob", "edited_log_prob", "change", "control_mean", "control_spread")
    }
    assert len(told["control"]["each"]) == 2
    none = compare(gpt2, PROMPT, "L2D5*2", control=0).as_dict()
    assert none["control"]["kl_mean"] is None


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"prompt": ""}, "a prompt of at least 1 token, found ''"),
        ({"prompt": "king " * 70}, "a prompt of 1 to 63 tokens, as .* takes, found 70"),
        ({"prompt": "king " * 60}, "0 to 3 tokens to generate behind a prompt of 60, found 20"),
        ({"position": 5}, "a position from 0 to 4 or from -5 to -1, found 5"),
        ({"at": "7:"}, r"some of the prompt's 5 tokens \(0 to 4\), found 7:"),
        ({"at": "3:", "position": 1}, "a position from 3 on, where the edits begin, found 1"),
        ({"at": "generated", "position": 0}, "position -1 where only generated tokens are edited"),
        ({"tokens": ["Oslo Paris"]}, "one token of .* found 'Oslo Paris', which it reads as 'Oslo' \\+ 'Paris'"),
        ({"tokens": ["xyzzy"]}, "one token of .* found 'xyzzy', which it reads as '<unk>'"),
        ({"tokens": [101]}, "a token id from 0 to 100, found 101"),
        ({"top": 0}, "top of at least 1"),
        ({"control": -1}, "control of at least 0"),
        ({"seed": -1}, "seed of at least 0, found -1"),
        ({"edits": []}, "at least one edit"),
        ({"bos": "maybe"}, "bos auto, on or off"),
    ],
)
def test_bad_input_gets_one_clear_line(gpt2, settings, line):
    settings = {"prompt": PROMPT, "edits": ["L1D0=0"]} | settings
    with pytest.raises(FfmemError, match=line) as error:
        compare(gpt2, settings.pop("prompt"), *settings.pop("edits"), **settings)
    assert "\n" not in str(error.value)
