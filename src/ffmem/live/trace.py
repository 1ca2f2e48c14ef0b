"""Trace a prompt: how the memories of every layer build what a model says at a position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ffmem.errors import FfmemError
from ffmem.live.blocks import WIDTH, Block, Shown, Text
from ffmem.live.contributions import Flow, capture, check_of, frozen_norms
from ffmem.live.position import Grid, PositionTrace
from ffmem.live.reading import read_grid, read_positions
from ffmem.live.scope import Scope
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import prompt_ids, token_id, token_texts
from ffmem.run.model import model_of
from ffmem.run.reader import Index, open_index
from ffmem.text import beginning, visible

FORMAT = 2
"""The format of what `as_dict` gives: raised when a name in it changes its meaning or goes away."""
POSITIONS = 256
"""The number of positions that are read at a time: all cells' parts of their logits are held."""


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
    **load: Any,
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
    loaded = load_model(model, **load) if index is None else model_of(index, model, **load)
    with_bos = index.manifest.settings.bos if index is not None and bos == "auto" else loaded.check_bos(bos)
    ids = prompt_ids(loaded, prompt, bos=with_bos)
    aim = None if target is None else token_id(loaded, target)
    asked = parse_positions(-1 if at is None else at, len(ids))
    with_grid = at in (None, "all") if grid is None else grid
    captured = list(range(len(ids))) if with_grid or at is None else asked
    first = [loaded.bos] if with_bos else []
    flows = capture(loaded, torch.tensor([[*first, *ids]]), torch.tensor(captured) + len(first))
    return Trace(loaded, prompt, tuple(ids), tuple(asked), with_grid, aim, cells, of, index, tuple(captured), flows)


def parse_positions(at: int | str | slice | Iterable[int], count: int) -> list[int]:
    """The positions of a prompt of `count` tokens that `at` names, in order; at least one."""
    asked = [at] if isinstance(at, (int, str, slice)) else list(at)
    found = sorted({position for one in asked for position in Scope.parse(one).tokens(count)})
    if not found:
        none = "generated tokens, which a trace has none of" if "generated" in map(str, asked) else "none"
        raise FfmemError(f"expected at least one position from 0 to {count - 1}, found {none}")
    return found


@dataclass(frozen=True, repr=False)
class Trace(Shown):
    """A prompt's way through a model: `.at(-1)` is a position in full, `.grid` every layer at every position."""

    model: MemoryModel
    prompt: str
    ids: tuple[int, ...]
    asked: tuple[int, ...]
    """The positions that are shown in full."""
    with_grid: bool
    """Whether the grid is shown beside the positions."""
    target: int | None
    cells: int
    of: str
    index: Index | None
    captured: tuple[int, ...]
    """The positions that flows have a row for."""
    flows: list[Flow] = field(compare=False)
    """A layer's tensors at the captured positions."""
    _read: dict[int, PositionTrace] = field(default_factory=dict, compare=False)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """The texts of the prompt's tokens."""
        return tuple(token_texts(self.model, list(self.ids)))

    def at(self, position: int) -> PositionTrace:
        """One position in full, counted from 0 or from the end."""
        return self._positions(parse_positions(position, len(self.ids)))[0]

    @property
    def positions(self) -> tuple[PositionTrace, ...]:
        """The positions that were asked for, in full."""
        return self._positions(self.asked)

    @cached_property
    def grid(self) -> Grid:
        """The predictions of every layer at every position."""
        if len(self.captured) < len(self.ids):
            raise FfmemError("expected a trace of every position for its grid, found one of some: use grid=True")
        columns = [
            column
            for rows in torch.arange(len(self.ids)).split(POSITIONS)
            for column in read_grid(self.model, self._flows(rows), self.target, self.of)
        ]
        return Grid(self.tokens, tuple(zip(*columns, strict=True)))

    def _flows(self, rows: torch.Tensor) -> list[Flow]:
        return [flow.at(rows) for flow in self.flows]

    def _positions(self, wanted: Iterable[int]) -> tuple[PositionTrace, ...]:
        """Some positions in full, each read once."""
        wanted = list(wanted)
        new = [position for position in wanted if position not in self._read]
        if missing := sorted(set(new) - set(self.captured)):
            have = ", ".join(map(str, self.captured))
            raise FfmemError(f"expected a position that was traced ({have}), found {missing[0]}: give it as at=")
        for begin in range(0, len(new), POSITIONS):
            some = new[begin : begin + POSITIONS]
            flows = self._flows(torch.tensor([self.captured.index(position) for position in some]))
            found = read_positions(
                self.model, flows, self.ids, some, target=self.target, cells=self.cells, of=self.of, index=self.index
            )
            self._read.update(zip(some, found, strict=True))
        return tuple(self._read[position] for position in wanted)

    def as_dict(self) -> dict[str, Any]:
        """The positions that were asked for in full, and the grid where it belongs to the trace, as a dict for JSON."""
        target = None
        if self.target is not None:
            target = {"id": self.target, "text": token_texts(self.model, [self.target])[0]}
        return {
            "format": FORMAT,
            "model": self.model.name,
            "prompt": self.prompt,
            "tokens": [{"id": id, "text": text} for id, text in zip(self.ids, self.tokens, strict=True)],
            "target": target,
            "of": self.of,
            "frozen": list(frozen_norms(self.model)),
            "run": None if self.index is None else str(self.index.path),
            "positions": [position.as_dict() for position in self.positions],
            "grid": self.grid.as_dict() if self.with_grid else None,
        }

    def blocks(self) -> list[Block]:
        """The prompt, the grid where it belongs to the trace, and the positions that were asked for."""
        found: list[Block] = [
            Text([beginning(f"{self.model.name} · {len(self.ids)} tokens: {visible(self.prompt)}", WIDTH)]),
            *(self.grid.blocks() if self.with_grid else []),
        ]
        return found + [block for position in self.positions for block in position.blocks()]

    def __repr__(self) -> str:
        return f"Trace({len(self.ids)} tokens through {self.model.name}, {len(self.flows)} layers)"
