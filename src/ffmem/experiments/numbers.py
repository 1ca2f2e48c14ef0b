"""Numbers as a reader sees them, never in scientific notation; and the rank correlation that trends are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10, sqrt

import numpy as np
from jaxtyping import Float

LEAST = 1e-6
"""The smallest share that is written out: 0.0001%."""
MINUS = "−"


def share(value: int | float) -> str:
    """A share as percent with three significant digits; one closer to 0 than 0.0001% is shown as below it.

    >>> share(0.5), share(-0.07123), share(1 / 267744), share(8.33e-26), share(0)
    ('50%', '−7.12%', '0.000373%', '< 0.0001%', '0%')
    """
    if value and abs(value) < LEAST:
        return f"{'< ' if value > 0 else '> ' + MINUS}0.0001%"
    return f"{plain(100 * value)}%"


def points(value: int | float) -> str:
    """A difference of shares, in percentage points.

    >>> points(0.0213), points(-0.5), points(1e-9)
    ('+2.13', '−50', '0')
    """
    if abs(value) < LEAST:
        return "0"
    return ("+" if value > 0 else "") + plain(100 * value)


def plain(value: int | float) -> str:
    """A number with three significant digits.

    >>> plain(22604.4), plain(0.00001234), plain(-2.5), plain(0)
    ('22,604', '0.0000123', '−2.5', '0')
    """
    decimals = 2 - floor(log10(abs(value))) if value else 0
    text = f"{value:,.{max(0, decimals)}f}"
    return (text.rstrip("0").rstrip(".") if decimals > 0 else text).replace("-", MINUS)


def whole(value: int | float) -> str:
    """A rank or a count as a whole number.

    >>> whole(9611.5)
    '9,612'
    """
    return f"{value:,.0f}".replace("-", MINUS)


def signed(value: int | float) -> str:
    """A correlation or a change with its sign and two decimals.

    >>> signed(0.5), signed(-1)
    ('+0.50', '−1.00')
    """
    return f"{value:+.2f}".replace("-", MINUS)


def average_ranks(
    values: Sequence[int | float], weights: Sequence[int | float] | Float[np.ndarray, " n"] | None = None
) -> Float[np.ndarray, " n"]:
    """Ranks from 1; equal values share the mean of their ranks. A value of weight w counts as w equal values.

    >>> average_ranks([10, 30, 10, 20]).tolist(), average_ranks([10, 20], [3, 1]).tolist()
    ([1.5, 4.0, 1.5, 3.0], [2.0, 4.0])
    """
    group = np.unique(values, return_inverse=True)[1]
    equal = np.bincount(group, weights)
    return (np.cumsum(equal) - (equal - 1) / 2)[group]


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
    heavy = np.ones(len(first)) if weights is None else np.array(weights, float)
    middle = (heavy.sum() + 1) / 2
    one, other = (average_ranks(values, heavy) - middle for values in (first, second))
    lengths = (heavy @ one**2) * (heavy @ other**2)
    return float(heavy @ (one * other)) / sqrt(lengths) if lengths else None
