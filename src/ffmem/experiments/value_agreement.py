"""The computation of the agreement experiment: rows, facts, and what is found on draws of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from ffmem.cells import Cell
from ffmem.experiments.resampling import RESAMPLES, as_draws, draw_counts, medians, resampling_settings, shares
from ffmem.progress import reporting
from ffmem.run.reader import Index
from ffmem.run.results import Result, check_request

if TYPE_CHECKING:
    from ffmem.experiments.value_scores import ValueScores
    from ffmem.model.memories import MemoryModel

BINS = 8
"""The number of bins of Fig 6."""
TABLE_CELLS, TABLE_TRIGGERS = 6, 3
"""The number of cells of Table 2, and of triggers of each that are shown."""


def agreement(
    model: MemoryModel | Any,
    index: Index,
    *,
    seed: int = 0,
    norm: bool = False,
    top_values: int = 100,
    quiet: bool = False,
) -> Result:
    """The agreement of each layer: how often a value's top token is what follows its key's top trigger, a row a layer.

    Values go to the vocabulary bare; `norm=True` sends them through the final norm first. Without `model` the run's own
    is loaded; any other is refused. Equal probabilities are ranked by id, the smaller first.
    """
    from ffmem.experiments.next_tokens import end_token
    from ffmem.experiments.value_scores import read_layer
    from ffmem.run.model import model_of

    check_request(seed=seed, top_values=top_values)
    model = model_of(index, model)
    end = end_token(model, index)
    with reporting("agreement", quiet=quiet) as reporter:
        layers = [read_layer(model, index, layer, end, norm, reporter) for layer in index.layers]
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


def _row(layer: ValueScores) -> dict[str, Any]:
    """A layer's numbers for Figs 4 and 5."""
    ranks = layer.rank[layer.known]
    quartiles = np.percentile(ranks, [25, 50, 75]).tolist() if len(ranks) else [None] * 3
    row = {"layer": layer.layer, **_counted([layer], "agreeing", "known")}
    row |= dict(zip(("rank_q1", "rank_median", "rank_q3"), quartiles, strict=True))
    if layer.negative_known is not None:
        negative = _counted([layer], "negative_agreeing", "negative_known")
        row |= {f"negative_{name}": value for name, value in negative.items()}
        row["negative_left_out"] = len(layer.top) - negative["cells"]
    return row


def _baselines(index: Index, layers: list[ValueScores], size: int, end: int | None) -> dict[str, Any]:
    """The agreement that there would be by chance, of four kinds, with the number of cells; a run's are over all its cells.

    `shuffled` is what the values and next tokens of a layer give on average where they are paired at random.
    """
    from ffmem.experiments.next_tokens import token_counts

    counts = token_counts(index, size, end)
    frequency = counts / max(1, counts.sum())
    commonest = int(counts.argmax())
    by_layer, sums, cells = [], np.zeros(3), 0
    for layer in layers:
        following, promised = layer.next[layer.known], layer.top[layer.known]
        hits = np.array([frequency[following].sum(), (following == commonest).sum(), shuffled_hits(promised, following)])
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


def shuffled_hits(promised: Int[np.ndarray, " n"], following: Int[np.ndarray, " n"]) -> float:
    """The number of cells that agree on average where the next tokens are dealt to the values at random.

    >>> shuffled_hits(np.array([5, 5, 7, 8]), np.array([5, 7, 7, 1]))
    1.0
    """
    (words, one), (others, other) = (np.unique(tokens, return_counts=True) for tokens in (promised, following))
    _, at, there = np.intersect1d(words, others, assume_unique=True, return_indices=True)
    return float(one[at] @ other[there]) / max(1, len(promised))


def _named(hits: Float[np.ndarray, "3"], cells: int) -> dict[str, float | None]:
    return {name: _share(hit, cells) for name, hit in zip(("unigram", "most_frequent", "shuffled"), hits, strict=True)}


def _by_probability(layers: list[ValueScores]) -> list[dict[str, Any]]:
    """The numbers of Fig 6: its bins span max pᵢ of all cells; a bin counts those whose first trigger has a next token."""
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


