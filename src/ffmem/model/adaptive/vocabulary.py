"""The adaptive softmax as a vocabulary projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.vocabulary import ChunkedVocabulary


@dataclass(frozen=True)
class AdaptiveVocabulary(ChunkedVocabulary):
    """log p(band) + log p(word | band). Unlike a plain softmax's, its ranking changes with a vector's length."""

    model: AdaptiveLM

    @property
    def size(self) -> int:
        return self.model.config.vocab_size

    @torch.inference_mode()
    def log_probs(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> Float[Tensor, "n vocab"]:
        """The model has no final norm, so `norm` changes nothing."""
        weight = self.model.softmax.bands.weight
        return self.model.log_probs(h.to(weight.device, weight.dtype))
