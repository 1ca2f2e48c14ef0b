"""Tracing a prompt: a planted model whose answer is known, slow references, runs, JSON and bad input."""

import json
from dataclasses import fields

import pytest
import torch

from ffmem import FfmemError, build_index, load_model, values
from ffmem.cells import Cell
from ffmem.live.position import PositionTrace, case_of
from ffmem.live.trace import trace
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.vocabulary import AdaptiveVocabulary
from tests.tiny import some_text, tiny_model, word_tokenizer

PROMPT = "the king left the river"
KINDS = ["gpt2-relu", "gpt2", "llama", "opt-post-norm-projected", "gemma2", "adaptive_lm"]


@pytest.fixture(scope="module")
def traced(tokenizer):
    """`traced(kind)`: a tiny model and the trace of a prompt through it. Shared: change nothing."""
    kept = {}

    def make(kind):
        if kind not in kept:
            model = load_model(tiny_model(kind), tokenizer=tokenizer)
            kept[kind] = model, trace(model, PROMPT, target="Paris", cells=3)
        return kept[kind]

    return make


TRUE, OTHER = word_tokenizer().convert_tokens_to_ids(["Paris", "Oslo"])


@pytest.fixture(scope="module")
def planted(tokenizer):
    """One layer, no attention, coefficients 2, 1, 3, 0 whatever is fed; entry 0 of the stream scores Paris, entry 1 Oslo.

    Values: cell 0 is for Paris (1), cell 1 against it (-4) and for Oslo (5), cell 2 nothing, cell 3 for Paris but silent.
    So y is -2 for Paris and 5 for Oslo: cell 0 is outvoted, by cell 1.
    """
    shape = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4, "cutoffs": [70]}
    config = AdaptiveConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=2, **shape)
    model = AdaptiveLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        words, _ = model.model.embed
        words.words.weight[TRUE, 0] = words.words.weight[OTHER, 1] = 1.0
        block = model.model.layers[0]
        block.fc1.bias.copy_(torch.tensor([2.0, 1.0, 3.0, 0.0]))
        block.fc2.weight[0] = torch.tensor([1.0, -4.0, 0.0, 9.0])
        block.fc2.weight[1, 1] = 5.0
        block.fc2.bias[0] = 0.5
    return load_model(model, tokenizer=tokenizer)


def test_a_planted_memory_is_outvoted_by_the_cell_that_suppresses_it(planted):
    place = trace(planted, "the capital is", target="Paris").at(-1)
    assert place.next is not None
    assert (place.final.token, place.next.token, place.token.id) == ("Oslo", "Paris", TRUE)
    assert [(one.cell, one.coefficient, one.contribution.total) for one in place.promoting] == [(Cell(1, 0), 2.0, 2.0)]
    assert [(one.cell, one.contribution.total) for one in place.suppressing] == [(Cell(1, 1), -4.0)]
    (layer,) = place.layers
    assert (layer.cells.total, layer.value_bias.total, layer.attention.total) == (-2.0, 0.5, 0.0)
    assert (layer.rest.total, place.rest_cells) == (0.0, 2)
    # Positions count from 2 behind the mark: the stream holds sin(5) in its first entry.
    assert place.embedding.total == pytest.approx(float(torch.tensor(5.0).sin()))
    assert place.logit.total == pytest.approx(place.embedding.total - 1.5)
    (outvoted,) = place.outvoted
    assert outvoted.said.token == "Oslo"
    assert [one.cell for one in outvoted.cells] == [Cell(1, 0)]  # the silent cell 3 promised it too
    assert [(one.cell, one.contribution.total) for one in outvoted.suppressors] == [(Cell(1, 1), -4.0)]


def test_the_true_next_token_is_the_prompts_own_and_at_its_end_the_targets(planted):
    following = trace(planted, "the Paris is")
    assert following.at(0).next.token == "Paris"
    assert [one.layer for one in following.at(0).outvoted] == [1]
    assert following.at(-1).next is None
    assert following.at(-1).outvoted == ()
    assert trace(planted, "the Paris is", target="Oslo").at(0).next.token == "Paris"


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_of_every_layer_are_those_of_full_log_probs(traced, kind):
    model, found = traced(kind)
    recording = model.record(torch.tensor([[model.bos, *found.ids]]))
    final = recording.logits[0, -1].argmax()
    place = found.at(-1)
    assert place.final.id == final
    assert place.final.probability == pytest.approx(float(recording.logits[0, -1].softmax(0).max()), rel=1e-4)
    for layer in place.layers:
        tops = []
        for name in ("r", "y", "o"):
            vector = model.after_post_norm(getattr(recording, name)[layer.layer - 1][0, -1:], layer.layer)
            log_probs = model.vocabulary.log_probs(vector, norm=True)[0]
            reading = getattr(layer, name)
            assert [one.id for one in reading.top] == log_probs.topk(5).indices.tolist()
            for standing, token in ((reading.final, final), (reading.target, found.target)):
                assert standing.probability == pytest.approx(float(log_probs[token].exp()), rel=1e-4)
                assert standing.rank == 1 + int((log_probs > log_probs[token]).sum())
            tops.append(int(log_probs.argmax()))
        assert layer.case == case_of(*tops)


