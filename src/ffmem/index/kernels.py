"""The fused filter on a GPU: one read of a layer's coefficients, survivors set aside, nothing told to the host.

Every cell has a row of room for t + w hits: the first t are its triggers so far, sorted; behind them wait up to w
survivors. `sift` reads a batch once and puts every hit that passes its cell's threshold into the waiting places;
`merge` lets them in. Both are exact and free of order: a hit that finds no place raises a flag, and its batch is read
again by the plain path (`top.best_of_rows`), which is also what the tests compare with.
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

ROWS = 4
"""Sentences that one program reads."""
BLOCK = 128
"""Cells that one program reads."""
COLUMNS = 16
"""Prefixes that it reads at a time."""
WARPS = 4
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
    _sift[(triton.cdiv(m.shape[2], BLOCK), triton.cdiv(len(rows), ROWS))](
        m,
        lengths,
        sentences,
        keys,
        *high.rooms,
        high.taken,
        *low.rooms,
        low.taken,
        *counted,
        flags,
        rows.start,
        rows.stop,
        m.shape[2],
        start,
        m.stride(0),
        m.stride(1),
        keys.stride(0),
        high.t,
        high.width,
        POSITION_BITS=POSITION_BITS,
        NEGATIVE=len(tops) > 1,
        STATISTICS=statistics is not None,
        BY_SENTENCE=high.distinct == "sentence",
        ROWS=ROWS,
        BLOCK=BLOCK,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


@triton.jit
@no_type_check
def _set_aside(
    passes, best, sign, cell, row, length, base, column_stride, sentences, keys, key_stride,
    coefficient, place, key, taken, t, width,
    POSITION_BITS: tl.constexpr, BY_SENTENCE: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Find where a sentence's survivors stand, drop those that are held already, and give the others a waiting place."""
    column = tl.full((BLOCK,), 1 << 30, tl.int32)
    begin = 0
    while begin < length:
        columns = begin + tl.arange(0, COLUMNS)
        seen = (columns < length)[:, None] & passes[None, :]
        found = tl.load(base[None, :] + columns[:, None] * column_stride, mask=seen, other=0.0).to(tl.float32) * sign
        column = tl.minimum(column, tl.min(tl.where(seen & (found == best[None, :]), columns[:, None], 1 << 30), 0))
        begin += COLUMNS
    where = (tl.load(sentences + row) << POSITION_BITS) | (column + 1).to(tl.int64)
    own_row = cell.to(tl.int64) * width
    # An equal of the last trigger enters only if it comes earlier.
    equal = best == tl.load(coefficient + own_row + t - 1, mask=passes, other=float("inf"))
    passes = passes & ~(equal & (where > tl.load(place + own_row + t - 1, mask=passes, other=0)))
    own = row.to(tl.int64) * key_stride + 2 * (column if not BY_SENTENCE else length - 1 + tl.zeros_like(column)).to(
        tl.int64
    )
    one = tl.load(keys + own, mask=passes, other=0)
    two = tl.load(keys + own + 1, mask=passes, other=0)
    # "The" opens very many sentences: a prefix that is held already would pass again and again.
    held_slot = 0
    while held_slot < t:
        at = own_row + held_slot
        same = passes & (tl.load(key + 2 * at, mask=passes, other=0) == one)
        same = same & (tl.load(key + 2 * at + 1, mask=same, other=0) == two)
        held = tl.load(coefficient + at, mask=same, other=0.0)
        earlier = tl.load(place + at, mask=same, other=0) <= where
        passes = passes & ~(same & ((held > best) | ((held == best) & earlier)))
        held_slot += 1
    slot = tl.atomic_add(taken + cell, 1, mask=passes)
    passes = passes & (slot < width - t)
    at = own_row + t + slot
    tl.store(coefficient + at, best, mask=passes)
    tl.store(place + at, where, mask=passes)
    tl.store(key + 2 * at, one, mask=passes)
    tl.store(key + 2 * at + 1, two, mask=passes)


@triton.jit
@no_type_check
def _sift(
    m,
    lengths,
    sentences,
    keys,
    coefficient,
    place,
    key,
    taken,
    low_coefficient,
    low_place,
    low_key,
    low_taken,
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
    key_stride,
    t,
    width,
    POSITION_BITS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    STATISTICS: tl.constexpr,
    BY_SENTENCE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    last = cell.to(tl.int64) * width + t - 1
    bound = tl.load(coefficient + last, mask=inside, other=float("inf"))
    low_bound = bound
    if NEGATIVE:
        low_bound = tl.load(low_coefficient + last, mask=inside, other=float("inf"))
    fired = tl.zeros((BLOCK,), tl.int32)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    odd = tl.zeros((BLOCK,), tl.int32)
    for number in range(ROWS):
        row = first_row + tl.program_id(1) * ROWS + number
        if row < rows:
            length = tl.load(lengths + row)
            base = m + row.to(tl.int64) * row_stride + start * column_stride + cell
            high = tl.full((COLUMNS, BLOCK), float("-inf"), tl.float32)
            low = tl.full((COLUMNS, BLOCK), float("inf"), tl.float32)
            count = tl.zeros((COLUMNS, BLOCK), tl.int32)
            begin = 0
            while begin < length:
                column = begin + tl.arange(0, COLUMNS)
                seen = (column < length)[:, None] & inside[None, :]
                found = tl.load(base[None, :] + column[:, None] * column_stride, mask=seen, other=0.0).to(tl.float32)
                high = tl.maximum(high, tl.where(seen, found, float("-inf")))
                if NEGATIVE or STATISTICS:
                    low = tl.minimum(low, tl.where(seen, found, float("inf")))
                if STATISTICS:
                    count += (found > 0).to(tl.int32)
                odd = odd | tl.max((found != found).to(tl.int32), 0)
                begin += COLUMNS
            best = tl.max(high, 0)
            highest = tl.maximum(highest, best)
            if NEGATIVE or STATISTICS:
                worst = tl.min(low, 0)
                lowest = tl.minimum(lowest, worst)
            if STATISTICS:
                fired += tl.sum(count, 0)
            passes = inside & (best > 0) & (best >= bound)
            if tl.max(passes.to(tl.int32), 0) > 0:
                _set_aside(
                    passes, best, 1.0, cell, row, length, base, column_stride, sentences, keys, key_stride,
                    coefficient, place, key, taken, t, width, POSITION_BITS, BY_SENTENCE, BLOCK, COLUMNS,
                )  # fmt: skip
            if NEGATIVE:
                passes = inside & (worst < 0) & (-worst >= low_bound)
                if tl.max(passes.to(tl.int32), 0) > 0:
                    _set_aside(
                        passes, -worst, -1.0, cell, row, length, base, column_stride, sentences, keys, key_stride,
                        low_coefficient, low_place, low_key, low_taken, t, width, POSITION_BITS, BY_SENTENCE, BLOCK, COLUMNS,
                    )  # fmt: skip
    # Where there are no minima, an infinity below is seen when it is a maximum; with them, on both sides.
    odd = odd | (highest == float("inf")).to(tl.int32)
    if NEGATIVE or STATISTICS:
        odd = odd | (lowest == float("-inf")).to(tl.int32)
    if tl.max(tl.where(inside, odd, 0), 0) > 0:
        tl.store(flags + 1, 1)
    if STATISTICS:
        tl.atomic_add(active + cell, fired.to(tl.int64), mask=inside)
        tl.atomic_max(maximum + cell, highest, mask=inside)
        tl.atomic_min(minimum + cell, lowest, mask=inside)


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
