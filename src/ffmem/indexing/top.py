"""Streaming top-t: the largest coefficients of every cell, exact whatever the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.run.manifest import Distinct

DISTINCT: tuple[Distinct, ...] = get_args(Distinct)
POSITION_BITS = 20
EMPTY = torch.iinfo(torch.int64).max
GATHER = 1 << 22
"""Coefficients gathered at a time to find where in its row a survivor stands."""
CANDIDATES = 1 << 23
"""Hits that are looked at together: the first batches, without thresholds, offer very many."""
DENSE = 12
"""Where more than one in so many pass, looking at every row is cheaper than gathering."""


@dataclass(frozen=True)
class Hits:
    """Flat candidates: a cell, its coefficient, where it was, and what makes it distinct.

    `place` is sentence · 2^20 + position, so that the order of places is the order of ties.
    """

    cell: Int[Tensor, " n"]
    coefficient: Float[Tensor, " n"]
    place: Int[Tensor, " n"]
    key: Int[Tensor, "n 2"]

    def __len__(self) -> int:
        return len(self.cell)

    def __getitem__(self, which: Tensor) -> Hits:
        return Hits(self.cell[which], self.coefficient[which], self.place[which], self.key[which])

    @staticmethod
    def cat(parts: list[Hits]) -> Hits:
        return Hits(
            torch.cat([part.cell for part in parts]),
            torch.cat([part.coefficient for part in parts]),
            torch.cat([part.place for part in parts]),
            torch.cat([part.key for part in parts]),
        )


def place_of(sentence: Int[Tensor, "*n"], position: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    return (sentence << POSITION_BITS) | position


def sentence_of(place: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    return place >> POSITION_BITS


def position_of(place: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    return place & ((1 << POSITION_BITS) - 1)


class TopTriggers:
    """The t best hits of each cell of one layer; only positive coefficients count.

    Rows are sorted by coefficient, then by place; an unused slot has coefficient 0 and place `EMPTY`. Hits with the
    same key count as one, the best of them, however much they differ (with `distinct="none"` keys are ignored). A hit
    below its cell's threshold, the t-th best so far, can never enter again, so it is dropped at once; the few survivors
    are kept aside and let in now and then.
    """

    def __init__(self, cells: int, t: int, distinct: Distinct, device: torch.device | str = "cpu") -> None:
        self.cells, self.t, self.distinct = cells, t, distinct
        self.coefficient = torch.zeros(cells, t, device=device)
        self.place = torch.full((cells, t), EMPTY, device=device)
        self.key = torch.zeros(cells, t, 2, dtype=torch.int64, device=device)
        self.full = False
        self._waiting: list[Hits] = []
        self._count = 0

    @property
    def threshold(self) -> Float[Tensor, " cells"]:
        """What a hit must reach: the t-th best coefficient, 0 where there are fewer."""
        return self.coefficient[:, -1]

    def passes(self, best: Float[Tensor, "n cells"]) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"]]:
        """Row and cell of every coefficient at or above its cell's threshold (and above 0)."""
        mask = best >= self.threshold.to(best.dtype)
        if not self.full:
            mask &= best > 0
        rows, cells = mask.nonzero(as_tuple=True)
        return rows, cells

    def add(self, hits: Hits) -> None:
        """Take candidates that passed the threshold; those equal to it enter only if they come earlier."""
        hits = Hits(hits.cell, hits.coefficient.float(), hits.place, hits.key)
        late = hits.coefficient == self.threshold[hits.cell]
        if late.any():
            late &= hits.place > self.place[:, -1][hits.cell]
            hits = hits[~late]
        if self.distinct != "none" and len(hits) * self.t <= GATHER // 4:
            # "The" opens very many sentences: a prefix that is held already would pass again and again.
            held = (self.key[hits.cell] == hits.key[:, None]).all(-1)
            better = self.coefficient[hits.cell] - hits.coefficient[:, None]
            earlier = self.place[hits.cell] <= hits.place[:, None]
            hits = hits[~(held & ((better > 0) | ((better == 0) & earlier))).any(1)]
        if len(hits):
            self._waiting.append(hits)
            self._count += len(hits)
        if self._count > self.cells * self.t // 2:
            self.settle()

    def settle(self) -> None:
        """Let the survivors in: sort all, drop repeated keys, keep the first t of each cell."""
        if not self._waiting:
            return
        hits = Hits.cat([self._held(), *self._waiting])
        order = _order(hits)
        if self.distinct != "none":
            order = order[_first_of_each_key(hits.cell[order], hits.key[order])]
        cell = hits.cell[order]
        begin = torch.searchsorted(cell, torch.arange(self.cells, device=cell.device))
        rank = torch.arange(len(cell), device=cell.device) - begin[cell]
        inside = rank < self.t
        best, rank = hits[order[inside]], rank[inside]
        # A cell only ever gains hits, so every slot in use is written anew.
        self.coefficient[best.cell, rank] = best.coefficient
        self.place[best.cell, rank] = best.place
        self.key[best.cell, rank] = best.key
        self.full = bool((self.threshold > 0).all())
        self._waiting, self._count = [], 0

    def _held(self) -> Hits:
        cell, slot = (self.coefficient > 0).nonzero(as_tuple=True)
        return Hits(cell, self.coefficient[cell, slot], self.place[cell, slot], self.key[cell, slot])

    def merge(self, other: TopTriggers) -> None:
        """Take in the triggers that another pass found, in any order of passes."""
        other.settle()
        hits = other._held()
        self.add(hits[hits.coefficient >= self.threshold[hits.cell]])

    def state(self) -> dict[str, Tensor]:
        """All there is to keep, once the survivors are in."""
        self.settle()
        return {name: getattr(self, name).contiguous() for name in ("coefficient", "place", "key")}

    def load(self, state: dict[str, Tensor]) -> None:
        for name in ("coefficient", "place", "key"):
            getattr(self, name).copy_(state[name])
        self.full = bool((self.threshold > 0).all())


