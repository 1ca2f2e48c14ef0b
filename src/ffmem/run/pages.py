"""Cells, triggers, values and statistics for people: as plain text, and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any

from ffmem.text import beginning, ending, shown_token, visible, width

if TYPE_CHECKING:
    from ffmem.cells import Trigger
    from ffmem.run.reader import CellStatistics, CellView, Index, TokenProbability, Triggers, Value

SHOWN = 10
"""The number of tokens shown of a value, on each side, and of triggers in a terminal."""
COLUMNS, PAGE_COLUMNS = 100, 160
"""The width of a trigger's line in a terminal and on a page, in columns; of a longer prefix the end is shown."""
FAR = 12.0
"""The number of standard deviations from which on a token is shown as dark as any."""

_CELL = "padding:1px 5px;text-align:left"
_TABLE = '<table style="border-spacing:1px;font-size:12px">'


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """An HTML table of texts, which are escaped."""
    head = "".join(f'<th style="{_CELL}">{escape(name)}</th>' for name in columns)
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{escape(text)}</td>' for text in row) + "</tr>" for row in rows)
    return f"{f'<b>{escape(title)}</b>' if title else ''}{_TABLE}<tr>{head}</tr>{body}</table>"


def shaded(share: float) -> str:
    """A CSS background, the darker the larger the share; a text stays readable on the darkest."""
    return f"background:rgba(70,130,220,{0.05 + 0.7 * min(1.0, share):.2f})"


def _rows(rows: list[list[str]]) -> str:
    body = "".join("<tr>" + "".join(f'<td style="{_CELL}">{column}</td>' for column in row) + "</tr>" for row in rows)
    return f"{_TABLE}{body}</table>"


def _facts(pairs: dict[str, Any]) -> str:
    return _rows([[f"<b>{escape(name)}</b>", escape(visible(str(value)))] for name, value in pairs.items()])


def token_text(token: TokenProbability) -> str:
    """A token, its probability and, for a value's, how far it stands out."""
    z = "" if token.z is None else f" z {token.z:.1f}"
    return f"{shown_token(token.token)} {token.probability:.2g}{z}"


def trigger_text(trigger: Trigger, columns: int) -> str:
    """A prefix and what follows it; the end of the prefix, which fires the cell, is what stays."""
    following = f" ▸ {beginning(shown_token(trigger.next), columns // 2)}"
    return ending(visible(trigger.prefix), columns - width(following)) + following


def triggers_page(triggers: Triggers, shown: int = 25) -> str:
    """A cell's triggers as an HTML table."""
    if not triggers:
        return "<i>no triggers</i>"
    rows = []
    for trigger in triggers[:shown]:
        prefix, following = ending(visible(trigger.prefix), PAGE_COLUMNS), beginning(shown_token(trigger.next), COLUMNS)
        rows.append([f"{trigger.coefficient:.3g}", f"{escape(prefix)} <b>▸ {escape(following)}</b>"])
    more = f"<i>and {len(triggers) - shown} more</i>" if len(triggers) > shown else ""
    return _rows(rows) + more


def triggers_text(triggers: Triggers, shown: int = 3) -> str:
    """The first triggers, a line each, and how many more there are."""
    lines = [f"  {trigger.coefficient:>8.3g}  {trigger_text(trigger, COLUMNS - 12)}" for trigger in triggers[:shown]]
    more = [f"  and {len(triggers) - shown} more"] if len(triggers) > shown else []
    return "\n".join([f"{len(triggers)} triggers", *lines, *more])


