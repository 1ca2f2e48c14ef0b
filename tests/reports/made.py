"""Runs without a model: a folder as `ffmem index` leaves it and results with the paper's own numbers, at any depth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from ffmem.experiments.paper import the_paper
from ffmem.run.folder import RunFolder
from ffmem.run.manifest import CorpusFacts, Counts, Manifest, ModelFacts, Settings, TokenizerFacts
from ffmem.run.reader import open_index
from ffmem.run.results import Result

SENTENCE = "the king <script>alert('x')</script> left </details> &amp; the city ."


def at_depth(values, layers):
    """The paper's curve read at the depths of another number of layers."""
    return np.interp(np.linspace(0, 1, layers), np.linspace(0, 1, len(values)), values).tolist()


def paper_results(layers=16, *, gated=False, examples_from="wiki.valid.tokens"):
    """Results whose numbers are the paper's; where the paper has none, they are made up and simple."""
    paper = the_paper()
    drawn = {"seed": 0, "examples": 4000, "examples_asked": 4000, "examples_from": examples_from}
    numbers = range(1, layers + 1)

    def rows(**columns):
        curves = {name: at_depth(values, layers) for name, values in columns.items()}
        return [{"layer": layer} | {name: curve[layer - 1] for name, curve in curves.items()} for layer in numbers]

    removal = [
        {"layer": row["layer"], "kind": kind, "mean": row["mean"], "low": row["mean"] - 0.01, "high": row["mean"] + 0.01}
        | {"median": row["mean"], "n": 5000}
        for row in rows(mean=[0.0] * 16)
        for kind, row in ((kind, rows(mean=values)[row["layer"] - 1]) for kind, values in paper.removal.items())
    ]
    agreement = rows(share=paper.agreement, rank_q1=paper.rank_q1, rank_median=paper.rank_median)
    for row in agreement:
        row |= {"cells": 4096, "agreeing": round(4096 * row["share"]), "rank_q3": row["rank_median"] * 1.5}
        if gated:
            row |= {"negative_cells": 4000, "negative_agreeing": 40, "negative_share": 0.01, "negative_left_out": 96}
    activity = rows(active_median=paper.active, mass_median=[x / 2 for x in paper.active])
    for row in activity:
        for name in ("active", "mass"):
            row |= {f"{name}_q1": 0.8 * row[f"{name}_median"], f"{name}_q3": 1.2 * row[f"{name}_median"]}
    composition = rows(zero_agreement=paper.zero_agreement)
    for row in composition:
        row |= {"examples": 4000, "zero_agreement_active": (1 + row["zero_agreement"]) / 2}
        row["zero_agreement_output"] = row["zero_agreement"] / 2
    refinement = rows(
        residual_matches_output=paper.residual_matches, residual_probability_median=paper.residual_probability, **paper.cases
    )
    for row in refinement:
        middle = row["residual_probability_median"]
        row |= {"residual_probability_q1": middle / 2, "residual_probability_q3": min(1, middle * 1.5), "violations": 0.0}
    normaliser = [
        {"layer": layer, "cells": 4096, "loss": 3.0, "loss_softmax": 3.2, "loss_softmax_scaled": 3.1}
        | {f"effective_memories_{q}": x for q, x in (("q1", 200.0), ("median", 300.0), ("q3", 400.0))}
        | {f"softmax_effective_{q}": x for q, x in (("q1", 1000.0), ("median", 1500.0), ("q3", 2000.0))}
        | {"change_softmax": 0.2, "change_softmax_scaled": 0.1 / layer}
        for layer in numbers
    ]
    return {
        result.experiment: result
        for result in (
            Result("removal", 0, {"cells": 100, "triggers": 50}, removal, {}),
            Result("agreement", 0, {"top": 50}, agreement, _agreement_facts(layers)),
            Result("activity", 0, drawn, activity, {}),
            Result("composition", 0, drawn, composition, {"stop_word_share": 0.6, "short_prefix_share": 0.43}),
            Result("refinement", 0, drawn, refinement, {"last_layer": _last_layer()}),
            Result("normaliser", 0, drawn | {"examples": 400, "examples_asked": 400}, normaliser, _normaliser_facts()),
        )
    }


