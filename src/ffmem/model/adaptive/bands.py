"""Words in bands of frequency, on both ends of the network: the adaptive input and the adaptive softmax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ffmem.model.adaptive.config import AdaptiveConfig, BandShape

IGNORED = -100
"""A target that counts for nothing, as everywhere in torch."""

Tail = tuple[Int[Tensor, " _rows"], Int[Tensor, " _rows"]]
"""Which rows of a batch have their target in a tail band, and the target's place in that band."""


class Band(nn.Module):
    """Words of about equal frequency: vectors of the band's width and their projection to the stream."""

    def __init__(self, shape: BandShape, d: int) -> None:
        super().__init__()
        self.low, self.high = shape.low, shape.high
        self.words = nn.Embedding(shape.size, shape.width)
        self.project = nn.Linear(shape.width, d, bias=False)


class AdaptiveInput(nn.Module):
    """From token ids to the stream."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.bands = nn.ModuleList(Band(shape, config.hidden_size) for shape in config.bands)
        self.scale = sqrt(config.hidden_size)
        self.size = config.vocab_size

    def __iter__(self) -> Iterator[Band]:
        return cast("Iterator[Band]", iter(self.bands))

    def forward(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d"]:
        total = None
        known = (ids >= 0) & (ids < self.size)
        for band in self:
            inside = (ids >= band.low) & (ids < band.high)
            # Ids of other bands are spread over all rows and then masked: one row for all of them would be a hot spot
            # of the gradient's atomic additions. An id that is no word has no row, which is an error.
            rows = torch.where(known, (ids - band.low) % band.words.num_embeddings, -1)
            found = band.project(band.words(rows))
            found = found.masked_fill(~inside[..., None], 0)
            total = found if total is None else total + found
        assert total is not None
        return total * self.scale


class AdaptiveSoftmax(nn.Module):
    """From the stream to words. The head holds the most frequent words and a score for each tail band.

    log p(word) = log p(band | h) + log p(word | band, h). Its tables are the input's; only `bands` is its own.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.bands = nn.Linear(config.hidden_size, len(config.bands) - 1, bias=False)

    def head(self, h: Float[Tensor, "*batch d"], tables: AdaptiveInput) -> Float[Tensor, "*batch head"]:
        """Unnormalised scores: the first band's words, then the tail bands."""
        return functional.linear(h, torch.cat([next(iter(tables)).words.weight, self.bands.weight]))

    @staticmethod
    def tail(h: Float[Tensor, "*batch d"], band: Band) -> Float[Tensor, "*batch words"]:
        """Unnormalised scores of a tail band's words."""
        return functional.linear(h @ band.project.weight, band.words.weight)

    def forward(self, h: Float[Tensor, "*batch d"], tables: AdaptiveInput) -> Float[Tensor, "*batch vocab"]:
        """Log-probabilities of all words, in float32."""
        head = torch.log_softmax(self.head(h, tables).float(), dim=-1)
        first, *rest = tables
        parts = [head[..., : first.high]]
        for number, band in enumerate(rest, first.high):
            inside = torch.log_softmax(self.tail(h, band).float(), dim=-1)
            parts.append(inside + head[..., number, None])
        return torch.cat(parts, dim=-1)

    def nll(
        self,
        h: Float[Tensor, "n d"],
        targets: Int[Tensor, " n"],
        tables: AdaptiveInput,
        tails: Sequence[Tail] | None = None,
    ) -> Float[Tensor, ""]:
        """Summed -log p(target); only the rows whose target is in a tail band are sent through that band.

        `tails` may be given where the targets are known on the host, so that no one waits for the device.
        """
        first, *rest = tables
        within = targets
        for number, band in enumerate(rest, first.high):
            within = torch.where((targets >= band.low) & (targets < band.high), number, within)
        total = functional.cross_entropy(self.head(h, tables).float(), within.long(), reduction="sum", ignore_index=IGNORED)
        for band, (places, inside) in zip(rest, tails if tails is not None else tails_of(targets, rest), strict=True):
            if len(places):
                scores = self.tail(h[places], band).float()
                total = total + functional.cross_entropy(scores, inside.long(), reduction="sum", ignore_index=IGNORED)
        return total


def tails_of(targets: Int[Tensor, " n"], bands: Sequence[Band | BandShape]) -> list[Tail]:
    """For each of these bands, the rows whose target it holds, and the target's place in it."""
    found = []
    for band in bands:
        places = torch.nonzero((targets >= band.low) & (targets < band.high)).flatten()
        found.append((places, targets[places] - band.low))
    return found
