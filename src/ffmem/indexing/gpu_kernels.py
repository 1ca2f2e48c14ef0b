"""The kernels of the sieve: `sift` reads a batch once and notes every hit that passes its cell's threshold, `tally` adds up
what was counted, `settle` gives the few survivors their waiting places, `merge` lets them in, and `take_back` gives the
places that are free then to survivors that found none before.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


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
    one = passes.to(tl.int32)
    line = tl.atomic_add(noted, tl.sum(one, 0)) + tl.cumsum(one, 0) - 1
    passes = passes & (line < most)
    tl.store(note_row + line, row + tl.zeros_like(cell), mask=passes)
    tl.store(note_cell + line, cell, mask=passes)
    tl.store(note_best + line, best, mask=passes)


@triton.jit
@no_type_check
def _two_at_once(code: tl.constexpr, one, other):
    return tl.inline_asm_elementwise(code, "=r,r,r", [one, other], dtype=one.dtype, is_pure=True, pack=2)


@triton.jit
@no_type_check
def _larger_of(one, other, PACKED: tl.constexpr):
    """The larger of each pair; what is not a number wins."""
    return _larger(one, other) if PACKED == "" else _two_at_once("max.NaN." + PACKED + " $0, $1, $2;", one, other)


@triton.jit
@no_type_check
def _smaller_of(one, other, PACKED: tl.constexpr):
    return _smaller(one, other) if PACKED == "" else _two_at_once("min.NaN." + PACKED + " $0, $1, $2;", one, other)


@triton.jit
@no_type_check
def _count(fired, found, real, PACKED: tl.constexpr):
    """Firings, one more where `found` is above 0. The bits of such a number, taken as an integer, are above 0 too."""
    if PACKED == "":
        fired += (real & (found > 0)).to(tl.int32)
    else:
        one = real.to(tl.int16) + tl.zeros_like(fired)
        fired += _two_at_once("min.relu.s16x2 $0, $1, $2;", found.to(tl.int16, bitcast=True), one)
    return fired


@triton.jit
@no_type_check
def _activated(x, table, ACTIVATION: tl.constexpr, PACKED: tl.constexpr):
    """A function of 16-bit numbers is a table of their bits."""
    if ACTIVATION == "relu":
        m = _larger_of(x, tl.zeros_like(x), PACKED)
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
    note_row,
    note_cell,
    note_best,
    group_fired,
    group_highest,
    group_lowest,
    odd,
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
    """The hot one: a few sentences, a block of cells. It only notes survivors, so that it needs few registers.

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
    strange = tl.zeros((BLOCK,), tl.int1)
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
                    best = _larger_of(best, high_found, PACKED)
                    if NEGATIVE or STATISTICS:
                        worst = _smaller_of(worst, low_found, PACKED)
                    if STATISTICS:
                        firings = _count(firings, found, real, PACKED)
                begin += COLUMNS
            high = best.to(tl.float32)
            strange = strange | ~(high < float("inf"))
            passes = inside & (high > 0) & (high >= bound)
            if tl.max(passes.to(tl.int32), 0) > 0:
                _note(passes, high, row, cell, noted, note_row, note_cell, note_best, most)
            if NEGATIVE or STATISTICS:
                low = -worst.to(tl.float32)
                strange = strange | ~(low < float("inf"))
            if STATISTICS:
                highest = _larger_of(highest, best, PACKED)
                lowest = _smaller_of(lowest, worst, PACKED)
                fired += firings.to(tl.int32)
            if NEGATIVE:
                passes = inside & (low > 0) & (low >= low_bound)
                if tl.max(passes.to(tl.int32), 0) > 0:
                    # The second half of the notes is for negatives.
                    _note(passes, low, row, cell, noted + 1, note_row + most, note_cell + most, note_best + most, most)
    if tl.max((inside & strange).to(tl.int32), 0) > 0:
        tl.store(odd, 1)
    if STATISTICS:
        at = group.to(tl.int64) * cells + cell
        tl.store(group_fired + at, fired, mask=inside)
        tl.store(group_highest + at, highest, mask=inside)
        tl.store(group_lowest + at, lowest, mask=inside)


@triton.jit(do_not_specialize=["groups"])
@no_type_check
def tally(group_fired, group_highest, group_lowest, active, maximum, minimum, groups, cells, BLOCK: tl.constexpr):
    """Add the counts of all groups of sentences to a layer's."""
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
            fired += tl.load(group_fired + at, mask=inside & new, other=0)
            highest = tl.maximum(highest, tl.load(group_highest + at, mask=inside, other=0.0).to(tl.float32))
            lowest = tl.minimum(lowest, tl.load(group_lowest + at, mask=inside, other=0.0).to(tl.float32))
        begin += 4 * tl.num_programs(1)
    tl.atomic_add(active + cell, fired, mask=inside)
    tl.atomic_max(maximum + cell, highest, mask=inside)
    tl.atomic_min(minimum + cell, lowest, mask=inside)


