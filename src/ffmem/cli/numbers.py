"""Options that are numbers: read exactly, in every notation that people use, and refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation

import typer

from ffmem.errors import FfmemError

MANY = 10**18
"""A number larger than anything that is counted here can be."""


def whole(name: str, least: int = 1, most: int = MANY) -> Callable[[str], int]:
    """Reads a whole number between two others: 10000, 10_000 and 1e4 are the same.

    >>> whole("tokens")("1e4")
    10000
    """

    def read(text: str | int) -> int:
        found = _number(text)
        if not least <= found <= most:
            raise FfmemError(f"expected {name} from {least:,} to {most:,}, found {text}")
        if found != found.to_integral_value():
            raise FfmemError(f"expected {name} as a whole number, found {text}")
        return int(found)

    return read


def whole_or_auto(name: str, most: int = MANY) -> Callable[[str], str]:
    """Reads `auto` or a whole number from 1, as text.

    >>> whole_or_auto("tokens")("1e4"), whole_or_auto("tokens")("auto")
    ('10000', 'auto')
    """
    number = whole(name, 1, most)

    def read(text: str) -> str:
        return text if text == "auto" else str(number(text))

    return read


def real(name: str, least: int = 0, most: int = MANY) -> Callable[[str], float]:
    """Reads a number between two others."""

    def read(text: str | int | float) -> float:
        found = _number(text)
        if not least <= found <= most:
            raise FfmemError(f"expected {name} from {least:,} to {most:,}, found {text}")
        return float(found)

    return read


def _number(text: str | int | float) -> Decimal:
    try:
        found = Decimal(str(text).strip())
    except InvalidOperation:
        found = Decimal("nan")
    if found.is_nan():
        raise typer.BadParameter(f"expected a number such as 10000 or 1e4, found {text!r}")
    return found
