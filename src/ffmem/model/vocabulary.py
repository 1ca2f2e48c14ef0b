"""The vocabulary projection: how likely a vector of the residual stream makes every token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ffmem.model.scores import Piece, Scored, first, multiply, rows_at_a_time

FLAT = 2**-20
"""Log-probabilities whose deviation is below this share of their mean are equal up to rounding."""


@dataclass(frozen=True)
class Extremes:
    """The k most promoted and the k most suppressed tokens of each vector, most promoted and most suppressed first.

    A token's z is the distance of its score from the mean of all scores, in standard deviations. In an adaptive softmax
    only the scores of the word's own band count, so that a likely band gives its words no higher z. Where a vector
    scores all tokens alike, z is 0.
    """

    promoted: Int[Tensor, "n k"]
    promoted_log_prob: Float[Tensor, "n k"]
    suppressed: Int[Tensor, "n k"]
    suppressed_log_prob: Float[Tensor, "n k"]
    promoted_z: Float[Tensor, "n k"]
    suppressed_z: Float[Tensor, "n k"]


@dataclass(frozen=True)
class TokenScore:
    """For each vector its most likely token, and the log-probability and rank of one given token."""

    top: Int[Tensor, " n"]
    top_log_prob: Float[Tensor, " n"]
    log_prob: Float[Tensor, " n"]
    """The log-probability of the given token."""
    rank: Int[Tensor, " n"]
    """The rank of the given token among all tokens, from 1; among equally likely ones the smaller id comes first."""


@dataclass(frozen=True)
class Readout:
    """For each row a vector and a bias: h·vector + bias is the score of the row's token, h being after the final norm."""

    name: str
    vectors: Float[Tensor, "n d"]
    bias: Float[Tensor, " n"]


