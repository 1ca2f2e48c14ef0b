"""The panels of a figure as plain numbers: curves over layers, of this model, of the paper and of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ffmem.experiments.paper import the_paper
from ffmem.experiments.resampling import interval
from ffmem.run.results import Result

Form = Literal["line", "bar"]
HERE, PAPER, RANDOM = "this model", "the paper", "random weights"
INTERVALS, QUARTILES = "95% interval", "quartiles"
COLOURS = {
    HERE: "#0072B2",
    PAPER: "#808080",
    RANDOM: "#6B8E23",
    "first token": "#B07D00",
    "last token": "#7A5195",
    "random token": "#1598A8",
    "residual": "#0072B2",
    "composition": "#CC79A7",
    "agreement": "#009E73",
    "ffn": "#D55E00",
    "shuffled pairs": "#CC79A7",
    "negative triggers": "#D55E00",
    "cells with 90% of the mass": "#B07D00",
    "active cells only": "#B07D00",
    "block's output": "#1598A8",
    "softmax": "#D55E00",
    "softmax, same length": "#009E73",
}
"""The colour of each thing, the same in all figures. Colour-blind safe (after Okabe and Ito); each has a contrast of
about 3 or more to white and to a dark page."""


@dataclass(frozen=True)
class Point:
    """A point of a curve: a number at a layer (or a bin), drawn at x, with the ends of its interval where it has one."""

    at: int
    x: float
    value: int | float
    low: int | float | None = None
    high: int | float | None = None
    note: str = ""
    few: str = ""
    """The number of cells that the point is from, in words, where they are too few to say much and the bar is hollow."""


@dataclass(frozen=True)
class Curve:
    """Points that belong together; the paper's are dashed, chance is dotted, random weights are dashed and dotted.

    `base` is where a stacked bar begins.
    """

    name: str
    points: list[Point]
    form: Form = "line"
    dash: tuple[int, ...] = (1, 0)
    colour: str = ""
    base: list[int | float] = field(default_factory=list)
    interval: str = ""
    """The meaning of the ends `low` and `high` of its points: quartiles, or a 95% interval."""


@dataclass(frozen=True)
class Axis:
    """The axis of layers: a layer is drawn at its number in a model as deep as the paper's, else at its depth (0 to 1)."""

    layers: int

    @property
    def relative(self) -> bool:
        """Whether layers are drawn at their depth from 0 to 1 rather than at their number."""
        return self.layers != the_paper().layers

    def x(self, layer: int, of: int) -> float:
        """The x of a layer in a model that has `of` layers.

        >>> Axis(12).x(4, 12), Axis(12).x(4, 16), Axis(16).x(4, 16)
        (0.2727272727272727, 0.2, 4.0)
        """
        if not self.relative:
            return float(layer)
        return (layer - 1) / (of - 1) if of > 1 else 1.0

    def half_bar(self, of: int) -> float:
        """Half the width of a bar for a layer in a model that has `of` layers."""
        return 0.4 if not self.relative else min(0.06, 0.4 / max(1, of - 1))

    @property
    def title(self) -> str:
        """The title of the axis."""
        return "depth (0 is the first layer, 1 the last)" if self.relative else "layer"


@dataclass(frozen=True)
class Panel:
    """A plot: a title, the meaning of its height, and curves; `half_bar` is half the width of a bar."""

    title: str
    y: str
    curves: list[Curve]
    axis: Axis | None
    """The axis of layers; None where x is a bin."""
    format: str = "~%"
    log: bool = False
    half_bar: float = 0.4
    limits: dict[str, Any] = field(default_factory=dict)
    """Arguments for the scale of the height, where its limits are known beforehand."""
    empty: Sequence[int] = ()
    """The bins that have no cells, so that there is no share to draw."""

    @property
    def spread(self) -> str:
        """The meaning of the panel's bands and whiskers, in words."""
        return ", ".join(sorted({curve.interval for curve in self.curves if any(p.low is not None for p in curve.points)}))


Results = Mapping[str, Result]


def layers_of(results: Iterable[Result]) -> int:
    """The depth of the model as far as results know it: the last layer they have a row for."""
    return max((row["layer"] for result in results for row in result.rows if "layer" in row), default=1)


Ends = tuple[int | float | None, int | float | None]
Rows = Callable[[Result], Sequence[Mapping[str, Any]]]


def all_rows(sample: Result) -> Sequence[Mapping[str, Any]]:
    """The rows that a curve is made from unless others are named."""
    return sample.rows


def curve_of(
    result: Result | None,
    axis: Axis,
    column: str,
    name: str = HERE,
    *,
    spread: str = INTERVALS,
    rows: Rows = all_rows,
    colour: str = "",
    **more: Any,
) -> Curve:
    """A column of a result as a curve; rows without a number are left out.

    Its interval is that over the result's resamples, where these hold the column, or the column's own quartiles.
    """
    found = [] if result is None else [row for row in rows(result) if row.get(column) is not None]
    ends: dict[int, Ends] = {}
    if spread == QUARTILES:
        low, high = (column.replace("_median", quartile) for quartile in ("_q1", "_q3"))
        ends = {row["layer"]: (row.get(low), row.get(high)) for row in found}
    elif found and "low" in found[0]:  # the experiment has counted them already
        ends = {row["layer"]: (row["low"], row["high"]) for row in found}
    elif result is not None and spread:
        ends = _ends(result, column, rows)
    points = [
        Point(layer, axis.x(layer, axis.layers), row[column], *ends.get(layer, (None, None)))
        for layer, row in ((row["layer"], row) for row in found)
    ]
    return Curve(name, points, colour=colour or COLOURS.get(name, COLOURS[HERE]), interval=spread, **more)


def _ends(result: Result, column: str, rows: Rows) -> dict[int, Ends]:
    """The 95% interval of a column in every layer, over the resamples that hold it."""
    drawn: dict[int, list[int | float | None]] = {}
    for draw in result.draws:
        for row in rows(draw):
            drawn.setdefault(row["layer"], []).append(row.get(column))
    ends = {layer: interval(values) for layer, values in drawn.items()}
    return {layer: both for layer, both in ends.items() if both is not None}


def random_curve(
    control: Result | None, axis: Axis, column: str, name: str = RANDOM, *, spread: str = INTERVALS, **more: Any
) -> Curve:
    """The same column on random weights as a curve, empty where that was not run; only the model's own has quartiles."""
    return curve_of(control, axis, column, name, spread="" if spread == QUARTILES else spread, dash=(8, 3, 2, 3), **more)


def paper_curve(
    values: Sequence[int | float], axis: Axis, name: str = PAPER, colour: str = COLOURS[PAPER], **more: Any
) -> Curve:
    """The paper's numbers, one a layer of its sixteen, dashed."""
    points = [Point(layer, axis.x(layer, len(values)), value) for layer, value in enumerate(values, 1)]
    return Curve(name, points, colour=colour, **({"dash": (5, 3)} | more))