@pytest.mark.parametrize("kind", KINDS)
def test_listed_cells_and_the_rest_make_the_logit(traced, kind):
    _, found = traced(kind)
    for position in range(5):
        place = found.at(position)
        cells = sum(one.contribution.total for one in (*place.promoting, *place.suppressing)) + place.rest.total
        layers = sum(layer.attention.total + layer.value_bias.total for layer in place.layers)
        total = place.embedding.total + layers + cells + place.norm_bias.total + place.unembedding_bias.total
        assert total == pytest.approx(place.logit.total, rel=1e-3, abs=1e-5)
        assert place.error < 1e-4
        assert len(place.promoting) == len(place.suppressing) == 3
        assert place.promoting[0].contribution.total > place.promoting[2].contribution.total > 0
        assert place.suppressing[0].contribution.total < place.suppressing[2].contribution.total < 0
        for part in (*place.promoting, *place.suppressing, *place.layers):
            amount = part.attention if hasattr(part, "attention") else part.contribution
            assert set(amount.scores) == ({"head", "tail"} if kind == "adaptive_lm" else set())
        for layer in place.layers:
            assert layer.ffn.total == pytest.approx(layer.cells.total + layer.value_bias.total)
            assert 0 <= layer.attention_share <= 1


@pytest.mark.parametrize("kind", ["llama", "opt-post-norm-projected", "adaptive_lm"])
def test_of_a_layer_its_parts_make_its_own_score(traced, kind):
    model, _ = traced(kind)
    place = trace(model, PROMPT, of="layer", target="Paris", cells=3).at(-1)
    assert (place.embedding, place.norm_bias, place.rest) == (None, None, None)
    for layer in place.layers:
        listed = [one.contribution.total for one in (*place.promoting, *place.suppressing) if one.cell.layer == layer.layer]
        parts = layer.before, layer.attention, layer.rest, layer.value_bias, layer.norm_bias, place.unembedding_bias
        total = sum(part.total for part in parts) + sum(listed)
        assert total == pytest.approx(layer.score.total, rel=1e-3, abs=1e-5)
    assert place.error < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_outvoted_cells_are_those_that_a_projection_of_every_value_finds(traced, kind):
    """On prompts whose next tokens are the ones that cells promise, so that there is something to find."""
    model, _ = traced(kind)
    first = model.vocabulary.best(model.values(1)[:6])[1].tolist()
    words = model.tokenizer.convert_ids_to_tokens([id for id in first if 2 < id < len(model.tokenizer)])
    found = trace(model, " ".join(["the", *words, *words]), cells=1000)
    assert len(found.ids) == 1 + 2 * len(words)
    seen = 0
    for position in range(len(found.ids) - 1):
        truth, place = found.ids[position + 1], found.at(position)
        by_layer = {one.layer: one for one in place.outvoted}
        for layer in place.layers:
            m = found.flows[layer.layer - 1].m[position]
            top = model.vocabulary.best(m.sign()[:, None] * model.values(layer.layer))[1]
            expected = set(((top == truth) & (m != 0)).nonzero()[:, 0].tolist()) if layer.y.top[0].id != truth else set()
            outvoted = by_layer.get(layer.layer)
            assert {one.cell.index for one in outvoted.cells} == expected if outvoted else not expected
            seen += len(expected)
            if outvoted:
                assert outvoted.said == layer.y.top[0]
                sizes = [one.contribution.total for one in outvoted.suppressors]
                assert sizes == sorted(sizes)
                assert sizes[-1] < 0
    assert seen


