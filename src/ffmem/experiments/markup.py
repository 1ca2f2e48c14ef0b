"""Pieces of HTML, every text escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ffmem.text import visible


class Raw(str):
    """Text that is HTML already and is not escaped again."""


def text(value: Any) -> Raw:
    """Any value as escaped HTML; None is a dash.

    >>> text("<b>"), text(Raw("<b>")), text(None)
    ('&lt;b&gt;', '<b>', '–')
    """
    if isinstance(value, Raw):
        return value
    return Raw("–" if value is None else escape(visible(str(value))))


def element(name: str, *inside: Any, **attributes: str) -> Raw:
    """An HTML element; `class_` and `aria_label` are written class and aria-label.

    >>> element("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Raw(f"<{name}{written}>{''.join(text(part) for part in inside)}</{name}>")


def join(parts: Iterable[Any]) -> Raw:
    """Parts of HTML, escaped and put one behind the other."""
    return Raw("\n".join(text(part) for part in parts))


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, class_: str = "") -> Raw:
    """An HTML table in a box of its own, which scrolls where the page is narrow; the first column heads its row."""
    head = element("tr", *(element("th", column, scope="col") for column in columns))
    body = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, data_label=name) for name, cell in zip(columns[1:], row[1:], strict=True)),
        )
        for row in rows
    )
    whole = element("table", element("caption", caption), element("thead", head), element("tbody", join(body)))
    return element("div", whole, class_=f"wide {class_}".strip(), tabindex="0", role="region", aria_label=caption)


def missing(experiment: str) -> Raw:
    """The note that stands where an experiment was not run, with the command that runs it."""
    return element("p", "not run: ", element("code", f"ffmem experiments RUN {experiment}"), class_="missing")


def details(summary: Any, *inside: Any, class_: str = "more") -> Raw:
    """HTML that a click on its summary opens."""
    return element("details", element("summary", summary), *inside, class_=class_)


def facts(pairs: dict[str, Any]) -> Raw:
    """Names and their meanings as an HTML description list."""
    return element("dl", *(part for name, what in pairs.items() for part in (element("dt", name), element("dd", what))))


def data(id: str, value: Any) -> Raw:
    """Data as JSON for the page's script, in which no tag can begin."""
    written = json.dumps(value, ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":"))
    safe = written.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return Raw(f'<script type="application/json" id="{escape(id)}">{safe}</script>')
