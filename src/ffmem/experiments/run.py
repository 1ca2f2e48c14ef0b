"""All experiments of the paper on one run: the model loaded once, the examples drawn once and followed in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ffmem.experiments.activity import Activity
from ffmem.experiments.agreement import agreement
from ffmem.experiments.composition import Composition
from ffmem.experiments.examples import EXAMPLES
from ffmem.experiments.normaliser import NORMALISED, normaliser
from ffmem.experiments.observe import Observer, follow
from ffmem.experiments.predictions import Known
from ffmem.experiments.refinement import Refinement
from ffmem.experiments.removal import removal
from ffmem.index.reader import Index, open_index
from ffmem.index.values import model_of
from ffmem.results import Result
from ffmem.words import FfmemError

NAMES = ("removal", "agreement", "activity", "composition", "refinement", "normaliser")


def run_experiments(
    run: str | Path | Index,
    names: Iterable[str] = (),
    *,
    model: Any = None,
    eval: Any = None,
    examples: int = EXAMPLES,
    cells: int = 100,
    seed: int = 0,
    quiet: bool = False,
    **load: Any,
) -> Iterator[Result]:
    """The results of these experiments (all of them if none is named), each kept in the run as soon as it is there.

    `eval` is the corpus that examples are drawn from (the indexed one if none is given), `examples` how many, `cells` how
    many of each layer have tokens removed from their triggers.
    """
    wanted = list(names) or list(NAMES)
    if unknown := [name for name in wanted if name not in NAMES]:
        raise FfmemError(f"expected experiments among {', '.join(NAMES)}, found {unknown[0]!r}")
    index = run if isinstance(run, Index) else open_index(run)
    loaded = model_of(index, model, **load)
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
        yield normaliser(loaded, index, eval, examples=min(examples, NORMALISED), seed=seed, quiet=quiet)