@pytest.mark.parametrize("kind", ["gpt2", "opt-post-norm-projected", "adaptive_lm"])
def test_a_grid_has_what_the_positions_have_in_full(traced, kind):
    model, found = traced(kind)
    grid = found.grid
    assert grid.tokens == tuple(PROMPT.split())
    assert len(grid.rows) == model.layers
    for position in range(5):
        for tiles, layer in zip(grid.rows, found.at(position).layers, strict=True):
            tile = tiles[position]
            assert (tile.r.id, tile.y.id, tile.o.id) == (layer.r.top[0].id, layer.y.top[0].id, layer.o.top[0].id)
            assert tile.o.probability == pytest.approx(layer.o.top[0].probability)
            assert tile.case == layer.case
            assert (tile.final.rank, tile.target.rank) == (layer.o.final.rank, layer.o.target.rank)
            assert tile.attention == pytest.approx(layer.attention.total, rel=1e-3, abs=1e-5)
            assert tile.ffn == pytest.approx(layer.ffn.total, rel=1e-3, abs=1e-5)


def test_one_position_projects_only_its_own_vectors(traced, monkeypatch):
    model, whole = traced("adaptive_lm")
    rows = []
    pieces = AdaptiveVocabulary.pieces
    monkeypatch.setattr(AdaptiveVocabulary, "pieces", lambda self, h, **kw: rows.append(len(h)) or pieces(self, h, **kw))
    one = trace(model, PROMPT, at=-1, cells=0)
    assert rows == []  # tracing itself makes no prediction
    assert len(one.flows[0].r) == 1
    assert one.at(-1).final.id == whole.at(-1).final.id
    assert max(rows) == 3 * model.layers
    for found, expected in zip(one.at(4).layers, whole.at(4).layers, strict=True):
        assert [said.id for said in found.o.top] == [said.id for said in expected.o.top]
    with pytest.raises(FfmemError, match=r"expected a position that was traced \(4\), found 2"):
        one.at(2)
    with pytest.raises(FfmemError, match="grid=True"):
        one.grid  # noqa: B018
    assert trace(model, PROMPT, at=2, grid=True).grid.rows


def test_positions_are_one_several_a_range_or_all(traced):
    model, _ = traced("gpt2")
    for at, expected in ((None, [4]), (-2, [3]), ([3, 0, -5], [0, 3]), ("1:3", [1, 2]), ("all", [0, 1, 2, 3, 4])):
        assert [place.position for place in trace(model, PROMPT, at=at, grid=False).positions] == expected


def test_a_change_of_the_model_that_is_open_while_tracing_is_in_the_trace_and_gone_afterwards(traced):
    model, before = traced("gpt2")
    untouched = model.logits(torch.tensor([[0, 5, 6]]))

    def silence(_, args):
        return (torch.zeros_like(args[0]),)

    handle = model.value_modules[0].register_forward_pre_hook(silence)
    changed = trace(model, PROMPT, target="Paris", cells=3)
    handle.remove()
    assert changed.at(-1).layers[0].cells.total == 0
    assert before.at(-1).layers[0].cells.total != 0
    assert torch.equal(model.logits(torch.tensor([[0, 5, 6]])), untouched)


def test_a_run_tells_what_fires_the_cells(traced, tmp_path):
    model, _ = traced("llama")
    text = tmp_path / "text.txt"
    text.write_text(some_text(40), "utf-8")
    run = build_index(model, text, out=tmp_path / "run", top=3, negative="on", layers=[1, 3], quiet=True)
    live = trace(model, PROMPT, run=run).at(-1)
    index = values(run, model, top=8, quiet=True)
    stored = trace(model, PROMPT, run=tmp_path / "run").at(-1)
    for one, other in zip((*live.promoting, *live.suppressing), (*stored.promoting, *stored.suppressing), strict=True):
        assert one.cell == other.cell
        assert [said.id for said in one.value] == [said.id for said in other.value]
        assert one.label is None
        if one.cell.layer == 2:
            assert one.trigger is None  # not in this run
        else:
            view = index[one.cell]
            triggers = view.triggers if one.coefficient > 0 else view.negative_triggers
            assert one.trigger == triggers[0]
    assert {one.cell.layer for one in live.promoting} > {2}
    with pytest.raises(FfmemError, match=r"gpt2|another|model"):
        trace(traced("gpt2")[0], PROMPT, run=run)


