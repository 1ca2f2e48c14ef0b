"""Scores of many words for many vectors: their normaliser, their ends in order, and where a given word ranks among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 23
"""Scores held at a time on a CPU: 32 MB in float32, about what its cache holds."""
GPU_CHUNK_ELEMENTS = 1 << 28
"""The same on a GPU, which needs more to be busy: 1 GB, and 1 GB more while their normaliser is computed."""
BLOCK = 32
"""Words of which only the best score is looked at in a first search for the k best words."""
SLACK = 1e-3
"""How far rounding may lift a log-probability over its piece's ceiling: orders of magnitude more than it does."""


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
        values, ids = first(self.scores, k, largest)
        return values + self.offset[:, None], ids + self.low

    def log_prob(self, token: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Of each row's token, which has to be in this piece."""
        return self.scores.gather(1, (token - self.low)[:, None])[:, 0] + self.offset

    def spread(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Mean and standard deviation of each row's log-probabilities. On a CPU it overwrites the scores."""
        if self.scores.is_cuda:  # one read; on a CPU the same call is not vectorised and takes ten times as long
            deviation, mean = torch.std_mean(self.scores, 1, correction=0)
            return mean + self.offset, deviation
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
        count = (self.scores > bound).sum(1)
        # Equal scores come before if their ids are smaller. Mostly a token's score is equal to nothing but itself.
        equal = (self.scores == bound).sum(1)
        for some in (equal > inside).nonzero()[:, 0].split(rows_at_a_time(token.device, 4 * self.scores.shape[1])):
            ids = torch.arange(self.low, self.low + self.scores.shape[1], device=token.device)
            count[some] += ((self.scores[some] == bound[some]) & (ids < token[some, None])).sum(1)
        return count


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


def rows_at_a_time(device: torch.device, width: int) -> int:
    """How many rows of this many scores are held at a time; on a GPU a number that suits its products."""
    if device.type == "cpu":
        return max(1, CHUNK_ELEMENTS // width)
    rows = GPU_CHUNK_ELEMENTS // width
    return rows // 128 * 128 if rows > 128 else max(1, rows)


def multiply(
    h: Float[Tensor, "n width"], words: Float[Tensor, "size width"], bias: Float[Tensor, " size"] | None = None
) -> Float[Tensor, "n size"]:
    """Each row times each word plus the word's bias, in float32. A GPU sums in float32 anyway: what it has is not rounded
    to the weights' dtype, in which many scores would be equal.
    """
    if h.is_cuda and h.dtype in (torch.bfloat16, torch.float16):
        scores = torch.mm(h, words.T, out_dtype=torch.float32)
        return scores if bias is None else scores.add_(bias)
    return functional.linear(h, words, bias).float()


def first(x: Float[Tensor, "n size"], k: int, largest: bool) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest (or smallest) of each row and their places, the smaller place first among equals, which topk does not
    promise.
    """
    k = min(k, x.shape[1])
    values, places = _topk(x, min(k + 1, x.shape[1]), largest)
    next_value = values[:, k:]
    places, order = places[:, :k].sort(1)
    values, again = values[:, :k].gather(1, order).sort(stable=True, dim=1, descending=largest)
    places = places.gather(1, again)
    # Where the one behind the last is equal to it, which of them was found is chance.
    for some in (values[:, -1:] == next_value).any(1).nonzero()[:, 0].split(rows_at_a_time(x.device, 4 * x.shape[1])):
        places[some] = x[some].sort(stable=True, dim=1, descending=largest).indices[:, :k]
    return values, places


def _topk(x: Float[Tensor, "n size"], k: int, largest: bool) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The k largest (or smallest) of each row and their places, any of those that are equal to the last one.

    A GPU's topk reads a row many times. So it is given the best of every block of 32, and then the k best blocks only: k
    blocks whose best are at least as good as any other block's hold k words that are at least as good as any other.
    """
    blocks = x.shape[1] // BLOCK
    if blocks <= 2 * k:
        return x.topk(k, largest=largest)
    whole = x[:, : blocks * BLOCK].unflatten(1, (BLOCK, blocks))  # a block is every blocks-th word: the read is coalesced
    best = whole.amax(1) if largest else whole.amin(1)
    near = best.topk(k, largest=largest, sorted=False).indices[:, None].expand(-1, BLOCK, -1)
    start = blocks * torch.arange(BLOCK, device=x.device)[:, None]
    rest = torch.arange(blocks * BLOCK, x.shape[1], device=x.device).expand(len(x), -1)
    found = torch.cat([whole.gather(2, near).flatten(1), x[:, blocks * BLOCK :]], 1).topk(k, largest=largest)
    return found.values, torch.cat([(near + start).flatten(1), rest], 1).gather(1, found.indices)
