"""Streaming top-t: the largest coefficients of every cell, exact whatever the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.indexing.coefficients import Coefficients
from ffmem.run.manifest import Distinct

POSITION_BITS = 20
"""The lower bits of a place hold a position; the 43 above them, a sentence's number; the sign bit is never set."""
EMPTY = torch.iinfo(torch.int64).max
"""The place of a slot that holds no trigger: behind all others."""
GATHERED = 1 << 22
"""The number of coefficients gathered at a time to find where in its sentence a hit stands."""
COMPARED = 1 << 20
"""The number of comparisons of a new hit's key with the held ones up to which it pays to drop repeated prefixes at once."""
CANDIDATES = 1 << 23
"""The number of hits that are looked at together: the first batches, without thresholds, offer very many."""
DENSE = 12
"""Rows are read whole, not gathered, where more than one pair of sentence and cell in this many passes: it is cheaper."""


@dataclass(frozen=True)
class Hits:
    """Prefixes that may become triggers, one an entry: the cell, its coefficient there, the place and the key.

    `place` is sentence · 2^20 + position, so that the order of places is the order of ties. Two hits of a cell with the same
    `key`, a 128-bit hash, count as one.
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
        """One set of hits from several, one behind the other."""
        return Hits(
            torch.cat([part.cell for part in parts]),
            torch.cat([part.coefficient for part in parts]),
            torch.cat([part.place for part in parts]),
            torch.cat([part.key for part in parts]),
        )


def place_of(sentence: Int[Tensor, "*n"], position: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The place of a prefix: one integer for its sentence's number and its position; the smaller place wins a tie."""
    return (sentence << POSITION_BITS) | position


