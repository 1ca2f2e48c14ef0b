"""The fused filter on a GPU: one read of a layer's coefficients, survivors set aside, nothing told to the host.

Every cell has a row of room for t + w hits: the first t are its triggers so far, sorted; behind them wait up to w
survivors. `_sift` reads a batch once and notes every hit that passes its cell's threshold, `_settle` gives those few
their waiting places, and `_merge` lets them in now and then. All is exact and free of order: a hit that finds no place
raises a flag, and its batch is read again by the plain path (`top.best_of_rows`), which is also what the tests compare
with.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.index.statistics import Statistics
from ffmem.index.top import EMPTY, POSITION_BITS, Distinct, TopTriggers

ROWS, BLOCK, COLUMNS = 4, 256, 8
"""Sentences and cells that one program reads, and prefixes that it reads at a time. A thread has eight neighbouring cells
and all columns of them, so that a maximum over columns needs no other thread."""
WARPS = 1
SETTLERS = 1056
"""Programs that settle survivors: eight for each processor of a large GPU."""
PAIRS = 16
"""Hits that `merge` compares with all others at a time."""
MOST = 256
"""The largest t that these kernels are for: `merge` compares all hits of a cell with one another."""
OVERFLOW, NOT_FINITE = 0, 1
"""Flags of a layer: a hit found no place; a coefficient is infinite or no number."""


class RoomyTop(TopTriggers):
    """Top triggers with waiting places behind each cell's: what kernels fill and merge without a word to the host."""

    def __init__(self, cells: int, t: int, distinct: Distinct, device: torch.device | str) -> None:
        super().__init__(cells, t, distinct, device)
        self.width = max(128, triton.next_power_of_2(2 * t))
        self.rooms = (
            torch.zeros(cells, self.width, device=device),
            torch.full((cells, self.width), EMPTY, device=device),
            torch.zeros(cells, self.width, 2, dtype=torch.int64, device=device),
        )
        self.coefficient, self.place, self.key = (room[:, :t] for room in self.rooms)
        self.taken = torch.zeros(cells, dtype=torch.int32, device=device)

    @property
    def places(self) -> int:
        """Hits that may wait at one cell."""
        return self.width - self.t

    def merge_waiting(self, flags: Int[Tensor, "2"]) -> None:
        """Let the waiting hits in; the flag is raised where one had found no place."""
        _merge[(self.cells,)](*self.rooms, self.taken, flags, self.t, self.width, WIDTH=self.width, PAIRS=PAIRS, num_warps=4)


