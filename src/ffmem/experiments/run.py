"""All experiments of the paper on one run: the model loaded once, the examples drawn once and followed in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffmem.experiments.experiment import EXAMPLES
from ffmem.run.reader import Index, open_index
from ffmem.run.registry import all_experiments
from ffmem.run.results import CONTROL, Result, check_request

if TYPE_CHECKING:
    from ffmem.model.memories import MemoryModel

CONTROL_EXAMPLES, CONTROL_CELLS = 200, 20
"""The number of prefixes that a control follows, and of cells of each layer from whose triggers it removes tokens."""


def run_experiments(run: str | Path | Index, names: Iterable[str] = (), **options: Any) -> list[Result]:
    """The results of these experiments (all of them if none is named), each kept in the run.

    Options are those of `each_experiment`, which gives one result after the other.
    """
    return list(each_experiment(run, names, **options))


def each_experiment(
    run: str | Path | Index,
    names: Iterable[str] = (),
    *,
    model: Any = None,
    eval: Any = None,
    control: str | None = None,
    examples: int | None = None,
    cells: int | None = None,
    seed: int = 0,
    quiet: bool = False,
    **load: Any,
) -> Iterator[Result]:
    """The results of these experiments, each yielded when it is there; bad names and numbers fail before a model is loaded.

    `eval` is the corpus that examples are drawn from (the indexed one if none is given), `examples` how many (4,000), and
    `cells` how many of each layer have tokens removed from their triggers (100). With `control="random"` they are asked of a
    model of the same shape with fresh random weights, on small samples (200 examples, 20 cells): such results are kept
    beside the run's own, and are not made again while nothing differs.
    """
    wanted = check_request(names, control=control, seed=seed, examples=examples, cells=cells)
    index = run if isinstance(run, Index) else open_index(run)

    def loaded() -> MemoryModel:
        from ffmem.run.model import model_of

        return model_of(index, model, **load)

    if control is None:
        return _each(index, wanted, loaded, eval, examples=examples, cells=cells, seed=seed, quiet=quiet)
    sizes = {"examples": examples or CONTROL_EXAMPLES, "cells": cells or CONTROL_CELLS, "seed": seed}
    return _controlled(index, wanted, loaded, eval, sizes, quiet=quiet)


def _each(
    index: Index,
    names: list[str],
    load: Callable[[], MemoryModel],
    eval: Any,
    *,
    examples: int | None,
    cells: int | None,
    seed: int,
    quiet: bool,
    control: bool = False,
) -> Iterator[Result]:
    """Every experiment by itself, but those that watch examples: these share one pass, in the turn of the first of them."""
    from ffmem.experiments.observe import follow

    model = load()
    observed = [name for name in names if all_experiments()[name].observer is not None]
    for name in names:
        experiment = all_experiments()[name]
        if name in observed:
            if name == observed[0]:
                makers = [made for one in observed if (made := all_experiments()[one].observer) is not None]
                yield from follow(model, index, makers, eval, examples=examples or EXAMPLES, seed=seed, quiet=quiet)
            continue
        most = experiment.most_control_examples if control else experiment.most_examples
        number = examples if examples is None or most is None else min(examples, most)
        given = {"eval": eval, "examples": number, "cells": cells, "seed": seed, "quiet": quiet}
        taken = signature(experiment.run).parameters
        yield experiment.run(model, index, **{key: x for key, x in given.items() if key in taken and x is not None})


def _controlled(
    index: Index, names: list[str], load: Callable[[], MemoryModel], eval: Any, sizes: dict[str, int], *, quiet: bool
) -> Iterator[Result]:
    """The control's results, from the run where it has them; all that are missing are made before one is kept."""
    from ffmem.experiments.control import cacheable, control_index, control_settings, kept_controls, random_model

    settings = control_settings(index, eval, **sizes)
    found = kept_controls(index, names, settings) if cacheable(eval) else {}
    if missing := [name for name in names if name not in found]:
        model = random_model(load(), sizes["seed"])
        with control_index(index, model, quiet=quiet) as small:
            made = list(_each(small, missing, lambda: model, eval, **sizes, quiet=quiet, control=True))
        for result in made:
            whole = replace(result, control=CONTROL, settings=result.settings | {"control": settings})
            found[result.experiment] = whole.saved(index)
    yield from (found[name] for name in names)
