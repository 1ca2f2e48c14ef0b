"""The adaptive softmax as a vocabulary projection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.model.adaptive.bands import Band
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.scores import Piece, Scored, multiply
from ffmem.model.vocabulary import Readout, Vocabulary


@dataclass(frozen=True)
class AdaptiveVocabulary(Vocabulary):
    """The projection log p(band) + log p(word | band). Unlike a plain softmax's, its ranks change with a vector's length."""

    model: AdaptiveLM

    @property
    def size(self) -> int:
        return self.model.config.vocab_size

    @property
    def leading(self) -> int:
        return next(iter(self.model.model.embed)).high

    def pieces(self, h: Float[Tensor, "n d"], *, norm: bool) -> list[Piece]:
        """A piece for each band, whose own probability is its ceiling. `norm` is ignored: there is no final norm."""
        softmax, (first, *rest) = self.model.softmax, self.model.model.embed
        h = h.to(softmax.bands.weight.device, softmax.bands.weight.dtype)
        # Two products: for one, the head's table would have to be concatenated for every chunk of rows.
        words, bands = multiply(h, first.words.weight), multiply(h, softmax.bands.weight)
        below = torch.logaddexp(words.logsumexp(1), bands.logsumexp(1))

        def frequent(rows: Tensor | None) -> Scored:
            return Scored(0, words, -below) if rows is None else Scored(0, words[rows], -below[rows])

        def rare(band: Band, log_prob: Tensor, rows: Tensor | None) -> Scored:
            some = h if rows is None else h[rows]
            scores = multiply(some @ band.project.weight, band.words.weight)
            return Scored(band.low, scores, (log_prob if rows is None else log_prob[rows]) - scores.logsumexp(1))

        found = [Piece(0, first.high, torch.zeros_like(below), frequent)]
        for band, log_prob in zip(rest, (bands - below[:, None]).T, strict=True):
            found.append(Piece(band.low, band.high - band.low, log_prob, partial(rare, band, log_prob)))
        return found

    @torch.inference_mode()
    def readouts(self, token: Int[Tensor, " n"]) -> tuple[Readout, ...]:
        """The head's score of each word or, for a rare word, of its band; and the score of a rare word inside its band."""
        softmax, (first, *rest) = self.model.softmax, self.model.model.embed
        token = token.to(softmax.bands.weight.device)
        head = first.words.weight[token.clamp(max=first.high - 1)].float()
        tail = torch.zeros_like(head)
        for number, band in enumerate(rest):
            rows = ((token >= band.low) & (token < band.high)).nonzero()[:, 0]
            head[rows] = softmax.bands.weight[number].float()
            tail[rows] = band.words.weight[token[rows] - band.low].float() @ band.project.weight.float().T
        none = torch.zeros(len(token), device=token.device)
        return Readout("head", head, none), Readout("tail", tail, none)
