"""The nouns everything else speaks: cell names, triggers and errors. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Sign = Literal["+", "-"]
SIGNS: tuple[Sign, Sign] = ("+", "-")


class FfmemError(Exception):
    """Something a user can mend. The message is one line: expected, found, where, what to try."""


class ModelError(FfmemError):
    """A model that cannot be loaded or read."""


class CorpusError(FfmemError):
    """A text source that cannot be read."""


class RunError(FfmemError):
    """A run folder that is missing, damaged, unfinished or made from something else."""


class CellError(FfmemError, KeyError):
    """A cell name that cannot be read, or names no cell of this run."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""


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
        if match := _SHORT.fullmatch(text):
            layer, index = int(match["layer"]), int(match["index"])
        elif match := _PATH.fullmatch(text):
            layer, index = int(match["layer"]) + 1, int(match["index"])
        elif _EXPERT.fullmatch(text):
            raise CellError(f"{text!r} names a cell of an expert layer, and models with experts are not supported yet")
        else:
            raise CellError(
                f"expected a cell such as L3D17 (layer from 1, cell from 0) or blocks.2.mlp.hook_post[17], found {name!r}"
            )
        if layer < 1:
            raise CellError(f"layers are counted from 1, found {name!r}; the first layer's cells are L1D0, L1D1, ...")
        return cls(layer, index)


_NUMBER = r"[0-9]{1,18}"  # more digits are no number of anything, and Python reads only so many
_SHORT = re.compile(rf"[Ll](?P<layer>{_NUMBER})[Dd](?P<index>{_NUMBER})")
_EXPERT = re.compile(rf"[Ll]{_NUMBER}[Ee]{_NUMBER}[Dd]{_NUMBER}")
_PATH = re.compile(
    rf"(?:[A-Za-z_]\w*\.)+(?P<layer>{_NUMBER})(?:\.[A-Za-z_]\w*)*"
    rf"(?:\[(?={_NUMBER}\]$)|[.:/](?={_NUMBER}$))(?P<index>{_NUMBER})\]?"
)


@dataclass(frozen=True)
class Trigger:
    """One prefix that fires a cell: its place in the corpus, its text, and what came next.

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


def parse_layers(text: str | int | Iterable[int] | None, count: int) -> list[int]:
    """Layers from 1, sorted, from `1-4,16`, a list of numbers, or None for all.

    >>> parse_layers("1-3,5", 6)
    [1, 2, 3, 5]
    """
    if text is None:
        return list(range(1, count + 1))
    layers: set[int] = set()
    if isinstance(text, str):
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
            if not match:
                raise FfmemError(f"expected layers such as 1-4,16, found {text!r}")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise FfmemError(f"expected layers from 1 to {count}, found {part.strip()!r}, which runs backwards")
            layers.update(range(first, last + 1))
    else:
        layers.update([text] if isinstance(text, int) else text)
    outside = sorted(layer for layer in layers if not 1 <= layer <= count)
    if outside or not layers:
        found = f"layer {outside[0]}" if outside else f"none in {text!r}"
        raise FfmemError(f"expected layers from 1 to {count}, found {found}")
    return sorted(layers)
