"""A memory cell and its triggers, and how people name cells and layers."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from ffmem.errors import CellError, FfmemError
from ffmem.text import quoted

SHOWN_PREFIX = 60
"""The number of characters of a prefix that a trigger shows of itself."""

Sign = Literal["+", "-"]
SIGNS: tuple[Sign, Sign] = ("+", "-")
DIGITS = 18
"""The most digits of a number that is read; there are fewer layers, cells and tokens than that can count."""


def sign_of(coefficient: float) -> Sign:
    """The side of a value that a cell adds to the stream: v, or -v where its coefficient is negative."""
    return "-" if coefficient < 0 else "+"


@dataclass(frozen=True, order=True)
class Cell:
    """One memory cell: a layer counted from 1 and an index counted from 0.

    >>> Cell.parse("L16D1935")
    Cell(layer=16, index=1935)
    >>> str(Cell.parse("blocks.15.mlp.hook_post[1935]"))
    'L16D1935'
    """

    layer: int
    index: int

    def __str__(self) -> str:
        return f"L{self.layer}D{self.index}"

    @classmethod
    def parse(cls, name: str | Cell) -> Cell:
        """Read `L3D17`, `blocks.2.mlp.hook_post[17]` or a module path such as `transformer.h.2.mlp.c_proj:17`.

        Paths count layers from 0, as the modules do.
        """
        if isinstance(name, Cell):
            return name
        text = str(name).strip()
        short, path = _SHORT.fullmatch(text), _PATH.fullmatch(text)
        if _EXPERT.fullmatch(text):
            raise CellError(f"{quoted(text)} names a cell of an expert layer, and models with experts are not supported yet")
        match = short or path
        if match is None:
            raise CellError(
                "expected a cell such as L3D17 (layer from 1, cell from 0) or blocks.2.mlp.hook_post[17], "
                f"found {quoted(name)}"
            )
        layer, index = int(match["layer"]) + (0 if short else 1), int(match["index"])
        if layer < 1:
            raise CellError(f"layers are counted from 1, found {quoted(name)}; the first layer's cells are L1D0, L1D1, ...")
        return cls(layer, index)


_NUMBER = rf"[0-9]{{1,{DIGITS}}}"  # more digits are no number of anything, and Python reads only so many
_SHORT = re.compile(rf"[Ll](?P<layer>{_NUMBER})[Dd](?P<index>{_NUMBER})")
_EXPERT = re.compile(rf"[Ll]{_NUMBER}[Ee]{_NUMBER}[Dd]{_NUMBER}")
_PATH = re.compile(
    rf"(?:[A-Za-z_]\w*\.)+(?P<layer>{_NUMBER})(?:\.[A-Za-z_]\w*)*"
    rf"(?:\[(?={_NUMBER}\]$)|[.:/](?={_NUMBER}$))(?P<index>{_NUMBER})\]?"
)


@dataclass(frozen=True, repr=False)
class Trigger:
    """One prefix that fires a cell: its sentence and position in the corpus, its text, and what came next.

    `position` is the length of the prefix in tokens, the beginning-of-sentence token not counted;
    `next` is None where the prefix ends its sentence.
    """

    cell: Cell
    sign: Sign
    rank: int
    coefficient: float
    sentence: int
    position: int
    prefix: str
    next: str | None

    def __repr__(self) -> str:
        """The trigger on one line; of a long prefix only the end is shown, since that fires the cell."""
        prefix = self.prefix if len(self.prefix) <= SHOWN_PREFIX else f"…{self.prefix[-SHOWN_PREFIX:]}"
        return f"Trigger({self.cell} {self.sign}{self.rank}, {self.coefficient:.3g}: {prefix!r} ▸ {self.next!r})"

    def _repr_html_(self) -> str:
        return escape(repr(self))

    def as_dict(self) -> dict[str, object]:
        """The row that `ffmem export triggers` prints."""
        return {
            "cell": str(self.cell),
            "layer": self.cell.layer,
            "index": self.cell.index,
            "sign": self.sign,
            "rank": self.rank,
            "coefficient": self.coefficient,
            "sentence": self.sentence,
            "position": self.position,
            "prefix": self.prefix,
            "next": self.next,
        }


def check_layer(layer: Any, count: int) -> int:
    """The layer itself if a model with `count` layers has it, from 1; else an error that names the range.

    >>> check_layer(6, 6)
    6
    """
    try:
        number = None if isinstance(layer, bool) else operator.index(layer)
    except TypeError:
        number = None
    if number is not None and 1 <= number <= count:
        return number
    if number is None:
        found = quoted(layer)
    elif abs(number) < 10**DIGITS:
        found = f"layer {number}"
    else:
        found = f"a far {'larger' if number > 0 else 'smaller'} number"  # Python refuses to write very long ones
    raise CellError(f"expected layers from 1 to {count}, found {found}")


def parse_layers(text: Any, count: int) -> list[int]:
    """Layers from 1, sorted, from `1-4,16`, a number, any iterable of numbers, or None for all.

    >>> parse_layers("1-3,5", 6)
    [1, 2, 3, 5]
    """
    if text is None:
        return list(range(1, count + 1))
    layers: set[int] = set()
    if isinstance(text, str):
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            if not match or max(len(end or "") for end in match.groups()) > DIGITS:
                raise FfmemError(f"expected layers such as 1-4,16, found {quoted(text)}")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise FfmemError(f"expected layers from 1 to {count}, found {part.strip()!r}, which runs backwards")
            check_layer(first, count)
            layers.update(range(first, check_layer(min(last, count + 1), count) + 1))  # however far it reaches
    else:
        layers.update(check_layer(layer, count) for layer in (text if isinstance(text, Iterable) else [text]))
    if not layers:
        raise FfmemError(f"expected layers from 1 to {count}, found none in {quoted(text)}")
    return sorted(layers)
