"""The panels of every figure: what this model's result, its control and the paper give to each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ffmem.errors import FfmemError
from ffmem.reports.curves import (
    COLOURS,
    HERE,
    INTERVALS,
    PAPER,
    QUARTILES,
    RANDOM,
    Axis,
    Curve,
    Form,
    Panel,
    Point,
    Results,
    layers_of,
)
from ffmem.reports.numbers import share
from ffmem.reports.paper import the_paper
from ffmem.reports.verdicts import FEW, Sample, own, resamples
from ffmem.reports.verdicts import interval as interval_of
from ffmem.run.results import Result


def panels(name: str, results: Results, layers: int | None = None, controls: Results | None = None) -> list[Panel]:
    """What figure `name` shows. `layers` is the model's depth; without it, the last layer that has a row.

    `controls` are the results of the same experiments on random weights; where there is one it is drawn too.
    """
    if name not in FIGURES:
        raise FfmemError(f"expected a figure among {', '.join(FIGURES)}, found {name!r}")
    experiment, make = FIGURES[name]
    if experiment not in results:
        raise FfmemError(f"{name} needs the result {experiment}: make it with ffmem experiments RUN {experiment}")
    result = results[experiment]
    return make(result, Axis(layers or layers_of([result])), (controls or {}).get(experiment))


Span = tuple[int | float | None, int | float | None]
Rows = Callable[[Sample], Sequence[Mapping[str, Any]]]


def _rows(sample: Sample) -> Sequence[Mapping[str, Any]]:
    return sample.rows


def _here(
    result: Result | None,
    axis: Axis,
    column: str,
    name: str = HERE,
    *,
    interval: str = INTERVALS,
    rows: Rows = _rows,
    colour: str = "",
    **more: Any,
) -> Curve:
    """A column of a result; rows without a number are left out.

    Its interval is that over the result's resamples, where these hold the column, or the column's own quartiles.
    """
    found = [] if result is None else [row for row in rows(own(result)) if row.get(column) is not None]
    spans: dict[int, Span] = {}
    if interval == QUARTILES:
        low, high = (column.replace("_median", quartile) for quartile in ("_q1", "_q3"))
        spans = {row["layer"]: (row.get(low), row.get(high)) for row in found}
    elif found and "low" in found[0]:  # the experiment has counted them already
        spans = {row["layer"]: (row["low"], row["high"]) for row in found}
    elif result is not None and interval:
        spans = _spans(result, column, rows)
    points = [
        Point(layer, axis.x(layer, axis.layers), row[column], *spans.get(layer, (None, None)))
        for layer, row in ((row["layer"], row) for row in found)
    ]
    return Curve(name, points, colour=colour or COLOURS[name], interval=interval, **more)


def _spans(result: Result, column: str, rows: Rows) -> dict[int, Span]:
    """The 95% interval of a column in every layer, over the resamples that hold it."""
    drawn: dict[int, list[int | float | None]] = {}
    for draw in resamples(result):
        for row in rows(draw):
            drawn.setdefault(row["layer"], []).append(row.get(column))
    ends = {layer: interval_of(values) for layer, values in drawn.items()}
    return {layer: span for layer, span in ends.items() if span is not None}


def _random(
    control: Result | None, axis: Axis, column: str, name: str = RANDOM, *, interval: str = INTERVALS, **more: Any
) -> Curve:
    """The same column on random weights; no points where that was not run. Quartiles are left to the model's own."""
    return _here(control, axis, column, name, interval="" if interval == QUARTILES else interval, dash=(8, 3, 2, 3), **more)


def _paper(values: Sequence[int | float], axis: Axis, name: str = PAPER, colour: str = COLOURS[PAPER], **more: Any) -> Curve:
    points = [Point(layer, axis.x(layer, len(values)), value) for layer, value in enumerate(values, 1)]
    return Curve(name, points, colour=colour, **({"dash": (5, 3)} | more))


