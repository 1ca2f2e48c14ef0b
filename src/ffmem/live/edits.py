"""Edits: the small language that says which coefficients change and how, `L3D1=0`, and what it means for a model.

    L3D1=0          set               L3D1*2         multiply
    L3D1+1, L3D1-1  add               L3D1~q0.99*2   set to 2 × the cell's own 0.99-quantile in a run

A comma list (`L3D1,L3D2=0`) or a file (`@cells.txt=0`: a cell a line, # for comments) stands where a cell does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import CellError, FfmemError, RunError
from ffmem.model.memories import MemoryModel
from ffmem.run.model import model_of
from ffmem.run.reader import Index, open_index
from ffmem.text import quoted, visible

EXAMPLES = "L3D1=0, L3D1*2, L3D1+1 or L3D1~q0.99*2"
FILE_BYTES = 1 << 24
"""The largest file of cells that is read: a million of them."""
SHOWN_CELLS = 4
"""The number of cells of a large set that are shown by name; of the others only the number is shown."""

# Each of these can be read in one way only: what is no edit is refused at once, however long it is.
_NUMBER = r"[+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|[iI]nf(?:inity)?|[nN]a[nN])"
_OPERATION = re.compile(
    rf"\s*(?:~\s*q(?P<quantile>{_NUMBER})\s*(?:\*\s*(?P<strength>{_NUMBER}))?|(?P<sign>[=*+-])\s*(?P<number>{_NUMBER}))\s*"
)
# The shortest text in front of an operation that reaches the end: a file's name may hold any sign.
_EDIT = re.compile(rf"(?P<cells>.+?)(?<=\S)(?P<operation>{re.sub('[?]P<[a-z]+>', '?:', _OPERATION.pattern)})", re.DOTALL)


@dataclass(frozen=True)
class Operation:
    """An operation on a coefficient: set, multiply or add. With a quantile the number is its strength, and the cell is
    set to their product.

    >>> str(Operation.parse("-1")), str(Operation.parse("~q0.99"))
    ('-1', '~q0.99*1')
    """

    kind: Literal["=", "*", "+"]
    number: float
    quantile: float | None = None

    @classmethod
    def parse(cls, text: str) -> Operation:
        """Read an operation such as `=0`, `*2`, `+1` or `~q0.99*2`; an error for anything else."""
        match = _OPERATION.fullmatch(text)
        if not match:
            raise FfmemError(f"expected an operation such as =0, *2, +1, -1 or ~q0.99*2, found {quoted(text)}")
        quantile = None if match["quantile"] is None else float(match["quantile"])
        number = float(match["number"] or match["strength"] or 1)
        if quantile is not None and not 0 <= quantile <= 1:
            raise FfmemError(f"expected a quantile from 0 to 1, found {quoted(text.strip())}")
        if not math.isfinite(number):
            raise FfmemError(f"expected a finite number, found {quoted(text.strip())}")
        if match["sign"] == "-":
            return cls("+", -number)
        return cls(match["sign"] or "=", number, quantile)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.quantile is not None:
            return f"~q{_written(self.quantile)}*{_written(self.number)}"
        sign = "" if self.kind == "+" and math.copysign(1, self.number) < 0 else self.kind
        return f"{sign}{_written(self.number)}"

    def amounts(self, cells: Sequence[Cell], run: Index | None) -> list[float]:
        """The number that each cell is set to, multiplied by or moved by."""
        if self.quantile is None:
            return [self.number] * len(cells)
        if run is None:
            raise FfmemError(f"{self} needs a run with the cells' statistics: give one (--run RUN, run=...)")
        found = [run[cell].stats.quantile(self.quantile) * self.number for cell in cells]
        for cell, amount in zip(cells, found, strict=True):
            if not math.isfinite(amount):
                raise RunError(f"{run.path} has no quantiles of {cell}: no token of it was measured")
        return found

    def of(self, m: Float[Tensor, "*pos n"], amounts: Float[Tensor, " n"]) -> Float[Tensor, "*pos n"]:
        """The coefficients that n cells get instead of m."""
        if self.kind == "=":
            return amounts.expand_as(m)
        return m * amounts if self.kind == "*" else m + amounts


@dataclass(frozen=True)
class Edit:
    """One operation on a set of cells, each of them once.

    >>> Edit.parse("L3D1,L3D2=0").cells
    (Cell(layer=3, index=1), Cell(layer=3, index=2))
    """

    cells: tuple[Cell, ...]
    operation: Operation

    @classmethod
    def parse(cls, edit: Any) -> Edit:
        """Read `L3D1=0`, or a pair `(cells, "=0")` of names, `Cell`s, cells of an index or triggers, and an operation."""
        if isinstance(edit, Edit):
            return edit
        if isinstance(edit, str):
            match = _EDIT.fullmatch(edit.strip())
            if not match:
                raise FfmemError(f"expected an edit such as {EXAMPLES}, found {quoted(edit)}")
            cells, operation = match["cells"].strip(), match["operation"]
        elif isinstance(edit, tuple) and len(edit) == 2 and isinstance(edit[1], str):
            cells, operation = edit
        else:
            raise FfmemError(f'expected an edit such as {EXAMPLES}, or a pair (cells, "=0"), found {quoted(edit)}')
        return cls(parse_cells(cells), Operation.parse(operation))

    def __str__(self) -> str:
        """The edit in its own language, whole."""
        return f"{','.join(map(str, self.cells))}{self.operation}"

    @property
    def shown(self) -> str:
        """The edit for people: of a large set the first cells and their number."""
        if len(self.cells) <= SHOWN_CELLS:
            return str(self)
        return f"{','.join(map(str, self.cells[:SHOWN_CELLS]))},…({len(self.cells):,} cells){self.operation}"


@dataclass(frozen=True)
class Change:
    """The change that an edit makes in one layer: an operation, the indices of its cells, and a number for each of them."""

    operation: Operation
    cells: list[int]
    amounts: list[float]


Changes = dict[int, list[Change]]
"""The changes of each edited layer (counted from 1), in the order in which they are made."""


def parse_cells(cells: Any) -> tuple[Cell, ...]:
    """Cells by name: one, a comma list, a file `@cells.txt`, or any iterable of cells; each is kept once.

    >>> [str(cell) for cell in parse_cells(["L1D2", Cell(2, 0), "L1D2"])]
    ['L1D2', 'L2D0']
    """
    if isinstance(cells, str):
        found = _file(cells[1:].strip()) if cells.startswith("@") else [Cell.parse(name) for name in cells.split(",")]
    elif isinstance(cells, Cell) or not isinstance(cells, Iterable):
        found = [_cell(cells)]
    else:
        found = [_cell(cell) for cell in cells]
    if not found:
        raise CellError(f"expected at least one cell, found none in {quoted(cells)}")
    return tuple(dict.fromkeys(found))


def parse_edits(edits: Iterable[Any]) -> list[Edit]:
    """Read edits in their order; it is an error if there is none."""
    found = [Edit.parse(edit) for edit in edits]
    if not found:
        raise FfmemError(f"expected at least one edit such as {EXAMPLES}, found none")
    return found


def statistics_for(model: MemoryModel, run: str | Path | Index | None) -> Index | None:
    """The run whose quantiles edits may name; it must be of this model, whether they name any or not."""
    if run is None:
        return None
    index = run if isinstance(run, Index) else open_index(run)
    model_of(index, model)
    return index


def resolve(model: MemoryModel, edits: Iterable[Edit], run: Index | None = None) -> Changes:
    """The changes that edits mean for a model, with quantiles read from `run`; an error where a cell is not the model's."""
    largest = torch.finfo(model.dtype).max
    changes: Changes = {}
    for edit in edits:
        by_layer: dict[int, list[Cell]] = {}
        for cell in edit.cells:
            check_cell(model, cell)
            by_layer.setdefault(cell.layer, []).append(cell)
        for layer, cells in by_layer.items():
            amounts = edit.operation.amounts(cells, run)
            if max(map(abs, amounts)) > largest:
                raise FfmemError(f"expected a number up to {largest:.3g}, as {model.dtype_name} holds, found {edit.shown}")
            changes.setdefault(layer, []).append(Change(edit.operation, [cell.index for cell in cells], amounts))
    return changes