def _predictive(index: Index, layers: list[ValueScores], count: int, depth: int) -> dict[str, Any]:
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


def _table2(index: Index, layers: list[ValueScores], depth: int, end: int | None) -> dict[str, Any]:
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


def _best_cell(layer: ValueScores) -> int:
    """The cell with most agreeing triggers; precision alone would not do, one trigger that agrees has a precision of 1."""
    precision = layer.matches / np.maximum(1, layer.with_next)
    # The last key counts first; the sort is stable, so the lower cell comes first among equals.
    return int(np.lexsort((-layer.probability, -precision, -layer.matches))[0])


def _cell(index: Index, layer: ValueScores, cell: int) -> dict[str, Any]:
    """A cell's value compared with all its triggers."""
    return {
        "cell": str(Cell(layer.layer, cell)),
        "layer": layer.layer,
        "token": index.token(int(layer.top[cell])),
        "token_id": int(layer.top[cell]),
        "max_probability": float(layer.probability[cell]),
        "precision_at_t": _share(layer.matches[cell], layer.with_next[cell]),
        "agreeing": int(layer.matches[cell]),
        "judged": int(layer.with_next[cell]),
        "triggers": int(layer.triggers[cell]),
    }


def _agreeing_triggers(index: Index, layer: ValueScores, cell: int, end: int | None) -> dict[str, Any]:
    from ffmem.experiments.next_tokens import next_tokens

    tokens, promised = next_tokens(index, layer.layer, "+", end), int(layer.top[cell])
    triggers = index[Cell(layer.layer, cell)].triggers
    agreeing = [triggers[at] for at in np.flatnonzero(tokens.ids[cell] == promised)[:TABLE_TRIGGERS].tolist()]
    # At a sentence's end it is the mark that agreed.
    following = [index.token(promised) if one.next is None else one.next for one in agreeing]
    return {
        "examples": [
            {"rank": one.rank, "prefix": one.prefix, "next": text} for one, text in zip(agreeing, following, strict=True)
        ]
    }


def _last_token_control(layers: list[ValueScores]) -> dict[str, Any]:
    """The agreement with the prefix's own last token instead of the next one, as the released script had it."""
    by_layer = [{"layer": layer.layer, **_counted([layer], "agreeing_last", "fired")} for layer in layers]
    return {**_counted(layers, "agreeing_last", "fired"), "by_layer": by_layer}


def _left_out(layers: list[ValueScores], end: int | None) -> dict[str, Any]:
    """The numbers of cells in no share, of triggers in no precision, and of times that the end mark was the next token."""
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


def _joined(layers: list[ValueScores], name: str) -> np.ndarray:
    return np.concatenate([getattr(layer, name) for layer in layers])


def _counted(layers: list[ValueScores], agreeing: str, among: str) -> dict[str, Any]:
    """The number of cells, the number of them that agree, and the share."""
    cells, hits = int(_joined(layers, among).sum()), int(_joined(layers, agreeing).sum())
    return {"cells": cells, "agreeing": hits, "share": _share(hits, cells)}


def _share(part: Any, whole: Any) -> float | None:
    """A share, or None where there is nothing to have a share of."""
    return float(part) / float(whole) if whole else None


