"""Panels drawn as charts: altair makes them, vl-convert turns them into files; both are loaded when first needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any

from ffmem.errors import FfmemError
from ffmem.experiments.numbers import plain, share, whole
from ffmem.experiments.panels import Axis, Curve, Panel, layers_of
from ffmem.run.results import Result

if TYPE_CHECKING:
    from altair import HConcatChart, LayerChart

    from ffmem.experiments.experiment import Figure

WIDTH, HEIGHT = 460, 280
MIDDLE_GREY = "#767676"
"""The colour of words and lines in a figure that stands alone, readable on white and on black."""
GRID = "#88888844"
SCALE = 2
"""The number of pixels of a PNG for each of the figure's."""


def altair() -> Any:
    """The altair package; an error that says what to install where it is missing."""
    return _loaded("altair")


def svg(chart: Any) -> str:
    """A figure as SVG, the same for the same chart: clips are numbered from 1, not on from the figure before."""
    drawn = _loaded("vl_convert").vegalite_to_svg(chart.to_dict(), vl_version=_version())
    numbers: dict[str, str] = {}
    return re.sub(
        r"\b(clip|gradient_)\d+\b", lambda found: numbers.setdefault(found[0], f"{found[1]}{len(numbers) + 1}"), drawn
    )


def png(chart: Any) -> bytes:
    """A figure as the bytes of a PNG."""
    return _loaded("vl_convert").vegalite_to_png(chart.to_dict(), vl_version=_version(), scale=SCALE)


@lru_cache(maxsize=1)
def bundle() -> str:
    """The script that draws charts in a page: it sets `window.vegaEmbed` and asks no network for anything."""
    return _loaded("vl_convert").javascript_bundle(vl_version=_version())


def _version() -> str:
    """The version of Vega-Lite that altair speaks: `v6.4.1` is 6.4."""
    return ".".join(altair().SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def _loaded(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.replace("vl_convert", "vl-convert-python")
        raise FfmemError(f"figures need {package}, which is not installed: pip install 'ffmem[report]'") from error


def plot(figures: Sequence[Figure], result: Result, layers: int | None = None) -> LayerChart | HConcatChart:
    """The figures of one result side by side, for a notebook."""
    axis, charts = Axis(layers or layers_of([result])), []
    for figure in figures:
        for at, panel in enumerate(figure.panels(result, axis, None), 1):
            title = ": ".join(filter(None, (figure.number, panel.title)))
            charts.append(draw(panel, figure.alt, f"{figure.name}_{at}", title=title))
    return side_by_side(charts)


def draw(panel: Panel, alt: str, name: str, *, title: str | None = None) -> LayerChart:
    """The chart of one panel: intervals, bars, lines and points, which a click in the legend singles out."""
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
    shared: dict[str, Any] = {"x": _x(panel), "color": colour, "tooltip": _tooltips(panel), "description": "spoken:N"}
    layers: list[Any] = []

    def y(field: str) -> Any:
        return al.Y(f"{field}:Q", axis=y_axis, scale=y_scale)

    def layer(form: str, rows: list[dict[str, Any]], mark: dict[str, Any], **channels: Any) -> None:
        if not rows:
            return
        # Only the first has a name: altair would hang the selection on each named layer of charts side by side.
        base = al.Chart(al.Data(values=tuple(rows)), **({} if layers else {"name": f"{name}_{form}"}))
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
    style = {"type": "text", "opacity": 1, "dy": -8, "fontSize": 11}
    layer("count", [row | {"over": row.get("high", row["top"])} for row in few], dict(style), y=y("over"), text="few:N")
    layer("empty", _nothing(panel, names), dict(style), y=y("value"), text="few:N")
    layer("line", lines, {"type": "line", "opacity": 1, "strokeWidth": 2}, y=y("value"), strokeDash=dash)
    layer("point", lines, {"type": "point", "opacity": 1, "filled": True, "size": 36}, y=y("value"))
    # Nothing to see but its legend, which shows a square for bars and a stroke for lines.
    keys = [rows[0] for rows in chain.from_iterable(every.values())]
    layer("key", keys, {"type": "point", "opacity": 0, "filled": True, "size": 0, "aria": False}, y=y("value"), shape=shape)
    chart = al.layer(*layers).add_params(picked).properties(width=WIDTH, height=HEIGHT, description=alt)
    heading = panel.title if title is None else title
    return chart.properties(title=heading) if heading else chart


def _nothing(panel: Panel, names: list[str]) -> list[dict[str, Any]]:
    """A row for each bin without cells, which shows the word for it where a bar would stand."""
    rows = []
    for at in panel.empty if names else ():
        row = {"series": names[0], "at": at, "x": float(at), "value": 0.0, "few": "none", "shown": "no cells"}
        rows.append(row | {"spoken": f"{names[0]}, bin {at}: no cells"})
    return rows


def _rows(panel: Panel, curve: Curve) -> list[dict[str, Any]]:
    """A curve as rows for a chart, with numbers as they are and as a reader sees them."""
    rows = []
    for at, point in enumerate(curve.points):
        row: dict[str, Any] = {"series": curve.name, "at": point.at, "x": point.x, "value": point.value}
        row["shown"] = shown(panel, point.value)
        row["spoken"] = f"{curve.name}, {'bin' if panel.axis is None else 'layer'} {point.at}: {row['shown']}"
        if curve.form == "bar":
            base = curve.base[at] if curve.base else 0.0
            row |= {"left": point.x - panel.half_bar, "right": point.x + panel.half_bar, "base": base}
            row["top"] = base + point.value
        if point.low is not None and point.high is not None:
            row |= {"low": point.low, "high": point.high}
            row["span"] = f"{shown(panel, point.low)} to {shown(panel, point.high)} ({curve.interval})"
        rows.append(row | {name: text for name, text in (("note", point.note), ("few", point.few)) if text})
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
    where = al.Tooltip("at:Q", title="bin" if panel.axis is None else "layer", format="d")
    found = [al.Tooltip("series:N", title="curve"), where, al.Tooltip("shown:N", title=panel.y)]
    if any(point.low is not None for point in points):
        found.append(al.Tooltip("span:N", title="from"))
    if any(point.note for point in points):
        found.append(al.Tooltip("note:N", title="probability"))
    return found


def side_by_side(charts: list[LayerChart]) -> LayerChart | HConcatChart:
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
