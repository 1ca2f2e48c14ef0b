"""The vocabulary projection: what a vector of the residual stream says about the next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ffmem.model.spread import Cloud

CHUNK_ELEMENTS = 1 << 23
"""Scores held at a time on a CPU: 32 MB in float32, about what its cache holds."""
GPU_CHUNK_ELEMENTS = 1 << 28
"""The same on a GPU, which needs more to be busy: 1 GB."""
TILED_BYTES = 9 << 28
"""What both ends of all scores may take on a GPU, where kernels find them: 2.4 GB."""
FEW_ELEMENTS = 1 << 22
"""Scores that are not worth a kernel of our own."""
FLAT = 2**-20
"""Log-probabilities that deviate from their mean by less than this share of it are equal up to rounding."""
SLACK = 1e-3
"""How far rounding may lift a log-probability over its piece's ceiling: orders of magnitude more than it does."""


@runtime_checkable
class Vocabulary(Protocol):
    """From vectors to words. `norm=True` sends a vector through the model's final norm first."""

    @property
    def size(self) -> int: ...

    @property
    def norm(self) -> nn.Module | None:
        """The model's final norm."""

    def readouts(self, token: Int[Tensor, " n"]) -> tuple[Readout, ...]: ...

    def log_probs(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> Float[Tensor, "n vocab"]: ...

    def top(
        self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]: ...

    def extremes(self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False) -> Extremes: ...

    def rank(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Int[Tensor, " n"]: ...

    def judge(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Judged: ...

    def log_prob(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Float[Tensor, " n"]: ...

    def best(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]: ...


@dataclass(frozen=True)
class Extremes:
    """The k most promoted and the k most suppressed tokens of each vector, best and worst first, and how far they stand out.

    A token's z is the distance of its score from the mean of all scores, in their standard deviations. In an adaptive
    softmax it is taken among the words of its own band: how likely bands are by themselves makes no word stand out. Where a
    vector tells no token from another, z is 0.
    """

    promoted: Int[Tensor, "n k"]
    promoted_log_prob: Float[Tensor, "n k"]
    suppressed: Int[Tensor, "n k"]
    suppressed_log_prob: Float[Tensor, "n k"]
    promoted_z: Float[Tensor, "n k"]
    suppressed_z: Float[Tensor, "n k"]


@dataclass(frozen=True)
class Judged:
    """Each vector's first token, and how it stands to a given one."""

    top: Int[Tensor, " n"]
    top_log_prob: Float[Tensor, " n"]
    log_prob: Float[Tensor, " n"]
    """of the given token"""
    rank: Int[Tensor, " n"]
    """of the given token, from 1"""


@dataclass(frozen=True)
class Readout:
    """A score of each row's own token as a linear map of the stream behind the final norm: h·vector + bias."""

    name: str
    vectors: Float[Tensor, "n d"]
    bias: Float[Tensor, " n"]


@dataclass(frozen=True)
class Scored:
    """The scores of a piece for some rows: log p = scores + offset. What is wanted is read off the scores:
    log-probabilities of all words are not made for it.
    """

    low: int
    scores: Float[Tensor, "n size"]
    offset: Float[Tensor, " n"]

    def best(self) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
        """Log-probability and id of the most likely token, the smaller id among equals."""
        found = self.scores.max(1)
        return found.values + self.offset, found.indices + self.low

    def top(self, k: int, *, largest: bool = True) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        values, ids = _first(self.scores, k, largest)
        return values + self.offset[:, None], ids + self.low

    def log_prob(self, token: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Of each row's token, which has to be in this piece."""
        return self.scores.gather(1, (token - self.low)[:, None])[:, 0] + self.offset

    def spread(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Mean and standard deviation of each row's log-probabilities. It uses the scores up: their distances from the mean
        are left.
        """
        mean = self.scores.mean(1, keepdim=True)
        distance = torch.linalg.vector_norm(self.scores.sub_(mean), dim=1)
        return mean[:, 0] + self.offset, distance / self.scores.shape[1] ** 0.5

    def before(self, log_prob: Float[Tensor, " n"], token: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """How many of the piece's tokens come before each row's token, which has this log-probability."""
        inside = (token >= self.low) & (token < self.low + self.scores.shape[1])
        place = (token - self.low).clamp(0, self.scores.shape[1] - 1)
        score = self.scores.gather(1, place[:, None])[:, 0]
        bound = torch.where(inside, score, log_prob - self.offset)
        bound = bound[:, None]
        count = (self.scores > bound).sum(1, dtype=torch.int32)
        # Equal ones come before if their ids are smaller: all of them in a piece before the token's own.
        rows = (self.low <= token).nonzero()[:, 0]
        equal = self.scores[rows] == bound[rows] if len(rows) < len(token) else self.scores == bound
        ids = torch.arange(self.low, self.low + self.scores.shape[1], device=token.device)
        return count.index_add(0, rows, (equal & (ids < token[rows, None])).sum(1, dtype=torch.int32)).long()


@dataclass(frozen=True)
class Piece:
    """A stretch of the vocabulary, from id `low` on, scored for the rows that need it. Most models have one, an
    adaptive softmax one a band.
    """

    low: int
    size: int
    ceiling: Float[Tensor, " n"]
    """No token of the piece has a larger log-probability, up to rounding."""
    score: Callable[[Int[Tensor, " rows"] | None], Scored]
    """The scores of these rows; of all for None."""

    @cached_property
    def whole(self) -> Scored:
        return self.score(None)

    def at(self, rows: Int[Tensor, " rows"]) -> Scored:
        return self.whole if len(rows) == len(self.ceiling) else self.score(rows)

    def reaching(self, log_prob: Float[Tensor, " n"]) -> Int[Tensor, " rows"]:
        """The rows in which a token of the piece may be as likely as this."""
        return (self.ceiling >= log_prob - SLACK).nonzero()[:, 0]

    def holding(self, token: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether each row's token is in the piece."""
        return (token >= self.low) & (token < self.low + self.size)


@dataclass(frozen=True)
class Product:
    """A piece before it is multiplied: a row an input, a word a row."""

    low: int
    inputs: Float[Tensor, "n width"]
    words: Float[Tensor, "size width"]
    finish: Callable[[Float[Tensor, "n size"]], Float[Tensor, "n size"]] | None = None
    """From the product to the scores, in place."""

    @property
    def plain(self) -> bool:
        """Whether the scores are the product itself."""
        return self.finish is None

    def scores(self) -> Float[Tensor, "n size"]:
        made = multiply(self.inputs, self.words)
        return made if self.finish is None else self.finish(made)


Offsets = Callable[[Float[Tensor, "n pieces"]], Float[Tensor, "n pieces"]]
"""From each piece's log Σ exp(score) to what makes its scores log-probabilities."""


class ChunkedVocabulary(ABC):
    """All that follows from the pieces, in chunks of rows: never more scores at a time than a chunk has."""

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    def leading(self) -> int:
        """Tokens of the first piece."""
        return self.size

    @abstractmethod
    def pieces(self, h: Float[Tensor, "n d"], *, norm: bool) -> list[Piece]:
        """The whole vocabulary, in the order of ids; the first piece is scored for every row."""

    @abstractmethod
    def products(self, h: Float[Tensor, "n d"], *, norm: bool) -> tuple[list[Product], Offsets]:
        """The same pieces, nothing of them multiplied yet."""

    @property
    def lows(self) -> list[int]:
        """The first id of each piece."""
        return [0]

    @property
    @abstractmethod
    def clouds(self) -> list[Cloud] | None:
        """One a product; None where scores are not linear in the inputs."""

    @abstractmethod
    def readouts(self, token: Int[Tensor, " n"]) -> tuple[Readout, ...]:
        """The scores that make each row's token likely, before any soft cap; the first one is in one softmax for all."""

    @torch.inference_mode()
    def log_probs(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> Float[Tensor, "n vocab"]:
        return torch.cat([piece.whole.scores + piece.whole.offset[:, None] for piece in self.pieces(h, norm=norm)], dim=1)

    def _chunked(
        self,
        h: Float[Tensor, "n d"],
        norm: bool,
        of: Callable[[list[Piece], slice], tuple[Tensor, ...]],
        width: int | None = None,
    ) -> tuple[Tensor, ...]:
        step = _rows_at_a_time(h.device, width or self.size)
        chunks = (slice(start, start + step) for start in range(0, max(1, len(h)), step))
        parts = [of(self.pieces(h[rows], norm=norm), rows) for rows in chunks]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @torch.inference_mode()
    def best(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
        """Log-probability and id of the most likely token, the smaller id among equals."""
        log_prob, ids = self._chunked(h, norm, lambda pieces, _: _best(pieces), width=self.leading)
        return log_prob, ids

    @torch.inference_mode()
    def top(self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Log-probabilities and ids of the k most likely tokens, most likely first, the smaller id among equals."""
        if can_tile(h.device, len(h) * self.size, k):
            ids, log_prob, *_ = self._kernel_ends(h, min(k, self.size), norm)
            return log_prob, ids
        log_prob, ids = self._chunked(h, norm, lambda pieces, _: _top(pieces, min(k, self.size)))
        return log_prob, ids

    @torch.inference_mode()
    def extremes(self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False) -> Extremes:
        """Both ends of the vocabulary, the smaller id first among equals.

        How far they stand out is told by the scores where these are held. Kernels hold none: then it is computed from where
        the words lie, or, behind a soft cap, from scores that are made once more.
        """
        k = min(k, self.size)
        if not can_tile(h.device, len(h) * self.size, k):
            found = self._chunked(h, norm, lambda pieces, _: (*_ends(pieces, k), *_spread(pieces)))
        elif self.clouds is None:
            found = (*self._kernel_ends(h, k, norm), *self._chunked(h, norm, lambda pieces, _: _spread(pieces)))
        else:
            found = self._kernel_ends(h, k, norm, self.clouds)
        *ends, mean, deviation = found
        z = [_standing_out(ids, log_prob, self.lows, mean, deviation) for ids, log_prob in (ends[:2], ends[2:])]
        return Extremes(*ends, *z)

    def _kernel_ends(
        self, h: Float[Tensor, "n d"], k: int, norm: bool, clouds: list[Cloud] | None = None
    ) -> tuple[Tensor, ...]:
        """Ids and log-probabilities of both ends; with clouds, each piece's mean and deviation too."""
        from ffmem.model.tiles import ends

        def tiled(products: list[Product], offsets: Offsets | None, _: slice) -> tuple[Tensor, ...]:
            found = ends(products, k, offsets)
            return found.ids[0], found.values[0], found.ids[1], found.values[1], found.normalisers, found.sure

        def beside(products: list[Product], offset: Tensor) -> tuple[Tensor, ...]:
            return () if clouds is None else _cloud_spread(clouds, products, offset)

        def read(pieces: list[Piece], _: slice) -> tuple[Tensor, ...]:
            return _ends(pieces, k) if clouds is None else (*_ends(pieces, k), *_spread(pieces))

        def plain(rows: Tensor) -> tuple[Tensor, ...]:
            return self._chunked(h[rows.to(h.device)], norm, read)

        return tuple(self._tiled(h, norm, k, tiled, plain, beside))

    def _tiled(
        self,
        h: Float[Tensor, "n d"],
        norm: bool,
        k: int,
        of: Callable[[list[Product], Offsets | None, slice], tuple[Tensor, ...]],
        plain: Callable[[Int[Tensor, " rows"]], tuple[Tensor, ...]],
        beside: Callable[[list[Product], Float[Tensor, "n pieces"]], tuple[Tensor, ...]] = lambda *_: (),
    ) -> list[Tensor]:
        """What kernels find that look into few scores, in chunks of rows; rows that they are not sure of go the plain way.

        Behind the columns that are wanted, `of` gives the normalisers and which rows are sure; `beside` gives columns that
        need no kernel, from the products and their offsets.
        """
        from ffmem.model.tiles import room

        step = _whole(TILED_BYTES // room(self.products(h[:1], norm=norm)[0], k))
        parts = []
        for start in range(0, len(h), step):
            rows = slice(start, start + step)
            products, offsets = self.products(h[rows], norm=norm)
            # With one piece its scores are compared, which its offset would round.
            compared = offsets if len(products) > 1 else None
            *found, normalisers, sure = of(products, compared, rows)
            offset = offsets(normalisers)
            if compared is None:
                found = [one + offset.view(-1, *[1] * (one.ndim - 1)) if one.is_floating_point() else one for one in found]
            parts.append((*found, *beside(products, offset), sure))
            del products
        *columns, sure = (torch.cat(column) for column in zip(*parts, strict=True))
        if len(unsure := (~sure).nonzero()[:, 0]):
            for column, other in zip(columns, plain(unsure), strict=True):
                column[unsure] = other
        return columns

    def rank(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Int[Tensor, " n"]:
        """How many tokens are at least as likely as `token`, itself counted, the smaller id first among equals: from 1."""
        return self.judge(h, token, norm=norm).rank

    @torch.inference_mode()
    def judge(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Judged:
        """What each vector puts first, and what it thinks of a token of its own, in one projection."""
        if not can_tile(h.device, len(h) * self.size):
            return Judged(*self._judged(h, token, norm))
        from ffmem.model.tiles import standing

        def tiled(products: list[Product], offsets: Offsets | None, rows: slice) -> tuple[Tensor, ...]:
            found = standing(products, token[rows].to(products[0].inputs.device), offsets)
            return found.first, found.first_value, found.value, found.rank, found.normalisers, found.sure

        def plain(rows: Tensor) -> tuple[Tensor, ...]:
            return self._judged(h[rows.to(h.device)], token[rows.to(token.device)], norm)

        return Judged(*self._tiled(h, norm, 1, tiled, plain))

    @torch.inference_mode()
    def log_prob(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Float[Tensor, " n"]:
        """The log-probability of each vector's own token; only the pieces that hold it are scored."""

        def own(pieces: list[Piece], rows: slice) -> tuple[Tensor]:
            ids, found = token[rows].to(pieces[0].ceiling.device), torch.zeros_like(pieces[0].ceiling)
            for piece in pieces:
                if len(held := piece.holding(ids).nonzero()[:, 0]):
                    found[held] = piece.at(held).log_prob(ids[held])
            return (found,)

        return self._chunked(h, norm, own)[0]

    def _judged(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], norm: bool) -> tuple[Tensor, ...]:
        def judged(pieces: list[Piece], rows: slice) -> tuple[Tensor, ...]:
            ids = token[rows].to(pieces[0].ceiling.device)
            own, rank = torch.zeros_like(pieces[0].ceiling), torch.ones_like(ids)
            for piece in pieces:
                if len(held := piece.holding(ids).nonzero()[:, 0]):
                    scored = piece.at(held)
                    own[held] = scored.log_prob(ids[held])
                    rank[held] += scored.before(own[held], ids[held])
            for piece in pieces:
                near = piece.reaching(own)
                if len(near := near[~piece.holding(ids)[near]]):
                    rank[near] += piece.at(near).before(own[near], ids[near])
            log_prob, top = _best(pieces)
            return top, log_prob, own, rank

        return self._chunked(h, norm, judged)


def _best(pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """A piece is looked into only where its ceiling allows for something better: in an adaptive softmax, rarely."""
    log_prob, ids = pieces[0].whole.best()
    for piece in pieces[1:]:
        for rows in piece.reaching(log_prob).split(_rows_at_a_time(ids.device, piece.size)):
            if len(rows):
                other, other_ids = piece.at(rows).best()
                better = other > log_prob[rows]
                log_prob[rows[better]], ids[rows[better]] = other[better], other_ids[better]
    return log_prob, ids


def _ends(pieces: list[Piece], k: int) -> tuple[Tensor, ...]:
    """Ids and log-probabilities of the k first and of the k last."""
    high, promoted = _top(pieces, k)
    low, suppressed = _top(pieces, k, largest=False)
    return promoted, high, suppressed, low


def _spread(pieces: list[Piece]) -> tuple[Tensor, ...]:
    """Mean and standard deviation of the log-probabilities of each piece, read off its scores last: it uses them up."""
    means, deviations = zip(*(piece.whole.spread() for piece in pieces), strict=True)
    return torch.stack(means, 1), torch.stack(deviations, 1)


def _cloud_spread(clouds: list[Cloud], products: list[Product], offset: Float[Tensor, "n pieces"]) -> tuple[Tensor, ...]:
    """The same without scores."""
    found = [cloud.spread(product.inputs) for cloud, product in zip(clouds, products, strict=True)]
    means, deviations = zip(*found, strict=True)
    return torch.stack(means, 1) + offset, torch.stack(deviations, 1)


def _standing_out(
    ids: Int[Tensor, "n k"],
    log_prob: Float[Tensor, "n k"],
    lows: list[int],
    mean: Float[Tensor, "n pieces"],
    deviation: Float[Tensor, "n pieces"],
) -> Float[Tensor, "n k"]:
    """How many deviations each token is from the mean of its piece."""
    piece = torch.bucketize(ids, torch.tensor(lows, device=ids.device), right=True) - 1
    mean, deviation = mean.gather(1, piece), deviation.gather(1, piece)
    return ((log_prob - mean) / deviation).masked_fill(deviation <= FLAT * mean.abs(), 0)


def _rows_at_a_time(device: torch.device, width: int) -> int:
    return max(1, CHUNK_ELEMENTS // width) if device.type == "cpu" else _whole(GPU_CHUNK_ELEMENTS // width)


def _whole(rows: int) -> int:
    """Many rows in a number that suits a GPU's products."""
    return rows // 128 * 128 if rows > 128 else max(1, rows)


def _top(pieces: list[Piece], k: int, *, largest: bool = True) -> tuple[Tensor, Tensor]:
    log_probs, ids = zip(*(piece.whole.top(k, largest=largest) for piece in pieces), strict=True)
    if len(pieces) == 1:
        return log_probs[0], ids[0]
    values, places = _first(torch.cat(log_probs, dim=1), k, largest)
    return values, torch.cat(ids, dim=1).gather(1, places)


def _first(x: Float[Tensor, "n size"], k: int, largest: bool) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k first of each row and their places, the smaller place first among equals, which topk does not promise."""
    k = min(k, x.shape[1])
    found = x.topk(min(k + 1, x.shape[1]), largest=largest)
    places, order = found.indices[:, :k].sort(1)
    values, again = found.values[:, :k].gather(1, order).sort(stable=True, dim=1, descending=largest)
    places = places.gather(1, again)
    if x.shape[1] > k and len(rows := (found.values[:, k - 1] == found.values[:, k]).nonzero()[:, 0]):
        for some in rows.split(_rows_at_a_time(x.device, 4 * x.shape[1])):
            places[some] = x[some].sort(stable=True, dim=1, descending=largest).indices[:, :k]
    return values, places


def can_tile(device: torch.device, elements: int, k: int = 1) -> bool:
    """Whether our kernels are for this: a GPU, enough scores, not too many of them wanted."""
    if device.type != "cuda" or elements < FEW_ELEMENTS or not find_spec("triton"):
        return False
    from ffmem.model.tiles import MOST

    return k <= MOST


def multiply(h: Float[Tensor, "n width"], words: Float[Tensor, "size width"]) -> Float[Tensor, "n size"]:
    """Each row times each word, in float32. A GPU sums in float32 anyway: what it has is not rounded to the weights' dtype,
    in which many scores would be equal.
    """
    if h.is_cuda and h.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(h, words.T, out_dtype=torch.float32)
    return functional.linear(h, words).float()


def log_sum_exp(scores: Float[Tensor, "n size"]) -> Float[Tensor, " n"]:
    if can_tile(scores.device, scores.numel()):
        from ffmem.model.tiles import logsumexp

        return logsumexp(scores)
    return scores.logsumexp(1)


@dataclass(frozen=True)
class SoftmaxVocabulary(ChunkedVocabulary):
    """softmax(cap(scale · (h·E + b))), as almost every model has it."""

    unembedding: nn.Linear
    norm: nn.Module | None = None
    project: nn.Module | None = None
    softcap: float | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        return self.unembedding.weight.shape[0]

    def _rows(self, h: Float[Tensor, "n d"], norm: bool) -> Float[Tensor, "n inputs"]:
        weight = self.unembedding.weight
        h = h.to(weight.device, weight.dtype)
        if norm and self.norm is not None:
            h = self.norm(h)
        return h if self.project is None else self.project(h)

    def _finish(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
        """From a product to scores, in place."""
        if self.unembedding.bias is not None:
            logits += self.unembedding.bias
        if self.scale != 1:
            logits *= self.scale
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def products(self, h: Float[Tensor, "n d"], *, norm: bool) -> tuple[list[Product], Offsets]:
        plain = self.unembedding.bias is None and self.scale == 1 and self.softcap is None
        rows = self._rows(h, norm).contiguous()
        return [Product(0, rows, self.unembedding.weight, None if plain else self._finish)], torch.neg

    @cached_property
    def clouds(self) -> list[Cloud] | None:
        if self.softcap is not None:
            return None
        with torch.inference_mode():
            return [Cloud.of(self.unembedding.weight, self.unembedding.bias, self.scale)]

    def pieces(self, h: Float[Tensor, "n d"], *, norm: bool) -> list[Piece]:
        if h.device.type == "cuda":
            logits = self.products(h, norm=norm)[0][0].scores()
        else:
            logits = self.unembedding(self._rows(h, norm)).float() * self.scale
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
        offset = -log_sum_exp(logits)

        def score(rows: Tensor | None) -> Scored:
            return Scored(0, logits, offset) if rows is None else Scored(0, logits[rows], offset[rows])

        return [Piece(0, logits.shape[1], torch.zeros_like(offset), score)]

    @torch.inference_mode()
    def readouts(self, token: Int[Tensor, " n"]) -> tuple[Readout, ...]:
        token = token.to(self.unembedding.weight.device)
        vectors, bias = self.unembedding.weight[token].float(), torch.zeros(len(token), device=token.device)
        if self.unembedding.bias is not None:
            bias = bias + self.unembedding.bias[token]
        if isinstance(self.project, nn.Linear):
            if self.project.bias is not None:
                bias = bias + vectors @ self.project.bias.float()
            vectors = vectors @ self.project.weight.float()
        return (Readout("logit", vectors * self.scale, bias * self.scale),)
