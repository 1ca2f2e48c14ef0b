"""The output of the commands: results to standard output, notes for people to standard error."""

from __future__ import annotations

import json
import re
import sys
from math import isfinite
from typing import TYPE_CHECKING, Any

from ffmem.text import shown_size, visible

if TYPE_CHECKING:
    from ffmem.run.manifest import Settings, ValueFacts
    from ffmem.run.reader import CellView, Index, TokenProbability
    from ffmem.run.results import Result


SHOWN = 10
"""The number of tokens of a value that are printed, on each side."""


def note(quiet: bool, text: str) -> None:
    """Print a line for people to standard error, unless they asked for quiet."""
    if not quiet:
        print(visible(f"ffmem: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print lines for people: whatever they hold of corpora, tokens and names can only be read."""
    print("\n".join(map(visible, text.split("\n"))), flush=True)


def say_json(value: Any, *, indent: int | None = None) -> None:
    """Print JSON for a program, which a person at a terminal may read too: what a terminal would obey is escaped in it."""
    unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    text = json.dumps(value, ensure_ascii=not unicode, indent=indent)
    print(re.sub(r"[^\n -~]", _escaped, text), flush=True)


def _escaped(found: re.Match[str]) -> str:
    return found[0] if visible(found[0]) == found[0] else json.dumps(found[0])[1:-1]


def show_json(view: CellView, top: int | None) -> dict[str, Any]:
    """A cell as `ffmem show --json` prints it, with `top` triggers and tokens on each side, or all triggers and ten tokens.

    What the run does not hold is null.
    """
    stats = view.index.manifest.settings.has_stats
    values = view.index.has_values or view.index.model is not None
    shown = min(top or SHOWN, view.value.kept) if values else 0
    return {
        "cell": view.name,
        "layer": view.cell.layer,
        "index": view.cell.index,
        "triggers": [trigger.as_dict() for trigger in (*view.triggers[:top], *view.negative_triggers[:top])],
        "value": {
            "promoted": [_token_as_dict(token) for token in view.value.top(shown)],
            "suppressed": [_token_as_dict(token) for token in view.value.bottom(shown)],
            "max_probability": view.value.max_probability,
            "norm": view.value.norm,
        }
        if values
        else None,
        "stats": view.stats.as_dict() if stats else None,
    }


def _token_as_dict(token: TokenProbability) -> dict[str, Any]:
    """A token that a value promotes or suppresses; a z that is no number is null."""
    return vars(token) | {"z": token.z if token.z is not None and isfinite(token.z) else None}


def info_lines(index: Index, disk: int) -> list[str]:
    """A run's facts as lines for people, as `ffmem info` prints them."""
    manifest = index.manifest
    model, settings, counts = manifest.model, manifest.settings, manifest.counts
    skipped = ", ".join(f"{count:,} {what}" for what, count in manifest.skipped.items()) or "nothing"
    found = "found by shape" if model.found_by_shape else f"family {model.family}"
    lines = {
        "run": str(index.path),
        "model": f"{model.name} ({model.architecture}, {found}, {model.dtype} on {model.device})",
        "hashes": f"model {model.hash[:12]}, tokenizer {manifest.tokenizer.hash[:12]}, corpus {manifest.corpus.hash[:12]}",
        "corpus": ", ".join(manifest.corpus.sources),
        "read": f"{counts.records:,} records, {counts.sentences:,} sentences, {counts.tokens:,} tokens "
        f"in {counts.shards} shards, {counts.padding_share:.1%} padding",
        "text": _text_read(settings, manifest.corpus.records),
        "skipped": f"{skipped}; {counts.cut_to_context:,} sentences cut to the context of {model.context:,}",
        "cells": f"{counts.cells:,} in layers {', '.join(map(str, index.layers))}",
        "triggers": f"{counts.triggers:,}, at most {settings.top} a cell and sign, "
        f"distinct by {settings.distinct}, negative {'on' if settings.negative else 'off'}; "
        f"{counts.sentences_kept:,} sentences kept",
        "statistics": f"{settings.measured}; {counts.measured_tokens:,} tokens measured",
        "values": _values_text(manifest.values) if manifest.values else f"none: ffmem values {index.path}",
        "disk": shown_size(disk),
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.environment.items()),
    }
    return [visible(f"{name:<11}{text}") for name, text in lines.items()]


def _text_read(settings: Settings, records: list[int] | None) -> str:
    """A line on how much of the corpus a run was made from, and on what became of WikiText's marks."""
    there = sum(records or ())
    drawn = f"{settings.sample:,} of {there:,} records, drawn with seed {settings.seed}" if settings.sample else "all"
    limit = f", up to {settings.limit_tokens:,} tokens" if settings.limit_tokens else ""
    return f"{drawn}{limit}; unit {settings.unit}; WikiText's marks: {settings.wikitext}"


def _values_text(values: ValueFacts) -> str:
    """A line on how a run's values were projected."""
    way = "through the final norm" if values.norm else "bare, without the final norm"
    return f"{values.top} tokens promoted and suppressed, {way}, in {values.dtype}"


def result_lines(result: Result) -> list[str]:
    """A result for people: its name, where its examples are from, and its table; the facts are in the file."""
    columns = list(result.rows[0]) if result.rows else []
    shown = [[_shown(row.get(name)) for name in columns] for row in result.rows]
    widths = [max(len(name), *(len(line[at]) for line in shown)) for at, name in enumerate(columns)]
    origin = result.settings.get("examples_from")
    title = f"{result.experiment}: {result.settings['examples']:,} examples from {origin}" if origin else result.experiment
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in [columns, *shown]]
    return [title, *lines, ""]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else visible(str(value))
