"""Ways to read a claim off a result that several experiments share: a trend over layers, a rule in most layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from statistics import fmean
from typing import Any

from ffmem.experiments.numbers import points, share, signed, spearman
from ffmem.experiments.rules import Measure, Reading, Rule
from ffmem.run.results import Result

FEWEST = 4
"""The number of layers that a trend needs at least: two points always have one."""
MOST = 0.8
"""The share of the layers in which a claim about most of them must be so."""

Row = dict[str, Any]
Read = Callable[[Result], Reading]


def not_measured(words: str) -> Reading:
    """A reading that says why a claim was not measured."""
    return Reading(words, verdict="not measured")


def units(result: Result) -> str:
    """The number of examples or cells that a result is from, with their name; empty where it does not say."""
    if (count := result.settings.get("examples")) is not None:
        return f"{count:,} examples"
    of_rows = [row["cells"] for row in result.rows if "cells" in row]
    count = result.facts.get("cells", sum(of_rows) if of_rows else None)
    return "" if count is None else f"{count:,} cells"


def row_of(rows: Iterable[Row], layer: int) -> Row:
    """The row of a layer, an empty one where there is none."""
    return next((row for row in rows if row["layer"] == layer), {})


def ends(values: Sequence[float], say: Callable[[float], str] = share) -> str:
    """The words for how a curve of the paper goes from its first layer to its last."""
    rho = spearman(list(range(1, len(values) + 1)), values) or 0.0
    return f"Spearman {signed(rho)}; {say(values[0])} in layer 1, {say(values[-1])} in {len(values)}"


def rises(what: str, above: float) -> str:
    """The rule of a trend upwards, in words."""
    return f"Spearman of {what} and layer above {above}, and the top quarter of the layers above the bottom quarter"


def falls(what: str, below: float) -> str:
    """The rule of a trend downwards, in words."""
    return f"Spearman of {what} and layer below −{-below}, and the top quarter of the layers below the bottom quarter"


def trend(
    column: str, *, above: int | float = -inf, below: int | float = inf, size: bool = False,
    say: Callable[[int | float], str] = share, difference: Callable[[int | float], str] = points,
    unit: str = "points", **only: str,
) -> Read:  # fmt: skip
    """A reading that asks whether a column (or its size) rises or falls with depth: by its ranks, and from the bottom
    quarter of the layers to the top quarter."""

    def values(sample: Result) -> list[tuple[int, int | float]]:
        rows = [row for row in sample.rows if row.get(column) is not None and only.items() <= row.items()]
        return [(row["layer"], abs(row[column]) if size else row[column]) for row in rows]

    def ranks(sample: Result) -> int | float | None:
        layers, found = [layer for layer, _ in values(sample)], [value for _, value in values(sample)]
        return (spearman(layers, found) or 0.0) if found else None  # where all are equal there is no trend

    def quarters(sample: Result) -> tuple[int | float, int | float]:
        found = [value for _, value in values(sample)]
        quarter = max(1, len(found) // 4)
        return fmean(found[:quarter]), fmean(found[-quarter:])

    def step(sample: Result) -> int | float | None:
        if not values(sample):
            return None
        bottom, top = quarters(sample)
        return top - bottom

    def read(result: Result) -> Reading:
        found = values(result)
        if len(found) < FEWEST:
            return not_measured(f"too few layers for a trend ({len(found)}; {FEWEST} needed)")
        (first, start), (last, end) = found[0], found[-1]
        bottom, top = quarters(result)
        words = f"{say(start)} in layer {first}, {say(end)} in {last}"
        ends = f"top quarter of the layers {say(top)}, bottom quarter {say(bottom)}, difference"
        measures = (
            Measure("Spearman", ranks, Rule(above=above, below=below), signed),
            Measure(ends, step, Rule(above=0) if above > -inf else Rule(below=0), difference, unit),
        )
        return Reading(words, measures, units(result))

    return read


def in_most_layers(
    number: Callable[[Row], int | float],
    rule: Rule,
    say: Callable[[Row], str],
    layers: Callable[[Result], Sequence[Row]] = lambda sample: sample.rows,
) -> Read:
    """A reading that asks whether a number of a layer meets a rule in at least 80% of the layers. The layer that is
    farthest from it is named."""
    sign = 1 if min(rule.below, rule.most) < inf else -1

    def met(rows: Sequence[Row]) -> int:
        return sum(rule.verdict([number(row)]) == "holds" for row in rows)

    def part(sample: Result) -> int | float | None:
        rows = layers(sample)
        return met(rows) / len(rows) if rows else None

    def read(result: Result) -> Reading:
        rows = layers(result)
        if not rows:
            return not_measured("no layer to judge")
        worst = max(rows, key=lambda row: sign * number(row))
        words = f"{met(rows)} of {len(rows)}, the weakest is layer {worst['layer']}: {say(worst)}"
        measure = Measure("", part, Rule(least=MOST), of="of layers")
        return Reading(words, [measure], units(result))

    return read


def layers_with(column: str, rule: Rule) -> Read:
    """A reading that asks whether a share meets a rule in most layers."""
    return in_most_layers(lambda row: row[column], rule, lambda row: share(row[column]))