def value_page(value: Value) -> str:
    """Tokens with their z, the darker the farther they stand out; the probability is in the title."""

    def one(token: TokenProbability) -> str:
        text = escape(shown_token(token.token))
        if token.z is None or not isfinite(token.z):
            return f"<code>{text}</code>&nbsp;{token.probability:.2g}"
        style = f"{shaded(abs(token.z) / FAR)};white-space:nowrap"
        title = f"probability {token.probability:.2g}, z {token.z:.2f}"
        return f'<code style="{style}" title="{title}">{text}</code>&nbsp;{token.z:.1f}'

    shown = min(SHOWN, value.kept)
    sides = {"promotes": value.top(shown), "suppresses": value.bottom(shown)}
    return _rows([[f"<b>{name}</b>", " ".join(map(one, tokens))] for name, tokens in sides.items()])


def value_text(value: Value) -> str:
    """A value on one line: the tokens that it promotes most."""
    index = value.cell.index
    if not index.has_values and index.model is None:
        return f"Value({value.cell.name}: not in this run)"
    shown = min(3, value.kept)
    sides = (" ".join(shown_token(token.token) for token in side) for side in (value.top(shown), value.bottom(shown)))
    return f"Value({value.cell.name}: promotes {', suppresses '.join(sides)})"


def statistics_page(stats: CellStatistics) -> str:
    """A cell's statistics as an HTML table."""
    return _facts({name: _number(x) for name, x in stats.as_dict().items()})


def statistics_text(stats: CellStatistics) -> str:
    """A cell's statistics on one line, as many as it has room for."""
    return (
        f"active {stats.active:.2%} of tokens   max {stats.maximum:.3g}   min {stats.minimum:.3g}   "
        f"mean {stats.mean:.3g}   q99 {stats.quantile(0.99):.3g}"
    )


def _number(x: Any) -> str:
    """A statistic for people; one of another package may be anything that a table holds."""
    if x is None:
        return "not measured"
    return f"{x:,}" if isinstance(x, int) else f"{x:.4g}" if isinstance(x, float) else str(x)


def cell_page(view: CellView) -> str:
    """A cell as HTML: its value, statistics and triggers."""
    parts = [f"<h4>{view.name}</h4>"]
    if view.index.has_values or view.index.model is not None:
        parts.append(value_page(view.value))
    parts.append(triggers_page(view.triggers))
    if view.negative_triggers:
        parts += ["<b>negative</b>", triggers_page(view.negative_triggers)]
    if view.index.manifest.settings.has_stats:
        parts.append(f"<details><summary>statistics</summary>{statistics_page(view.stats)}</details>")
    return "".join(parts)


def index_page(index: Index) -> str:
    """A run as HTML: its model, text and counts."""
    counts, model = index.counts, index.manifest.model
    return _facts(
        {
            "run": index.path,
            "model": model.name,
            "layers": ", ".join(map(str, index.layers)),
            "cells": f"{len(index):,}",
            "tokens": f"{counts.tokens:,}",
            "sentences": f"{counts.sentences:,}",
            "triggers": f"{counts.triggers:,}",
        }
    )


def cell_text(view: CellView, shown: int = SHOWN) -> str:
    """A cell for a terminal: what its value says, statistics, triggers; at most `shown` tokens and triggers on each side."""
    lines = [f"{view.name} of {visible(view.index.manifest.model.name)}"]
    if view.index.has_values or view.index.model is not None:
        count = min(shown, view.value.kept)
        for name, tokens in (("promotes", view.value.top(count)), ("suppresses", view.value.bottom(count))):
            lines.append(f"  {name:<11}" + "  ".join(map(token_text, tokens)))
    if view.index.manifest.settings.has_stats:
        lines.append(f"  {statistics_text(view.stats)}")
    for name, triggers in (("triggers", view.triggers), ("negative triggers", view.negative_triggers)):
        if not triggers:
            lines += ["  no triggers: it never fired"] if name == "triggers" else []
            continue
        of = f"{len(triggers)}" if len(triggers) <= shown else f"{shown} of {len(triggers)}"
        lines.append(f"  {name} ({of})")
        for trigger in triggers[:shown]:
            lines.append(f"    {trigger.coefficient:>8.3g}  {trigger_text(trigger, COLUMNS - 14)}")
    return "\n".join(lines)
