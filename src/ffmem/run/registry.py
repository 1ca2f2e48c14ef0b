"""The registry of experiments: each file of `ffmem/experiments/questions`, and each that another package registers."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.errors import FfmemError

if TYPE_CHECKING:
    from ffmem.experiments.experiment import Experiment

GROUP = "ffmem.experiments"
"""The group of entry points by which a package adds an experiment: `toy = "its_package.toy:EXPERIMENT"`."""
NAME = re.compile(r"[a-z][a-z0-9_]*")
TAKEN = ("causal", "random")
"""Names that no experiment may have, since other things in a run's folder of results have them."""


@cache
def registered() -> dict[str, EntryPoint]:
    """The entry point of each experiment, by name. Nothing is imported, so that this is cheap enough for whoever needs
    names alone."""
    folder = Path(__file__).parents[1] / "experiments" / "questions"
    names = sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))
    found = {name: EntryPoint(name, f"ffmem.experiments.questions.{name}:EXPERIMENT", GROUP) for name in names}
    for entry in entry_points(group=GROUP):
        if entry.name in found or entry.name in TAKEN or not NAME.fullmatch(entry.name):
            raise FfmemError(
                f"{_package(entry)} registers an experiment {entry.name!r}: expected a name of lower-case letters, digits "
                f"and _ that none of {', '.join((*found, *TAKEN))} has; rename it in its entry points, or uninstall it"
            )
        found[entry.name] = entry
    return found


@cache
def all_experiments() -> dict[str, Experiment]:
    """All experiments by name, in the order in which they are run and shown. None of them loads torch by being imported."""
    found = sorted(map(_imported, registered().values()), key=lambda one: one.order)
    return {one.name: one for one in found}


def _imported(entry: EntryPoint) -> Experiment:
    again = f"mend {entry.value}, or uninstall that package"
    try:
        found: Experiment = entry.load()
        name, figures = found.name, [figure.name for figure in found.figures]
    except Exception as error:
        raise FfmemError(
            f"the experiment {entry.name} of {_package(entry)} cannot be imported ({error!r}): {again}"
        ) from error
    if name != entry.name:
        raise FfmemError(f"{_package(entry)}: expected an experiment called {entry.name}, found {name!r}: {again}")
    if wrong := [figure for figure in figures if not is_figure(figure, name)]:
        raise FfmemError(
            f"the experiment {name} of {_package(entry)}: expected figures called {name}, {name}_2 and so on, "
            f"found {wrong[0]!r}: {again}"
        )
    return found


def is_figure(figure: str, experiment: str) -> bool:
    """Whether a figure may have this name, by which its files are known: `figN`, or its experiment's name and a number.

    >>> is_figure("fig4", "agreement"), is_figure("toy_2", "toy"), is_figure("photo", "toy")
    (True, True, False)
    """
    return re.fullmatch(rf"fig\d+|{experiment}(_\d+)?", figure) is not None


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "ffmem"
