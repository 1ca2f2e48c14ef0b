"""Both ends of every vector's scores on a GPU, without sorting them: tiles of words are looked through, few are looked into.

The scores of a row are read once, in tiles of 32 words: what is written down is each tile's maximum and minimum, and the
row's normaliser. Where the word vectors are narrow, writing scores would take longer than computing them, so they are
never written: `_multiply` reduces them as they leave the product. The k-th best of the maxima over groups of tiles is a
bound that the k-th best word cannot be below; `_choose` lists the tiles that reach it, `_fetch` reads their scores or
`_again` computes them a second time, `_pick` ranks those that reach the bound. All is exact: a row in which more reach
the bound than there are places (many equal scores), or fewer than k, is told, and left to the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ffmem.model.vocabulary import Offsets, Product

WORDS = 32
"""Words of a tile."""
SPAN = 4096
"""Words that one program reads, of scores that are kept: 128 tiles, each of every 128th word."""
BLOCK = 128
"""Words that a product makes at a time, of scores that are not: four tiles, each of the words that one thread has."""
STEPS = 32
"""Blocks that one program multiplies."""
NARROW = (16, 32, 64, 128, 256)
"""Widths of word vectors whose scores are not kept."""
ROWS, WARPS, STAGES = 128, 8, 3
"""Rows, warps and loads in flight of a product; two of them share a processor. Wide vectors leave room for two loads."""
MOST = 128
"""The largest k that these kernels are for."""
SHARES = 4
"""Programs that compute a tile again, for different rows."""


@dataclass(frozen=True)
class Ends:
    """Ids and values of both ends, best and worst first, the smaller id first among equals; and which rows are sure."""

    ids: Int[Tensor, "2 n k"]
    values: Float[Tensor, "2 n k"]
    normalisers: Float[Tensor, "n pieces"]
    sure: Bool[Tensor, " n"]


def is_kept(product: Product) -> bool:
    """Whether the scores are written to memory."""
    size, width = product.words.shape
    half = product.inputs.dtype in (torch.bfloat16, torch.float16)
    return not (product.plain and half and width in NARROW and size >= BLOCK)


def room(products: Sequence[Product], k: int) -> int:
    """Bytes that `ends` needs for a row, about."""
    sizes = [(len(product.words), is_kept(product)) for product in products]
    tiles = sum(_tiles(size, kept) for size, kept in sizes)
    return 4 * (sum(size for size, kept in sizes if kept) + 2 * tiles + 2 * _places(k) * (WORDS + 8))


def ends(products: Sequence[Product], k: int, offsets: Offsets | None) -> Ends:
    """The k largest and the k smallest scores of each row, over all pieces.

    `offsets`, from the pieces' normalisers, are added to their scores before these are compared.
    """
    with torch.cuda.device_of(products[0].inputs):
        return _ends(products, k, offsets)


def _ends(products: Sequence[Product], k: int, offsets: Offsets | None) -> Ends:
    n, device = len(products[0].inputs), products[0].inputs.device
    shapes = tuple((product.low, len(product.words), is_kept(product)) for product in products)
    firsts = [0]
    for _, size, kept in shapes:
        firsts.append(firsts[-1] + _tiles(size, kept))
    tiles, places = firsts[-1], _places(k)
    edges = torch.empty(2, n, tiles, device=device)
    scores: list[Tensor | None] = []
    normalisers = []
    for product, first in zip(products, firsts, strict=False):
        scores.append(product.scores() if is_kept(product) else None)
        made = _read_scores(scores[-1], edges, first) if scores[-1] is not None else _read_product(product, edges, first)
        normalisers.append(_combined(*made))
    normaliser = torch.stack(normalisers, 1)
    added = offsets(normaliser).contiguous() if offsets is not None else torch.zeros_like(normaliser)
    piece, base, end, step = _geometry(shapes, device)
    chosen = torch.full((n, 2, places), tiles, dtype=torch.int32, device=device)
    counts = torch.empty(2, n, 2, dtype=torch.int32, device=device)
    bound = torch.empty(n, 2, device=device)
    _choose[(n, 2)](
        edges,
        added,
        piece,
        chosen,
        counts[0],
        bound,
        n,
        tiles,
        len(shapes),
        k,
        GROUPS=2 * places,
        PLACES=places,
        num_warps=1,
    )
    del edges
    got = torch.empty(n, 2, places, WORDS, device=device)
    if all(found is not None for found in scores):
        order = starts = None
    else:
        small = torch.int16 if tiles < 1 << 15 else torch.int32
        ordered, order = chosen.flatten().to(small).sort()
        starts = torch.searchsorted(ordered, torch.arange(tiles + 1, device=device).to(small), out_int32=True)
    for product, found, first, last in zip(products, scores, firsts, firsts[1:], strict=False):
        if found is not None:
            _fetch[(n, 2)](found, chosen, got, found.shape[1], first, last, PLACES=places, num_warps=4)
        else:
            size, width = product.words.shape
            _again[(last - first, SHARES)](
                product.inputs, product.words, order, starts, got, size, first, places, K=width, PAIRS=64, num_warps=4
            )
    most = 2 * places
    spare = torch.empty(2, n, 2, most, dtype=torch.int32, device=device)
    ids = torch.empty(2, n, k, dtype=torch.int64, device=device)
    values = torch.empty(2, n, k, device=device)
    _pick[(n, 2)](
        got,
        chosen,
        counts,
        bound,
        added,
        piece,
        base,
        end,
        step,
        spare[0].view(torch.float32),
        spare[1],
        ids,
        values,
        n,
        tiles,
        len(shapes),
        k,
        PLACES=places,
        MOST=most,
        TILES=32,
        num_warps=4,
    )
    counted = counts.amin(2), counts.amax(2)
    sure = (counted[1][0] <= places) & (counted[0][1] >= k) & (counted[1][1] <= most) & normaliser.isfinite().all(1)
    return Ends(ids, values, normaliser, sure)


def logsumexp(scores: Float[Tensor, "n size"]) -> Float[Tensor, " n"]:
    with torch.cuda.device_of(scores):
        return _combined(*_read_scores(scores, None, 0))


def before(scores: Float[Tensor, "n size"], bound: Float[Tensor, " n"], place: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """How many scores of each row are larger than its bound, or equal to it and in front of its place."""
    n, size = scores.shape
    spans = triton.cdiv(size, SPAN)
    count = torch.empty(n, spans, dtype=torch.int32, device=scores.device)
    with torch.cuda.device_of(scores):
        _before[(n, spans)](scores, bound.contiguous(), place.contiguous(), count, size, scores.stride(0), SPAN=SPAN)
    return count.sum(1)


def _tiles(size: int, kept: bool) -> int:
    return triton.cdiv(size, SPAN) * (SPAN // WORDS) if kept else triton.cdiv(size, BLOCK) * (BLOCK // WORDS)


def _places(k: int) -> int:
    """Tiles that may be chosen: more than k only by chance or where scores are equal."""
    return max(128, triton.next_power_of_2(2 * k))


@lru_cache(maxsize=8)
def _geometry(shapes: tuple[tuple[int, int, bool], ...], device: torch.device) -> tuple[Tensor, ...]:
    """Of every tile: its piece, its first word's id, the id behind its piece, and how far its words are apart."""
    columns: list[list[Tensor]] = [[], [], [], []]
    for number, (low, size, kept) in enumerate(shapes):
        tile = torch.arange(_tiles(size, kept), dtype=torch.int32)
        apart = SPAN // WORDS if kept else BLOCK // WORDS
        first = tile // apart * (apart * WORDS) + tile % apart * (1 if kept else 2)
        rows = torch.full_like(tile, number), low + first, torch.full_like(tile, low + size), torch.full_like(tile, apart)
        for column, row in zip(columns, rows, strict=True):
            column.append(row)
    return tuple(torch.cat(column).to(device) for column in columns)


