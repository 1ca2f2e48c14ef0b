"""Numbers as a reader sees them: shares as percent, ranks, signed numbers; never in scientific notation."""

from __future__ import annotations

from math import floor, log10

LEAST = 1e-6
"""The smallest share that is written out: 0.0001%."""
MINUS = "−"


def share(value: int | float) -> str:
    """A share as percent with three digits that count; what is closer to none than 0.0001% is said to be below it.

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
    """A number with three digits that count.

    >>> plain(22604.4), plain(0.00001234), plain(-2.5), plain(0)
    ('22,604', '0.0000123', '−2.5', '0')
    """
    decimals = 2 - floor(log10(abs(value))) if value else 0
    text = f"{value:,.{max(0, decimals)}f}"
    return (text.rstrip("0").rstrip(".") if decimals > 0 else text).replace("-", MINUS)


def whole(value: int | float) -> str:
    """A rank or a count.

    >>> whole(9611.5)
    '9,612'
    """
    return f"{value:,.0f}".replace("-", MINUS)


def signed(value: int | float) -> str:
    """A correlation or a change.

    >>> signed(0.5), signed(-1)
    ('+0.50', '−1.00')
    """
    return f"{value:+.2f}".replace("-", MINUS)
