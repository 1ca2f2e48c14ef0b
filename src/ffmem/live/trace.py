"""Trace a prompt: how the memories of every layer build what a model says at a position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ffmem.errors import FfmemError
from ffmem.live import trace_pages
from ffmem.live.capture import Flow, capture
from ffmem.live.contributions import check_of, frozen_norms
from ffmem.live.grid import Grid, grid_of
from ffmem.live.known import Known
from ffmem.live.place import Place
from ffmem.live.reading import Question, read_places
from ffmem.live.scope import Scope
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import prompt_ids, token_id, token_texts
from ffmem.run.model import model_of
from ffmem.run.reader import Index, open_index

FORMAT = 2
"""Of what `as_dict` gives: raised when a name in it changes its meaning or goes away."""


def trace(
    model: MemoryModel | Any,
    prompt: str,
    *,
    at: int | str | slice | Iterable[int] | None = None,
    target: str | int | None = None,
    cells: int = 10,
    of: str = "output",
    run: Index | str | Path | None = None,
    grid: bool | None = None,
    bos: str = "auto",
) -> Trace:
    """Watch one prompt go through a model.

    Positions are the prompt's tokens, counted from 0 or from the end. `at` says which are read in full: one (`-1`), some
    (`[2, 5]`, `2:5`), `all`; by default the last, and `.at(...)` gives any other. `grid` says whether the layer × token
    grid belongs to what is shown: by default where `at` is not given or `all`. `target` is a token to follow beside what the
    model itself says. `cells` is how many promoting and how many suppressing cells are listed. Contributions are `of` the
    token's logit in the model's output, or in each layer's own output. A `run` tells what fires the cells.

    The forward is made here, so that edits that are open at this time act on it; projections are made when asked for.
    """
    check_of(of)
    if cells < 0:
        raise FfmemError(f"expected cells of at least 0, found {cells}")
    index = None if run is None else run if isinstance(run, Index) else open_index(run)
    loaded = load_model(model) if index is None else model_of(index, model)
    with_bos = index.manifest.settings.bos if index is not None and bos == "auto" else loaded.check_bos(bos)
    ids = prompt_ids(loaded, prompt, bos=with_bos)
    aim = None if target is None else token_id(loaded, target)
    asked = _positions(-1 if at is None else at, len(ids))
    with_grid = at in (None, "all") if grid is None else grid
    captured = list(range(len(ids))) if with_grid or at is None else asked
    first = [loaded.bos] if with_bos else []
    fed = torch.tensor([[*first, *ids]])
    flows = capture(loaded, fed, torch.tensor(captured) + len(first))
    return Trace(loaded, prompt, tuple(ids), tuple(asked), with_grid, aim, cells, of, index, tuple(captured), flows)


def _positions(at: int | str | slice | Iterable[int], count: int) -> list[int]:
    asked = [at] if isinstance(at, (int, str, slice)) else list(at)
    found = sorted({position for one in asked for position in Scope.parse(one).tokens(count)})
    if not found:
        none = "generated tokens, which a trace has none of" if "generated" in map(str, asked) else "none"
        raise FfmemError(f"expected at least one position from 0 to {count - 1}, found {none}")
    return found


@dataclass(frozen=True, repr=False)
class Trace:
    """A prompt's way through a model: `.at(-1)` is a position in full, `.grid` every layer at every position."""

    model: MemoryModel
    prompt: str
    ids: tuple[int, ...]
    asked: tuple[int, ...]
    """The positions that are shown in full."""
    with_grid: bool
    target: int | None
    cells: int
    of: str
    index: Index | None
    captured: tuple[int, ...]
    flows: list[Flow] = field(compare=False)
    """A layer's tensors at the captured positions."""
    _places: dict[int, Place] = field(default_factory=dict, compare=False)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        return tuple(token_texts(self.model, list(self.ids)))

    def at(self, position: int) -> Place:
        """A position in full."""
        (found,) = _positions(position, len(self.ids))
        self._read([found])
        return self._places[found]

    @property
    def places(self) -> tuple[Place, ...]:
        """The positions that were asked for."""
        self._read(self.asked)
        return tuple(self._places[position] for position in self.asked)

    @cached_property
    def grid(self) -> Grid:
        if len(self.captured) < len(self.ids):
            raise FfmemError("expected a trace of every position for its grid, found one of some: use grid=True")
        return grid_of(self.model, self.flows, self.tokens, self.target, self.of)

    @cached_property
    def _known(self) -> Known:
        return Known(self.model, self.index)

    def _read(self, positions: Iterable[int]) -> None:
        new = [position for position in positions if position not in self._places]
        if not new:
            return
        if missing := sorted(set(new) - set(self.captured)):
            have = ", ".join(map(str, self.captured))
            raise FfmemError(f"expected a position that was traced ({have}), found {missing[0]}: give it as at=")
        rows = torch.tensor([self.captured.index(position) for position in new])
        following = [*self.ids[1:], -1 if self.target is None else self.target]
        question = Question(
            positions=new,
            prefixes=[self.model.tokenizer.decode(list(self.ids[: position + 1])) for position in new],
            truth=torch.tensor([following[position] for position in new]),
            target=self.target,
            cells=self.cells,
            of=self.of,
        )
        flows = [flow.at(rows.to(flow.r.device)) for flow in self.flows]
        found = read_places(self.model, flows, question, self._known)
        self._places.update(zip(new, found, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the positions that were asked for in full, and the grid where it belongs to the trace."""
        return {
            "format": FORMAT,
            "model": self.model.name,
            "prompt": self.prompt,
            "tokens": [{"id": id, "text": text} for id, text in zip(self.ids, self.tokens, strict=True)],
            "target": None
            if self.target is None
            else {"id": self.target, "text": token_texts(self.model, [self.target])[0]},
            "of": self.of,
            "frozen": list(frozen_norms(self.model)),
            "run": None if self.index is None else str(self.index.path),
            "positions": [place.as_dict() for place in self.places],
            "grid": self.grid.as_dict() if self.with_grid else None,
        }

    def lines(self) -> list[str]:
        """For a terminal of 100 columns."""
        return trace_pages.trace_lines(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"Trace({len(self.ids)} tokens through {self.model.name}, {len(self.flows)} layers)"

    def _repr_html_(self) -> str:
        return trace_pages.trace_page(self)