def _combined(top: Float[Tensor, "n parts"], total: Float[Tensor, "n parts"]) -> Float[Tensor, " n"]:
    """log Σ exp from parts, each a maximum and a sum of exp(score - maximum)."""
    best = top.amax(1)
    return best + (total * (top - best[:, None]).exp()).sum(1).log()


def _read_scores(scores: Float[Tensor, "n size"], edges: Tensor | None, first: int) -> tuple[Tensor, Tensor]:
    n, size = scores.shape
    spans = triton.cdiv(size, SPAN)
    top, total = torch.empty(2, n, spans, device=scores.device)
    high, low = (top, top) if edges is None else edges
    _read[(n, spans)](
        scores, high, low, top, total, size, scores.stride(0), high.shape[1], first, TILES=edges is not None, SPAN=SPAN
    )
    return top, total


def _read_product(product: Product, edges: Tensor, first: int) -> tuple[Tensor, Tensor]:
    inputs, words = product.inputs, product.words
    (n, width), size = inputs.shape, len(words)
    assert inputs.is_contiguous()
    assert words.is_contiguous()
    whole = size // BLOCK
    parts = triton.cdiv(whole, STEPS)
    ragged = size % BLOCK > 0
    top, total = torch.empty(2, n, parts + ragged, device=inputs.device)

    def launch(begin: int, end: int, count: int, part: int) -> None:
        _multiply[(triton.cdiv(n, ROWS), count)](
            inputs,
            words,
            *edges,
            top,
            total,
            n,
            size,
            edges.shape[2],
            first,
            begin,
            end,
            top.shape[1],
            part,
            RAGGED=end > whole,
            K=width,
            STEPS=STEPS if end <= whole else 1,
            ROWS=ROWS,
            STAGES=STAGES if width <= 64 else 2,
            num_warps=WARPS,
        )

    launch(0, whole, parts, 0)
    if ragged:
        launch(whole, whole + 1, 1, parts)
    return top, total


