"""Blocks of output, of which traces and comparisons are made; terminals and notebooks render the same blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from math import isfinite
from typing import Any

from ffmem.cells import Cell
from ffmem.run.pages import html_table, shaded
from ffmem.run.reader import TokenProbability
from ffmem.text import beginning, ending, padded, width

WIDTH = 100
"""The number of columns of a terminal, and of a long text on a page."""
TILE, TILE_GAP = 12, 1
"""The number of columns of a tile of a heat map in a terminal, and between two of them."""

_CELL = "padding:1px 5px;text-align:left;white-space:nowrap"  # a heat map is scrolled, not broken


@dataclass(frozen=True)
class Text:
    """Lines of text, one below the other. Of a line that is too long for a terminal its beginning is shown."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Column:
    """The layout of a column of a table in a terminal; a page needs its name alone."""

    name: str
    width: int = 0
    """The column's width; 0 is the rest of the line, which takes as many of the words given apart as there is room for."""
    right: bool = False
    gap: int = 1
    """The number of spaces in front of the column."""
    below: bool = False
    """Whether the column has a line of its own under each row, `gap` spaces in; of a long text the end is shown."""


@dataclass(frozen=True)
class Table:
    """A table of texts; where a row holds a list of words, none of them is cut."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Sequence[str]]]
    title: str = ""


@dataclass(frozen=True)
class Tile:
    """A tile of a heat map: the larger its share (0 to 1), the darker it is. The hint is for a page alone."""

    text: str
    share: float
    hint: str


@dataclass(frozen=True)
class HeatMap:
    """Tiles in rows, with a name a row and a column. A terminal shows the last columns that it has room for."""

    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Tile]]]


Block = Text | Table | HeatMap


class Shown:
    """A dataclass that shows itself in a terminal and in a notebook, by the blocks that it gives, and is plain JSON."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by their names (see docs/live.md) as a dict for JSON."""
        return {part.name: plain(getattr(self, part.name)) for part in fields(self)}  # type: ignore[arg-type]

    def blocks(self) -> list[Block]:
        """The blocks that are shown, from the first to the last."""
        raise NotImplementedError

    def lines(self, columns: int = WIDTH) -> list[str]:
        """The blocks as lines of a terminal, each at most so many columns wide, with an empty one between two blocks."""
        return text_lines(self.blocks(), columns)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return html_page(self.blocks())


def plain(value: Any) -> Any:
    """A value for JSON: dataclasses by their fields, a cell by its name, numbers to six digits, None for what is not finite.

    >>> plain((Cell(1, 0), 1 / 3, float("nan")))
    ['L1D0', 0.333333, None]
    """
    if isinstance(value, Cell):
        return str(value)
    if hasattr(value, "as_dict"):
        return plain(value.as_dict())
    if is_dataclass(value):
        found = {part.name: plain(getattr(value, part.name)) for part in fields(value)}
        if isinstance(value, TokenProbability) and value.z is None:  # only a value's tokens have one
            del found["z"]
        return found
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else None
    return value


def text_lines(blocks: Sequence[Block], columns: int = WIDTH) -> list[str]:
    """Blocks as lines of a terminal, an empty one between two blocks."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, HeatMap):
            block = _last_columns(block, columns)
        found = block.lines if isinstance(block, Text) else _table_lines(block, columns)
        lines += [*([""] if lines else []), *(beginning(line, columns) for line in found)]
    return lines


def html_page(blocks: Sequence[Block]) -> str:
    """Blocks as HTML, on one line; all text is escaped."""
    return f"<div>{''.join(map(_html_block, blocks))}</div>"


def _table_lines(table: Table, columns: int) -> list[str]:
    beside = [column for column in table.columns if not column.below]
    lines = [table.title] if table.title else []
    lines.append(_row(beside, [column.name for column in beside], columns))
    for row in table.rows:
        pairs = list(zip(table.columns, row, strict=True))
        lines.append(_row(beside, [content for column, content in pairs if not column.below], columns))
        for column, content in pairs:
            if column.below and isinstance(content, str) and content:
                lines.append(" " * column.gap + ending(content, columns - column.gap))
    return lines


def _row(columns: Sequence[Column], row: Sequence[str | Sequence[str]], most: int) -> str:
    line = ""
    for column, content in zip(columns, row, strict=True):
        line += " " * column.gap
        room = column.width or most - width(line)
        text = _cut(content, room) if isinstance(content, str) else _first_words(content, room)
        line += " " * (column.width - width(text)) + text if column.right else padded(text, column.width)
    return line.rstrip()


def _cut(text: str, columns: int) -> str:
    """A text cut to its columns; a number at its end stays whole.

    >>> _cut("“householder” 0.0072", 15)
    '“househ… 0.0072'
    """
    if width(text) <= columns:
        return text
    token, _, number = text.rpartition(" ")
    return f"{beginning(token, columns - width(number) - 1)} {number}" if token else beginning(text, columns)


def _first_words(words: Sequence[str], columns: int) -> str:
    """The first words, as many as there is room for, but at least one."""
    shown = words[0] if words else ""
    for word in words[1:]:
        if width(shown) + 1 + width(word) > columns:
            break
        shown += f" {word}"
    return shown


def _last_columns(heat: HeatMap, columns: int) -> Table:
    """A heat map as a table for a terminal, with as many of its last columns as there is room for."""
    side = max(width(name) for name in (heat.corner, *(name for name, _ in heat.rows)))
    fitting = max(1, (columns - side) // (TILE + TILE_GAP))
    shown = [Column(name, TILE, gap=TILE_GAP) for name in heat.columns[-fitting:]]
    missing = len(heat.columns) - len(shown)
    title = f"the last {len(shown)} of {len(heat.columns)} tokens; a notebook and JSON have all" if missing else ""
    rows = [[name, *(tile.text for tile in tiles[-fitting:])] for name, tiles in heat.rows]
    return Table([Column(heat.corner, side, right=True, gap=0), *shown], rows, title)


def _html_block(block: Block) -> str:
    if isinstance(block, Text):
        return f'<p style="white-space:pre-wrap">{"<br>".join(map(escape, block.lines))}</p>'
    if isinstance(block, HeatMap):
        return _html_heat(block)
    rows = [[one if isinstance(one, str) else " ".join(one) for one in row] for row in block.rows]
    used = [at for at, column in enumerate(block.columns) if not column.below or any(row[at] for row in rows)]
    names = [block.columns[at].name.strip() for at in used]
    return html_table(names, [[row[at] for at in used] for row in rows], block.title)


def _html_heat(heat: HeatMap) -> str:
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in (heat.corner, *heat.columns))
    rows = [f"<tr>{head}</tr>"]
    for name, tiles in heat.rows:
        row = "".join(map(_html_tile, tiles))
        rows.append(f'<tr><th style="{_CELL}">{escape(name)}</th>{row}</tr>')
    table = f'<table style="border-spacing:1px;font-size:12px">{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto">{table}</div>'


def _html_tile(tile: Tile) -> str:
    style = f"{_CELL};{shaded(tile.share)}"
    return f'<td style="{style}" title="{escape(tile.hint)}">{escape(tile.text)}</td>'