def check_cell(model: MemoryModel, cell: Cell) -> None:
    """Raise an error with the valid range where a model has no such cell."""
    if not 1 <= cell.layer <= model.layers:
        raise CellError(f"{cell}: {model.name} has layers 1 to {model.layers}, found layer {cell.layer}")
    if not 0 <= cell.index < model.cells[cell.layer - 1]:
        last = model.cells[cell.layer - 1] - 1
        raise CellError(f"{cell}: layer {cell.layer} of {model.name} has cells 0 to {last}, found {cell.index}")


def edited(
    m: Float[Tensor, "*pos cells"], changes: Sequence[Change], where: Bool[Tensor, "*pos"] | None = None
) -> Float[Tensor, "*pos cells"]:
    """A layer's coefficients with its changes made one behind the other, everywhere or `where` it is true: a new tensor."""
    new = m.clone()
    for change in changes:
        cells = torch.tensor(change.cells, device=m.device)
        before = new[..., cells]
        after = change.operation.of(before, torch.tensor(change.amounts, device=m.device, dtype=m.dtype))
        new[..., cells] = after if where is None else torch.where(where[..., None], after, before)
    return new


def _cell(cell: Any) -> Cell:
    """A cell from its name, from itself, or from what has one as `cell`: a cell of an index, a trigger."""
    return Cell.parse(cell if isinstance(cell, (str, Cell)) else getattr(cell, "cell", cell))


def _file(name: str) -> list[Cell]:
    try:
        path = Path(name).expanduser()
        found = path.stat()
        if not S_ISREG(found.st_mode):
            # What is written by others may never end.
            raise FfmemError(f"@{visible(name)}: expected a file with a cell a line, found none that lies on a disk")
        if found.st_size > FILE_BYTES:
            raise FfmemError(f"@{visible(name)}: expected a file of at most {FILE_BYTES:,} bytes, found {found.st_size:,}")
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, ValueError, RuntimeError) as error:  # of a name, of what is in the file, of a home that is not there
        reason = getattr(error, "strerror", None) or error
        raise FfmemError(f"@{visible(name)}: expected a file with a cell a line, found: {reason}") from error
    cells = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        try:
            cells += [Cell.parse(text)] if text else []
        except CellError as error:
            raise CellError(f"{visible(str(path))}:{number}: {error}") from error
    return cells


def _written(number: float) -> str:
    """A number as the shortest text that is read again as the same number."""
    return repr(number).removesuffix(".0")