def with_draws(result, *changes):
    """The result with a resample for each of these changes of its rows (a function of a row)."""
    draws = [{"rows": [row | change(row) for row in result.rows], "facts": result.facts} for change in changes]
    return replace(result, resamples=draws)


def with_fact_draws(result, *facts):
    """The result with a resample for each of these changes of its facts."""
    return replace(result, resamples=[{"rows": result.rows, "facts": result.facts | changed} for changed in facts])


def resampled(results, count=40):
    """Results with resamples that are wider and narrower by up to a hundredth."""
    scales = np.linspace(0.99, 1.01, count).tolist()

    def scaled(found, scale):
        if isinstance(found, dict):
            kept = ("layer", "cells", "low", "high") if "share" in found or "layer" in found else ()
            return {name: part if name in kept else scaled(part, scale) for name, part in found.items()}
        if isinstance(found, list):
            return [scaled(part, scale) for part in found]
        return found * scale if isinstance(found, float) else found

    return {
        name: replace(result, resamples=[scaled({"rows": result.rows, "facts": result.facts}, scale) for scale in scales])
        for name, result in results.items()
    }


def random_weights(layers=16, **more):
    """The same experiments on a model that has learned nothing: every layer alike, nothing agrees but by chance."""
    flat = {
        "removal": {"mean": -0.5, "low": -0.51, "high": -0.49},
        "agreement": {"share": 0.0, "agreeing": 0, "rank_q1": 70_000.0, "rank_median": 130_000.0, "rank_q3": 200_000.0},
        "activity": {f"active_{q}": 0.5 for q in ("q1", "median", "q3")} | {"mass_median": 0.4},
        "composition": {"zero_agreement": 0.99, "zero_agreement_active": 0.995, "zero_agreement_output": 0.99},
        "refinement": {"residual_matches_output": 0.9, "residual": 0.95, "composition": 0.05, "agreement": 0.0, "ffn": 0.0}
        | {f"residual_probability_{q}": 0.001 for q in ("q1", "median", "q3")},
        "normaliser": {"change_softmax": 0.0, "change_softmax_scaled": 0.0},
    }
    found = paper_results(layers, **more)
    facts = {
        "agreement": {
            "fig6": [one | {"share": 0.0, "agreeing": 0} for one in found["agreement"].facts["fig6"]],
            "predictive": found["agreement"].facts["predictive"] | {"in_top_layers": 37, "with_agreeing_trigger": 0},
        },
        "activity": {"exact_zeros": 0.5},
        "composition": {"stop_word_share": 0.0, "short_prefix_share": 0.1},
        "refinement": {"last_layer": {"compositions": 200, "distant": 1.0, "related": 0.0}},
        "normaliser": {"change_softmax_all": 0.0, "change_softmax_scaled_all": 0.0},
    }
    return {
        name: replace(
            result,
            rows=[row | flat[name] for row in result.rows],
            facts=result.facts | facts.get(name, {}),
            control="random",
        )
        for name, result in found.items()
    }


