"""What agreement finds on cells drawn again within each layer, one layer's draws held at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ffmem.experiments.judged import JudgedCells
from ffmem.experiments.resampling import RESAMPLES, as_draws, draw_counts, medians, shares


def agreement_draws(
    layers: Sequence[JudgedCells],
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
    first = _first(layers, top_values)
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
        chance.append({"layer": layer.layer, "shuffled": _shuffled(counts[:, known], layer)})
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
        "predictive": _predictive(layers, first, candidates, top_values, top_layers),
    }
    return as_draws(rows, facts)


def _first(layers: Sequence[JudgedCells], top_values: int) -> dict[int, np.ndarray]:
    """The cells of each layer among which a draw's most predictive values are.

    So many more than are asked for that no draw lacks some: of n cells about 0.63·n are in a draw, most of them repeated.
    """
    probability = np.concatenate([layer.probability for layer in layers])
    least = np.sort(-probability)[: 4 * top_values + 200]
    return {layer.layer: np.flatnonzero(-layer.probability <= least[-1]) for layer in layers}


def _predictive(
    layers: Sequence[JudgedCells],
    first: dict[int, np.ndarray],
    candidates: Sequence[Float[np.ndarray, "draws _"]],
    top_values: int,
    top_layers: Sequence[int],
) -> dict[str, Any]:
    """A cell that was drawn twice is two of the most predictive values."""
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


def _shuffled(counts: Float[np.ndarray, "draws known"], layer: JudgedCells) -> Float[np.ndarray, " draws"]:
    """As `shuffled_hits`, of the words that are both said by a value and next to a trigger."""
    said, following = layer.top[layer.known], layer.next[layer.known]
    words = np.intersect1d(said, following)
    total, pairs = counts.sum(1), np.zeros(len(counts))
    if len(words):
        pairs = (_by_word(counts, said, words) * _by_word(counts, following, words)).sum(1)
    return np.divide(pairs, total**2, out=np.full(len(counts), np.nan), where=total > 0)


def _by_word(counts: np.ndarray, tokens: np.ndarray, words: np.ndarray) -> Float[np.ndarray, "draws words"]:
    """How often each word stands among a draw's tokens."""
    order = np.argsort(tokens, kind="stable")
    order = order[np.isin(tokens[order], words)]
    return np.add.reduceat(counts[:, order], np.searchsorted(tokens[order], words), axis=1)


def _whole(counted: np.ndarray) -> np.ndarray:
    return np.rint(counted).astype(np.int64)
