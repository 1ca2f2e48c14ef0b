"""Experiments: questions asked of a model and its index, each as `ffmem.experiments.NAME(model, index, ...) -> Result`.

They are found by themselves: the files of `ffmem.experiments.questions`, and what other packages register under the group of
entry points `ffmem.experiments`. Nothing here loads torch before an experiment is run.
"""

from __future__ import annotations

from collections.abc import Callable

from ffmem.experiments.experiment import Experiment, Figure, Section, followed
from ffmem.experiments.panels import Panel, curve_of, paper_curve, random_curve
from ffmem.experiments.rules import Claim, Measure, Reading, Rule
from ffmem.experiments.run import each_experiment, run_experiments
from ffmem.run.registry import all_experiments, registered
from ffmem.run.results import Result

__all__ = [
    "Claim",
    "Experiment",
    "Figure",
    "Measure",
    "Panel",
    "Reading",
    "Result",
    "Rule",
    "Section",
    "curve_of",
    "each_experiment",
    "followed",
    "paper_curve",
    "random_curve",
    "run_experiments",
    *registered(),
]


def __getattr__(name: str) -> Callable[..., Result]:
    if name not in registered():
        raise AttributeError(f"module 'ffmem.experiments' has no attribute {name!r}")
    return all_experiments()[name].run


def __dir__() -> list[str]:
    return __all__