@triton.jit
@no_type_check
def _offer(cell, best, where, one, two, coefficient, place, key, taken, t, width, WIDTH: tl.constexpr):
    """Give a hit a waiting place, unless it cannot become a trigger; 1 where all places are taken, else 0.

    "The" opens very many sentences: a prefix that is held, or waits, would pass again and again. A hit that waits may be
    only half written when it is looked at; its place was empty before, so it is not taken for another.
    """
    slot = tl.arange(0, WIDTH)
    used = slot < t + tl.minimum(tl.load(taken + cell), width - t)
    room = cell * width + slot
    held = tl.load(coefficient + room, mask=used, other=0.0)
    held_place = tl.load(place + room, mask=used, other=0)
    same = used & (tl.load(key + 2 * room, mask=used, other=0) == one)
    same = same & (tl.load(key + 2 * room + 1, mask=same, other=0) == two)
    # Better, or equal and earlier: as a hit of the same prefix, or as the last trigger.
    before = (held > best) | ((held == best) & (held_place <= where))
    without = 0
    if tl.max((before & (same | (slot == t - 1))).to(tl.int32), 0) == 0:
        free = tl.atomic_add(taken + cell, 1)
        if free < width - t:
            mine = cell * width + t + free
            tl.store(coefficient + mine, best)
            tl.store(place + mine, where)
            tl.store(key + 2 * mine, one)
            tl.store(key + 2 * mine + 1, two)
        else:
            without = 1
    return without


@triton.jit
@no_type_check
def _set_aside(cell, best, where, one, two, cells, coefficients, places, keys, aside, lost, SPILLED: tl.constexpr):
    """Keep a hit that found no waiting place; where there is no room either, say so."""
    at = tl.atomic_add(aside, 1)
    if at < SPILLED:
        tl.store(cells + at, cell)
        tl.store(coefficients + at, best)
        tl.store(places + at, where)
        tl.store(keys + 2 * at, one)
        tl.store(keys + 2 * at + 1, two)
    else:
        tl.store(lost, 1)


@triton.jit(do_not_specialize=["start", "key_stride"])
@no_type_check
def settle(
    m,
    lengths,
    sentences,
    keys,
    coefficient,
    place,
    key,
    taken,
    spilled_cell,
    spilled_coefficient,
    spilled_place,
    spilled_key,
    aside,
    lost,
    noted,
    note_row,
    note_cell,
    note_best,
    start,
    row_stride,
    column_stride,
    key_stride,
    t,
    width,
    most,
    POSITION_BITS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    BY_SENTENCE: tl.constexpr,
    WIDTH: tl.constexpr,
    SPILLED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each noted survivor: find where in its sentence it stands, and give it a place; set it aside if there is none."""
    count = tl.load(noted)
    if count > most:
        tl.store(lost, 1)
        count = most
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
            found = tl.load(base + column.to(tl.int64) * column_stride, mask=column < length, other=0.0).to(tl.float32)
            if NEGATIVE:
                found = -found
            first = tl.minimum(first, tl.min(tl.where((column < length) & (found == best), column, 1 << 30), 0))
            begin += COLUMNS
        where = (tl.load(sentences + row) << POSITION_BITS) | (first + 1).to(tl.int64)
        own = row * key_stride + 2 * (length - 1 if BY_SENTENCE else first).to(tl.int64)
        one = tl.load(keys + own)
        two = tl.load(keys + own + 1)
        if _offer(cell, best, where, one, two, coefficient, place, key, taken, t, width, WIDTH) > 0:
            _set_aside(
                cell,
                best,
                where,
                one,
                two,
                spilled_cell,
                spilled_coefficient,
                spilled_place,
                spilled_key,
                aside,
                lost,
                SPILLED,
            )
        line += tl.num_programs(0)


@triton.jit
@no_type_check
def take_back(
    coefficient,
    place,
    key,
    taken,
    spilled_cell,
    spilled_coefficient,
    spilled_place,
    spilled_key,
    aside,
    again_cell,
    again_coefficient,
    again_place,
    again_key,
    again,
    lost,
    t,
    width,
    WIDTH: tl.constexpr,
    SPILLED: tl.constexpr,
):
    """Those that were set aside, once the waiting places are empty again; what finds none is set aside again, elsewhere."""
    count = tl.minimum(tl.load(aside), SPILLED)
    line = tl.program_id(0)
    while line < count:
        cell = tl.load(spilled_cell + line)
        best = tl.load(spilled_coefficient + line)
        where = tl.load(spilled_place + line)
        one = tl.load(spilled_key + 2 * line)
        two = tl.load(spilled_key + 2 * line + 1)
        if _offer(cell, best, where, one, two, coefficient, place, key, taken, t, width, WIDTH) > 0:
            _set_aside(
                cell, best, where, one, two, again_cell, again_coefficient, again_place, again_key, again, lost, SPILLED
            )
        line += tl.num_programs(0)


@triton.jit
@no_type_check
def merge(
    coefficient,
    place,
    key,
    taken,
    bound,
    t,
    width,
    EMPTY: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A cell's triggers and the hits that wait, sorted, repeated prefixes dropped; the waiting places are empty again."""
    cell = tl.program_id(0)
    waiting = tl.load(taken + cell)
    if waiting > 0:
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
        tl.store(taken + cell, 0)
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
