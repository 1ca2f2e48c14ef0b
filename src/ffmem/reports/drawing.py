"""The two libraries that draw, loaded when first needed: altair makes charts, vl-convert turns them into files."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

from ffmem.errors import FfmemError

SCALE = 2
"""Pixels of a PNG for each of the figure's."""


def altair() -> Any:
    return _loaded("altair")


def svg(chart: Any) -> str:
    """A figure as SVG, the same for the same chart: clips are numbered from 1, not on from the figure before."""
    drawn = _loaded("vl_convert").vegalite_to_svg(chart.to_dict(), vl_version=_version())
    numbers: dict[str, str] = {}
    return re.sub(
        r"\b(clip|gradient_)\d+\b", lambda found: numbers.setdefault(found[0], f"{found[1]}{len(numbers) + 1}"), drawn
    )


def png(chart: Any) -> bytes:
    return _loaded("vl_convert").vegalite_to_png(chart.to_dict(), vl_version=_version(), scale=SCALE)


@lru_cache(maxsize=1)
def bundle() -> str:
    """The script that draws charts in a page: it sets `window.vegaEmbed` and asks no network for anything."""
    return _loaded("vl_convert").javascript_bundle(vl_version=_version())


def _version() -> str:
    """Of Vega-Lite, as altair speaks it: `v6.4.1` is 6.4."""
    return ".".join(altair().SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def _loaded(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.replace("vl_convert", "vl-convert-python")
        raise FfmemError(f"figures need {package}, which is not installed: pip install 'ffmem[report]'") from error
