"""The kernels of the filter, which `gpu.py` launches.

`sift` reads a batch once and notes every hit that passes its cell's threshold, `tally` adds up what was counted, `add_noted`
puts the noted hits into their cells' pending slots, `merge` merges these into the triggers, and `retry_overflow` puts hits
that found no slot before into those that are free then. Tuples of tensors are `notes` (row, cell and coefficient of a hit),
`slots` (coefficient, place and two words of a key; `WIDTH` a cell), `overflow` (cell, and what a slot has) and `counts`
(firings, maximum and minimum).
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def _note(passes, best, row, cell, noted, notes, first, most):
    """Note row, cell and coefficient of every hit that passes; one that finds no line is counted all the same."""
    one = passes.to(tl.int32)
    line = tl.atomic_add(noted, tl.sum(one, 0)) + tl.cumsum(one, 0) - 1
    passes = passes & (line < most)
    tl.store(notes[0] + first + line, row + tl.zeros_like(cell), mask=passes)
    tl.store(notes[1] + first + line, cell, mask=passes)
    tl.store(notes[2] + first + line, best, mask=passes)


@triton.jit
@no_type_check
def _two_at_once(code: tl.constexpr, one, other):
    """An instruction that works on two 16-bit numbers in each register."""
    return tl.inline_asm_elementwise(code, "=r,r,r", [one, other], dtype=one.dtype, is_pure=True, pack=2)


@triton.jit
@no_type_check
def _larger(one, other, PACKED: tl.constexpr):
    """The larger of each pair of numbers; what is not a number is the larger."""
    if PACKED == "":
        found = tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)
    else:
        found = _two_at_once("max.NaN." + PACKED + " $0, $1, $2;", one, other)
    return found


@triton.jit
@no_type_check
def _smaller(one, other, PACKED: tl.constexpr):
    """The smaller of each pair of numbers; what is not a number is the smaller."""
    if PACKED == "":
        found = tl.minimum(one, other, propagate_nan=tl.PropagateNan.ALL)
    else:
        found = _two_at_once("min.NaN." + PACKED + " $0, $1, $2;", one, other)
    return found


@triton.jit
@no_type_check
def _count(fired, found, real, PACKED: tl.constexpr):
    """The count of firings, one more where `found` is above 0. The bits of such a number, as an integer, are above 0 too."""
    if PACKED == "":
        fired += (real & (found > 0)).to(tl.int32)
    else:
        one = real.to(tl.int16) + tl.zeros_like(fired)
        fired += _two_at_once("min.relu.s16x2 $0, $1, $2;", found.to(tl.int16, bitcast=True), one)
    return fired


@triton.jit
@no_type_check
def _activated(x, table, ACTIVATION: tl.constexpr, PACKED: tl.constexpr):
    """The activation of x; where x is 16-bit, it is looked up in a table by the bits of x."""
    if ACTIVATION == "relu":
        m = _larger(x, tl.zeros_like(x), PACKED)
    else:
        m = tl.load(table + (x.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF))
    return m


@triton.jit(do_not_specialize=["first_row", "rows", "start", "columns"])
@no_type_check
def sift(
    source,
    m,
    table,
    lengths,
    bounds,
    low_bounds,
    noted,
    notes,
    group_counts,
    nonfinite,
    first_row,
    rows,
    cells,
    start,
    columns,
    row_stride,
    column_stride,
    most,
    NEGATIVE: tl.constexpr,
    STATISTICS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Read a few sentences and a block of cells: the hot loop. It only notes the hits, so that it needs few registers.

    The last sentences come first: what was written last is still in the cache.
    """
    group = tl.num_programs(1) - 1 - tl.program_id(1)
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    bound = tl.load(bounds + cell, mask=inside, other=float("inf"))
    if NEGATIVE:
        low_bound = tl.load(low_bounds + cell, mask=inside, other=float("inf"))
    never = tl.full((BLOCK,), float("-inf"), tl.float32).to(m.dtype.element_ty)
    always = tl.full((BLOCK,), float("inf"), tl.float32).to(m.dtype.element_ty)
    if STATISTICS:
        fired = tl.zeros((BLOCK,), tl.int32)
        highest = never
        lowest = always
    infinite = tl.zeros((BLOCK,), tl.int1)
    for number in range(ROWS):
        row = first_row + group * ROWS + number
        if row < rows:
            length = tl.load(lengths + row).to(tl.int32)
            base = row.to(tl.int64) * row_stride + cell
            best = never
            worst = always
            firings = tl.zeros((BLOCK,), tl.int32 if PACKED == "" else tl.int16)
            begin = start if ACTIVATION == "" else 0
            end = start + length if ACTIVATION == "" else columns
            while begin < end:
                # All loads come before the first store: the compiler does not know that they are of different tensors.
                tile = ()
                for ahead in tl.static_range(COLUMNS):
                    # Behind the end the last column is read again: that changes no extreme, and is not counted.
                    column = tl.minimum(begin + ahead, end - 1)
                    tile += (tl.load(source + base + column.to(tl.int64) * column_stride, mask=inside, other=0.0),)
                for ahead in tl.static_range(COLUMNS):
                    column = begin + ahead
                    found = tile[ahead]
                    real = column < end
                    high_found = found
                    low_found = found
                    if ACTIVATION != "":
                        found = _activated(found, table, ACTIVATION, PACKED)
                        tl.store(m + base + column.to(tl.int64) * column_stride, found, mask=inside & real)
                        real = (column >= start) & (column < start + length)
                        high_found = tl.where(real, found, never)
                        low_found = tl.where(real, found, always)
                    best = _larger(best, high_found, PACKED)
                    if NEGATIVE or STATISTICS:
                        worst = _smaller(worst, low_found, PACKED)
                    if STATISTICS:
                        firings = _count(firings, found, real, PACKED)
                begin += COLUMNS
            high = best.to(tl.float32)
            infinite = infinite | ~(high < float("inf"))
            passes = inside & (high > 0) & (high >= bound)
            if tl.max(passes.to(tl.int32), 0) > 0:
                _note(passes, high, row, cell, noted, notes, 0, most)
            if NEGATIVE or STATISTICS:
                low = -worst.to(tl.float32)
                infinite = infinite | ~(low < float("inf"))
            if STATISTICS:
                highest = _larger(highest, best, PACKED)
                lowest = _smaller(lowest, worst, PACKED)
                fired += firings.to(tl.int32)
            if NEGATIVE:
                passes = inside & (low > 0) & (low >= low_bound)
                if tl.max(passes.to(tl.int32), 0) > 0:
                    # The second half of the notes is for negatives.
                    _note(passes, low, row, cell, noted + 1, notes, most, most)
    if tl.max((inside & infinite).to(tl.int32), 0) > 0:
        tl.store(nonfinite, 1)
    if STATISTICS:
        at = group.to(tl.int64) * cells + cell
        tl.store(group_counts[0] + at, fired, mask=inside)
        tl.store(group_counts[1] + at, highest, mask=inside)
        tl.store(group_counts[2] + at, lowest, mask=inside)


