"""The shape of an adaptive-input language model."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

MOST_CUTOFFS = 64
"""The most cutoffs a config may have; a damaged one could ask for any number of bands."""


@dataclass(frozen=True)
class BandShape:
    """The words with ids from `low` up to `high` (excluded), the most frequent first, each a vector of `width` numbers."""

    low: int
    high: int
    width: int

    @property
    def size(self) -> int:
        """The number of words in the band."""
        return self.high - self.low


class AdaptiveConfig(PretrainedConfig):  # type: ignore[misc]
    """The config of an adaptive-input language model; its defaults are those of the paper's model.

    Words are cut into bands of frequency at `cutoffs`; the vectors of each band are `factor` times narrower than those of
    the band before.

    >>> [(band.size, band.width) for band in AdaptiveConfig().bands]
    [(20000, 1024), (40000, 256), (207744, 64)]
    """

    model_type = "adaptive_lm"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 267744,
        hidden_size: int = 1024,
        num_hidden_layers: int = 16,
        num_attention_heads: int = 8,
        intermediate_size: int = 4096,
        cutoffs: list[int] | tuple[int, ...] = (20000, 60000),
        factor: int = 4,
        max_position_embeddings: int = 512,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.cutoffs = list(cutoffs)
        self.factor = factor
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        special = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}
        # Input and softmax share their tables by construction; there is no second copy to tie.
        super().__init__(**(special | kwargs | {"tie_word_embeddings": False}))
        if min(num_hidden_layers, num_attention_heads, intermediate_size, factor) < 1 or hidden_size < 4:
            raise ValueError(
                f"expected layers, heads, cells and factor of at least 1 and a hidden_size of at least 4, found "
                f"{num_hidden_layers}, {num_attention_heads}, {intermediate_size}, {factor} and {hidden_size}"
            )
        edges = [0, *self.cutoffs, vocab_size]
        if edges != sorted(set(edges)) or not 1 <= len(self.cutoffs) <= MOST_CUTOFFS:
            raise ValueError(
                f"expected 1 to {MOST_CUTOFFS} rising cutoffs below vocab_size {vocab_size}, "
                f"found {reprlib.repr(self.cutoffs)}"
            )
        if hidden_size % num_attention_heads or hidden_size % 2:
            raise ValueError(f"expected an even hidden_size divided by {num_attention_heads} heads, found {hidden_size}")
        if hidden_size // factor ** len(self.cutoffs) < 1:
            raise ValueError(f"factor {factor} leaves no width for the last band of hidden_size {hidden_size}")

    @property
    def bands(self) -> list[BandShape]:
        """The bands in the order of ids, the most frequent words first."""
        edges = [0, *self.cutoffs, self.vocab_size]
        widths = [self.hidden_size // self.factor**band for band in range(len(edges) - 1)]
        return [BandShape(low, high, width) for low, high, width in zip(edges, edges[1:], widths, strict=False)]
