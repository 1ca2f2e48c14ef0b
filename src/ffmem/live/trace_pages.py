"""How a trace shows itself: text that fits a terminal, and in a notebook a grid of layers and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from ffmem.run.pages import html_table, shaded
from ffmem.text import beginning, ending, padded, shown_token, visible, width

if TYPE_CHECKING:
    from ffmem.live.grid import Grid, Tile
    from ffmem.live.place import Amount, CellPart, LayerTrace, Outvoted, Place
    from ffmem.live.trace import Trace
    from ffmem.run.reader import TokenProbability

WIDTH = 100
"""Columns of a terminal."""
SHOWN_VOTES = 3
"""Cells for and against a token that a line has room for."""


def trace_lines(trace: Trace) -> list[str]:
    """The positions that were asked for, one below the other."""
    lines = [beginning(f"{trace.model.name} · {len(trace.ids)} tokens: {visible(trace.prompt)}", WIDTH)]
    for place in trace.places:
        lines += ["", *place_lines(place)]
    return lines


def place_lines(place: Place) -> list[str]:
    return [
        *_head(place),
        "",
        *_layer_table(place),
        "",
        *_sum(place),
        "",
        *_cells("promoting", place.promoting),
        *_cells("suppressing", place.suppressing),
        *_rest(place),
        *_outvoted(place),
    ]


def _head(place: Place) -> list[str]:
    said = [f"predicts {_said(place.final)}"]
    if place.next is not None:
        said.append(f"next {_said(place.next)}")
    if place.token.id not in (place.final.id, None if place.next is None else place.next.id):
        said.append(f"target {_said(place.token)}, rank {place.rank:,}")
    title = f"position {place.position}: "
    return [title + ending(visible(place.prefix), WIDTH - len(title)), beginning("  ".join(said), WIDTH)]


def _layer_table(place: Place) -> list[str]:
    name = shown_token(place.token.token)
    aimed = place.layers[0].o.target is not None
    lines = [
        beginning(f"residual + ffn = output; the rank of {name} there, and what its logit gets", WIDTH),
        _row("layer", "residual", "ffn", "output", "case", "p", "rank", "attention", "ffn"),
    ]
    for layer in place.layers:
        standing = layer.o.target if aimed else layer.o.final
        assert standing is not None
        r, y, o = (_said(reading.top[0]) for reading in (layer.r, layer.y, layer.o))
        p, rank = f"{standing.probability:.2g}", _count(standing.rank)
        lines.append(_row(str(layer.layer), r, y, o, layer.case, p, rank, _signed(layer.attention), _signed(layer.ffn)))
    return lines


def _row(layer: str, r: str, y: str, o: str, case: str, p: str, rank: str, attention: str, ffn: str) -> str:
    said = " ".join(padded(_short(text, 15), 15) for text in (r, y, o))
    return f"{layer:>5} {said} {case:<11} {p:>7} {rank:>7} {attention:>9} {ffn:>8}".rstrip()


def _sum(place: Place) -> list[str]:
    """What the logit is made of."""
    name = shown_token(place.token.token)
    if place.embedding is None or place.norm_bias is None:
        lines = [f"contributions are to the logit of {name} in each layer's own output"]
    else:
        attention = sum(layer.attention.total for layer in place.layers)
        cells = sum(layer.cells.total for layer in place.layers)
        value_bias = sum(layer.value_bias.total for layer in place.layers)
        parts = {"embedding": place.embedding.total, "attention": attention, "cells": cells, "value bias": value_bias}
        parts |= {"norm bias": place.norm_bias.total, "unembedding bias": place.unembedding_bias.total}
        shown = "  ".join(f"{part} {size:+.3g}" for part, size in parts.items() if size)
        lines = [f"{name} has {place.logit.total:.4g} = {shown}"]
    if place.logit.scores:
        scores = " and ".join(f"{size:.4g} in the {score}" for score, size in place.logit.scores.items())
        lines.append(f"an adaptive softmax: {scores}, before each is normalised")
    how = f"held at their actual scales: {', '.join(place.frozen)}" if place.frozen else "no norm in the way: exact"
    return [beginning(line, WIDTH) for line in (*lines, how)]


def _cells(title: str, cells: Sequence[CellPart]) -> list[str]:
    if not cells:
        return [f"{title}: no cell"]
    lines = [f"{title:<12} {'m':>8} {'adds':>8}  {_says(cells)}"]
    for one in cells:
        numbers = f"  {one.cell!s:<10} {one.coefficient:>8.3g} {_signed(one.contribution):>8}"
        begin = f"{numbers}  {_side(one)} "
        lines.append(beginning(begin + _promoted(one, WIDTH - width(begin)), WIDTH))
        if one.trigger is not None:
            following = f" ▸ {shown_token(one.trigger.next)}"
            prefix = ending(visible(one.trigger.prefix), WIDTH - 34 - width(following))
            lines.append(beginning(f"{'':<34}{prefix}{following}", WIDTH))
    return lines


def _says(cells: Sequence[CellPart]) -> str:
    """The head of a column of values."""
    turned = ", or −v where m is negative," if any(one.sign == "-" for one in cells) else ""
    return f"what v{turned} promotes{', with z' if any(said.z is not None for one in cells for said in one.value) else ''}"


def _side(one: CellPart) -> str:
    return "−v" if one.sign == "-" else " v"


def _promoted(one: CellPart, columns: int | None = None) -> str:
    """A value's tokens, as many as there is room for: how far each stands out, which tells more than its probability."""
    shown = ""
    for said in one.value:
        more = f"{shown} {_said(said) if said.z is None else f'{shown_token(said.token)} {said.z:.1f}'}".lstrip()
        if shown and columns is not None and width(more) > columns:
            break
        shown = more
    return shown


