"""The adaptive softmax as a vocabulary projection."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.vocabulary import ChunkedVocabulary, Piece


@dataclass(frozen=True)
class AdaptiveVocabulary(ChunkedVocabulary):
    """log p(band) + log p(word | band). Unlike a plain softmax's, its ranking changes with a vector's length."""

    model: AdaptiveLM

    @property
    def size(self) -> int:
        return self.model.config.vocab_size

    def pieces(self, h: Float[Tensor, "n d"], *, norm: bool) -> list[Piece]:
        """A piece a band. The model has no final norm, so `norm` changes nothing."""
        softmax, (first, *rest) = self.model.softmax, self.model.model.embed
        h = h.to(softmax.bands.weight.device, softmax.bands.weight.dtype)
        head = softmax.head(h, self.model.model.embed).float()
        below = head.logsumexp(1)
        found = [Piece(0, head[:, : first.high], -below)]
        for number, band in enumerate(rest, first.high):
            scores = softmax.tail(h, band).float()
            found.append(Piece(band.low, scores, head[:, number] - below - scores.logsumexp(1)))
        return found
