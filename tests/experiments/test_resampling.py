"""Draws: against the experiment itself on cells or examples that are really repeated, and the bootstrap by hand."""

from dataclasses import replace
from math import isnan, sqrt
from statistics import median

import numpy as np
import pytest

from ffmem.experiments.examples import Examples, sample_examples
from ffmem.experiments.observe import observe
from ffmem.experiments.questions.activity import Activity
from ffmem.experiments.questions.composition import Composition
from ffmem.experiments.questions.normaliser import SOFTMAXES, _feeds, batch_losses, normaliser
from ffmem.experiments.questions.refinement import Refinement
from ffmem.experiments.questions.removal import KINDS, draw_triggers, removal, remove_tokens
from ffmem.experiments.resampling import RESAMPLES, as_draws, draw_counts, interval, medians, shares
from ffmem.experiments.run import run_experiments
from ffmem.experiments.substitution import softmax, softmax_scaled, substituted
from ffmem.experiments.value_agreement import agreement, agreement_draws, shuffled_hits
from ffmem.experiments.value_scores import ValueScores, read_layer
from ffmem.progress import reporting
from ffmem.reports.claims import judge_claims
from ffmem.run.registry import all_experiments
from ffmem.run.results import load_result

COUNT, SEED = 24, 3
LOOKED_AT = (0, 1, RESAMPLES - 1)


def repeated(counts):
    """The units of a draw, one after the other."""
    return np.repeat(np.arange(len(counts)), counts.astype(int))


def same(draw, whole):
    """Every number of a draw is that of the experiment on the repeated units."""
    if isinstance(draw, dict):
        return all(same(part, whole[name]) for name, part in draw.items())
    if isinstance(draw, list):
        return len(draw) == len(whole) and all(same(*pair) for pair in zip(draw, whole, strict=True))
    if draw is None:
        return whole is None or isnan(whole)
    return draw == whole if isinstance(draw, str) else draw == pytest.approx(whole, rel=2e-5, abs=1e-12)


@pytest.mark.parametrize("kind", ["gpt2-relu", "llama", "adaptive_lm"])
@pytest.mark.slow
def test_draws_of_examples_are_the_experiments_on_examples_that_are_repeated(kind, made):
    model, index, _ = made(kind)
    examples = sample_examples(model, index, count=COUNT, seed=SEED, quiet=True)
    observers = [Activity(model, examples), Composition(model, examples), Refinement(model, examples)]
    results = observe(model, examples, observers, bos=True, settings={"seed": SEED}, quiet=True)
    counts = draw_counts(COUNT, [SEED])
    for number in LOOKED_AT:
        which = repeated(counts[number])
        again = Examples([examples[at] for at in which.tolist()], "", COUNT)
        for observer, result in zip(observers, results, strict=True):
            assert len(result.resamples) == result.settings["resamples"] == RESAMPLES
            assert result.settings["unit"] == "examples"
            other = type(observer)(model, again)
            for name in ("active", "mass", "zeros", "probability", "targets"):
                if hasattr(observer, name):
                    setattr(other, name, getattr(observer, name)[:, which])
            for name in ("agrees", "tops"):
                if hasattr(observer, name):
                    setattr(other, name, {kind: array[:, which] for kind, array in getattr(observer, name).items()})
            whole = other.result({"seed": SEED})
            assert same(result.resamples[number], {"rows": whole.rows, "facts": whole.facts}), (result.experiment, number)
    assert observers[0].gated == (kind == "llama")
    zeros = results[0].facts["exact_zeros"]
    assert (zeros > 0.3) == (kind != "llama")


