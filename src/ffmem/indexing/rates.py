"""Rates that were measured (rates.json; `python -m benchmarks.plan` writes it), from which a run is planned."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.resources import files
from math import log


@dataclass(frozen=True)
class Rate:
    """What a GPU was measured to do with the trunk of a model of one shape."""

    shape: str
    d: int
    layers: int
    tflops: int | float
    """Of the bare trunk: 2 × the weights of its blocks × positions, padding included, over its time."""
    ratio_with_index: int | float
    """Time of a pass that finds triggers over that of the bare trunk, both up to the last layer's coefficients."""
    ratio_with_statistics: int | float
    machine: str
    date: str
    measured: bool = True
    """False for a number that stands in until there is a measured one."""


@dataclass(frozen=True)
class HostRate:
    """What one processor core was measured to do."""

    text_tokens_a_second: int | float
    """Read, segmented and tokenized."""
    merged_triggers_a_second: int | float
    """Of a worker's state merged with another's, or written as a table."""
    machine: str
    date: str
    measured: bool = True


def measured_rates() -> tuple[list[Rate], HostRate]:
    """Those that come with ffmem."""
    stored = json.loads((files("ffmem.indexing") / "rates.json").read_text("utf-8"))
    return [Rate(shape=name, **facts) for name, facts in stored["gpus"].items()], HostRate(**stored["host"])


def nearest(rates: list[Rate], d: int) -> Rate:
    """The rate of the nearest width. A narrower model than any is slower in proportion, a wider one is not faster."""
    found = min(rates, key=lambda rate: abs(log(rate.d / d)))
    return replace(found, tflops=found.tflops * min(1.0, d / min(rate.d for rate in rates)))
