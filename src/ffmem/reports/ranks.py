"""Spearman's rank correlation, with average ranks for equal values."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt


def average_ranks(values: Sequence[int | float]) -> list[float]:
    """Ranks from 1; equal values share the mean of their ranks.

    >>> average_ranks([10, 30, 10, 20])
    [1.5, 4.0, 1.5, 3.0]
    """
    order = sorted(range(len(values)), key=lambda at: values[at])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for at in order[start : end + 1]:
            ranks[at] = (start + end) / 2 + 1
        start = end + 1
    return ranks


def spearman(first: Sequence[int | float], second: Sequence[int | float]) -> float | None:
    """Pearson's correlation of the average ranks; None where it has no meaning (fewer than two, or all equal).

    >>> spearman([1, 2, 3], [5, 6, 7]), spearman([1, 2, 3], [4, 4, 4])
    (1.0, None)
    """
    if len(first) != len(second):
        raise ValueError(f"expected two sequences of one length, found {len(first)} and {len(second)}")
    middle = (len(first) + 1) / 2
    one, other = ([rank - middle for rank in average_ranks(values)] for values in (first, second))
    lengths = sum(x * x for x in one) * sum(y * y for y in other)
    if not lengths:
        return None
    return sum(x * y for x, y in zip(one, other, strict=True)) / sqrt(lengths)
