"""ffmem reads the feed-forward memories of a transformer.

Names are loaded when they are first used, so `import ffmem` needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

TYPE_CHECKING = False  # as checkers know it; `typing` takes a while, in which no signal is heard yet
if TYPE_CHECKING:
    from ffmem import experiments as experiments
    from ffmem import reports as reports
    from ffmem.cells import Cell as Cell
    from ffmem.cells import Trigger as Trigger
    from ffmem.corpus.sources import Dataset as Dataset
    from ffmem.demonstration import demo as demo
    from ffmem.errors import FfmemError as FfmemError
    from ffmem.indexing.build import build_index as build_index
    from ffmem.indexing.plan import plan as plan
    from ffmem.indexing.values import values as values
    from ffmem.live.causal import causal as causal
    from ffmem.live.comparison import compare as compare
    from ffmem.live.intervene import intervene as intervene
    from ffmem.live.recipe import recipe as recipe
    from ffmem.live.trace import trace as trace
    from ffmem.model.convert import convert as convert
    from ffmem.model.loading import load_model as load_model
    from ffmem.model.memories import MemoryModel as MemoryModel
    from ffmem.reports.page import report as report
    from ffmem.run.export import export as export
    from ffmem.run.reader import Index as Index
    from ffmem.run.reader import open_index as open_index
    from ffmem.run.results import Result as Result
    from ffmem.run.show import info as info
    from ffmem.run.show import show as show
    from ffmem.training.train import train as train

    index = build_index

_MODULES = {
    "Cell": "ffmem.cells",
    "Dataset": "ffmem.corpus.sources",
    "FfmemError": "ffmem.errors",
    "Index": "ffmem.run.reader",
    "Result": "ffmem.run.results",
    "MemoryModel": "ffmem.model.memories",
    "Trigger": "ffmem.cells",
    "build_index": "ffmem.indexing.build",
    "causal": "ffmem.live.causal",
    "compare": "ffmem.live.comparison",
    "convert": "ffmem.model.convert",
    "demo": "ffmem.demonstration",
    "export": "ffmem.run.export",
    "index": "ffmem.indexing.build:build_index",
    "info": "ffmem.run.show",
    "intervene": "ffmem.live.intervene",
    "load_model": "ffmem.model.loading",
    "open_index": "ffmem.run.reader",
    "plan": "ffmem.indexing.plan",
    "recipe": "ffmem.live.recipe",
    "report": "ffmem.reports.page",
    "show": "ffmem.run.show",
    "trace": "ffmem.live.trace",
    "train": "ffmem.training.train",
    "values": "ffmem.indexing.values",
}
"""The module that defines each public name; behind a colon, the name that it has there if that differs."""
_PACKAGES = ("experiments", "reports")
"""Modules that are reached through the package: `ffmem.experiments.agreement(...)`."""
__all__ = ["__version__", *_PACKAGES, *sorted(_MODULES)]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"ffmem.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'ffmem' has no attribute {name!r}")
    module, _, own = _MODULES[name].partition(":")
    return getattr(importlib.import_module(module), own or name)


def __dir__() -> list[str]:
    return __all__
