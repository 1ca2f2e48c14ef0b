"""Do values predict what follows their keys' triggers? (Section 4 of the paper: Figs 4, 5 and 6, Table 2.)"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ffmem.cells import Cell
from ffmem.experiments.agreement_draws import agreement_draws
from ffmem.experiments.judged import JudgedCells, read_layer
from ffmem.experiments.next_tokens import end_token, next_tokens, token_counts
from ffmem.experiments.predictions import Known, Predictions
from ffmem.experiments.resampling import resampling_settings
from ffmem.model.memories import MemoryModel
from ffmem.progress import reporting
from ffmem.run.model import model_of
from ffmem.run.reader import Index
from ffmem.run.results import Result, check_request

BINS = 8
TABLE_CELLS = 6
TABLE_TRIGGERS = 3


def agreement(
    model: MemoryModel | Any,
    index: Index,
    *,
    seed: int = 0,
    norm: bool = False,
    top_values: int = 100,
    quiet: bool = False,
    known: Known | None = None,
) -> Result:
    """How often a value's top token is what follows its key's top trigger: a row a layer.

    Values go to the vocabulary bare; `norm=True` sends them through the final norm first. Without `model` the run's own
    is loaded; any other is refused. Equal probabilities are ranked by id, the smaller first. `known` is filled with what
    the values predict.
    """
    check_request(seed=seed, top_values=top_values)
    model = model_of(index, model)
    end = end_token(model, index)
    with reporting("agreement", quiet=quiet) as reporter:
        layers = [read_layer(model, index, layer, end, norm, reporter) for layer in index.layers]
    if known is not None:
        known |= {(one.layer, norm, "+"): Predictions(one.top, one.probability) for one in layers}
    settings = index.manifest.settings
    fig6 = _by_probability(layers)
    return Result(
        "agreement",
        seed,
        {
            "model": model.name,
            "dtype": model.dtype_name,
            "layers": index.layers,
            "norm": norm,
            "top": settings.top,
            "top_values": top_values,
            "vocabulary": model.vocabulary.size,
            "end_token": None if end is None else index.token(end),
            **resampling_settings("cells within layers"),
        },
        [_row(layer) for layer in layers],
        {
            "overall": _counted(layers, "agreeing", "known"),
            "baselines": _baselines(index, layers, model.vocabulary.size, end),
            "fig6": fig6,
            "predictive": _predictive(index, layers, top_values, model.layers),
            "table2": _table2(index, layers, model.layers, end),
            "last_token_control": _last_token_control(layers),
            "left_out": _left_out(layers, end),
        },
        agreement_draws(
            layers,
            edges=[one["low"] for one in fig6[1:]],
            top_values=top_values,
            top_layers=_top_layers(model.layers)[0],
            vocabulary=model.vocabulary.size,
            seed=seed,
        ),
    ).saved(index)


def _row(layer: JudgedCells) -> dict[str, Any]:
    """Figs 4 and 5."""
    ranks = layer.rank[layer.known]
    quartiles = np.percentile(ranks, [25, 50, 75]).tolist() if len(ranks) else [None] * 3
    row = {"layer": layer.layer, **_counted([layer], "agreeing", "known")}
    row |= dict(zip(("rank_q1", "rank_median", "rank_q3"), quartiles, strict=True))
    if layer.negative_known is not None:
        negative = _counted([layer], "negative_agreeing", "negative_known")
        row |= {f"negative_{name}": value for name, value in negative.items()}
        row["negative_left_out"] = len(layer.top) - negative["cells"]
    return row


def _baselines(index: Index, layers: list[JudgedCells], size: int, end: int | None) -> dict[str, Any]:
    """What agreement would be by chance, of four kinds, with the number of cells; those of a run are over all its cells.

    `shuffled` is what the values and next tokens of a layer give on average where they are paired at random.
    """
    counts = token_counts(index, size, end)
    frequency = counts / max(1, counts.sum())
    commonest = int(counts.argmax())
    by_layer, sums, cells = [], np.zeros(3), 0
    for layer in layers:
        following, said = layer.next[layer.known], layer.top[layer.known]
        hits = np.array([frequency[following].sum(), (following == commonest).sum(), shuffled_hits(said, following)])
        sums, cells = sums + hits, cells + len(following)
        by_layer.append({"layer": layer.layer, "cells": len(following)} | _named(hits, len(following)))
    kept = "the sentences that the run has kept for its triggers"
    return {
        "uniform": 1 / size,
        "vocabulary": size,
        "cells": cells,
        **_named(sums, cells),
        "by_layer": by_layer,
        "most_frequent_token": index.token(commonest),
        "most_frequent_id": commonest,
        "counted_over": kept if end is None else f"{kept}, {index.token(end)} once behind each",
        "counted_tokens": int(counts.sum()),
    }


def shuffled_hits(said: Int[np.ndarray, " n"], following: Int[np.ndarray, " n"]) -> float:
    """How many agree on average where the next tokens are dealt to the values at random.

    >>> shuffled_hits(np.array([5, 5, 7, 8]), np.array([5, 7, 7, 1]))
    1.0
    """
    (words, one), (others, other) = (np.unique(tokens, return_counts=True) for tokens in (said, following))
    _, at, there = np.intersect1d(words, others, assume_unique=True, return_indices=True)
    return float(one[at] @ other[there]) / max(1, len(said))


def _named(hits: Float[np.ndarray, "3"], cells: int) -> dict[str, float | None]:
    return {name: _share(hit, cells) for name, hit in zip(("unigram", "most_frequent", "shuffled"), hits, strict=True)}


def _by_probability(layers: list[JudgedCells]) -> list[dict[str, Any]]:
    """Fig 6. The bins span max pᵢ of all cells; a bin counts those whose first trigger has a next token."""
    probability, known, agreeing = (_joined(layers, name) for name in ("probability", "known", "agreeing"))
    edges = np.linspace(float(probability.min()), float(probability.max()), BINS + 1)
    bins = np.searchsorted(edges[1:-1], probability, side="right")
    found = []
    for at in range(BINS):
        hits, cells = int(agreeing[bins == at].sum()), int(known[bins == at].sum())
        low, high = edges[at : at + 2].tolist()
        found.append({"low": low, "high": high, "cells": cells, "agreeing": hits, "share": _share(hits, cells)})
    return found


def _top_layers(depth: int) -> tuple[list[int], str]:
    """The layers that stand for the paper's 11 to 16 of 16."""
    first = depth - -(-6 * depth // 16) + 1
    return list(range(first, depth + 1)), f"the top 6/16 of the model's {depth} layers, rounded up: {first} to {depth}"


def _predictive(index: Index, layers: list[JudgedCells], count: int, depth: int) -> dict[str, Any]:
    """The cells with the largest max pᵢ; among equals the lower layer, then the lower cell."""
    probability = _joined(layers, "probability")
    order = np.argsort(-probability, kind="stable")[:count]
    sizes = [len(layer.top) for layer in layers]
    begins = np.cumsum([0, *sizes])
    number = np.searchsorted(begins, order, side="right") - 1
    found = [
        _cell(index, layers[at], cell) for at, cell in zip(number.tolist(), (order - begins[number]).tolist(), strict=True)
    ]
    top_layers, rule = _top_layers(depth)
    return {
        "values": found,
        "cells": len(found),
        "in_top_layers": sum(one["layer"] in top_layers for one in found),
        "with_agreeing_trigger": sum(one["agreeing"] > 0 for one in found),
        "top_layers": top_layers,
        "top_layers_rule": rule,
    }


def _table2(index: Index, layers: list[JudgedCells], depth: int, end: int | None) -> dict[str, Any]:
    top_layers, rule = _top_layers(depth)
    best = [(layer, _best_cell(layer)) for layer in layers if layer.layer in top_layers and layer.matches.any()]
    best.sort(key=lambda one: (-one[0].matches[one[1]], -one[0].layer))
    chosen = sorted(best[:TABLE_CELLS], key=lambda one: one[0].layer)
    return {
        "cells": [_cell(index, layer, cell) | _agreeing_triggers(index, layer, cell, end) for layer, cell in chosen],
        "rule": (
            f"in each of {rule} (as far as the run has them), the cell with most agreeing triggers, among equals the one "
            f"with the larger precision, max probability, the lower number; of these the {TABLE_CELLS} with most agreeing "
            f"triggers, among equals the higher layers; of each the first {TABLE_TRIGGERS} agreeing triggers"
        ),
    }


def _best_cell(layer: JudgedCells) -> int:
    """By agreeing triggers and not by precision alone: one trigger that agrees is a precision of 1 too."""
    precision = layer.matches / np.maximum(1, layer.judged)
    # The last key counts first; the sort is stable, so the lower cell comes first among equals.
    return int(np.lexsort((-layer.probability, -precision, -layer.matches))[0])


def _cell(index: Index, layer: JudgedCells, cell: int) -> dict[str, Any]:
    """A cell's value against all its triggers."""
    return {
        "cell": str(Cell(layer.layer, cell)),
        "layer": layer.layer,
        "token": index.token(int(layer.top[cell])),
        "token_id": int(layer.top[cell]),
        "max_probability": float(layer.probability[cell]),
        "precision_at_t": _share(layer.matches[cell], layer.judged[cell]),
        "agreeing": int(layer.matches[cell]),
        "judged": int(layer.judged[cell]),
        "triggers": int(layer.triggers[cell]),
    }


def _agreeing_triggers(index: Index, layer: JudgedCells, cell: int, end: int | None) -> dict[str, Any]:
    tokens, said = next_tokens(index, layer.layer, "+", end), int(layer.top[cell])
    triggers = index[Cell(layer.layer, cell)].triggers
    agreeing = [triggers[at] for at in np.flatnonzero(tokens.ids[cell] == said)[:TABLE_TRIGGERS].tolist()]
    # At a sentence's end it is the mark that agreed.
    following = [index.token(said) if one.next is None else one.next for one in agreeing]
    return {
        "examples": [
            {"rank": one.rank, "prefix": one.prefix, "next": text} for one, text in zip(agreeing, following, strict=True)
        ]
    }


def _last_token_control(layers: list[JudgedCells]) -> dict[str, Any]:
    """The same with the prefix's own last token in the place of the next one, as the released script had it."""
    by_layer = [{"layer": layer.layer, **_counted([layer], "agreeing_last", "fired")} for layer in layers]
    return {**_counted(layers, "agreeing_last", "fired"), "by_layer": by_layer}


def _left_out(layers: list[JudgedCells], end: int | None) -> dict[str, Any]:
    """Cells in no share of the rows and triggers in no precision; and how many the mark has been the next token of."""
    by_layer = []
    for layer in layers:
        cells, triggers = int(layer.first_at_end.sum()), layer.at_end
        by_layer.append(
            {
                "layer": layer.layer,
                "without_triggers": int((~layer.fired).sum()),
                "top_trigger_ends_sentence": cells if end is None else 0,
                "triggers_that_end_sentences": triggers if end is None else 0,
                "top_trigger_before_mark": 0 if end is None else cells,
            }
        )
    names = [name for name in by_layer[0] if name != "layer"]
    return {name: sum(row[name] for row in by_layer) for name in names} | {"by_layer": by_layer}


def _joined(layers: list[JudgedCells], name: str) -> np.ndarray:
    return np.concatenate([getattr(layer, name) for layer in layers])


def _counted(layers: list[JudgedCells], agreeing: str, among: str) -> dict[str, Any]:
    """How many cells, how many of them agree, and the share."""
    cells, hits = int(_joined(layers, among).sum()), int(_joined(layers, agreeing).sum())
    return {"cells": cells, "agreeing": hits, "share": _share(hits, cells)}


def _share(part: Any, whole: Any) -> float | None:
    """None where there is nothing to have a share of."""
    return float(part) / float(whole) if whole else None
