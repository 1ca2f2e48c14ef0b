"""Both ends of every vector's scores on a GPU, and where a given word stands, without sorting them: tiles of words are
looked through, few are looked into.

The scores of a row are read once, in tiles of 32 words: what is written down is each tile's maximum and minimum, and the
row's normaliser. Where the word vectors are narrow, writing scores would take longer than computing them, so they are
never written, but reduced as they leave the product. The k-th best of the maxima over groups of tiles is a bound that the
k-th best word cannot be below; the tiles that reach it are listed, their scores read or computed a second time, and those
that reach the bound are ranked. A word's rank is a count of the scores in front of its own. All is exact: a row in which
more reach the bound than there are places (many equal scores), or fewer than k, is told, and left to the plain way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ffmem.model import tile_kernels as kernels
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
SHARES, PAIRS = 4, 64
"""Programs that compute a tile again, for different rows, and rows that each takes at a time."""


@dataclass(frozen=True)
class Ends:
    """Ids and values of both ends, best and worst first, the smaller id first among equals; and which rows are sure."""

    ids: Int[Tensor, "2 n k"]
    values: Float[Tensor, "2 n k"]
    normalisers: Float[Tensor, "n pieces"]
    sure: Bool[Tensor, " n"]


@dataclass(frozen=True)
class Standing:
    """Each row's first word, where a word of its own stands, from 1, the smaller id first among equals; and which rows
    are sure."""

    first: Int[Tensor, " n"]
    first_value: Float[Tensor, " n"]
    value: Float[Tensor, " n"]
    rank: Int[Tensor, " n"]
    normalisers: Float[Tensor, "n pieces"]
    sure: Bool[Tensor, " n"]


def is_kept(product: Product) -> bool:
    """Whether the scores are written to memory."""
    size, width = product.words.shape
    half = product.inputs.dtype in (torch.bfloat16, torch.float16)
    return not (product.plain and half and width in NARROW and size >= BLOCK)


def room(products: Sequence[Product], k: int) -> int:
    """Bytes that `ends` or `standing` needs for a row, about."""
    sizes = [(len(product.words), is_kept(product)) for product in products]
    tiles = sum(_tiles(size, kept) for size, kept in sizes)
    return 4 * (sum(size for size, kept in sizes if kept) + 2 * tiles + 2 * _places(k) * (WORDS + 8))


def ends(products: Sequence[Product], k: int, offsets: Offsets | None) -> Ends:
    """The k largest and the k smallest scores of each row, over all pieces.

    `offsets`, from the pieces' normalisers, are added to their scores before these are compared.
    """
    with torch.cuda.device_of(products[0].inputs):
        return _ends(_Survey.of(products, offsets), k)


def standing(products: Sequence[Product], token: Int[Tensor, " n"], offsets: Offsets | None) -> Standing:
    """The largest score of each row, and the rank of its own token's, over all pieces."""
    with torch.cuda.device_of(products[0].inputs):
        survey = _Survey.of(products, offsets)
        top = _ends(survey, 1, sides=1)
        lows = torch.tensor([product.low for product in products], device=token.device)
        piece = torch.searchsorted(lows, token, right=True) - 1
        places = token[:, None] - lows
        own = torch.stack([_scores_at(survey, number, places[:, number]) for number in range(len(products))], 1)
        own = own.gather(1, piece[:, None])
        value = own + survey.added.gather(1, piece[:, None])
        # In its own piece the score itself is the bound, not what rounding makes of it there and back.
        bounds = (value - survey.added).scatter(1, piece[:, None], own)
        counted = [_count(survey, number, bounds[:, number], places[:, number]) for number in range(len(products))]
        rank = torch.stack(counted).sum(0) + 1
    return Standing(top.ids[0, :, 0], top.values[0, :, 0], value[:, 0], rank, survey.normalisers, top.sure)


def logsumexp(scores: Float[Tensor, "n size"]) -> Float[Tensor, " n"]:
    with torch.cuda.device_of(scores):
        return _combined(*_read_scores(scores, None, 0))


@dataclass(frozen=True)
class _Survey:
    """What one look through all scores tells."""

    products: Sequence[Product]
    scores: Sequence[Float[Tensor, "n _"] | None]
    """Of each piece, where they are kept."""
    firsts: Sequence[int]
    """Each piece's first tile, and the number of all."""
    edges: Float[Tensor, "2 n tiles"]
    """Every tile's maximum and minimum."""
    normalisers: Float[Tensor, "n pieces"]
    added: Float[Tensor, "n pieces"]
    """What makes the scores of different pieces comparable."""

    @staticmethod
    def of(products: Sequence[Product], offsets: Offsets | None) -> _Survey:
        n, device = len(products[0].inputs), products[0].inputs.device
        firsts = [0]
        for product in products:
            firsts.append(firsts[-1] + _tiles(len(product.words), is_kept(product)))
        edges = torch.empty(2, n, firsts[-1], device=device)
        scores: list[Tensor | None] = []
        normalisers = []
        for product, first in zip(products, firsts, strict=False):
            kept = product.scores() if is_kept(product) else None
            made = _read_product(product, edges, first) if kept is None else _read_scores(kept, edges, first)
            scores.append(kept)
            normalisers.append(_combined(*made))
        normaliser = torch.stack(normalisers, 1)
        added = torch.zeros_like(normaliser) if offsets is None else offsets(normaliser).contiguous()
        return _Survey(products, scores, firsts, edges, normaliser, added)


