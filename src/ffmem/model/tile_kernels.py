"""The kernels of the tiles: `multiply` and `read` look through all scores, `choose` lists the tiles worth a look, `fetch`
and `again` bring their scores, `pick` ranks them; `before` and `count` count those in front of a given one.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def multiply(
    inputs,
    words,
    highs,
    lows,
    tops,
    totals,
    tiles,
    first,
    n,
    size,
    begin,
    end,
    parts,
    part,
    RAGGED: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The hot one for narrow vectors: some rows, blocks of words from `begin` to `end`; no score leaves it. No thread
    needs another's scores, either: in a product's layout it has words 2q and 2q + 1 of every eight, and they are a tile.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < n)[:, None]
    k = tl.arange(0, K)
    a = tl.load(inputs + tl.minimum(row, n - 1)[:, None] * K + k[None, :])
    at = row.to(tl.int64)[:, None] * tiles + first + tl.arange(0, 4)[None, :]
    top = tl.full((ROWS, 4), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 4), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        number = begin + tl.program_id(1) * STEPS + step
        # Behind the last block, that one again: its tiles are what they were, its sum must not count twice.
        block = tl.minimum(number, end - 1)
        word = block * 128 + tl.arange(0, 128)
        if RAGGED:
            b = tl.load(words + tl.minimum(word, size - 1)[:, None] * K + k[None, :])
            x = tl.dot(a, b.T)
            low = tl.reshape(tl.where((word < size)[None, :], x, float("inf")), (ROWS, 16, 4, 2))
            x = tl.reshape(tl.where((word < size)[None, :], x, float("-inf")), (ROWS, 16, 4, 2))
        else:
            b = tl.load(words + word[:, None] * K + k[None, :])
            x = tl.reshape(tl.dot(a, b.T), (ROWS, 16, 4, 2))
            low = x
        high = tl.max(tl.max(x, 3), 1)
        low = tl.min(tl.min(low, 3), 1)
        tl.store(highs + at + block * 4, high, mask=inside)
        tl.store(lows + at + block * 4, low, mask=inside)
        new = tl.maximum(top, high)
        base = new * LOG2E
        if RAGGED:
            base = tl.where(new > float("-inf"), base, 0.0)
        more = tl.sum(tl.sum(tl.exp2(x * LOG2E - base[:, None, :, None]), 3), 1)
        total = total * tl.exp2(top * LOG2E - base) + tl.where(number < end, more, 0.0)
        top = new
    best = tl.max(top, 1)
    total = tl.sum(total * tl.exp2((top - best[:, None]) * LOG2E), 1)
    place = row.to(tl.int64) * parts + part + tl.program_id(1)
    tl.store(tops + place, best, mask=row < n)
    tl.store(totals + place, total, mask=row < n)


@triton.jit
@no_type_check
def read(scores, highs, lows, tops, totals, size, stride, tiles, first, TILES: tl.constexpr, SPAN: tl.constexpr):
    """The hot one for scores that are kept: a row, a span of words, read once."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    column = tl.arange(0, 128)
    word = span * SPAN + tl.arange(0, SPAN // 128)[:, None] * 128 + column[None, :]
    x = tl.load(scores + row * stride + word, mask=word < size, other=float("-inf"))
    high = tl.max(x, 0)
    if TILES:
        low = tl.min(tl.where(word < size, x, float("inf")), 0)
        at = row * tiles + first + span * 128 + column
        tl.store(highs + at, high)
        tl.store(lows + at, low)
    best = tl.max(high, 0)
    base = tl.where(best > float("-inf"), best, 0.0)
    total = tl.sum(tl.exp2((x - base) * 1.4426950408889634))
    part = row * tl.num_programs(1) + span
    tl.store(tops + part, best)
    tl.store(totals + part, total)


@triton.jit
@no_type_check
def before(scores, bounds, places, counts, size, stride, SPAN: tl.constexpr):
    """Of scores that are kept, how many are larger than a row's bound, or equal and in front of its place."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    x = tl.load(scores + row * stride + word, mask=word < size, other=float("-inf"))
    bound = tl.load(bounds + row)
    place = tl.load(places + row)
    ahead = (word < size) & ((x > bound) | ((x == bound) & (word < place)))
    tl.store(counts + row * tl.num_programs(1) + tl.program_id(1), tl.sum(ahead.to(tl.int32), 0))


@triton.jit
@no_type_check
def count(
    inputs,
    words,
    bounds,
    places,
    counts,
    n,
    size,
    begin,
    end,
    parts,
    part,
    RAGGED: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `before`, of scores that are not kept: as they leave the product, thread by thread as in `multiply`.

    The word at the place itself is not in front of itself, whatever the last digit of its second product.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = tl.minimum(row, n - 1)
    k = tl.arange(0, K)
    a = tl.load(inputs + real[:, None] * K + k[None, :])
    bound = tl.load(bounds + real)[:, None]
    place = tl.load(places + real)[:, None]
    # Counted in floats, which takes fewer registers: two programs share a processor.
    total = tl.zeros((ROWS, 4), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        number = begin + tl.program_id(1) * STEPS + step
        word = tl.minimum(number, end - 1) * 128 + tl.arange(0, 128)
        b = tl.load(words + (tl.minimum(word, size - 1) if RAGGED else word)[:, None] * K + k[None, :])
        x = tl.dot(a, b.T)
        ahead = ((x > bound) & (word[None, :] != place)) | ((x == bound) & (word[None, :] < place))
        if RAGGED:
            ahead = ahead & (word < size)[None, :]
        more = tl.sum(tl.sum(tl.reshape(tl.where(ahead, 1.0, 0.0), (ROWS, 16, 4, 2)), 3), 1)
        total += tl.where(number < end, more, 0.0)
    tl.store(counts + row.to(tl.int64) * parts + part + tl.program_id(1), tl.sum(total, 1).to(tl.int32), mask=row < n)


@triton.jit
@no_type_check
def _edge(edges, offsets, pieces_of, row, side, tile, n, tiles, pieces):
    """The best that each tile has, on this side."""
    edge = tl.load(edges + (side.to(tl.int64) * n + row) * tiles + tile, mask=tile < tiles, other=0.0)
    piece = tl.load(pieces_of + tile, mask=tile < tiles, other=0)
    value = (edge + tl.load(offsets + row * pieces + piece)) * (1 - 2 * side).to(tl.float32)
    return tl.where(tile < tiles, value, float("-inf"))


@triton.jit
@no_type_check
def choose(
    edges,
    offsets,
    pieces_of,
    chosen,
    counts,
    bounds,
    n,
    tiles,
    pieces,
    k,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """The tiles of a row that reach the k-th best of its groups of tiles. A group has every GROUPS-th tile, so that
    words that stand together, being frequent, are spread over groups."""
    row = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    best = tl.full((GROUPS,), float("-inf"), tl.float32)
    begin = 0
    while begin < tiles:
        tile = begin + tl.arange(0, 4)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
        best = tl.maximum(best, tl.max(_edge(edges, offsets, pieces_of, row, side, tile, n, tiles, pieces), 0))
        begin += 4 * GROUPS
    # The largest number that k of them reach, bit by bit: with the bits of negatives flipped, integers are in the order
    # of the numbers.
    bits = best.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    least = tl.where(tl.sum((bits >= 0).to(tl.int32), 0) >= k, 0, -0x80000000).to(tl.int32)
    for digit in tl.static_range(31):
        more = least | (1 << (30 - digit))
        least = tl.where(tl.sum((bits >= more).to(tl.int32), 0) >= k, more, least)
    bound = (least ^ ((least >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    mine = (row * 2 + side) * PLACES
    count = 0
    begin = 0
    while begin < tiles:
        tile = begin + tl.arange(0, 4 * GROUPS)
        value = _edge(edges, offsets, pieces_of, row, side, tile, n, tiles, pieces)
        reaches = ((value >= bound) & (value > float("-inf"))).to(tl.int32)
        place = count + tl.cumsum(reaches, 0) - 1
        tl.store(chosen + mine + place, tile, mask=(reaches > 0) & (place < PLACES))
        count += tl.sum(reaches, 0)
        begin += 4 * GROUPS
    tl.store(counts + row * 2 + side, count)
    tl.store(bounds + row * 2 + side, bound)


@triton.jit
@no_type_check
def fetch(scores, chosen, got, size, first, last, PLACES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = (row * 2 + tl.program_id(1)) * PLACES + tl.arange(0, PLACES)
    tile = tl.load(chosen + place)
    own = (tile >= first) & (tile < last)
    tile = tile - first
    number = tl.arange(0, 32)[None, :]
    word = (tile // 128 * 4096 + tile % 128)[:, None] + number * 128
    x = tl.load(scores + row * size + word, mask=own[:, None] & (word < size), other=0.0)
    tl.store(got + place[:, None] * 32 + number, x, mask=own[:, None])


@triton.jit
@no_type_check
def again(inputs, words, order, starts, got, size, first, each, K: tl.constexpr, PAIRS: tl.constexpr):
    """A tile's scores a second time, for the rows that have chosen it: the same product of the same numbers. A row may
    choose `each` tiles; `order` has all choices by tile, `starts` where each tile's begin."""
    tile = tl.program_id(0)
    start = tl.load(starts + first + tile) + tl.program_id(1) * PAIRS
    stop = tl.load(starts + first + tile + 1)
    k = tl.arange(0, K)
    number = tl.arange(0, 32)
    word = tl.minimum(tile // 4 * 128 + tile % 4 * 2 + number // 2 * 8 + number % 2, size - 1)
    b = tl.load(words + word[:, None] * K + k[None, :])
    while start < stop:
        line = start + tl.arange(0, PAIRS)
        pair = tl.load(order + line, mask=line < stop, other=0)
        row = pair // each
        a = tl.load(inputs + row[:, None] * K + k[None, :], mask=(line < stop)[:, None], other=0.0)
        x = tl.dot(a, b.T)
        tl.store(got + pair[:, None] * 32 + number[None, :], x, mask=(line < stop)[:, None])
        start += PAIRS * tl.num_programs(1)


@triton.jit
@no_type_check
def pick(
    got,
    chosen,
    counts,
    bounds,
    offsets,
    pieces_of,
    bases,
    ends_of,
    steps,
    spare_value,
    spare_id,
    ids,
    values,
    n,
    tiles,
    pieces,
    k,
    PLACES: tl.constexpr,
    MOST: tl.constexpr,
    TILES: tl.constexpr,
):
    """The words of the chosen tiles that reach the bound, put aside and ranked: best first, then by id."""
    row = tl.program_id(0).to(tl.int64)
    side = tl.program_id(1)
    sign = (1 - 2 * side).to(tl.float32)
    mine = row * 2 + side
    bound = tl.load(bounds + mine)
    used = tl.minimum(tl.load(counts + mine), PLACES)
    number = tl.arange(0, 32)[None, :]
    found = 0
    begin = 0
    while begin < used:
        place = begin + tl.arange(0, TILES)
        inside = place < used
        tile = tl.load(chosen + mine * PLACES + place, mask=inside, other=0)
        offset = tl.load(offsets + row * pieces + tl.load(pieces_of + tile))
        step = tl.load(steps + tile)[:, None]
        apart = tl.where(step == 128, number * 128, number // 2 * 8 + number % 2)
        word = tl.load(bases + tile)[:, None] + apart
        inside = inside[:, None] & (word < tl.load(ends_of + tile)[:, None])
        x = tl.load(got + (mine * PLACES + place)[:, None] * 32 + number, mask=inside, other=0.0)
        value = tl.reshape((x + offset[:, None]) * sign, (TILES * 32,))
        word = tl.reshape(word, (TILES * 32,))
        reaches = (tl.reshape(inside, (TILES * 32,)) & (value >= bound)).to(tl.int32)
        at = found + tl.cumsum(reaches, 0) - 1
        kept = (reaches > 0) & (at < MOST)
        tl.store(spare_value + mine * MOST + at, value, mask=kept)
        tl.store(spare_id + mine * MOST + at, word, mask=kept)
        found += tl.sum(reaches, 0)
        begin += TILES
    tl.store(counts + 2 * n + mine, found)
    tl.debug_barrier()
    at = tl.arange(0, MOST)
    held = at < found
    value = tl.load(spare_value + mine * MOST + at, mask=held, other=0.0)
    word = tl.load(spare_id + mine * MOST + at, mask=held, other=0)
    rank = tl.zeros((MOST,), tl.int32)
    begin = 0
    while begin < tl.minimum(found, MOST):
        other = begin + tl.arange(0, 16)
        inside = other < tl.minimum(found, MOST)
        other_value = tl.load(spare_value + mine * MOST + other, mask=inside, other=float("-inf"))[:, None]
        other_word = tl.load(spare_id + mine * MOST + other, mask=inside, other=0x7FFFFFFF)[:, None]
        first = (other_value > value[None, :]) | ((other_value == value[None, :]) & (other_word < word[None, :]))
        rank += tl.sum(first.to(tl.int32), 0)
        begin += 16
    out = (side.to(tl.int64) * n + row) * k + rank
    tl.store(ids + out, word.to(tl.int64), mask=held & (rank < k))
    tl.store(values + out, value * sign, mask=held & (rank < k))