@pytest.mark.parametrize("norm", [False, True], ids=["bare", "normed"])
def test_a_cell_with_a_negative_coefficient_says_what_its_value_turned_round_promotes(tokenizer, norm, tmp_path):
    """Not the lower end of v turned round: the unembedding has a bias here."""
    model = load_model(tiny_model("gptj"), tokenizer=tokenizer)
    run = build_index(model, ["the king left ."], out=tmp_path / "run", quiet=True)
    found = [trace(model, PROMPT, cells=20).at(-1)]
    found.append(trace(model, PROMPT, cells=20, run=values(run, model, top=9, norm=norm, quiet=True)).at(-1))
    for place, normed in zip(found, (False, norm), strict=True):
        cells = (*place.promoting, *place.suppressing)
        assert {one.sign for one in cells} == {"+", "-"}
        turned = 0
        for one in cells:
            v = model.values(one.cell.layer)[one.cell.index] * (1 if one.sign == "+" else -1)
            assert one.sign == ("-" if one.coefficient < 0 else "+")
            log_probs = model.vocabulary.log_probs(v[None], norm=normed)[0]
            assert [said.id for said in one.value] == log_probs.topk(5).indices.tolist()
            z = (log_probs - log_probs.mean()) / log_probs.std(correction=0)
            assert [said.z for said in one.value] == pytest.approx(z.topk(5).values.tolist(), rel=1e-3)
            lowest = model.vocabulary.log_probs(-v[None], norm=normed)[0].topk(5, largest=False).indices.tolist()
            turned += [said.id for said in one.value] != lowest
        assert turned
        told = place.as_dict()["suppressing"]
        assert [(one["sign"], one["value"][0]["z"] > 0) for one in told] == [(one.sign, True) for one in place.suppressing]
        assert any("−v “" in line for line in place.lines())
        assert "−v “" in place._repr_html_()


@pytest.mark.parametrize("kind", ["gpt2", "adaptive_lm"])
def test_the_dict_is_plain_json_with_the_names_that_are_promised(traced, kind):
    model, found = traced(kind)
    told = found.as_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert list(told) == ["format", "model", "prompt", "tokens", "target", "of", "frozen", "run", "positions", "grid"]
    assert told["target"] == {"id": TRUE, "text": "Paris"}
    (place,) = told["positions"]
    assert list(place) == [field.name for field in fields(PositionTrace)]
    assert place["promoting"][0]["cell"].startswith("L")
    names = ["total", "head", "tail"] if kind == "adaptive_lm" else ["total"]
    assert list(place["promoting"][0]["contribution"]) == list(place["logit"]) == names
    total = sum(
        layer["attention"]["total"] + layer["cells"]["total"] + layer["value_bias"]["total"] for layer in place["layers"]
    )
    total += sum(place[name]["total"] for name in ("embedding", "norm_bias", "unembedding_bias"))
    assert total == pytest.approx(place["logit"]["total"], rel=1e-3)
    assert len(told["grid"]["rows"]) == model.layers
    assert trace(model, PROMPT, at=1).as_dict()["grid"] is None


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ("", {}, "expected a prompt of at least 1 token, found ''"),
        ("the " * 64, {}, "expected a prompt of 1 to 63 tokens.*found 64"),
        (PROMPT, {"at": 5}, "expected a position from 0 to 4 or from -5 to -1, found 5"),
        ("the \udce9 king", {}, r"expected a prompt in UTF-8, found '\\udce9' at character 4"),
        ("the " * 100_000, {}, "expected a prompt of 1 to 63 tokens.*found 100000"),
        ("\t" * 5000, {}, "expected a prompt of at least 1 token, found '"),
        (PROMPT, {"at": "generated"}, "position from 0 to 4, found generated tokens, which a trace has none of"),
        (PROMPT, {"target": "\udce9"}, "expected one token in UTF-8, found"),
        (PROMPT, {"target": "king " * 5000}, "expected one token of .*'king'"),
        (PROMPT, {"target": -(10**5000)}, "expected a token id from 0 to 100, found a far"),
        (PROMPT, {"at": []}, "expected at least one position from 0 to 4, found none"),
        (PROMPT, {"target": "Paris Oslo"}, "expected one token of .*'Paris Oslo'.*'Paris'.*'Oslo'"),
        (PROMPT, {"target": "unheard"}, "expected one token of .*'unheard'.*<unk>"),
        (PROMPT, {"target": 101}, "expected a token id from 0 to 100, found 101"),
        (PROMPT, {"of": "head"}, "expected of output or layer, found 'head'"),
        (PROMPT, {"cells": -1}, "expected cells of at least 0, found -1"),
        (PROMPT, {"bos": "maybe"}, "expected bos auto, on or off, found 'maybe'"),
    ],
)
def test_bad_input_is_one_clear_line(traced, prompt, settings, message):
    model, _ = traced("gpt2")
    with pytest.raises(FfmemError, match=message) as caught:
        trace(model, prompt, **settings)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
