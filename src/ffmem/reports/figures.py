"""Figures as Altair charts: for a notebook, for files, for the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.errors import FfmemError
from ffmem.reports.captions import CAPTIONS
from ffmem.reports.curves import Curve, Panel, Results, layers_of
from ffmem.reports.drawing import altair, png, svg
from ffmem.reports.numbers import plain, share, whole
from ffmem.reports.panels import FIGURES, panels
from ffmem.run.folder import RunFolder
from ffmem.run.reader import Index
from ffmem.run.results import CONTROL, Result, load_result, saved_results

if TYPE_CHECKING:
    from altair import HConcatChart, LayerChart

WIDTH, HEIGHT = 460, 280
MIDDLE_GREY = "#767676"
"""Words and lines of a figure that stands alone, readable on white and on black."""
GRID = "#88888844"


def figure(
    name: str,
    results: Results | Iterable[Result],
    *,
    layers: int | None = None,
    controls: Results | Iterable[Result] = (),
) -> LayerChart | HConcatChart:
    """A figure of the paper (`fig3` to `fig11`, or `normaliser`) with this model's numbers and the paper's.

    `layers` is the model's depth; without it, the last layer that the result has a row for. `controls` are the results on
    random weights.
    """
    found = panels(name, _by_name(results), layers, _by_name(controls))
    charts = [draw(panel, CAPTIONS[name].alt, f"{name}_{at}") for at, panel in enumerate(found, 1)]
    return _finished(charts)


def plot(result: Result, *, layers: int | None = None) -> LayerChart | HConcatChart:
    """All figures of a result side by side, for a notebook: agreement as Figs 4, 5 and 6."""
    depth, charts = layers or layers_of([result]), []
    for name, (experiment, _) in FIGURES.items():
        if experiment == result.experiment:
            for at, panel in enumerate(panels(name, {experiment: result}, depth), 1):
                title = ": ".join(filter(None, (CAPTIONS[name].number, panel.title)))
                charts.append(draw(panel, CAPTIONS[name].alt, f"{name}_{at}", title=title))
    if not charts:
        made = ", ".join(dict.fromkeys(experiment for experiment, _ in FIGURES.values()))
        raise FfmemError(f"expected a result of {made}, found {result.experiment!r}")
    return _finished(charts)


def save_figures(index: Index, folder: str | Path) -> list[Path | str]:
    """Write every figure that the run has results for as NAME.svg and NAME.png; their paths or URLs."""
    results, controls, target = all_results(index), all_results(index, CONTROL), RunFolder(folder)
    target.sweep()
    made: list[Path | str] = []
    for name, (experiment, _) in FIGURES.items():
        if experiment in results:
            chart = figure(name, results, layers=index.manifest.model.layers, controls=controls)
            for ending, data in (("svg", svg(chart).encode()), ("png", png(chart))):
                with target.writing(f"{name}.{ending}") as path:
                    path.write_bytes(data)
                made.append(target.location(f"{name}.{ending}"))
    return made


def all_results(index: Index, control: str | None = None) -> dict[str, Result]:
    """The results of a run that figures are made from: of its model, or of a control."""
    known = {experiment for experiment, _ in FIGURES.values()}
    return {name: load_result(index, name, control) for name in saved_results(index, control) if name in known}


def draw(panel: Panel, alt: str, name: str, *, width: int | str = WIDTH, title: str | None = None) -> LayerChart:
    """One panel: intervals, bars, lines and points, which a click in the legend singles out."""
    al = altair()
    curves = [curve for curve in panel.curves if curve.points]
    names = [curve.name for curve in curves]
    picked = al.selection_point(name=f"{name}_picked", fields=["series"], bind="legend")
    stacked = all(curve.base for curve in curves)
    legend = al.Legend(title=None, orient="top", labelLimit=0, symbolOpacity=1, symbolStrokeWidth=2.5, symbolSize=250)

    def by_curve(values: list[Any]) -> dict[str, Any]:
        return {"scale": al.Scale(domain=names, range=values), "legend": legend}

    colour = al.Color("series:N", **by_curve([curve.colour for curve in curves]))
    dash = al.StrokeDash("series:N", **by_curve([list(curve.dash) for curve in curves]))
    shape = al.Shape("series:N", **by_curve(["square" if curve.form == "bar" else "stroke" for curve in curves]))
    y_axis = al.Axis(title=f"{panel.y} ({panel.spread})" if panel.spread else panel.y, format=panel.format, tickCount=6)
    y_scale = al.Scale(type="log", nice=False) if panel.log else al.Scale(zero=True, **panel.limits)
    shared: dict[str, Any] = {"x": _x(panel), "color": colour, "tooltip": _tooltips(panel), "description": "said:N"}
    layers: list[Any] = []

    def y(field: str) -> Any:
        return al.Y(f"{field}:Q", axis=y_axis, scale=y_scale)

    def layer(form: str, rows: list[dict[str, Any]], mark: dict[str, Any], **channels: Any) -> None:
        if not rows:
            return
        # Only the first has a name: altair would hang the selection on each named layer of charts side by side.
        base = al.Chart(al.Data(values=rows), **({} if layers else {"name": f"{name}_{form}"}))
        strength = al.condition(picked, al.value(mark.pop("opacity")), al.value(0.08))
        layers.append(getattr(base, f"mark_{mark.pop('type')}")(**mark).encode(**shared | channels, opacity=strength))

    every = {form: [_rows(panel, curve) for curve in curves if curve.form == form] for form in ("line", "bar")}
    lines, bars = (list(chain.from_iterable(every[form])) for form in ("line", "bar"))
    layer("band", [row for row in lines if "low" in row], {"type": "area", "opacity": 0.18}, y=y("low"), y2="high:Q")
    box = {"x": _x(panel, "left:Q"), "x2": "right:Q", "y": y("top"), "y2": "base:Q"}
    full = {"type": "bar", "opacity": 0.85 if stacked else 0.45, "clip": True}
    layer("bar", [row for row in bars if "few" not in row], full, **box)
    few = [row for row in bars if "few" in row]
    layer("hollow", few, {"type": "bar", "opacity": 1, "filled": False, "strokeWidth": 1.5, "clip": True}, **box)
    whiskers = [row for row in bars if "low" in row]
    layer("whisker", whiskers, {"type": "rule", "opacity": 1, "strokeWidth": 2}, y=y("low"), y2="high:Q")
    said = {"type": "text", "opacity": 1, "dy": -8, "fontSize": 11}
    layer("count", [row | {"over": row.get("high", row["top"])} for row in few], dict(said), y=y("over"), text="few:N")
    layer("empty", _nothing(panel, names), dict(said), y=y("value"), text="few:N")
    layer("line", lines, {"type": "line", "opacity": 1, "strokeWidth": 2}, y=y("value"), strokeDash=dash)
    layer("point", lines, {"type": "point", "opacity": 1, "filled": True, "size": 36}, y=y("value"))
    # Nothing to see but its legend, which shows a square for bars and a stroke for lines.
    keys = [rows[0] for rows in chain.from_iterable(every.values())]
    layer("key", keys, {"type": "point", "opacity": 0, "filled": True, "size": 0, "aria": False}, y=y("value"), shape=shape)
    chart = al.layer(*layers).add_params(picked).properties(width=width, height=HEIGHT, description=alt)
    heading = panel.title if title is None else title
    return chart.properties(title=heading) if heading else chart


def _nothing(panel: Panel, names: list[str]) -> list[dict[str, Any]]:
    """Bins without cells: the word for it, where a bar would stand."""
    rows = []
    for at in panel.empty if names else ():
        row = {"series": names[0], "at": at, "x": float(at), "value": 0.0, "few": "none", "shown": "no cells"}
        rows.append(row | {"said": f"{names[0]}, bin {at}: no cells"})
    return rows


def _rows(panel: Panel, curve: Curve) -> list[dict[str, Any]]:
    """A curve as rows for a chart, numbers as they are and as a reader sees them."""
    rows = []
    for at, point in enumerate(curve.points):
        row: dict[str, Any] = {"series": curve.name, "at": point.at, "x": point.x, "value": point.value}
        row["shown"] = shown(panel, point.value)
        row["said"] = f"{curve.name}, {'bin' if panel.axis is None else 'layer'} {point.at}: {row['shown']}"
        if curve.form == "bar":
            base = curve.base[at] if curve.base else 0.0
            row |= {"left": point.x - panel.half_bar, "right": point.x + panel.half_bar, "base": base}
            row["top"] = base + point.value
        if point.low is not None and point.high is not None:
            row |= {"low": point.low, "high": point.high}
            row["span"] = f"{shown(panel, point.low)} to {shown(panel, point.high)} ({curve.interval})"
        rows.append(row | {name: said for name, said in (("note", point.note), ("few", point.few)) if said})
    return rows


def shown(panel: Panel, value: int | float) -> str:
    """A number as a reader sees it.

    >>> shown(Panel("", "", [], None), -0.0712), shown(Panel("", "", [], None, ",~r", log=True), 9611.5)
    ('−7.12%', '9,612')
    """
    return whole(value) if panel.log else share(value) if panel.format.endswith("%") else plain(value)


def _x(panel: Panel, field: str = "x:Q") -> Any:
    al = altair()
    if panel.axis is None:
        bins = [*panel.empty, *(point.at for curve in panel.curves for point in curve.points)]
        last = max(bins, default=1)
        axis = al.Axis(
            values=list(range(1, last + 1)), format="d", title="bin of the value's largest probability", grid=False
        )
        return al.X(field, axis=axis, scale=al.Scale(domain=[0.4, last + 0.6], nice=False))
    if panel.axis.relative:
        room = max(0.03, panel.half_bar + 0.02) if any(curve.form == "bar" for curve in panel.curves) else 0.03
        axis = al.Axis(title=panel.axis.title, format=".2~f", values=[0, 0.25, 0.5, 0.75, 1], grid=False)
        return al.X(field, axis=axis, scale=al.Scale(domain=[-room, 1 + room], nice=False))
    layers = list(range(1, panel.axis.layers + 1))
    axis = al.Axis(title=panel.axis.title, values=layers, format="d", grid=False, labelOverlap=True, labelSeparation=5)
    return al.X(field, axis=axis, scale=al.Scale(domain=[0.4, len(layers) + 0.6], nice=False))


def _tooltips(panel: Panel) -> list[Any]:
    al = altair()
    points = [point for curve in panel.curves for point in curve.points]
    place = al.Tooltip("at:Q", title="bin" if panel.axis is None else "layer", format="d")
    found = [al.Tooltip("series:N", title="curve"), place, al.Tooltip("shown:N", title=panel.y)]
    if any(point.low is not None for point in points):
        found.append(al.Tooltip("span:N", title="from"))
    if any(point.note for point in points):
        found.append(al.Tooltip("note:N", title="probability"))
    return found


def _finished(charts: list[LayerChart]) -> LayerChart | HConcatChart:
    """Charts side by side, with nothing behind them, so that they can lie on any ground."""
    al = altair()
    whole = (
        charts[0] if len(charts) == 1 else al.hconcat(*charts).resolve_scale(color="independent", strokeDash="independent")
    )
    return (
        whole.properties(background="transparent")
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=MIDDLE_GREY, titleColor=MIDDLE_GREY, domainColor=MIDDLE_GREY, tickColor=MIDDLE_GREY, gridColor=GRID
        )
        .configure_legend(labelColor=MIDDLE_GREY, columns=2)
        .configure_title(color=MIDDLE_GREY)
    )


def _by_name(results: Results | Iterable[Result]) -> Results:
    return results if isinstance(results, Mapping) else {result.experiment: result for result in results}