def _fig3(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """Three curves and the paper's three; random weights have a panel of their own, on the same scale."""
    curves, random = [], []
    for kind in ("last", "random", "first"):
        name = f"{kind} token"
        rows = partial(_of_kind, kind=kind)
        curves.append(_here(result, axis, "mean", name, rows=rows))
        curves.append(_paper(the_paper().removal[kind], axis, f"{name}, paper", COLOURS[name]))
        random.append(_here(control, axis, "mean", name, rows=rows))
    if control is None:
        return [Panel("", "change of the coefficient", curves, axis)]
    heights = [end for curve in (*curves, *random) for point in curve.points for end in (point.value, point.low, point.high)]
    known = [height for height in heights if height is not None]
    limits = {"domain": [min(0, *known), max(0, *known)], "nice": True}
    return [
        Panel(title, "change of the coefficient", drawn, axis, limits=limits)
        for title, drawn in ((f"{HERE} and {PAPER}", curves), (RANDOM, random))
    ]


def _of_kind(sample: Sample, *, kind: str) -> Sequence[Mapping[str, Any]]:
    return [row for row in sample.rows if row["kind"] == kind]


def _chance(sample: Sample) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = sample.facts.get("baselines", {}).get("by_layer", [])
    return found


def _fig4(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    curves = [
        _here(result, axis, "share"),
        _paper(the_paper().agreement, axis),
        _random(control, axis, "share"),
        _here(result, axis, "shuffled", "shuffled pairs", rows=_chance, dash=(1, 3)),
        _here(result, axis, "negative_share", "negative triggers"),
    ]
    return [Panel("", "cells that agree", curves, axis)]


def _fig5(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    curves = [
        _here(result, axis, "rank_median", interval=QUARTILES),
        _paper(the_paper().rank_median, axis),
        _paper(the_paper().rank_q1, axis, "the paper, first quartile", dash=(1, 3)),
        _random(control, axis, "rank_median", interval=QUARTILES),
    ]
    return [Panel("", "rank of the next token", curves, axis, ",~r", log=True)]


def _bins(result: Result | None, name: str, form: Form, **more: Any) -> Curve:
    """Fig 6 of a result: bins with cells, each with its interval over the resamples; those of few cells are marked."""
    points = []
    for at, one in enumerate(result.facts.get("fig6", []) if result else [], 1):
        if one["share"] is not None and result is not None:
            drawn = [draw.facts.get("fig6", []) for draw in resamples(result)]
            low, high = interval_of(found[at - 1]["share"] for found in drawn if len(found) >= at) or (None, None)
            few = f"n {one['cells']}" if one["cells"] < FEW else ""
            note = f"{share(one['low'])} to {share(one['high'])}, {one['cells']:,} cells"
            points.append(Point(at, float(at), one["share"], low, high, note, few))
    return Curve(name, points, form, colour=COLOURS[name], interval=INTERVALS, **more)


def _fig6(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    paper = [
        Point(at, float(at), part, note=f"up to {share(edge)}")
        for at, (edge, part) in enumerate(the_paper().agreement_by_probability, 1)
    ]
    curves = [
        _bins(result, HERE, "bar"),
        Curve(PAPER, paper, dash=(5, 3), colour=COLOURS[PAPER]),
        _bins(control, RANDOM, "line", dash=(8, 3, 2, 3)),
    ]
    empty = [at for at, one in enumerate(result.facts.get("fig6", []), 1) if one["share"] is None]
    return [Panel("", "cells that agree", curves, None, empty=empty)]


def _fig7(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    curves = [
        _here(result, axis, "active_median", interval=QUARTILES),
        _paper(the_paper().active, axis),
        _here(result, axis, "mass_median", "cells with 90% of the mass", interval=QUARTILES),
        _random(control, axis, "active_median", interval=QUARTILES),
        _random(
            control,
            axis,
            "mass_median",
            "90% of the mass, random weights",
            interval=QUARTILES,
            colour=COLOURS["first token"],
        ),
    ]
    return [Panel("", "cells of the layer", curves, axis)]


def _fig8(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    curves = [
        _here(result, axis, "zero_agreement", form="bar"),
        _paper(the_paper().zero_agreement, axis),
        _random(control, axis, "zero_agreement"),
        _here(result, axis, "zero_agreement_active", "active cells only", interval=""),
        _here(result, axis, "zero_agreement_output", "block's output", interval=""),
    ]
    return [Panel("", "examples without agreement", curves, axis, half_bar=axis.half_bar(axis.layers))]


def _fig9(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    curves = [
        _here(result, axis, "residual_matches_output", form="bar"),
        _paper(the_paper().residual_matches, axis),
        _random(control, axis, "residual_matches_output"),
    ]
    return [Panel("", "examples", curves, axis, half_bar=axis.half_bar(axis.layers))]


def _fig10(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    curves = [
        _here(result, axis, "residual_probability_median", interval=QUARTILES),
        _paper(the_paper().residual_probability, axis),
        _random(control, axis, "residual_probability_median", interval=QUARTILES),
    ]
    return [Panel("", "probability", curves, axis)]


def _fig11(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """Stacked bars: a panel of this model's, of the paper's and of random weights', on the same scale."""
    cases = the_paper().cases
    paper: list[dict[str, Any]] = [
        {"layer": layer} | {case: cases[case][layer - 1] for case in cases} for layer in range(1, the_paper().layers + 1)
    ]
    found = []
    shown = [(HERE, result.rows, axis.layers), (PAPER, paper, the_paper().layers)]
    if control is not None:
        shown.append((RANDOM, control.rows, axis.layers))
    for title, rows, of in shown:
        curves: list[Curve] = []
        bottom: list[int | float] = [0.0] * len(rows)
        for case in cases:
            points = [Point(row["layer"], axis.x(row["layer"], of), row[case]) for row in rows]
            curves.append(Curve(case, points, "bar", colour=COLOURS[case], base=bottom))
            bottom = [low + point.value for low, point in zip(bottom, points, strict=True)]
        found.append(Panel(title, "examples", curves, axis, half_bar=axis.half_bar(of), limits={"domain": [0, 1]}))
    return found


def _normaliser(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    loss = [
        _here(result, axis, "change_softmax", "softmax"),
        _here(result, axis, "change_softmax_scaled", "softmax, same length"),
        _random(control, axis, "change_softmax_scaled", "same length, random weights", colour=COLOURS[RANDOM]),
    ]
    effective = [
        _here(result, axis, f"{column}_median", name, interval=QUARTILES, rows=_effective)
        for column, name in EFFECTIVE.items()
    ]
    effective.append(_random(control, axis, "effective_memories_median", interval=QUARTILES, rows=_effective))
    return [
        Panel("change of loss, one layer replaced", "nats a token", loss, axis, "~g"),
        Panel("memories that effectively take part", "share of the layer's cells", effective, axis),
    ]


def _effective(sample: Sample) -> Sequence[Mapping[str, Any]]:
    """Effective memories as shares of their layer's cells, of the layers that have all of them."""
    names = [f"{name}_{q}" for name in EFFECTIVE for q in ("q1", "median", "q3")]
    whole = [row for row in sample.rows if all(row.get(name) is not None for name in names)]
    return [{"layer": row["layer"]} | {name: row[name] / row["cells"] for name in names} for row in whole]


EFFECTIVE = {"effective_memories": HERE, "softmax_effective": "softmax"}
FIGURES: dict[str, tuple[str, Callable[[Result, Axis, Result | None], list[Panel]]]] = {
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
