"""Cells of a run, and what a run was made from, by one call each: what `ffmem show` and `ffmem info` print."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ffmem.cells import Cell
from ffmem.run.manifest import Manifest
from ffmem.run.reader import CellView, Index, open_index


def show(
    run: str | Path | Index, cells: str | Cell | Iterable[str | Cell], *, model: Any = None, **load: Any
) -> list[CellView]:
    """The named cells of a run, each with its triggers, its statistics and what its value says.

    Where the run has no values yet they are computed with `model`, the one that the run was made with; `load` is as for
    `load_model`.
    """
    index = run if isinstance(run, Index) else open_index(run)
    names = [cells] if isinstance(cells, str | Cell) else list(cells)
    views = [index[name] for name in names]
    if model is None or index.has_values:
        return views
    from ffmem.run.model import model_of  # loads torch

    index = open_index(index.path, model=model_of(index, model, **load))
    return [index[name] for name in names]


def info(run: str | Path | Index) -> Manifest:
    """The manifest of a run: what it was made from, what it holds, and what was skipped."""
    return (run if isinstance(run, Index) else open_index(run)).manifest