@triton.jit(do_not_specialize=["groups"])
@no_type_check
def tally(group_counts, counts, groups, cells, BLOCK: tl.constexpr):
    """Add the firings and extremes of all groups of sentences to those of the layer."""
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    fired = tl.zeros((BLOCK,), tl.int64)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    begin = tl.program_id(1)
    while begin < groups:
        for ahead in tl.static_range(4):
            # Behind the end the last group is read again: that changes no extreme, and is not counted.
            group = tl.minimum(begin + ahead * tl.num_programs(1), groups - 1)
            new = begin + ahead * tl.num_programs(1) < groups
            at = group.to(tl.int64) * cells + cell
            fired += tl.load(group_counts[0] + at, mask=inside & new, other=0)
            highest = tl.maximum(highest, tl.load(group_counts[1] + at, mask=inside, other=0.0).to(tl.float32))
            lowest = tl.minimum(lowest, tl.load(group_counts[2] + at, mask=inside, other=0.0).to(tl.float32))
        begin += 4 * tl.num_programs(1)
    tl.atomic_add(counts[0] + cell, fired, mask=inside)
    tl.atomic_max(counts[1] + cell, highest, mask=inside)
    tl.atomic_min(counts[2] + cell, lowest, mask=inside)


@triton.jit
@no_type_check
def _add_pending(cell, hit, slots, pending, t, WIDTH: tl.constexpr):
    """Put a hit into a pending slot, unless it cannot become a trigger; 1 where no slot is free, else 0.

    "The" opens very many sentences: a prefix that is held, or pending, would pass again and again. A pending hit may be
    only half written when it is compared; its slot was empty before, so it is not taken for another.
    """
    best, where, one, two = hit
    coefficient, place, key = slots
    slot = tl.arange(0, WIDTH)
    used = slot < t + tl.minimum(tl.load(pending + cell), WIDTH - t)
    at = cell * WIDTH + slot
    held = tl.load(coefficient + at, mask=used, other=0.0)
    held_place = tl.load(place + at, mask=used, other=0)
    same = used & (tl.load(key + 2 * at, mask=used, other=0) == one)
    same = same & (tl.load(key + 2 * at + 1, mask=same, other=0) == two)
    # Better, or equal and earlier: as a hit of the same prefix, or as the last trigger.
    before = (held > best) | ((held == best) & (held_place <= where))
    no_slot = 0
    if tl.max((before & (same | (slot == t - 1))).to(tl.int32), 0) == 0:
        free = tl.atomic_add(pending + cell, 1)
        if free < WIDTH - t:
            _write(hit, slots, cell * WIDTH + t + free)
        else:
            no_slot = 1
    return no_slot


