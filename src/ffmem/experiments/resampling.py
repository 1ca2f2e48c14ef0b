"""Resamples: the results of an experiment on cells or examples drawn again from its own with replacement (the bootstrap).
A draw is a row of counts: how often each unit is in it.

A draw is a row of counts: how often each unit is in it. What is found on all draws is an array whose first axis is the draw.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

import numpy as np
from jaxtyping import Float

RESAMPLES = 200
"""The number of draws that a result keeps."""
DIGITS = 6
"""The significant digits of the numbers of draws, few enough to keep a result's file small."""


def draw_counts(units: int, seed: Sequence[int], draws: int = RESAMPLES) -> Float[np.ndarray, "draws units"]:
    """The number of times that each unit is in each draw of as many units with replacement, as draws × units.

    >>> draw_counts(3, [0], draws=2).sum(1).tolist()
    [3.0, 3.0]
    """
    # A stream of its own: what is drawn here is not what the experiment itself drew from the same seed.
    chance = np.random.default_rng([*seed, RESAMPLES])
    counts = np.empty((draws, units))
    for row in counts:
        row[:] = np.bincount(chance.integers(0, units, units), minlength=units) if units else 0
    return counts


def shares(
    counts: Float[np.ndarray, "draws units"], hits: np.ndarray, among: np.ndarray | None = None
) -> Float[np.ndarray, " draws"]:
    """For each draw, the sum of `hits` over the sum of `among` (over its units, if not given); NaN where that is 0.

    >>> shares(np.array([[1.0, 1.0], [2.0, 0.0]]), np.array([3, 1]), np.array([4, 1])).tolist()
    [0.8, 0.75]
    """
    whole = counts.sum(1) if among is None else counts @ among.astype(np.float64)
    return np.divide(counts @ hits.astype(np.float64), whole, out=np.full(len(counts), np.nan), where=whole != 0)


def medians(counts: Float[np.ndarray, "draws units"], values: np.ndarray) -> Float[np.ndarray, " draws"]:
    """The median of each draw's values, the mean of the middle two of an even number; NaN of nothing.

    >>> medians(np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 0.0]]), np.array([5.0, 3.0, 9.0])).tolist()
    [5.0, 4.0]
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order].astype(np.float64)
    upto = np.cumsum(counts[:, order], axis=1)
    found = np.full(len(counts), np.nan)
    for draw, row in enumerate(upto):
        if len(row) and row[-1]:
            low, high = np.searchsorted(row, [(row[-1] - 1) // 2, row[-1] // 2], side="right")
            found[draw] = (ordered[low] + ordered[high]) / 2
    return found


def as_draws(rows: list[dict[str, Any]], facts: dict[str, Any], draws: int = RESAMPLES) -> list[dict[str, Any]]:
    """The `Result.resamples` from rows and facts that hold arrays, an entry a draw, where the result's own hold numbers.

    >>> as_draws([{"layer": 1, "share": np.array([0.5, np.nan])}], {"cells": np.array([4, 0])}, draws=2)[1]
    {'rows': [{'layer': 1, 'share': None}], 'facts': {'cells': 0}}
    """
    return [_at({"rows": rows, "facts": facts}, draw) for draw in range(draws)]


def resampling_settings(unit: str) -> dict[str, Any]:
    """The settings by which a result says how many draws it keeps, and of what."""
    return {"resamples": RESAMPLES, "unit": unit}


def interval(values: Iterable[int | float | None]) -> tuple[float, float] | None:
    """The 95% interval of what was found on draws: 2.5th and 97.5th percentile; None where none gave a number.

    >>> interval([None, *range(41)])
    (1.0, 39.0)
    """
    known = [value for value in values if value is not None and isfinite(value)]
    if not known:
        return None
    low, high = np.quantile(known, [0.025, 0.975]).tolist()
    return low, high


def quartiles(values: np.ndarray) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile, interpolated; NaN of nothing."""
    if not len(values):
        return float("nan"), float("nan"), float("nan")
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return float(low), float(middle), float(high)


def _at(found: Any, draw: int) -> Any:
    if isinstance(found, dict):
        return {name: _at(part, draw) for name, part in found.items()}
    if isinstance(found, list):
        return [_at(part, draw) for part in found]
    value = found[draw].item() if isinstance(found, np.ndarray) else found
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if isfinite(value) else None
    return value