class Vocabulary(ABC):
    """A projection of vectors onto the vocabulary. It works in chunks of rows, so that few scores are held at a time.

    With `norm=True` a method applies the model's final norm to the vectors first.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of tokens."""

    @property
    def norm(self) -> nn.Module | None:
        """The model's final norm; None if it has none."""
        return None

    @property
    def leading(self) -> int:
        """The number of tokens of the first piece."""
        return self.size

    @abstractmethod
    def pieces(self, h: Float[Tensor, "n d"], *, norm: bool) -> list[Piece]:
        """The whole vocabulary in pieces, in the order of ids; the first piece is always scored for every row."""

    @abstractmethod
    def readouts(self, token: Int[Tensor, " n"]) -> tuple[Readout, ...]:
        """The scores that make each row's token likely, before any soft cap; all rows share the softmax of the first one."""

    @torch.inference_mode()
    def log_probs(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> Float[Tensor, "n vocab"]:
        """Log-probabilities of all tokens in float32, for all rows at once."""
        return torch.cat([piece.whole.scores + piece.whole.offset[:, None] for piece in self.pieces(h, norm=norm)], dim=1)

    def _chunked(
        self,
        h: Float[Tensor, "n d"],
        norm: bool,
        of: Callable[[list[Piece], slice], tuple[Tensor, ...]],
        width: int | None = None,
    ) -> tuple[Tensor, ...]:
        """The columns that `of(pieces, rows)` gives for each chunk of rows, put together again."""
        step = rows_at_a_time(h.device, width or self.size)
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
        log_prob, ids = self._chunked(h, norm, lambda pieces, _: _top(pieces, min(k, self.size)))
        return log_prob, ids

    @torch.inference_mode()
    def extremes(self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False) -> Extremes:
        """The k most promoted and most suppressed tokens and their z, the smaller id first among equals."""

        def of(pieces: list[Piece], _: slice) -> tuple[Tensor, ...]:
            high, promoted = _top(pieces, min(k, self.size))
            low, suppressed = _top(pieces, min(k, self.size), largest=False)
            z = _z_scores(pieces, torch.stack([promoted, suppressed]), torch.stack([high, low]))
            return promoted, high, suppressed, low, *z

        return Extremes(*self._chunked(h, norm, of))

    @torch.inference_mode()
    def score_token(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> TokenScore:
        """Each vector's most likely token, and the log-probability and rank of its own `token`, in one projection."""

        def scored(pieces: list[Piece], rows: slice) -> tuple[Tensor, ...]:
            ids = token[rows].to(pieces[0].ceiling.device)
            own, rank = torch.zeros_like(pieces[0].ceiling), torch.ones_like(ids)
            for piece in pieces:
                if len(held := piece.holding(ids).nonzero()[:, 0]):
                    found = piece.at(held)
                    own[held] = found.log_prob(ids[held])
                    rank[held] += found.before(own[held], ids[held])
            for piece in pieces:
                near = piece.reaching(own)
                if len(near := near[~piece.holding(ids)[near]]):
                    rank[near] += piece.at(near).before(own[near], ids[near])
            log_prob, top = _best(pieces)
            return top, log_prob, own, rank

        return TokenScore(*self._chunked(h, norm, scored))

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


def _best(pieces: list[Piece]) -> tuple[Tensor, Tensor]:
    """Log-probability and id of each row's most likely token. A piece is scored only for rows where its ceiling allows a
    better token, which is rare in an adaptive softmax.
    """
    log_prob, ids = pieces[0].whole.best()
    for piece in pieces[1:]:
        for rows in piece.reaching(log_prob).split(rows_at_a_time(ids.device, piece.size)):
            if len(rows):
                other, other_ids = piece.at(rows).best()
                better = other > log_prob[rows]
                log_prob[rows[better]], ids[rows[better]] = other[better], other_ids[better]
    return log_prob, ids


def _z_scores(
    pieces: list[Piece], ids: Int[Tensor, "ends n k"], log_prob: Float[Tensor, "ends n k"]
) -> Float[Tensor, "ends n k"]:
    """How many standard deviations each token is from the mean of its piece; the pieces' scores are overwritten."""
    lows = torch.tensor([piece.low for piece in pieces], device=ids.device)
    means, deviations = zip(*(piece.whole.spread() for piece in pieces), strict=True)
    number = torch.bucketize(ids, lows, right=True) - 1
    mean, deviation = (torch.stack(column, 1).expand(len(ids), -1, -1).gather(2, number) for column in (means, deviations))
    return ((log_prob - mean) / deviation).masked_fill(deviation <= FLAT * mean.abs(), 0)


def _top(pieces: list[Piece], k: int, *, largest: bool = True) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the k most (or least) likely tokens of all pieces, the smaller id first among equals."""
    log_probs, ids = zip(*(piece.whole.top(k, largest=largest) for piece in pieces), strict=True)
    if len(pieces) == 1:
        return log_probs[0], ids[0]
    values, places = first(torch.cat(log_probs, dim=1), k, largest)
    return values, torch.cat(ids, dim=1).gather(1, places)


@dataclass(frozen=True)
class SoftmaxVocabulary(Vocabulary):
    """softmax(cap(scale · (h·E + b))): the vocabulary projection of almost every model."""

    unembedding: nn.Linear
    norm: nn.Module | None = None
    project: nn.Module | None = None
    softcap: float | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        return self.unembedding.weight.shape[0]

    def pieces(self, h: Float[Tensor, "n d"], *, norm: bool) -> list[Piece]:
        weight = self.unembedding.weight
        h = h.to(weight.device, weight.dtype)
        if norm and self.norm is not None:
            h = self.norm(h)
        scores = multiply(h if self.project is None else self.project(h), weight, self.unembedding.bias)
        if self.scale != 1:
            scores.mul_(self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        offset = -scores.logsumexp(1)

        def score(rows: Tensor | None) -> Scored:
            return Scored(0, scores, offset) if rows is None else Scored(0, scores[rows], offset[rows])

        return [Piece(0, scores.shape[1], torch.zeros_like(offset), score)]

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
