"""The causal check: on a planted model whose answer is known, and its prefixes against all there are."""

import copy
import json
import sys
from math import isnan

import numpy as np
import pytest
import torch

from ffmem import Cell, FfmemError, build_index, load_model
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder
from ffmem.indexing.values import values
from ffmem.live.causal import bootstrap, causal, causal_lines
from ffmem.live.matched import gather
from ffmem.run.results import load_result
from tests.tiny import silent_gpt2, some_sentences, tiny_model

TEXT = [
    "the war is great .",
    "the king is great .",
    "a war is old",
    "a sea is old",
    "the king of Norway left the army .",
    "the war of Norway left the army .",
    "the city by the sea is red",
]


def planted(tokenizer):
    """One layer whose attention adds the mean of all words so far: cell 0 fires where `war` is among them, and its value
    promises `army`, then `sea`; cell 1 fires where the last word is `king`; the others are silent."""
    size = len(tokenizer)
    model = silent_gpt2(size)
    war, king, army, sea = tokenizer.convert_tokens_to_ids(["war", "king", "army", "sea"])
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.eye(size))
        block = model.transformer.h[0]
        for norm in (block.ln_1, block.ln_2, model.transformer.ln_f):
            norm.weight.fill_(1)
        block.attn.c_attn.weight[:, 2 * size :].copy_(torch.eye(size))
        block.attn.c_proj.weight.copy_(torch.eye(size) * 0.1)
        block.mlp.c_fc.weight[war, 0] = 1.0
        block.mlp.c_fc.weight[king, 1] = 1.0
        block.mlp.c_fc.bias[1] = -4.0
        block.mlp.c_proj.weight[0, army], block.mlp.c_proj.weight[0, sea] = 2.0, 1.0
        block.mlp.c_proj.weight[1, sea] = 1.0
    return load_model(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def planted_run(tokenizer, tmp_path_factory):
    model = planted(tokenizer)
    run = build_index(
        model, TEXT, out=tmp_path_factory.mktemp("causal") / "run", top=3, unit="line", stats="full", quiet=True
    )
    return model, values(run, model, top=6, quiet=True)


def prefixes_of(model, texts):
    """Every different prefix (without the beginning-of-sentence token) and the token that first follows it."""
    found = {}
    for text in texts:
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        for length in range(1, len(ids) + 1):
            found.setdefault(tuple(ids[:length]), ids[length] if length < len(ids) else None)
    return found


def log_probs(model, ids):
    return model.logits(torch.tensor([[model.bos, *ids]]))[0, -1].double().log_softmax(-1)


def test_the_effect_of_a_planted_cell_is_that_of_a_model_without_its_value(planted_run, tokenizer):
    model, index = planted_run
    result = causal(index, "L1D0", eval=TEXT, model=model, tokens=2, quantile=0.0, quiet=True)
    fires, matched = result.rows
    assert (fires["group"], matched["group"]) == ("fires", "matched")
    army, sea, war = tokenizer.convert_tokens_to_ids(["army", "sea", "war"])
    assert fires["promise_ids"] == [army, sea]
    without = copy.deepcopy(model.model)
    with torch.no_grad():
        without.transformer.h[0].mlp.c_proj.weight[0] = 0
    without = load_model(without, tokenizer=tokenizer)
    firing = {ids: follows for ids, follows in prefixes_of(model, TEXT).items() if war in ids}
    assert fires["n"] == len(firing)
    change = {ids: (log_probs(model, ids), log_probs(without, ids)) for ids in firing}
    promise = [float(q[[army, sea]].logsumexp(0) - p[[army, sea]].logsumexp(0)) for p, q in change.values()]
    following = [float(change[ids][1][token] - change[ids][0][token]) for ids, token in firing.items() if token is not None]
    assert fires["promise_change"] == pytest.approx(np.mean(promise), abs=1e-5)
    assert fires["n_next"] == len(following)
    assert fires["next_change"] == pytest.approx(np.mean(following), abs=1e-5)
    assert fires["promise_low"] <= fires["promise_change"] <= fires["promise_high"] < -0.05
    # Where it is silent, switching it off does nothing at all.
    assert matched["coefficient"] == matched["promise_change"] == matched["promise_low"] == matched["next_change"] == 0
    assert load_result(index, "causal").rows == json.loads(json.dumps(result.as_dict()))["rows"]


def test_a_cell_that_fires_on_a_word_has_no_match_with_the_same_last_token_and_that_is_counted(planted_run):
    model, index = planted_run
    result = causal(index, "L1D1", eval=TEXT, model=model, tokens=1, quantile=0.0, quiet=True)
    facts = result.facts["cells"]["L1D1"]
    assert facts["prefixes_above"] == facts["matched_any_token"] == 1
    assert facts["repeated_prefixes"] == 1  # `the king` begins two sentences
    assert facts["matched_same_token"] == facts["unmatched"] == 0
    assert "L1D1: 1 of 1 prefixes matched by length alone" in result.facts["notes"]
    assert "L1D1: 1 prefixes above 0, 200 asked" in result.facts["notes"]
    assert [row["length"] for row in result.rows] == [2, 2]


def test_cells_are_shown_with_their_promise_and_a_cell_without_a_prefix_is_noted(planted_run):
    model, index = planted_run
    result = causal(index, ["L1D0", "L1D2"], eval=TEXT, model=model, quantile=0.0, prefixes=4, quiet=True)
    assert [row["cell"] for row in result.rows] == ["L1D0", "L1D0"]
    assert result.facts["cells"]["L1D0"]["prefixes_used"] == 4
    lines = causal_lines(result, 90)
    assert max(map(len, lines)) <= 90
    assert any(line.startswith("L1D0  promises “army” “sea”") for line in lines)
    assert "note: L1D2: no prefix above 0" in lines
    assert json.dumps(result.as_dict(), allow_nan=False)


def test_a_seed_gives_the_same_rows_and_other_cells_do_not_change_them(planted_run):
    model, index = planted_run

    def rows(cells, seed):
        found = causal(index, cells, eval=TEXT, model=model, quantile=0.0, prefixes=3, seed=seed, quiet=True)
        return [row for row in found.rows if row["cell"] == "L1D0"]

    assert rows("L1D0", 1) == rows("L1D0", 1) == rows("L1D1,L1D0", 1)
    assert rows("L1D0", 1) != rows("L1D0", 2)


@pytest.mark.parametrize("shard_tokens", [60, 10**6])
@pytest.mark.parametrize("variant", ["gpt2-relu", "llama"])
@pytest.mark.slow
def test_firing_prefixes_are_all_there_are_and_each_match_is_the_nearest_that_is_left(variant, shard_tokens, tokenizer):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    texts = some_sentences(60, seed=3)
    everything, m = prefixes_of(model, texts), {}
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        read = model.record(torch.tensor([[model.bos, *ids]])).m[1][0, 1:, 9].tolist()
        m |= {tuple(ids[: at + 1]): coefficient for at, coefficient in enumerate(read)}
    threshold = float(np.quantile(list(m.values()), 0.9)) + 1e-5
    corpus = Corpus(open_sources(texts), Encoder(tokenizer, 63), Unit.parse("line"), "en", shard_tokens)
    [found] = gather(model, corpus, {Cell(2, 9): threshold}, bos=model.bos, limit=10**4, seed=0, quiet=True)
    firing = {ids for ids in everything if m[ids] > threshold}
    assert 20 < len(firing) < len(everything) / 5
    assert {tuple(pair.fires.ids.tolist()) for pair in found.pairs} == firing
    assert found.above == len(firing) == len(found.pairs)
    for pair in found.pairs:
        assert pair.fires.coefficient == pytest.approx(m[tuple(pair.fires.ids.tolist())], rel=1e-4)
        assert pair.fires.next == everything[tuple(pair.fires.ids.tolist())] or shard_tokens == 60
        if pair.matched is not None:
            assert m[tuple(pair.matched.ids.tolist())] <= threshold
            assert pair.same_token == (pair.fires.ids[-1] == pair.matched.ids[-1])
    given = [tuple(pair.matched.ids.tolist()) for pair in found.pairs if pair.matched is not None]
    if shard_tokens == 60:
        return
    assert len(given) == len(set(given))
    left = set(everything) - firing
    for pair in found.pairs:  # in the order in which they were drawn
        alike = [ids for ids in left if ids[-1] == pair.fires.ids[-1]]
        pool = alike or list(left)
        assert pair.same_token == bool(alike)
        nearest = min(abs(len(ids) - len(pair.fires.ids)) for ids in pool)
        assert abs(len(pair.matched.ids) - len(pair.fires.ids)) == nearest
        left.remove(tuple(pair.matched.ids.tolist()))


def test_a_limit_draws_from_the_whole_text_and_not_its_beginning(tokenizer):
    model = load_model(tiny_model("gpt2-relu"), tokenizer=tokenizer)
    texts = some_sentences(120, seed=3)
    corpus = Corpus(open_sources(texts), Encoder(tokenizer, 63), Unit.parse("line"), "en", 100)
    some, every = (
        gather(model, corpus, {Cell(2, 9): 0.0}, bos=model.bos, limit=limit, seed=0, quiet=True)[0] for limit in (30, 10**4)
    )
    assert len(some.pairs) == 30
    assert some.above == every.above > 100
    order = {ids: at for at, ids in enumerate(prefixes_of(model, texts))}
    places = [order[tuple(pair.fires.ids.tolist())] for pair in some.pairs]
    assert max(places) > 0.7 * len(order)
    assert min(places) < 0.3 * len(order)


def test_progress_counts_the_tokens_of_all_parts(tokenizer, monkeypatch):
    model = load_model(tiny_model("gpt2-relu"), tokenizer=tokenizer)
    notes = []
    monkeypatch.setattr("ffmem.progress.Reporter.update", lambda _, share, note: notes.append(note))
    corpus = Corpus(open_sources(["the king ."] * 200), Encoder(tokenizer, 63), Unit.parse("line"), "en", 100)
    gather(model, corpus, {Cell(2, 9): 0.0}, bos=model.bos, limit=5, seed=0)
    assert notes[-1] == "600 tokens read"


def test_the_run_of_a_gated_model_gives_thresholds_above_zero_and_rows_of_both_groups(llama, tmp_path):
    texts = some_sentences(150, seed=1)
    index = build_index(llama, texts, out=tmp_path / "run", top=2, unit="line", quiet=True)
    result = causal(index, "L1D3,L2D4", eval=some_sentences(80, seed=2), model=llama, quantile=0.9, prefixes=20, quiet=True)
    assert [row["group"] for row in result.rows] == ["fires", "matched"] * 2
    for row in result.rows:
        threshold = result.facts["cells"][row["cell"]]["threshold"]
        assert (row["coefficient"] > threshold > 0) == (row["group"] == "fires")
        assert row["promise_low"] <= row["promise_change"] <= row["promise_high"]


def test_bad_input_gets_one_clear_line(planted_run, gpt2, tmp_path):
    model, index = planted_run
    bare = build_index(gpt2, ["the king left ."], out=tmp_path / "bare", stats="off", quiet=True)
    for line, run, settings in (
        ("found none in an iterable|found none in", index, {"cells": "L1D2"}),
        ("above the cells' 99.9% quantile", index, {"cells": "L1D0", "eval": ["the sea"]}),
        ("this run has layers 1 to 1, found layer 2", index, {"cells": "L2D0"}),
        ("layer 1 has cells 0 to 3, found 4", index, {"cells": "L1D4"}),
        ("expected a cell such as", index, {"cells": "king"}),
        ("prefixes of at least 1", index, {"prefixes": 0}),
        ("tokens of at least 1", index, {"tokens": 0}),
        ("seed of at least 0", index, {"seed": -1}),
        ("at most the 6 tokens that are known of each value, found 9", index, {"tokens": 9, "quantile": 0.0}),
        ("a quantile from 0 to 1", index, {"quantile": 1.5}),
        ("built with stats off", bare, {"model": gpt2}),
        ("was made with model", index, {"model": gpt2}),
    ):
        with pytest.raises(FfmemError, match=line) as error:
            causal(run, **({"cells": "L1D0", "eval": TEXT, "model": model, "quiet": True} | settings))
        assert "\n" not in str(error.value)


def test_the_interval_is_that_of_a_mean():
    values = np.repeat([0.0, 1.0], 2000)
    low, high = bootstrap(values, np.random.default_rng(0))
    assert (high - low) / 2 == pytest.approx(1.96 * 0.5 / np.sqrt(4000), rel=0.1)
    assert (high + low) / 2 == pytest.approx(0.5, abs=0.002)
    assert bootstrap(np.array([3.0]), np.random.default_rng(0)) == (3.0, 3.0)
    assert all(isnan(end) for end in bootstrap(np.array([]), np.random.default_rng(0)))


def test_the_draw_is_made_in_pieces_where_it_is_large(monkeypatch):
    values = np.arange(50.0)
    whole = bootstrap(values, np.random.default_rng(0))
    monkeypatch.setattr(sys.modules[bootstrap.__module__], "DRAWN_AT_A_TIME", 333)
    assert bootstrap(values, np.random.default_rng(0)) == pytest.approx(whole, abs=1.5)