def drawn_layer(layer, counts):
    which = repeated(counts)
    arrays = {name: array[which] for name, array in vars(layer).items() if isinstance(array, np.ndarray)}
    return replace(layer, **arrays)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_draws_of_agreement_are_those_of_cells_repeated_within_their_layers(kind, made):
    model, index, _ = made(kind)
    result = agreement(model, index, seed=SEED, top_values=7, quiet=True)
    assert result.settings["unit"] == "cells within layers"
    with reporting("agreement", quiet=True) as reporter:
        layers = [read_layer(model, index, layer, None, False, reporter) for layer in index.layers]
    edges = [one["low"] for one in result.facts["fig6"]] + [np.inf]
    for number in LOOKED_AT:
        draw = result.resamples[number]
        counts = [draw_counts(len(one.top), [SEED, one.layer])[number] for one in layers]
        drawn = [drawn_layer(one, count) for one, count in zip(layers, counts, strict=True)]
        for one, row, chance in zip(drawn, draw["rows"], draw["facts"]["baselines"]["by_layer"], strict=True):
            agreeing = [bool(a) for a, k in zip(one.agreeing, one.known, strict=True) if k]
            wanted = {"layer": one.layer, "cells": len(agreeing), "share": sum(agreeing) / len(agreeing)}
            wanted["rank_median"] = median(one.rank[one.known].tolist())
            if kind == "llama":
                wanted["negative_cells"] = int(one.negative_known.sum())
                wanted["negative_share"] = one.negative_agreeing.sum() / one.negative_known.sum()
            assert row.keys() == wanted.keys()
            assert same(row, wanted)
            said, following = one.top[one.known], one.next[one.known]
            pairs = sum(int((following == token).sum()) for token in said)
            assert same(chance, {"layer": one.layer, "shuffled": pairs / len(said) ** 2})
        probability, known, agreeing = (
            np.concatenate([getattr(one, name) for one in drawn]) for name in ("probability", "known", "agreeing")
        )
        for at, found in enumerate(draw["facts"]["fig6"]):
            inside = (edges[at] <= probability) & (probability < edges[at + 1]) & known
            assert found["cells"] == inside.sum()
            assert same(found["share"], (agreeing & inside).sum() / inside.sum() if inside.any() else None)
        cells = [
            (-float(one.probability[at]), one.layer, bool(one.matches[at])) for one in drawn for at in range(len(one.top))
        ]
        best = sorted(cells, key=lambda cell: cell[0])[:7]
        predictive = draw["facts"]["predictive"]
        assert predictive["cells"] == 7
        assert predictive["in_top_layers"] == sum(layer in predictive["top_layers"] for _, layer, _ in best)
        assert predictive["with_agreeing_trigger"] == sum(agrees for *_, agrees in best)


def test_draws_of_removal_keep_the_triggers_of_a_cell_together(made):
    model, index, _ = made("llama")
    result = removal(model, index, cells=9, triggers=3, seed=SEED, quiet=True)
    drawn = [
        draw_triggers(index, layer, cells=9, triggers=3, chance=np.random.default_rng([SEED, layer]))
        for layer in index.layers
    ]
    every, _ = remove_tokens(model, index, drawn, seed=SEED)
    for number in LOOKED_AT:
        rows = iter(result.resamples[number]["rows"])
        for found in every:
            counts = draw_counts(found.drawn.cells, [SEED, found.drawn.layer])[number]
            cell = found.drawn.cell[found.kept][found.usable]
            for kind in KINDS:
                changes = []
                for own, times in zip(np.unique(found.drawn.cell), counts.astype(int), strict=True):
                    changes += found.changes(kind)[cell == own].tolist() * times
                wanted = {"layer": found.drawn.layer, "kind": kind, "mean": np.mean(changes), "n": len(changes)}
                row = next(rows)
                assert row.keys() == wanted.keys()
                assert same(row, wanted)
    for row in result.rows:
        means = [
            other["mean"]
            for draw in result.resamples
            for other in draw["rows"]
            if (other["layer"], other["kind"]) == (row["layer"], row["kind"])
        ]
        assert [row["low"], row["high"]] == pytest.approx(np.quantile(means, [0.025, 0.975]), rel=1e-4)


