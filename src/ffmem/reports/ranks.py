"""Spearman's rank correlation, with average ranks for equal values."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt


def average_ranks(values: Sequence[int | float], weights: Sequence[int] | None = None) -> list[float]:
    """Ranks from 1; equal values share the mean of their ranks. A value of weight w counts as w equal values.

    >>> average_ranks([10, 30, 10, 20]), average_ranks([10, 20], [3, 1])
    ([1.5, 4.0, 1.5, 3.0], [2.0, 4.0])
    """
    heavy = [1] * len(values) if weights is None else weights
    order = sorted(range(len(values)), key=lambda at: values[at])
    ranks = [0.0] * len(values)
    start, below = 0, 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        equal = sum(heavy[at] for at in order[start:end])
        for at in order[start:end]:
            ranks[at] = below + (equal + 1) / 2
        start, below = end, below + equal
    return ranks


def spearman(
    first: Sequence[int | float], second: Sequence[int | float], weights: Sequence[int] | None = None
) -> float | None:
    """Pearson's correlation of the average ranks; None where it has no meaning (fewer than two, or all equal).

    With weights it is that of the pairs written down as often as their weights say.

    >>> spearman([1, 2, 3], [5, 6, 7]), spearman([1, 2, 3], [4, 4, 4]), round(spearman([1, 2, 3], [5, 6, 4], [99, 99, 1]), 2)
    (1.0, None, 0.96)
    """
    if len(first) != len(second):
        raise ValueError(f"expected two sequences of one length, found {len(first)} and {len(second)}")
    heavy = [1] * len(first) if weights is None else weights
    middle = (sum(heavy) + 1) / 2
    one, other = ([rank - middle for rank in average_ranks(values, heavy)] for values in (first, second))

    def summed(left: Sequence[float], right: Sequence[float]) -> int | float:
        return sum(w * x * y for w, x, y in zip(heavy, left, right, strict=True))

    lengths = summed(one, one) * summed(other, other)
    return summed(one, other) / sqrt(lengths) if lengths else None