def _ends(survey: _Survey, k: int, sides: int = 2) -> Ends:
    """Both ends, or only the first one; what stands at the other is not told then."""
    products, edges, added = survey.products, survey.edges, survey.added
    (_, n, tiles), device, places = edges.shape, edges.device, _places(k)
    shapes = tuple((product.low, len(product.words), is_kept(product)) for product in products)
    piece, base, end, step = _geometry(shapes, device)
    chosen = torch.full((n, 2, places), tiles, dtype=torch.int32, device=device)
    counts = torch.empty(2, n, 2, dtype=torch.int32, device=device)
    bound = torch.empty(n, 2, device=device)
    kernels.choose[(n, sides)](
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
    got = torch.empty(n, 2, places, WORDS, device=device)
    order = starts = None
    if any(found is None for found in survey.scores):
        order, starts = _by_tile(chosen.flatten(), tiles)
    for product, found, first, last in zip(products, survey.scores, survey.firsts, survey.firsts[1:], strict=False):
        if found is not None:
            kernels.fetch[(n, sides)](found, chosen, got, found.shape[1], first, last, PLACES=places, num_warps=4)
        else:
            _compute_again(product, order, starts, got, range(first, last), 2 * places)
    most = 2 * places
    spare = torch.empty(2, n, 2, most, dtype=torch.int32, device=device)
    ids = torch.empty(2, n, k, dtype=torch.int64, device=device)
    values = torch.empty(2, n, k, device=device)
    kernels.pick[(n, sides)](
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
    reaching, picked = counts[:, :, :sides]
    sure = (reaching <= places) & (picked >= k) & (picked <= most)
    return Ends(ids, values, survey.normalisers, sure.all(1) & survey.normalisers.isfinite().all(1))


def _scores_at(survey: _Survey, number: int, place: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Each row's score at its place in a piece; anything where that is outside."""
    product, scores = survey.products[number], survey.scores[number]
    size = len(product.words)
    inside = (place >= 0) & (place < size)
    place = place.clamp(0, size - 1)
    if scores is not None:
        return scores.gather(1, place[:, None])[:, 0]
    # The inverse of the order of words in tiles that `multiply` has.
    tile = place // BLOCK * (BLOCK // WORDS) + place % 8 // 2
    line = place % BLOCK // 8 * 2 + place % 2
    tiles = _tiles(size, kept=False)
    order, starts = _by_tile(torch.where(inside, tile, tiles).int(), tiles)
    got = torch.zeros(len(place), WORDS, device=place.device)
    _compute_again(product, order, starts, got, range(tiles), 1)
    return got.gather(1, line[:, None])[:, 0]


def _by_tile(chosen: Int[Tensor, " m"], tiles: int) -> tuple[Int[Tensor, " m"], Int[Tensor, " starts"]]:
    """All choices in the order of their tiles, and where each tile's begin."""
    small = torch.int16 if tiles < 1 << 15 else torch.int32
    ordered, order = chosen.to(small).sort()
    return order, torch.searchsorted(ordered, torch.arange(tiles + 1, device=chosen.device).to(small), out_int32=True)


def _compute_again(
    product: Product, order: Tensor | None, starts: Tensor | None, got: Tensor, tiles: range, each: int
) -> None:
    size, width = product.words.shape
    kernels.again[(len(tiles), SHARES)](
        product.inputs, product.words, order, starts, got, size, tiles.start, each, K=width, PAIRS=PAIRS, num_warps=4
    )


def _count(survey: _Survey, number: int, bound: Float[Tensor, " n"], place: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """How many scores of a piece are larger than each row's bound, or equal to it and in front of its place."""
    product, scores = survey.products[number], survey.scores[number]
    bound, place, n = bound.contiguous(), place.int(), len(bound)
    if scores is not None:
        spans = triton.cdiv(scores.shape[1], SPAN)
        counts = torch.empty(n, spans, dtype=torch.int32, device=bound.device)
        kernels.before[(n, spans)](scores, bound, place, counts, scores.shape[1], scores.stride(0), SPAN=SPAN)
    else:
        counts = torch.empty(n, _parts(product), dtype=torch.int32, device=bound.device)
        _multiply(kernels.count, product, bound, place, counts)
    return counts.sum(1)


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
    kernels.read[(n, spans)](
        scores, high, low, top, total, size, scores.stride(0), high.shape[1], first, TILES=edges is not None, SPAN=SPAN
    )
    return top, total


def _read_product(product: Product, edges: Tensor, first: int) -> tuple[Tensor, Tensor]:
    top, total = torch.empty(2, len(product.inputs), _parts(product), device=edges.device)
    _multiply(kernels.multiply, product, *edges, top, total, edges.shape[2], first)
    return top, total


def _parts(product: Product) -> int:
    """Programs that share a row's words: the last one has what is no whole block."""
    size = len(product.words)
    return triton.cdiv(size // BLOCK, STEPS) + (size % BLOCK > 0)


def _multiply(kernel: Any, product: Product, *own: Any) -> None:
    """Send every row and every word through a kernel that keeps no score."""
    inputs, words, parts = product.inputs, product.words, _parts(product)
    (n, width), size = inputs.shape, len(words)
    assert inputs.is_contiguous()
    assert words.is_contiguous()
    whole = size // BLOCK
    for begin, end, count in ((0, whole, triton.cdiv(whole, STEPS)), (whole, whole + 1, int(size % BLOCK > 0))):
        if count:
            kernel[(triton.cdiv(n, ROWS), count)](
                inputs,
                words,
                *own,
                n,
                size,
                begin,
                end,
                parts,
                0 if begin == 0 else parts - 1,
                RAGGED=end > whole,
                K=width,
                STEPS=STEPS if end <= whole else 1,
                ROWS=ROWS,
                STAGES=STAGES if width <= 64 else 2,
                num_warps=WARPS,
            )
