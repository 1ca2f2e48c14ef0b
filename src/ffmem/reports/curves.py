"""What each figure shows, as plain numbers: curves over layers, of this model and of the paper side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ffmem.reports.paper import the_paper
from ffmem.results import Result
from ffmem.words import FfmemError

Form = Literal["line", "bar"]
HERE, PAPER = "this model", "the paper"
FEW = 30
"""Cells below which a bin's share says little."""
COLOURS = {
    HERE: "#0072B2",
    PAPER: "#808080",
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
"""The same thing has the same colour in all figures. Colour-blind safe (after Okabe and Ito); each has a contrast of
about 3 or more to white and to a dark page."""


@dataclass(frozen=True)
class Point:
    """One number: at a layer (or a bin), drawn at x, with the ends of its interval where it has one."""

    at: int
    x: float
    value: int | float
    low: int | float | None = None
    high: int | float | None = None
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """Points that belong together; the paper's are dashed, chance is dotted. `base` is where a stacked bar begins."""

    name: str
    points: list[Point]
    form: Form = "line"
    dash: tuple[int, ...] = (1, 0)
    colour: str = ""
    base: list[int | float] = field(default_factory=list)
    interval: str = ""
    """What `low` and `high` are."""


@dataclass(frozen=True)
class Axis:
    """Where a layer is drawn: at its number in a model as deep as the paper's, else at its depth from 0 to 1."""

    layers: int

    @property
    def relative(self) -> bool:
        return self.layers != the_paper().layers

    def x(self, layer: int, of: int) -> float:
        """The place of a layer of a model that has `of`.

        >>> Axis(12).x(4, 12), Axis(12).x(4, 16), Axis(16).x(4, 16)
        (0.2727272727272727, 0.2, 4.0)
        """
        if not self.relative:
            return float(layer)
        return (layer - 1) / (of - 1) if of > 1 else 1.0

    def half_bar(self, of: int) -> float:
        """Half the width of a bar for a layer of a model that has `of`."""
        return 0.4 if not self.relative else min(0.06, 0.4 / max(1, of - 1))

    @property
    def title(self) -> str:
        return "depth (0 is the first layer, 1 the last)" if self.relative else "layer"


@dataclass(frozen=True)
class Panel:
    """One plot: a title, what the height says, and curves; `half_bar` is half the width of a bar."""

    title: str
    y: str
    curves: list[Curve]
    axis: Axis | None
    """None where x is a bin."""
    format: str = "~%"
    log: bool = False
    half_bar: float = 0.4
    limits: dict[str, Any] = field(default_factory=dict)
    """Of the height, where they are known, as the scale wants them."""


Results = Mapping[str, Result]


def layers_of(results: Iterable[Result]) -> int:
    """The depth of the model as far as results know it: the last layer they have a row for."""
    return max((row["layer"] for result in results for row in result.rows if "layer" in row), default=1)


def panels(name: str, results: Results, layers: int | None = None) -> list[Panel]:
    """What figure `name` shows. `layers` is the model's depth; without it, the last layer that has a row."""
    if name not in FIGURES:
        raise FfmemError(f"expected a figure among {', '.join(FIGURES)}, found {name!r}")
    experiment, make = FIGURES[name]
    if experiment not in results:
        raise FfmemError(f"{name} needs the result {experiment}: make it with ffmem experiments RUN {experiment}")
    result = results[experiment]
    return make(result, Axis(layers or layers_of([result])))


def _here(
    rows: Iterable[Mapping[str, Any]],
    axis: Axis,
    column: str,
    name: str = HERE,
    ends: tuple[str, str] | None = None,
    **more: Any,
) -> Curve:
    """A column of a result; rows without a number are left out."""
    points = [
        Point(row["layer"], axis.x(row["layer"], axis.layers), row[column], *((row[ends[0]], row[ends[1]]) if ends else ()))
        for row in rows
        if row.get(column) is not None
    ]
    return Curve(name, points, colour=more.pop("colour", COLOURS[name]), **more)


def _paper(values: Sequence[int | float], axis: Axis, name: str = PAPER, colour: str = COLOURS[PAPER], **more: Any) -> Curve:
    points = [Point(layer, axis.x(layer, len(values)), value) for layer, value in enumerate(values, 1)]
    return Curve(name, points, colour=colour, **({"dash": (5, 3)} | more))


def _fig3(result: Result, axis: Axis) -> list[Panel]:
    curves = []
    for kind in ("last", "random", "first"):
        name = f"{kind} token"
        rows = [row for row in result.rows if row["kind"] == kind]
        curves.append(_here(rows, axis, "mean", name, ("low", "high"), interval="95% interval"))
        curves.append(_paper(the_paper().removal[kind], axis, f"{name}, paper", COLOURS[name]))
    return [Panel("", "change of the coefficient", curves, axis)]


def _fig4(result: Result, axis: Axis) -> list[Panel]:
    curves = [_here(result.rows, axis, "share"), _paper(the_paper().agreement, axis)]
    chance = result.facts.get("baselines", {}).get("by_layer", [])
    curves.append(_here(chance, axis, "shuffled", "shuffled pairs", dash=(1, 3)))
    curves.append(_here(result.rows, axis, "negative_share", "negative triggers"))
    return [Panel("", "cells that agree", curves, axis)]


def _fig5(result: Result, axis: Axis) -> list[Panel]:
    ends = ("rank_q1", "rank_q3")
    curves = [
        _here(result.rows, axis, "rank_median", ends=ends, interval="quartiles"),
        _paper(the_paper().rank_median, axis),
        _paper(the_paper().rank_q1, axis, "the paper, first quartile", dash=(1, 3)),
    ]
    return [Panel("", "rank of the next token", curves, axis, ",~r", log=True)]


def _fig6(result: Result, axis: Axis) -> list[Panel]:
    bins = result.facts.get("fig6", [])
    here = [
        Point(at, float(at), one["share"], note=f"{one['low']:.3g} to {one['high']:.3g}, {one['cells']:,} cells")
        for at, one in enumerate(bins, 1)
        if one["share"] is not None
    ]
    paper = [
        Point(at, float(at), share, note=f"up to {edge:.3g}")
        for at, (edge, share) in enumerate(the_paper().agreement_by_probability, 1)
    ]
    curves = [
        Curve(HERE, here, "bar", colour=COLOURS[HERE]),
        Curve(PAPER, paper, dash=(5, 3), colour=COLOURS[PAPER]),
    ]
    return [Panel("", "cells that agree", curves, None)]


def _fig7(result: Result, axis: Axis) -> list[Panel]:
    here = _here(result.rows, axis, "active_median", ends=("active_q1", "active_q3"), interval="quartiles")
    mass = _here(
        result.rows, axis, "mass_median", "cells with 90% of the mass", ("mass_q1", "mass_q3"), interval="quartiles"
    )
    return [Panel("", "cells of the layer", [here, _paper(the_paper().active, axis), mass], axis)]


def _fig8(result: Result, axis: Axis) -> list[Panel]:
    curves = [
        _here(result.rows, axis, "zero_agreement", form="bar"),
        _paper(the_paper().zero_agreement, axis),
        _here(result.rows, axis, "zero_agreement_active", "active cells only"),
        _here(result.rows, axis, "zero_agreement_output", "block's output"),
    ]
    return [Panel("", "examples without agreement", curves, axis, half_bar=axis.half_bar(axis.layers))]


def _fig9(result: Result, axis: Axis) -> list[Panel]:
    curves = [_here(result.rows, axis, "residual_matches_output", form="bar"), _paper(the_paper().residual_matches, axis)]
    return [Panel("", "examples", curves, axis, half_bar=axis.half_bar(axis.layers))]


def _fig10(result: Result, axis: Axis) -> list[Panel]:
    ends = ("residual_probability_q1", "residual_probability_q3")
    here = _here(result.rows, axis, "residual_probability_median", ends=ends, interval="quartiles")
    return [Panel("", "probability", [here, _paper(the_paper().residual_probability, axis)], axis)]


def _fig11(result: Result, axis: Axis) -> list[Panel]:
    """Stacked bars: this model's panel, and the paper's on the same scale."""
    cases = the_paper().cases
    paper: list[dict[str, Any]] = [
        {"layer": layer} | {case: cases[case][layer - 1] for case in cases} for layer in range(1, the_paper().layers + 1)
    ]
    found = []
    for title, rows, of in ((HERE, result.rows, axis.layers), (PAPER, paper, the_paper().layers)):
        curves: list[Curve] = []
        bottom: list[int | float] = [0.0] * len(rows)
        for case in cases:
            points = [Point(row["layer"], axis.x(row["layer"], of), row[case]) for row in rows]
            curves.append(Curve(case, points, "bar", colour=COLOURS[case], base=bottom))
            bottom = [low + point.value for low, point in zip(bottom, points, strict=True)]
        found.append(Panel(title, "examples", curves, axis, half_bar=axis.half_bar(of), limits={"domain": [0, 1]}))
    return found


def _normaliser(result: Result, axis: Axis) -> list[Panel]:
    loss = [
        _here(result.rows, axis, "change_softmax", "softmax"),
        _here(result.rows, axis, "change_softmax_scaled", "softmax, same length"),
    ]
    shares = [
        row | {f"{name}_{q}_share": row[f"{name}_{q}"] / row["cells"] for name in EFFECTIVE for q in ("q1", "median", "q3")}
        for row in result.rows
        if all(row.get(f"{name}_{q}") is not None for name in EFFECTIVE for q in ("q1", "median", "q3"))
    ]
    effective = [
        _here(
            shares, axis, f"{column}_median_share", name, (f"{column}_q1_share", f"{column}_q3_share"), interval="quartiles"
        )
        for column, name in EFFECTIVE.items()
    ]
    return [
        Panel("change of loss, one layer replaced", "nats a token", loss, axis, "~g"),
        Panel("memories that effectively take part", "share of the layer's cells", effective, axis),
    ]


EFFECTIVE = {"effective_memories": HERE, "softmax_effective": "softmax"}
FIGURES: dict[str, tuple[str, Callable[[Result, Axis], list[Panel]]]] = {
    "fig3": ("removal", _fig3),
    "fig4": ("agreement", _fig4),
    "fig5": ("agreement", _fig5),
    "fig6": ("agreement", _fig6),
    "fig7": ("activity", _fig7),
    "fig8": ("composition", _fig8),
    "fig9": ("refinement", _fig9),
    "fig10": ("refinement", _fig10),
    "fig11": ("refinement", _fig11),
    "normaliser": ("normaliser", _normaliser),
}
"""The experiment behind every figure, and what makes its panels."""