def _agreement_facts(layers):
    paper, edge = the_paper(), 0.0
    bins = []
    for right, share in paper.agreement_by_probability:
        bins.append({"low": edge, "high": right, "cells": 100, "agreeing": round(100 * share), "share": share})
        edge = right
    cell = {"cell": f"L{layers}D0", "layer": layers, "token": "</s>", "token_id": 1, "max_probability": 0.4}
    cell |= {"precision_at_t": 0.5, "agreeing": 1, "judged": 2, "triggers": 2}
    upper = list(range(layers - -(-6 * layers // 16) + 1, layers + 1))
    return {
        "overall": {"cells": 65536, "agreeing": 458, "share": 458 / 65536},
        "baselines": {
            "uniform": 1 / 267744,
            "by_layer": [
                {"layer": layer, "unigram": 0.001, "most_frequent": 0.002, "shuffled": 0.0001}
                for layer in range(1, layers + 1)
            ],
        },
        "fig6": bins,
        "predictive": {
            "values": [cell, cell | {"cell": f"L{layers}D1", "token": "<script>", "agreeing": 0}],
            "cells": 100,
            "in_top_layers": 97,
            "with_agreeing_trigger": 46,
            "top_layers": upper,
            "top_layers_rule": f"the top 6/16 of the model's {layers} layers",
        },
        "table2": {
            "cells": [cell | {"examples": [{"rank": 1, "prefix": SENTENCE, "next": "</s>"}]}],
            "rule": "the one with most",
        },
    }


def _last_layer():
    case = {"residual": "king", "ffn": "<b>", "output": "queen", "cosine": 0.5, "related": True, "prefix": SENTENCE}
    cases = [case, case | {"related": False, "cosine": 0.1}]
    return {"compositions": 536, "related": 0.34, "distant": 0.66, "rule": "related: cosine of 0.3", "cases": cases}


def _normaliser_facts():
    facts = {"loss": 3.0, "change_softmax_all": 2.0, "change_softmax_scaled_all": 0.5}
    return facts | {"loss_softmax_all": 5.0, "loss_softmax_scaled_all": 3.5}


def made_run(folder, layers=16, *, cells=2, gated=False, results=None, name="paper/model"):
    """A finished run of `cells` cells a layer, of which the last layer's first has two triggers."""
    run = RunFolder(folder)
    run.path.mkdir(parents=True)
    total, last = cells * layers, cells * (layers - 1)
    counts = np.zeros(total, int)
    counts[last] = 2
    tables = {
        "tokens": pa.table({"text": ["<s>", "</s>", *SENTENCE.split(" ")]}),
        "sentences": pa.table({"text": [SENTENCE], "tokens": [[2, 3, 4]], "ends": [[3, 8, len(SENTENCE)]]}),
        "cells": pa.table(
            {
                "layer": np.repeat(np.arange(1, layers + 1), cells),
                "index": np.tile(np.arange(cells), layers),
                "first_trigger": np.cumsum(counts) - counts,
                "positive_triggers": counts,
                "negative_triggers": np.zeros(total, int),
            }
        ),
        "triggers": pa.table({"coefficient": [2.0, 1.0], "sentence": [0, 0], "position": [3, 2], "row": [0, 0]}),
    }
    for table, data in tables.items():
        with pa.OSFile(str(run / f"{table}.arrow"), "wb") as sink, pa.ipc.new_file(sink, data.schema) as writer:
            writer.write_table(data)
    model = ModelFacts(
        name=name,
        in_memory=False,
        revision=None,
        hash="a" * 64,
        architecture="AdaptiveLM",
        family="adaptive_lm",
        found_by_shape=False,
        layers=layers,
        cells=[cells] * layers,
        d=1024,
        gated=gated,
        vocabulary=267744,
        context=512,
        bos=1,
        device="cpu",
        dtype="float32",
    )
    settings = Settings(
        top=50,
        unit="sentence",
        distinct="text",
        layers=list(range(1, layers + 1)),
        limit_tokens=None,
        batch_tokens=4096,
        shard_tokens=1 << 18,
        bos=True,
        negative=gated,
        stats="off",
        language="en",
        column="text",
        wikitext="keep",
    )
    run.write_manifest(
        Manifest(
            state="complete",
            ffmem="0.1.0",
            model=model,
            tokenizer=TokenizerFacts("b" * 64),
            corpus=CorpusFacts(["wiki.train.tokens"], "c" * 64),
            settings=settings,
            environment={"ffmem": "0.1.0", "python": "3.11"},
            counts=Counts(records=1, sentences=1, tokens=3, cells=total, triggers=2, sentences_kept=1),
            files=run.described(*(f"{table}.arrow" for table in tables)),
        )
    )
    index = open_index(folder)
    for result in (paper_results(layers, gated=gated) if results is None else results).values():
        result.saved(index)
    return index