def best_of_rows(
    top: TopTriggers,
    m: Float[Tensor, "batch pos cells"],
    best: Float[Tensor, "batch cells"],
    *,
    negative: bool = False,
    lengths: Int[Tensor, " batch"],
    shortest: int,
    sentences: Int[Tensor, " batch"],
    keys: Int[Tensor, "batch pos 2"],
) -> None:
    """Offer each sentence's best prefix (the earliest among equals), keyed by its text, its sentence or its document.

    `m` starts at the first token; `best` is its maximum over each row's tokens, or that of -m for negatives.
    """
    rows, cells = top.passes(best)
    for row, cell in zip(rows.split(CANDIDATES), cells.split(CANDIDATES), strict=True):
        column = _first_column(m, row, cell, lengths, shortest, negative)
        key = keys[row, column] if top.distinct == "text" else keys[row, lengths[row] - 1]
        top.add(Hits(cell, best[row, cell], place_of(sentences[row], column + 1), key))


def _first_column(
    m: Float[Tensor, "batch pos cells"],
    rows: Int[Tensor, " k"],
    cells: Int[Tensor, " k"],
    lengths: Int[Tensor, " batch"],
    shortest: int,
    negative: bool,
) -> Int[Tensor, " k"]:
    """Where each row's largest (smallest, for negatives) coefficient stands.

    Torch's max and min return the first among equals, which is the one wanted.
    """
    pick, never = (torch.min, torch.inf) if negative else (torch.max, -torch.inf)
    if len(rows) * DENSE > m.shape[0] * m.shape[2]:
        head = pick(m[:, :shortest], 1)
        if shortest == m.shape[1]:
            return head.indices[rows, cells]
        padding = torch.arange(shortest, m.shape[1], device=m.device) >= lengths[:, None]
        tail = pick(m[:, shortest:].masked_fill(padding[:, :, None], never), 1)
        behind = tail.values < head.values if negative else tail.values > head.values
        return torch.where(behind, tail.indices + shortest, head.indices)[rows, cells]
    padding = torch.arange(m.shape[1], device=m.device) >= lengths[:, None]
    parts = []
    step = max(1, GATHER // m.shape[1])
    for row, cell in zip(rows.split(step), cells.split(step), strict=True):
        found = m[row, :, cell]
        if shortest < m.shape[1]:
            found.masked_fill_(padding[row], never)
        parts.append(pick(found, 1).indices)
    return torch.cat(parts)


def every_prefix(
    top: TopTriggers,
    m: Float[Tensor, "batch pos cells"],
    *,
    negative: bool = False,
    lengths: Int[Tensor, " batch"],
    sentences: Int[Tensor, " batch"],
) -> None:
    """Offer every prefix of every sentence, by m or, for negatives, by -m."""
    columns = torch.arange(m.shape[1], device=m.device)
    row, column = (columns < lengths[:, None]).nonzero(as_tuple=True)
    flat = -m[row, column] if negative else m[row, column]
    bound = top.threshold.to(flat.dtype)
    if not top.full and len(flat) > top.t:
        # Where there is no threshold yet, the batch's own t-th best is one, since every prefix counts.
        unfilled = (bound == 0).nonzero().squeeze(1)
        bound = bound.index_copy(0, unfilled, flat[:, unfilled].topk(top.t, dim=0).values[-1])
    which, cells = ((flat >= bound) & (flat > 0)).nonzero(as_tuple=True)
    place = place_of(sentences[row], column + 1)[which]
    none = torch.zeros(len(which), 2, dtype=torch.int64, device=m.device)
    top.add(Hits(cells, flat[which, cells], place, none))


def _order(hits: Hits) -> Int[Tensor, " n"]:
    """The order by cell, then by coefficient from the largest, then by place."""
    # The bits of a positive float grow with it, so cell and coefficient are one integer.
    size = hits.coefficient.contiguous().view(torch.int32).long()
    rank = (hits.cell << 31) | (0x7FFFFFFF - size)
    rank, order = rank.sort()
    alike = rank[1:] == rank[:-1]
    if alike.any():
        # Few are tied: put only those in the order of their places.
        tied = torch.nn.functional.pad(alike, (0, 1)) | torch.nn.functional.pad(alike, (1, 0))
        which = tied.nonzero().squeeze(1)
        by_place = hits.place[order[which]].argsort()
        order[which] = order[which][by_place[rank[which][by_place].argsort(stable=True)]]
    return order


def _first_of_each_key(cell: Int[Tensor, " n"], key: Int[Tensor, "n 2"]) -> Tensor:
    """Which of the ordered hits are the first of their cell with their key."""
    mixed = key[:, 0] ^ (cell * 0x9E3779B97F4A7C1)
    order = mixed.argsort(stable=True)
    mixed = mixed[order]
    alike = (mixed[1:] == mixed[:-1]).nonzero().squeeze(1)
    before, after = order[alike], order[alike + 1]
    same = (cell[before] == cell[after]) & (key[before] == key[after]).all(1)
    first = torch.ones(len(cell), dtype=torch.bool, device=cell.device)
    first[after[same]] = False
    return first