@triton.jit
@no_type_check
def _write(hit, slots, at):
    """Write a hit's coefficient, place and key into a slot."""
    tl.store(slots[0] + at, hit[0])
    tl.store(slots[1] + at, hit[1])
    tl.store(slots[2] + 2 * at, hit[2])
    tl.store(slots[2] + 2 * at + 1, hit[3])


@triton.jit
@no_type_check
def _add_overflow(cell, hit, overflow, overflow_count, lost, OVERFLOW: tl.constexpr):
    """Put a hit that found no slot into the overflow list; where that is full, raise the flag that one was lost."""
    at = tl.atomic_add(overflow_count, 1)
    if at < OVERFLOW:
        tl.store(overflow[0] + at, cell)
        _write(hit, (overflow[1], overflow[2], overflow[3]), at)
    else:
        tl.store(lost, 1)


@triton.jit(do_not_specialize=["start", "key_stride"])
@no_type_check
def add_noted(
    m,
    lengths,
    sentences,
    keys,
    slots,
    pending,
    overflow,
    overflow_count,
    lost,
    noted,
    notes,
    first_note,
    start,
    row_stride,
    column_stride,
    key_stride,
    t,
    most,
    POSITION_BITS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BY_SENTENCE: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERFLOW: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find each noted hit's position in its sentence, and put it into a pending slot, or else into the overflow list."""
    count = tl.load(noted)
    if count > most:
        tl.store(lost, 1)
        count = most
    line = tl.program_id(0)
    while line < count:
        row = tl.load(notes[0] + first_note + line).to(tl.int64)
        cell = tl.load(notes[1] + first_note + line).to(tl.int64)
        best = tl.load(notes[2] + first_note + line)
        length = tl.load(lengths + row).to(tl.int32)
        base = m + row * row_stride + start * column_stride + cell
        begin = 0
        first = 1 << 30
        while begin < length:
            column = begin + tl.arange(0, COLUMNS)
            found = tl.load(base + column.to(tl.int64) * column_stride, mask=column < length, other=0.0).to(tl.float32)
            if NEGATIVE:
                found = -found
            first = tl.minimum(first, tl.min(tl.where((column < length) & (found == best), column, 1 << 30), 0))
            begin += COLUMNS
        where = (tl.load(sentences + row) << POSITION_BITS) | (first + 1).to(tl.int64)
        own = row * key_stride + 2 * (length - 1 if BY_SENTENCE else first).to(tl.int64)
        hit = (best, where, tl.load(keys + own), tl.load(keys + own + 1))
        if _add_pending(cell, hit, slots, pending, t, WIDTH) > 0:
            _add_overflow(cell, hit, overflow, overflow_count, lost, OVERFLOW)
        line += tl.num_programs(0)


@triton.jit
@no_type_check
def retry_overflow(
    slots,
    pending,
    overflow,
    overflow_count,
    again,
    again_count,
    lost,
    t,
    WIDTH: tl.constexpr,
    OVERFLOW: tl.constexpr,
):
    """Offer the hits of the overflow list again after a merge; one that finds no slot again goes into the other list."""
    cells, coefficient, place, key = overflow
    count = tl.minimum(tl.load(overflow_count), OVERFLOW)
    line = tl.program_id(0)
    while line < count:
        cell = tl.load(cells + line)
        one, two = tl.load(key + 2 * line), tl.load(key + 2 * line + 1)
        hit = (tl.load(coefficient + line), tl.load(place + line), one, two)
        if _add_pending(cell, hit, slots, pending, t, WIDTH) > 0:
            _add_overflow(cell, hit, again, again_count, lost, OVERFLOW)
        line += tl.num_programs(0)


@triton.jit
@no_type_check
def merge(slots, pending, bound, t, EMPTY: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Sort a cell's triggers and pending hits, drop repeated prefixes, and empty the pending slots."""
    coefficient, place, key = slots
    cell = tl.program_id(0)
    count = tl.load(pending + cell)
    if count > 0:
        used = t + tl.minimum(count, WIDTH - t)
        begin = cell.to(tl.int64) * WIDTH
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
        tl.store(pending + cell, 0)
        behind = (mine >= t) & (mine < used)
        tl.store(coefficient + begin + mine, 0.0, mask=behind)
        tl.store(place + begin + mine, EMPTY, mask=behind)
        tl.store(key + 2 * (begin + mine), 0, mask=behind)
        tl.store(key + 2 * (begin + mine) + 1, 0, mask=behind)
        kept = valid & (repeated == 0) & (rank < t)
        at = begin + rank
        tl.store(coefficient + at, c, mask=kept)
        tl.store(place + at, p, mask=kept)
        tl.store(key + 2 * at, one, mask=kept)
        tl.store(key + 2 * at + 1, two, mask=kept)
        tl.store(bound + cell, tl.max(tl.where(kept & (rank == t - 1), c, 0.0), 0))