def sentence_of(place: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The sentence's number of a place; that of an unused slot is behind all sentences."""
    return place >> POSITION_BITS


def position_of(place: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The position of a place: the length of the prefix in tokens."""
    return place & ((1 << POSITION_BITS) - 1)


class TopTriggers:
    """The t best hits of each cell of one layer; only positive coefficients count.

    The t slots of a cell are sorted by coefficient, then by place; an unused one has coefficient 0 and place `EMPTY`. Hits
    with the same key count as one, the best of them (with `distinct="none"` keys are ignored). A hit below its cell's
    threshold, the t-th best so far, can never enter again, so it is dropped at once; the few others are pending until
    `flush` merges them in, now and then.
    """

    def __init__(self, cells: int, t: int, distinct: Distinct, device: torch.device | str = "cpu") -> None:
        self.cells, self.t, self.distinct = cells, t, distinct
        self.coefficient = torch.zeros(cells, t, device=device)
        self.place = torch.full((cells, t), EMPTY, device=device)
        self.key = torch.zeros(cells, t, 2, dtype=torch.int64, device=device)
        self.full = False
        """Whether every cell has t triggers, so that every threshold is above 0."""
        self._pending: list[Hits] = []
        self._pending_count = 0

    @property
    def threshold(self) -> Float[Tensor, " cells"]:
        """The coefficient that a hit must reach, for each cell: its t-th best, 0 where there are fewer."""
        return self.coefficient[:, -1]

    def passes(self, best: Float[Tensor, "n cells"]) -> tuple[Int[Tensor, " k"], Int[Tensor, " k"]]:
        """The row and the cell of every coefficient that is above 0 and not below its cell's threshold."""
        mask = best >= self.threshold.to(best.dtype)
        if not self.full:
            mask &= best > 0
        rows, cells = mask.nonzero(as_tuple=True)
        return rows, cells

    def add(self, hits: Hits) -> None:
        """Add hits that passed the threshold; one that equals it enters only if its place is before the last trigger's."""
        hits = Hits(hits.cell, hits.coefficient.float(), hits.place, hits.key)
        late = hits.coefficient == self.threshold[hits.cell]
        if late.any():
            late &= hits.place > self.place[:, -1][hits.cell]
            hits = hits[~late]
        if self.distinct != "none" and len(hits) * self.t <= COMPARED:
            # "The" opens very many sentences: a prefix that is held already would be pending again and again.
            held = (self.key[hits.cell] == hits.key[:, None]).all(-1)
            better = self.coefficient[hits.cell] - hits.coefficient[:, None]
            earlier = self.place[hits.cell] <= hits.place[:, None]
            hits = hits[~(held & ((better > 0) | ((better == 0) & earlier))).any(1)]
        if len(hits):
            self._pending.append(hits)
            self._pending_count += len(hits)
        if self._pending_count > self.cells * self.t // 2:
            self.flush()

    def flush(self) -> None:
        """Merge in the pending hits: sort all, drop repeated keys, keep the first t of each cell."""
        if not self._pending:
            return
        hits = Hits.cat([self._held(), *self._pending])
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
        self._pending, self._pending_count = [], 0

    def _held(self) -> Hits:
        cell, slot = (self.coefficient > 0).nonzero(as_tuple=True)
        return Hits(cell, self.coefficient[cell, slot], self.place[cell, slot], self.key[cell, slot])

    def merge(self, other: TopTriggers) -> None:
        """Merge in the triggers of another part of the corpus; parts may be merged in any order."""
        other.flush()
        hits = other._held()
        self.add(hits[hits.coefficient >= self.threshold[hits.cell]])

    def state(self) -> dict[str, Tensor]:
        """All that a checkpoint needs, with no hit pending."""
        self.flush()
        return {name: getattr(self, name).contiguous() for name in ("coefficient", "place", "key")}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from tensors that `state` gave."""
        for name in ("coefficient", "place", "key"):
            getattr(self, name).copy_(state[name])
        self.full = bool((self.threshold > 0).all())


def best_of_rows(top: TopTriggers, found: Coefficients, *, negative: bool = False) -> None:
    """Offer the prefix of each sentence with the largest coefficient, the earliest among equals; for negatives, of -m.

    Its key, which tells it from other triggers of the cell, is that of the prefix, or with `distinct` other than `text` that
    of the whole sentence.
    """
    batch, best = found.batch, -found.lowest if negative else found.highest
    rows, cells = top.passes(best)
    for row, cell in zip(rows.split(CANDIDATES), cells.split(CANDIDATES), strict=True):
        column = _first_column(found, row, cell, negative=negative)
        key = batch.keys[row, column if top.distinct == "text" else batch.lengths[row] - 1]
        top.add(Hits(cell, best[row, cell], place_of(batch.sentences[row], column + 1), key))


def _first_column(
    found: Coefficients, rows: Int[Tensor, " k"], cells: Int[Tensor, " k"], *, negative: bool
) -> Int[Tensor, " k"]:
    """The column of each pair's largest coefficient in its row (smallest, for negatives), the first among equals.

    Torch's max and min return the first among equals too.
    """
    pick, never = (torch.min, torch.inf) if negative else (torch.max, -torch.inf)
    m, shortest = found.m, found.batch.shortest
    if len(rows) * DENSE > m.shape[0] * m.shape[2]:
        head = pick(m[:, :shortest], 1)
        if shortest == m.shape[1]:
            return head.indices[rows, cells]
        tail = pick(m[:, shortest:].masked_fill(found.batch.padding[:, :, None], never), 1)
        behind = tail.values < head.values if negative else tail.values > head.values
        return torch.where(behind, tail.indices + shortest, head.indices)[rows, cells]
    parts = []
    step = max(1, GATHERED // m.shape[1])
    for row, cell in zip(rows.split(step), cells.split(step), strict=True):
        gathered = m[row, :, cell]
        gathered[:, shortest:].masked_fill_(found.batch.padding[row], never)
        parts.append(pick(gathered, 1).indices)
    return torch.cat(parts)


def every_prefix(top: TopTriggers, found: Coefficients, *, negative: bool = False) -> None:
    """Offer every prefix of every sentence, by its coefficient or, for negatives, by minus that."""
    m, batch = found.m, found.batch
    row, column = (torch.arange(m.shape[1], device=m.device) < batch.lengths[:, None]).nonzero(as_tuple=True)
    flat = -m[row, column] if negative else m[row, column]
    bound = top.threshold.to(flat.dtype)
    if not top.full and len(flat) > top.t:
        # Where there is no threshold yet, the batch's own t-th best is one, since every prefix counts.
        unfilled = (bound == 0).nonzero().squeeze(1)
        bound = bound.index_copy(0, unfilled, flat[:, unfilled].topk(top.t, dim=0).values[-1])
    which, cells = ((flat >= bound) & (flat > 0)).nonzero(as_tuple=True)
    place = place_of(batch.sentences[row], column + 1)[which]
    no_key = torch.zeros(len(which), 2, dtype=torch.int64, device=m.device)
    top.add(Hits(cells, flat[which, cells], place, no_key))


def _order(hits: Hits) -> Int[Tensor, " n"]:
    """The permutation that sorts hits by cell, then by coefficient from the largest, then by place."""
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
    """Whether each of the sorted hits is the first of its cell with its key."""
    mixed = key[:, 0] ^ (cell * 0x9E3779B97F4A7C1)
    order = mixed.argsort(stable=True)
    mixed = mixed[order]
    alike = (mixed[1:] == mixed[:-1]).nonzero().squeeze(1)
    before, after = order[alike], order[alike + 1]
    same = (cell[before] == cell[after]) & (key[before] == key[after]).all(1)
    first = torch.ones(len(cell), dtype=torch.bool, device=cell.device)
    first[after[same]] = False
    return first