@triton.jit
@no_type_check
def _multiply(
    inputs,
    words,
    highs,
    lows,
    tops,
    totals,
    n,
    size,
    tiles,
    first,
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
def _read(scores, highs, lows, tops, totals, size, stride, tiles, first, TILES: tl.constexpr, SPAN: tl.constexpr):
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
    total = tl.sum(tl.exp2((x - best) * 1.4426950408889634))
    part = row * tl.num_programs(1) + span
    tl.store(tops + part, best)
    tl.store(totals + part, total)


@triton.jit
@no_type_check
def _before(scores, bounds, places, counts, size, stride, SPAN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    x = tl.load(scores + row * stride + word, mask=word < size, other=float("-inf"))
    bound = tl.load(bounds + row)
    place = tl.load(places + row)
    ahead = (word < size) & ((x > bound) | ((x == bound) & (word < place)))
    tl.store(counts + row * tl.num_programs(1) + tl.program_id(1), tl.sum(ahead.to(tl.int32), 0))


@triton.jit
@no_type_check
def _standing(edges, offsets, pieces_of, row, side, tile, n, tiles, pieces):
    """The best that each tile has, on this side."""
    edge = tl.load(edges + (side.to(tl.int64) * n + row) * tiles + tile, mask=tile < tiles, other=0.0)
    piece = tl.load(pieces_of + tile, mask=tile < tiles, other=0)
    value = (edge + tl.load(offsets + row * pieces + piece)) * (1 - 2 * side).to(tl.float32)
    return tl.where(tile < tiles, value, float("-inf"))


@triton.jit
@no_type_check
def _choose(
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
        best = tl.maximum(best, tl.max(_standing(edges, offsets, pieces_of, row, side, tile, n, tiles, pieces), 0))
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
        value = _standing(edges, offsets, pieces_of, row, side, tile, n, tiles, pieces)
        reaches = ((value >= bound) & (value > float("-inf"))).to(tl.int32)
        place = count + tl.cumsum(reaches, 0) - 1
        tl.store(chosen + mine + place, tile, mask=(reaches > 0) & (place < PLACES))
        count += tl.sum(reaches, 0)
        begin += 4 * GROUPS
    tl.store(counts + row * 2 + side, count)
    tl.store(bounds + row * 2 + side, bound)


@triton.jit
@no_type_check
def _fetch(scores, chosen, got, size, first, last, PLACES: tl.constexpr):
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
def _again(inputs, words, order, starts, got, size, first, places, K: tl.constexpr, PAIRS: tl.constexpr):
    """A tile's scores a second time, for the rows that have chosen it: the same product of the same numbers."""
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
        row = pair // (2 * places)
        a = tl.load(inputs + row[:, None] * K + k[None, :], mask=(line < stop)[:, None], other=0.0)
        x = tl.dot(a, b.T)
        tl.store(got + pair[:, None] * 32 + number[None, :], x, mask=(line < stop)[:, None])
        start += PAIRS * tl.num_programs(1)


@triton.jit
@no_type_check
def _pick(
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