@pytest.mark.slow
def test_draws_of_the_normaliser_are_losses_per_token_of_repeated_examples(made):
    model, index, _ = made("gpt2")
    result = normaliser(model, index, examples=COUNT, seed=SEED, quiet=True)
    feeds = _feeds(sample_examples(model, index, count=COUNT, seed=SEED, quiet=True), model, True)

    def losses():
        """Of each example, its losses."""
        each = [[] for _ in range(COUNT)]
        for feed in feeds:
            for example, loss in zip(feed.examples, batch_losses(model, feed), strict=True):
                each[example].append(float(loss))
        return each

    found = {"base": losses()}
    for name, rule in zip(SOFTMAXES, (softmax, softmax_scaled), strict=True):
        for layers in ([1, 2, 3], [1], [2], [3]):
            with substituted(model, layers, rule):
                found[name, *layers] = losses()
    for number in LOOKED_AT:
        which = repeated(draw_counts(COUNT, [SEED])[number])
        mean = {of: np.mean([loss for at in which for loss in each[at]]) for of, each in found.items()}
        draw = result.resamples[number]
        assert same(draw["facts"]["loss"], mean["base"])
        for name in SOFTMAXES:
            change = mean[name, 1, 2, 3] - mean["base"]
            assert draw["facts"][f"change_{name}_all"] == pytest.approx(change, abs=1e-5)
            for row in draw["rows"]:
                assert row[f"change_{name}"] == pytest.approx(mean[name, row["layer"]] - mean["base"], abs=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.slow
def test_every_claim_can_be_judged_on_every_draw_as_on_the_result_and_the_file_stays_small(kind, made):
    model, index, _ = made(kind)
    results = {one.experiment: one for one in run_experiments(index, model=model, examples=12, cells=4, quiet=True)}
    claims = judge_claims(results)
    for number in LOOKED_AT:
        drawn = {name: replace(one, **one.resamples[number]) for name, one in results.items()}
        judged = judge_claims(drawn)
        # Shares of few cases are not judged, and a draw may have a few more or less of them.
        few = {claim.id for claim in judged if claim.figure == "Fig 8"}
        assert [(claim.id, claim.verdict == "not measured") for claim in judged if claim.id not in few] == [
            (claim.id, claim.verdict == "not measured") for claim in claims if claim.id not in few
        ]
    for name in all_experiments():
        assert (index.path / "results" / f"{name}.json").stat().st_size < 400_000
        assert load_result(index, name).resamples == results[name].resamples


def test_a_draw_has_as_many_units_as_there_are_each_with_the_same_chance_and_the_same_for_a_seed():
    counts = draw_counts(50, [1, 2])
    assert counts.shape == (RESAMPLES, 50)
    assert (counts.sum(1) == 50).all()
    assert np.array_equal(counts, draw_counts(50, [1, 2]))
    assert not np.array_equal(counts, draw_counts(50, [1, 3]))
    assert abs(counts.mean(0) - 1).max() < 5 / sqrt(RESAMPLES)
    assert counts.var() == pytest.approx(1, rel=0.05)
    assert draw_counts(0, [0]).shape == (RESAMPLES, 0)


def test_where_there_is_nothing_there_is_no_number():
    counts = np.array([[2.0, 0.0], [0.0, 2.0]])
    found = shares(counts, np.array([1, 0]), np.array([1, 0]))
    assert found[0] == 1
    assert isnan(found[1])
    assert np.isnan(medians(counts[:, :0], np.zeros(0))).all()
    assert medians(counts, np.array([3, 7])).tolist() == [3, 7]
    assert interval(np.array([np.nan])) is None
    drawn = as_draws([{"layer": 1, "x": found}], {"n": np.array([3, 4]), "part": [{"y": 1 / 3 * np.ones(2)}]}, draws=2)
    assert drawn == [
        {"rows": [{"layer": 1, "x": 1.0}], "facts": {"n": 3, "part": [{"y": 0.333333}]}},
        {"rows": [{"layer": 1, "x": None}], "facts": {"n": 4, "part": [{"y": 0.333333}]}},
    ]


def test_pairs_shuffled_agree_as_often_as_a_mean_over_many_shuffles():
    chance = np.random.default_rng(0)
    said, following = chance.integers(0, 5, 30), chance.integers(2, 8, 30)
    many = np.mean([(chance.permutation(said) == following).sum() for _ in range(3000)])
    assert shuffled_hits(said, following) == pytest.approx(many, rel=0.05)
    assert shuffled_hits(said[:0], following[:0]) == 0


def test_draws_of_a_layer_where_nothing_is_judged_have_no_share():
    cells = np.zeros(5, np.int64)
    layer = ValueScores(
        layer=1,
        top=cells,
        probability=np.linspace(0, 1, 5),
        rank=cells,
        next=cells - 1,
        last=cells,
        triggers=cells,
        with_next=cells,
        matches=cells,
        first_at_end=cells > 0,
        at_end=0,
    )
    draw = agreement_draws([layer], edges=[0.5], top_values=3, top_layers=[1], vocabulary=10, seed=0)[0]
    assert draw["rows"] == [{"layer": 1, "cells": 0, "share": None, "rank_median": None}]
    assert draw["facts"]["baselines"] == {"uniform": 0.1, "by_layer": [{"layer": 1, "shuffled": None}]}
    assert [one["share"] for one in draw["facts"]["fig6"]] == [None, None]
    assert draw["facts"]["predictive"] == {"cells": 3, "in_top_layers": 3, "with_agreeing_trigger": 0, "top_layers": [1]}
