"""Figures of a run: each by its name, and all of them as files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.errors import FfmemError
from ffmem.experiments.charts import draw, png, side_by_side, svg
from ffmem.experiments.experiment import Experiment, Figure
from ffmem.experiments.panels import Axis, Panel, Results, layers_of
from ffmem.run.folder import RunFolder
from ffmem.run.reader import Index
from ffmem.run.registry import all_experiments
from ffmem.run.results import CONTROL, Result, load_result, saved_results

if TYPE_CHECKING:
    from altair import HConcatChart, LayerChart


def figure(
    name: str,
    results: Results | Iterable[Result],
    *,
    layers: int | None = None,
    controls: Results | Iterable[Result] = (),
) -> LayerChart | HConcatChart:
    """A figure by its name (`fig3` to `fig11`, `normaliser`) with this model's numbers and the paper's.

    `layers` is the model's depth; without it, the last layer that the result has a row for. `controls` are the results on
    random weights.
    """
    found = panels(name, _by_name(results), layers, _by_name(controls))
    alt = figures()[name][1].alt
    return side_by_side([draw(panel, alt, f"{name}_{at}") for at, panel in enumerate(found, 1)])


def figures() -> dict[str, tuple[Experiment, Figure]]:
    """Every figure by its name, with the experiment that it is of."""
    return {figure.name: (one, figure) for one in all_experiments().values() for figure in one.figures}


def panels(name: str, results: Results, layers: int | None = None, controls: Results | None = None) -> list[Panel]:
    """The panels of a figure. `layers` is the model's depth; without it, the last layer that has a row. `controls` are
    the results of the same experiments on random weights; where there is one it is drawn too.

    `controls` are the results of the same experiments on random weights; where there is one it is drawn too.
    """
    if name not in figures():
        raise FfmemError(f"expected a figure among {', '.join(figures())}, found {name!r}")
    experiment, figure = figures()[name]
    if experiment.name not in results:
        raise FfmemError(f"{name} needs the result {experiment.name}: make it with ffmem experiments RUN {experiment.name}")
    result = results[experiment.name]
    return list(figure.panels(result, Axis(layers or layers_of([result])), (controls or {}).get(experiment.name)))


def plot(result: Result, *, layers: int | None = None) -> LayerChart | HConcatChart:
    """All figures of a result side by side, for a notebook: agreement as Figs 4, 5 and 6."""
    chart: LayerChart | HConcatChart = result.plot(layers=layers)
    return chart


def save_figures(index: Index, folder: str | Path) -> list[Path | str]:
    """Write every figure that the run has results for as NAME.svg and NAME.png; their paths or URLs."""
    results, controls, target = all_results(index), all_results(index, CONTROL), RunFolder(folder)
    target.sweep()
    made: list[Path | str] = []
    for name, (experiment, _) in figures().items():
        if experiment.name in results:
            chart = figure(name, results, layers=index.manifest.model.layers, controls=controls)
            for ending, data in (("svg", svg(chart).encode()), ("png", png(chart))):
                with target.writing(f"{name}.{ending}") as path:
                    path.write_bytes(data)
                made.append(target.location(f"{name}.{ending}"))
    return made


def all_results(index: Index, control: str | None = None) -> dict[str, Result]:
    """The results of the registered experiments that a run holds: of its model, or of a control."""
    saved = saved_results(index, control)
    return {name: load_result(index, name, control) for name in all_experiments() if name in saved}


def _by_name(results: Results | Iterable[Result]) -> Results:
    return results if isinstance(results, Mapping) else {result.experiment: result for result in results}
