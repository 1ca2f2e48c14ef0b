"""How cells, triggers, values and statistics show themselves: plain text, and HTML in a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ffmem.text import shown_token, visible

if TYPE_CHECKING:
    from ffmem.index.reader import CellStatistics, CellView, Index, Triggers, Value

SHOWN = 10
_TABLE = '<table style="text-align:left;border-spacing:0 2px">'
_CELL = '<td style="text-align:left;padding:0 10px 0 0">'


def _rows(rows: list[list[str]]) -> str:
    body = "".join("<tr>" + "".join(f"{_CELL}{column}</td>" for column in row) + "</tr>" for row in rows)
    return f"{_TABLE}{body}</table>"


def _facts(pairs: dict[str, Any]) -> str:
    return _rows([[f"<b>{escape(name)}</b>", escape(str(value))] for name, value in pairs.items()])


def triggers_page(triggers: Triggers, shown: int = 25) -> str:
    if not triggers:
        return "<i>no triggers</i>"
    rows = [
        [
            f"{trigger.coefficient:.3g}",
            f"{escape(visible(trigger.prefix))} <b>▸ {escape(shown_token(trigger.next))}</b>",
        ]
        for trigger in triggers[:shown]
    ]
    more = f"<i>and {len(triggers) - shown} more</i>" if len(triggers) > shown else ""
    return _rows(rows) + more


def value_page(value: Value) -> str:
    def side(said: list[Any]) -> str:
        return " ".join(f"<code>{escape(shown_token(s.token))}</code>&nbsp;{s.probability:.2g}" for s in said)

    shown = min(SHOWN, value.kept)
    return _rows([["<b>promotes</b>", side(value.top(shown))], ["<b>suppresses</b>", side(value.bottom(shown))]])


def statistics_page(stats: CellStatistics) -> str:
    return _facts({name: _number(x) for name, x in stats.as_dict().items()})


def _number(x: int | float | None) -> str:
    if x is None:
        return "not measured"
    return f"{x:,}" if isinstance(x, int) else f"{x:.4g}"


def cell_page(view: CellView) -> str:
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
    counts, model = index.counts, index.manifest.model
    return _facts(
        {
            "run": index.path,
            "model": model.name,
            "layers": ", ".join(map(str, index.layers)),
            "cells": f"{len(index):,}",
            "tokens": f"{counts['tokens']:,}",
            "sentences": f"{counts['sentences']:,}",
            "triggers": f"{counts['triggers']:,}",
        }
    )


def cell_text(view: CellView) -> str:
    """A cell for a terminal: value, statistics in a line, triggers."""
    lines = [f"{view.name} of {view.index.manifest.model.name}"]
    if view.index.has_values or view.index.model is not None:
        shown = min(SHOWN, view.value.kept)
        for name, said in (("promotes", view.value.top(shown)), ("suppresses", view.value.bottom(shown))):
            lines.append(f"  {name:<11}" + "  ".join(f"{shown_token(s.token)} {s.probability:.2g}" for s in said))
    if view.index.manifest.settings.has_stats:
        stats = view.stats
        lines.append(
            f"  active {stats.active:.2%} of tokens   max {stats.maximum:.3g}   min {stats.minimum:.3g}   "
            f"mean {stats.mean:.3g}   q99 {stats.quantile(0.99):.3g}"
        )
    for name, triggers in (("triggers", view.triggers), ("negative triggers", view.negative_triggers)):
        if triggers or name == "triggers":
            lines.append(f"  {name} ({len(triggers)})" if triggers else "  no triggers: it never fired")
        for trigger in triggers[:SHOWN]:
            lines.append(f"    {trigger.coefficient:>8.3g}  {visible(trigger.prefix)} ▸ {shown_token(trigger.next)}")
    return "\n".join(lines)