def sift(
    m: Float[Tensor, "batch columns cells"],
    rows: range,
    *,
    start: int,
    lengths: Int[Tensor, " batch"],
    sentences: Int[Tensor, " batch"],
    keys: Int[Tensor, "batch pos 2"],
    tops: list[RoomyTop],
    statistics: Statistics | None,
    flags: Int[Tensor, "2"],
) -> None:
    """Read these rows of a batch once: survivors to their waiting places, firings and extremes to the statistics.

    `tops` are the positive triggers and, where they are wanted, the negative ones; `start` is the first token's column.
    """
    high, low = tops[0], tops[-1]
    counted = (statistics.active, statistics.maximum, statistics.minimum) if statistics else (flags, flags, flags)
    # As many sentences as there are places may all be noted; later, far fewer pass.
    most = min(len(rows), high.places) * m.shape[2]
    noted = torch.zeros(len(tops), dtype=torch.int32, device=m.device)
    lines = torch.empty(3, len(tops), most, dtype=torch.int32, device=m.device)
    notes = (lines[0], lines[1], lines[2].view(torch.float32))
    _sift[(triton.cdiv(m.shape[2], BLOCK), triton.cdiv(len(rows), ROWS))](
        m,
        lengths,
        high.rooms[0],
        low.rooms[0],
        noted,
        *notes,
        *counted,
        flags,
        rows.start,
        rows.stop,
        m.shape[2],
        start,
        m.stride(0),
        m.stride(1),
        high.t,
        high.width,
        most,
        NEGATIVE=len(tops) > 1,
        STATISTICS=statistics is not None,
        ROWS=ROWS,
        BLOCK=BLOCK,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    for side, top in enumerate(tops):
        _settle[(SETTLERS,)](
            m,
            lengths,
            sentences,
            keys,
            *top.rooms,
            top.taken,
            flags,
            noted[side:],
            *(part[side] for part in notes),
            1.0 - 2.0 * side,
            start,
            m.stride(0),
            m.stride(1),
            keys.stride(0),
            top.t,
            top.width,
            most,
            POSITION_BITS=POSITION_BITS,
            BY_SENTENCE=top.distinct == "sentence",
            WIDTH=triton.next_power_of_2(top.t),
            COLUMNS=32,
            num_warps=1,
        )


@triton.jit
@no_type_check
def _larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
@no_type_check
def _smaller(one, other):
    return tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
@no_type_check
def _note(passes, best, row, cell, noted, note_row, note_cell, note_best, most):
    """Write down sentence, cell and coefficient of every survivor; what finds no line is counted all the same."""
    line = tl.atomic_add(noted + tl.zeros_like(cell), 1, mask=passes)
    passes = passes & (line < most)
    tl.store(note_row + line, row + tl.zeros_like(cell), mask=passes)
    tl.store(note_cell + line, cell, mask=passes)
    tl.store(note_best + line, best, mask=passes)


@triton.jit
@no_type_check
def _sift(
    m,
    lengths,
    coefficient,
    low_coefficient,
    noted,
    note_row,
    note_cell,
    note_best,
    active,
    maximum,
    minimum,
    flags,
    first_row,
    rows,
    cells,
    start,
    row_stride,
    column_stride,
    t,
    width,
    most,
    NEGATIVE: tl.constexpr,
    STATISTICS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The hot one: a few sentences, a block of cells. It only notes survivors, so that it needs few registers."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    last = cell.to(tl.int64) * width + t - 1
    bound = tl.load(coefficient + last, mask=inside, other=float("inf"))
    if NEGATIVE:
        low_bound = tl.load(low_coefficient + last, mask=inside, other=float("inf"))
    if STATISTICS:
        fired = tl.zeros((BLOCK,), tl.int32)
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    odd = tl.zeros((BLOCK,), tl.int1)
    for number in range(ROWS):
        row = first_row + tl.program_id(1) * ROWS + number
        if row < rows:
            length = tl.load(lengths + row).to(tl.int32)
            base = m + row.to(tl.int64) * row_stride + start * column_stride + cell
            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            worst = tl.full((BLOCK,), float("inf"), tl.float32)
            begin = 0
            while begin < length:
                # Behind the end the last token is read again: that changes no extreme, and no mask is needed.
                column = tl.minimum(begin + tl.arange(0, COLUMNS), length - 1)
                found = tl.load(base[None, :] + column[:, None] * column_stride, mask=inside[None, :], other=0.0).to(
                    tl.float32
                )
                best = _larger(best, tl.reduce(found, 0, _larger))
                if NEGATIVE or STATISTICS:
                    worst = _smaller(worst, tl.reduce(found, 0, _smaller))
                if STATISTICS:
                    new = (begin + tl.arange(0, COLUMNS) < length)[:, None]
                    fired += tl.sum((new & (found > 0)).to(tl.int32), 0)
                begin += COLUMNS
            odd = odd | ~(best < float("inf"))
            passes = inside & (best > 0) & (best >= bound)
            if tl.max(passes.to(tl.int32), 0) > 0:
                _note(passes, best, row, cell, noted, note_row, note_cell, note_best, most)
            if NEGATIVE or STATISTICS:
                odd = odd | ~(worst > float("-inf"))
            if STATISTICS:
                highest = tl.maximum(highest, best)
                lowest = tl.minimum(lowest, worst)
            if NEGATIVE:
                passes = inside & (worst < 0) & (-worst >= low_bound)
                if tl.max(passes.to(tl.int32), 0) > 0:
                    # The second half of the notes is for negatives.
                    _note(passes, -worst, row, cell, noted + 1, note_row + most, note_cell + most, note_best + most, most)
    if tl.max((inside & odd).to(tl.int32), 0) > 0:
        tl.store(flags + 1, 1)
    if STATISTICS:
        tl.atomic_add(active + cell, fired.to(tl.int64), mask=inside)
        tl.atomic_max(maximum + cell, highest, mask=inside)
        tl.atomic_min(minimum + cell, lowest, mask=inside)


@triton.jit
@no_type_check
def _settle(
    m,
    lengths,
    sentences,
    keys,
    coefficient,
    place,
    key,
    taken,
    flags,
    noted,
    note_row,
    note_cell,
    note_best,
    sign,
    start,
    row_stride,
    column_stride,
    key_stride,
    t,
    width,
    most,
    POSITION_BITS: tl.constexpr,
    BY_SENTENCE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each noted survivor: find where in its sentence it stands, drop it if it is held already, else give it a place."""
    count = tl.load(noted)
    if count > most:
        tl.store(flags, 1)
        count = most
    slot = tl.arange(0, WIDTH)
    line = tl.program_id(0)
    while line < count:
        row = tl.load(note_row + line).to(tl.int64)
        cell = tl.load(note_cell + line).to(tl.int64)
        best = tl.load(note_best + line)
        length = tl.load(lengths + row).to(tl.int32)
        base = m + row * row_stride + start * column_stride + cell
        begin = 0
        first = 1 << 30
        while begin < length:
            column = begin + tl.arange(0, COLUMNS)
            found = tl.load(base + column * column_stride, mask=column < length, other=0.0).to(tl.float32) * sign
            first = tl.minimum(first, tl.min(tl.where((column < length) & (found == best), column, 1 << 30), 0))
            begin += COLUMNS
        where = (tl.load(sentences + row) << POSITION_BITS) | (first + 1).to(tl.int64)
        own = row * key_stride + 2 * (length - 1 if BY_SENTENCE else first).to(tl.int64)
        one = tl.load(keys + own)
        two = tl.load(keys + own + 1)
        at = cell * width + slot
        held = tl.load(coefficient + at, mask=slot < t, other=0.0)
        held_place = tl.load(place + at, mask=slot < t, other=0)
        same = (slot < t) & (tl.load(key + 2 * at, mask=slot < t, other=0) == one)
        same = same & (tl.load(key + 2 * at + 1, mask=same, other=0) == two)
        # "The" opens very many sentences: a prefix that is held already would pass again and again. And an equal of the
        # last trigger enters only if it comes earlier.
        stays_out = (same & ((held > best) | ((held == best) & (held_place <= where)))) | (
            (slot == t - 1) & (held == best) & (held_place < where)
        )
        if tl.max(stays_out.to(tl.int32), 0) == 0:
            free = tl.atomic_add(taken + cell, 1)
            if free < width - t:
                mine = cell * width + t + free
                tl.store(coefficient + mine, best)
                tl.store(place + mine, where)
                tl.store(key + 2 * mine, one)
                tl.store(key + 2 * mine + 1, two)
        line += tl.num_programs(0)


@triton.jit
@no_type_check
def _merge(coefficient, place, key, taken, flags, t, width, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    cell = tl.program_id(0)
    waiting = tl.load(taken + cell)
    if waiting > 0:
        tl.store(taken + cell, 0)
        if waiting > width - t:
            tl.store(flags, 1)
        used = t + tl.minimum(waiting, width - t)
        begin = cell.to(tl.int64) * width
        mine = tl.arange(0, WIDTH)
        c = tl.load(coefficient + begin + mine, mask=mine < used, other=0.0)
        p = tl.load(place + begin + mine, mask=mine < used, other=0)
        one = tl.load(key + 2 * (begin + mine), mask=mine < used, other=0)
        two = tl.load(key + 2 * (begin + mine) + 1, mask=mine < used, other=0)
        valid = (mine < used) & (c > 0)
        rank = tl.zeros((WIDTH,), tl.int32)
        repeated = tl.zeros((WIDTH,), tl.int32)
        first = 0
        while first < used:
            other = first + tl.arange(0, PAIRS)
            oc = tl.load(coefficient + begin + other, mask=other < used, other=0.0)
            op = tl.load(place + begin + other, mask=other < used, other=0)
            o_one = tl.load(key + 2 * (begin + other), mask=other < used, other=0)
            o_two = tl.load(key + 2 * (begin + other) + 1, mask=other < used, other=0)
            both = valid[:, None] & ((other < used) & (oc > 0))[None, :]
            same = both & (one[:, None] == o_one[None, :]) & (two[:, None] == o_two[None, :])
            tie = c[:, None] == oc[None, :]
            before = (p[:, None] < op[None, :]) | ((p[:, None] == op[None, :]) & (mine[:, None] < other[None, :]))
            better = (c[:, None] > oc[None, :]) | (tie & before)
            self = mine[:, None] == other[None, :]
            worse = ~better & ~self
            # A hit with a better one of its key counts for nothing, neither here nor there.
            o_repeated = tl.max((same & better).to(tl.int32), 0)
            repeated = repeated | tl.max((same & worse).to(tl.int32), 1)
            rank += tl.sum((both & worse & (o_repeated == 0)[None, :]).to(tl.int32), 1)
            first += PAIRS
        tl.debug_barrier()
        kept = valid & (repeated == 0) & (rank < t)
        at = begin + rank
        tl.store(coefficient + at, c, mask=kept)
        tl.store(place + at, p, mask=kept)
        tl.store(key + 2 * at, one, mask=kept)
        tl.store(key + 2 * at + 1, two, mask=kept)