def _rest(place: Place) -> list[str]:
    if place.rest is None:
        return []
    return [f"  the other {place.rest_cells:,} cells add {_signed(place.rest)}"]


def _outvoted(place: Place) -> list[str]:
    if not place.outvoted or place.next is None:
        return []
    name = shown_token(place.next.token)
    lines = ["", beginning(f"outvoted: cells whose value puts {name} first, in layers whose FFN does not", WIDTH)]
    for one in place.outvoted:
        lines.append(beginning(f"  layer {one.layer} says {_said(one.said)}", WIDTH))
        lines.append(beginning(f"    for {name}: {_votes(one.cells)}", WIDTH))
        lines.append(beginning(f"    against it: {_votes(one.suppressors)}", WIDTH))
    return lines


def _votes(cells: Sequence[CellPart]) -> str:
    shown = ", ".join(f"{one.cell} {_signed(one.contribution)}" for one in cells[:SHOWN_VOTES])
    more = len(cells) - SHOWN_VOTES
    return (shown or "none") + (f" and {more} more" if more > 0 else "")


def _said(said: TokenProbability) -> str:
    return f"{shown_token(said.token)} {said.probability:.2g}"


def _signed(amount: Amount) -> str:
    """In at most eight columns: a logit's thousandths are enough for the eye."""
    return f"{amount.total:+.3f}" if abs(amount.total) < 100 else f"{amount.total:+.2e}"


def _count(rank: int) -> str:
    """In at most seven columns.

    >>> _count(283429), _count(1234567)
    ('283,429', '1.2e+06')
    """
    return f"{rank:,}" if rank < 10**6 else f"{rank:.1e}"


def _short(text: str, columns: int) -> str:
    """A token with its probability: the token is cut, not the number."""
    if width(text) <= columns:
        return text
    token, _, number = text.rpartition(" ")
    return f"{beginning(token, columns - len(number) - 1)} {number}"


_CELL = "padding:1px 5px;text-align:left;white-space:nowrap"  # a grid is scrolled, not broken
_TABLE = '<table style="border-spacing:1px;font-size:12px">'


def trace_page(trace: Trace) -> str:
    """The grid where it belongs to the trace, and the positions that were asked for."""
    parts = [grid_page(trace.grid)] if trace.with_grid else []
    return "".join([*parts, *(place_page(place) for place in trace.places)])


def grid_page(grid: Grid) -> str:
    """The last layer on top; a tile is what o says, the darker the likelier; all else is in its title."""
    head = "".join(f'<th style="{_CELL}">{escape(visible(token))}</th>' for token in grid.tokens)
    rows = [f'<tr><th style="{_CELL}">layer</th>{head}</tr>']
    for layer, tiles in reversed(list(enumerate(grid.rows, 1))):
        rows.append(f'<tr><th style="{_CELL}">{layer}</th>{"".join(_tile(layer, tile) for tile in tiles)}</tr>')
    return f'<div style="overflow-x:auto">{_TABLE}{"".join(rows)}</table></div>'


def _tile(layer: int, tile: Tile) -> str:
    title = (
        f"layer {layer}, {tile.case}\nresidual {_said(tile.r)}\nffn {_said(tile.y)}\noutput {_said(tile.o)}\n"
        f"final token {tile.final.probability:.2g}, rank {tile.final.rank:,}\n"
    )
    if tile.target is not None:
        title += f"target {tile.target.probability:.2g}, rank {tile.target.rank:,}\n"
    title += f"adds to the logit: attention {tile.attention:+.3g}, ffn {tile.ffn:+.3g}"
    return f'<td style="{_CELL};{shaded(tile.o.probability)}" title="{escape(title)}">{escape(visible(tile.o.token))}</td>'


def place_page(place: Place) -> str:
    """The text's tables as HTML."""
    listed = (*place.promoting, *place.suppressing)
    columns = ["cell", "m", "adds", _says(listed), "best trigger"]
    tables = [
        html_table(["layer", "residual", "ffn", "output", "case", "attention", "ffn adds"], map(_html_layer, place.layers)),
        *(
            html_table(columns[: 5 if any(part.trigger for part in cells) else 4], map(_html_cell, cells), title)
            for title, cells in (("promoting", place.promoting), ("suppressing", place.suppressing))
            if cells
        ),
    ]
    if place.outvoted:
        tables.append(
            html_table(
                ["layer", "says", "for the next token", "against it"], map(_html_outvoted, place.outvoted), "outvoted"
            )
        )
    text = [escape(line) for line in (*_head(place), *_sum(place))]
    return f"<div><p>{'<br>'.join(text)}</p>{''.join(tables)}<p>{escape(''.join(_rest(place)))}</p></div>"


def _html_layer(layer: LayerTrace) -> list[str]:
    said = [_said(reading.top[0]) for reading in (layer.r, layer.y, layer.o)]
    return [str(layer.layer), *said, layer.case, _signed(layer.attention), _signed(layer.ffn)]


def _html_cell(one: CellPart) -> list[str]:
    trigger = ""
    if one.trigger is not None:
        trigger = f"{ending(visible(one.trigger.prefix), WIDTH)} ▸ {shown_token(one.trigger.next)}"
    value = f"{_side(one).strip()} {_promoted(one)}"
    return [str(one.cell), f"{one.coefficient:.3g}", _signed(one.contribution), value, trigger]


def _html_outvoted(one: Outvoted) -> list[str]:
    return [str(one.layer), _said(one.said), _votes(one.cells), _votes(one.suppressors)]
