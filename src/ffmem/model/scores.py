"""Scores of many tokens for many vectors: their normaliser, the k largest and smallest, and the rank of a given token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 23
"""How many scores are held at a time on a CPU: 32 MB in float32, about what its cache holds."""
GPU_CHUNK_ELEMENTS = 1 << 28
"""How many scores are held at a time on a GPU: 1 GB, and as much again while their normaliser is computed."""
BUCKET = 32
"""How many scores are first reduced to their largest one in a search for the k largest."""
CEILING_ERROR = 1e-3
"""By how much rounding may lift a log-probability above its piece's ceiling, orders of magnitude more than it does."""


@dataclass(frozen=True)
class Scored:
    """The scores of the tokens from id `low` on for some rows: log p = scores + offset.

    Every answer is read off the scores, so that no log-probabilities of all tokens are made.
    """

    low: int
    scores: Float[Tensor, "n size"]
    offset: Float[Tensor, " n"]

    def best(self) -> tuple[Float[Tensor, " n"], Int[Tensor, " n"]]:
        """Log-probability and id of the most likely token, the smaller id among equals."""
        found = self.scores.max(1)
        return found.values + self.offset, found.indices + self.low

    def top(self, k: int, *, largest: bool = True) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Log-probabilities and ids of the k most (or least) likely tokens, the smaller id first among equals."""
        values, ids = first(self.scores, k, largest)
        return values + self.offset[:, None], ids + self.low

    def log_prob(self, token: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """The log-probability of each row's token, which has to be in this piece."""
        return self.scores.gather(1, (token - self.low)[:, None])[:, 0] + self.offset

    def spread(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Mean and standard deviation of each row's log-probabilities; on a CPU the scores are overwritten."""
        if self.scores.is_cuda:  # one read; on a CPU the same call is not vectorised and takes ten times as long
            deviation, mean = torch.std_mean(self.scores, 1, correction=0)
            return mean + self.offset, deviation
        mean = self.scores.mean(1, keepdim=True)
        distance = torch.linalg.vector_norm(self.scores.sub_(mean), dim=1)
        return mean[:, 0] + self.offset, distance / self.scores.shape[1] ** 0.5

    def before(self, log_prob: Float[Tensor, " n"], token: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """How many tokens of the piece rank before each row's token, whose log-probability is `log_prob`."""
        inside = (token >= self.low) & (token < self.low + self.scores.shape[1])
        column = (token - self.low).clamp(0, self.scores.shape[1] - 1)
        score = self.scores.gather(1, column[:, None])[:, 0]
        bound = torch.where(inside, score, log_prob - self.offset)
        bound = bound[:, None]
        count = (self.scores > bound).sum(1)
        # Equal scores come before if their ids are smaller. Mostly a token's score is equal to nothing but itself.
        equal = (self.scores == bound).sum(1)
        for some in (equal > inside).nonzero()[:, 0].split(rows_at_a_time(token.device, 4 * self.scores.shape[1])):
            ids = torch.arange(self.low, self.low + self.scores.shape[1], device=token.device)
            count[some] += ((self.scores[some] == bound[some]) & (ids < token[some, None])).sum(1)
        return count


@dataclass(frozen=True)
class Piece:
    """The part of the vocabulary from id `low` on, scored only for the rows that need it.

    A plain softmax has one piece, an adaptive softmax one for each band.
    """

    low: int
    size: int
    ceiling: Float[Tensor, " n"]
    """For each row a log-probability that no token of the piece exceeds, up to rounding."""
    score: Callable[[Int[Tensor, " rows"] | None], Scored]
    """Computes the scores of the given rows, of all rows for None."""

    @cached_property
    def whole(self) -> Scored:
        """The scores of all rows, computed once."""
        return self.score(None)

    def at(self, rows: Int[Tensor, " rows"]) -> Scored:
        """The scores of these rows; `rows` of full length have to be all rows in order."""
        return self.whole if len(rows) == len(self.ceiling) else self.score(rows)

    def reaching(self, log_prob: Float[Tensor, " n"]) -> Int[Tensor, " rows"]:
        """The rows in which some token of the piece may have at least this log-probability."""
        return (self.ceiling >= log_prob - CEILING_ERROR).nonzero()[:, 0]

    def holding(self, token: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Whether each row's token is in the piece."""
        return (token >= self.low) & (token < self.low + self.size)


def rows_at_a_time(device: torch.device, width: int) -> int:
    """How many rows of `width` scores are held at a time; on a GPU a multiple of 128, which suits matrix products."""
    if device.type == "cpu":
        return max(1, CHUNK_ELEMENTS // width)
    rows = GPU_CHUNK_ELEMENTS // width
    return rows // 128 * 128 if rows > 128 else max(1, rows)


def multiply(
    h: Float[Tensor, "n width"], words: Float[Tensor, "size width"], bias: Float[Tensor, " size"] | None = None
) -> Float[Tensor, "n size"]:
    """The product of each row with each word plus the word's bias, in float32.

    A GPU sums in float32 anyway; rounding its sums to the weights' dtype would make many scores equal.
    """
    if h.is_cuda and h.dtype in (torch.bfloat16, torch.float16):
        scores = torch.mm(h, words.T, out_dtype=torch.float32)
        return scores if bias is None else scores.add_(bias)
    return functional.linear(h, words, bias).float()


def first(x: Float[Tensor, "n size"], k: int, largest: bool) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest (or smallest) numbers of each row and their columns, the smaller column first among equals.

    `torch.topk` does not promise any order among equals.
    """
    k = min(k, x.shape[1])
    values, columns = _topk(x, min(k + 1, x.shape[1]), largest)
    next_value = values[:, k:]
    columns, order = columns[:, :k].sort(1)
    values, again = values[:, :k].gather(1, order).sort(stable=True, dim=1, descending=largest)
    columns = columns.gather(1, again)
    # Where the number behind the k-th equals it, which of the two was found is chance.
    for some in (values[:, -1:] == next_value).any(1).nonzero()[:, 0].split(rows_at_a_time(x.device, 4 * x.shape[1])):
        columns[some] = x[some].sort(stable=True, dim=1, descending=largest).indices[:, :k]
    return values, columns


def _topk(x: Float[Tensor, "n size"], k: int, largest: bool) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest (or smallest) numbers of each row and their columns; which of those that equal the k-th is chance.

    A GPU's topk reads a row many times. So it is given the largest number of every bucket of 32 first, and then only the k
    buckets whose largest are the largest: they hold the k largest numbers of the row.
    """
    buckets = x.shape[1] // BUCKET
    if buckets <= 2 * k:
        return x.topk(k, largest=largest)
    # A bucket is every so-many-th number: reads are coalesced.
    whole = x[:, : buckets * BUCKET].unflatten(1, (BUCKET, buckets))
    best = whole.amax(1) if largest else whole.amin(1)
    near = best.topk(k, largest=largest, sorted=False).indices[:, None].expand(-1, BUCKET, -1)
    start = buckets * torch.arange(BUCKET, device=x.device)[:, None]
    rest = torch.arange(buckets * BUCKET, x.shape[1], device=x.device).expand(len(x), -1)
    found = torch.cat([whole.gather(2, near).flatten(1), x[:, buckets * BUCKET :]], 1).topk(k, largest=largest)
    return found.values, torch.cat([(near + start).flatten(1), rest], 1).gather(1, found.indices)
