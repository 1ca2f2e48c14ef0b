"""All experiments of the paper on one run: the model loaded once, the examples drawn once and followed in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ffmem.experiments.activity import Activity
from ffmem.experiments.agreement import agreement
from ffmem.experiments.composition import Composition
from ffmem.experiments.control import (
    CONTROL_CELLS,
    CONTROL_EXAMPLES,
    CONTROL_NORMALISED,
    cacheable,
    control_index,
    control_settings,
    kept_controls,
    random_model,
)
from ffmem.experiments.examples import EXAMPLES
from ffmem.experiments.normaliser import NORMALISED, normaliser
from ffmem.experiments.observe import Observer, follow
from ffmem.experiments.predictions import Known
from ffmem.experiments.refinement import Refinement
from ffmem.experiments.removal import CELLS, removal
from ffmem.model.memories import MemoryModel
from ffmem.run.model import model_of
from ffmem.run.reader import Index, open_index
from ffmem.run.results import CONTROL, Result, check_request


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
    """The results of these experiments, each as soon as it is there; names and numbers are checked before a model is loaded.

    `eval` is the corpus that examples are drawn from (the indexed one if none is given), `examples` how many (4,000), and
    `cells` how many of each layer have tokens removed from their triggers (100). With `control="random"` they are asked of a
    model of the same shape with fresh random weights, on small samples (200 examples, 20 cells): such results are kept
    beside the run's own, and are not made again while nothing differs.
    """
    wanted = check_request(names, control=control, seed=seed, examples=examples, cells=cells)
    index = run if isinstance(run, Index) else open_index(run)
    if control is None:
        return _each(
            index,
            wanted,
            lambda: model_of(index, model, **load),
            eval,
            examples=examples or EXAMPLES,
            cells=cells or CELLS,
            normalised=NORMALISED,
            seed=seed,
            quiet=quiet,
        )
    sizes = {
        "examples": examples or CONTROL_EXAMPLES,
        "cells": cells or CONTROL_CELLS,
        "normalised": CONTROL_NORMALISED,
        "seed": seed,
    }
    return iter(_controlled(index, wanted, lambda: model_of(index, model, **load), eval, sizes, quiet=quiet))


def _each(
    index: Index,
    wanted: list[str],
    load: Callable[[], MemoryModel],
    eval: Any,
    *,
    examples: int,
    cells: int,
    normalised: int,
    seed: int,
    quiet: bool,
) -> Iterator[Result]:
    loaded = load()
    if "removal" in wanted:
        yield removal(loaded, index, cells=cells, seed=seed, quiet=quiet)
    known: Known = {}
    if "agreement" in wanted:
        yield agreement(loaded, index, seed=seed, quiet=quiet, known=known)
    followed: dict[str, Callable[..., Observer]] = {
        "activity": Activity,
        "composition": partial(Composition, known=known),
        "refinement": Refinement,
    }
    if makers := [make for name, make in followed.items() if name in wanted]:
        yield from follow(loaded, index, makers, eval, examples=examples, seed=seed, quiet=quiet)
    if "normaliser" in wanted:
        yield normaliser(loaded, index, eval, examples=min(examples, normalised), seed=seed, quiet=quiet)


def _controlled(
    index: Index, wanted: list[str], load: Callable[[], MemoryModel], eval: Any, sizes: dict[str, int], *, quiet: bool
) -> Iterator[Result]:
    """The control's results, from the run where it has them; all that are missing are made before one is kept."""
    settings = control_settings(index, eval, **sizes)
    found = kept_controls(index, wanted, settings) if cacheable(eval) else {}
    if missing := [name for name in wanted if name not in found]:
        model = random_model(load(), sizes["seed"])
        with control_index(index, model, quiet=quiet) as small:
            made = list(_each(small, missing, lambda: model, eval, **sizes, quiet=quiet))
        for result in made:
            whole = replace(result, control=CONTROL, settings=result.settings | {"control": settings})
            found[result.experiment] = whole.saved(index)
    yield from (found[name] for name in wanted)