def agreement_draws(
    layers: Sequence[ValueScores],
    *,
    edges: Sequence[float],
    top_values: int,
    top_layers: Sequence[int],
    vocabulary: int,
    seed: int,
) -> list[dict[str, Any]]:
    """The rows and facts by which agreement is judged, on every draw.

    `edges` are the inner ones of Fig 6, the same in all draws; the most predictive values are those of the draw.
    """
    first = _most_predictive(layers, top_values)
    bins, hits = (np.zeros((RESAMPLES, len(edges) + 1)) for _ in range(2))
    rows, chance, candidates = [], [], []
    for layer in layers:
        counts = draw_counts(len(layer.top), [seed, layer.layer])
        known, agreeing = layer.known, layer.agreeing
        row = {"layer": layer.layer, "cells": _whole(counts @ known), "share": shares(counts, agreeing, known)}
        row["rank_median"] = medians(counts[:, known], layer.rank[known])
        if layer.negative_known is not None and layer.negative_agreeing is not None:
            row["negative_cells"] = _whole(counts @ layer.negative_known)
            row["negative_share"] = shares(counts, layer.negative_agreeing, layer.negative_known)
        rows.append(row)
        chance.append({"layer": layer.layer, "shuffled": _shuffled_draws(counts[:, known], layer)})
        inside = np.searchsorted(edges, layer.probability, side="right")[:, None] == np.arange(len(edges) + 1)
        bins += counts @ (inside & known[:, None])
        hits += counts @ (inside & agreeing[:, None])
        candidates.append(counts[:, first[layer.layer]])
    facts = {
        "baselines": {"uniform": 1 / vocabulary, "by_layer": chance},
        "fig6": [
            {"cells": _whole(cells), "share": np.divide(hit, cells, out=np.full(RESAMPLES, np.nan), where=cells > 0)}
            for cells, hit in zip(bins.T, hits.T, strict=True)
        ],
        "predictive": _predictive_draws(layers, first, candidates, top_values, top_layers),
    }
    return as_draws(rows, facts)


def _most_predictive(layers: Sequence[ValueScores], top_values: int) -> dict[int, np.ndarray]:
    """The cells of each layer among which a draw's most predictive values are.

    So many more than are asked for that no draw lacks some: of n cells about 0.63·n are in a draw, most of them repeated.
    """
    probability = np.concatenate([layer.probability for layer in layers])
    least = np.sort(-probability)[: 4 * top_values + 200]
    return {layer.layer: np.flatnonzero(-layer.probability <= least[-1]) for layer in layers}


def _predictive_draws(
    layers: Sequence[ValueScores],
    first: dict[int, np.ndarray],
    candidates: Sequence[Float[np.ndarray, "draws _"]],
    top_values: int,
    top_layers: Sequence[int],
) -> dict[str, Any]:
    """The facts on the most predictive values of each draw; a cell that was drawn twice is two of them."""
    probability, above, agreeing = (
        np.concatenate(parts)
        for parts in zip(
            *(
                (layer.probability[at], np.full(len(at), layer.layer in top_layers), layer.matches[at] > 0)
                for layer, at in ((layer, first[layer.layer]) for layer in layers)
            ),
            strict=True,
        )
    )
    order = np.argsort(-probability, kind="stable")
    upto = np.minimum(np.cumsum(np.concatenate(candidates, axis=1)[:, order], axis=1), top_values)
    taken = np.diff(upto, axis=1, prepend=0)
    found = (taken.sum(1), taken @ above[order], taken @ agreeing[order])
    names = ("cells", "in_top_layers", "with_agreeing_trigger")
    return dict(zip(names, map(_whole, found), strict=True)) | {"top_layers": list(top_layers)}


def _shuffled_draws(counts: Float[np.ndarray, "draws known"], layer: ValueScores) -> Float[np.ndarray, " draws"]:
    """For each draw, the share that agrees on average where next tokens are dealt to values at random."""
    promised, following = layer.top[layer.known], layer.next[layer.known]
    words = np.intersect1d(promised, following)
    total, pairs = counts.sum(1), np.zeros(len(counts))
    if len(words):
        pairs = (_by_word(counts, promised, words) * _by_word(counts, following, words)).sum(1)
    return np.divide(pairs, total**2, out=np.full(len(counts), np.nan), where=total > 0)


def _by_word(counts: np.ndarray, tokens: np.ndarray, words: np.ndarray) -> Float[np.ndarray, "draws words"]:
    """The number of times that each word stands among each draw's tokens."""
    order = np.argsort(tokens, kind="stable")
    order = order[np.isin(tokens[order], words)]
    return np.add.reduceat(counts[:, order], np.searchsorted(tokens[order], words), axis=1)


def _whole(counted: np.ndarray) -> np.ndarray:
    return np.rint(counted).astype(np.int64)
