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
"""A target that adds nothing to the loss, as everywhere in torch."""

Tail = tuple[Int[Tensor, " _rows"], Int[Tensor, " _rows"]]
"""The rows of a batch whose target is in one tail band, and for each the target's index in that band."""


class Band(nn.Module):
    """The vectors of a band of words of about equal frequency, and the projection from their width to the stream's."""

    def __init__(self, shape: BandShape, d: int) -> None:
        super().__init__()
        self.low, self.high = shape.low, shape.high
        self.words = nn.Embedding(shape.size, shape.width)
        self.project = nn.Linear(shape.width, d, bias=False)


class AdaptiveInput(nn.Module):
    """The adaptive input: maps token ids to vectors of the stream, scaled by sqrt(d)."""

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
    """The adaptive softmax: maps vectors of the stream to log-probabilities of words.

    The head scores the most frequent words and each tail band: log p(word) = log p(band | h) + log p(word | band, h). Word
    vectors are those of the `AdaptiveInput`, given at each call as `tables`; only `bands` is the softmax's own.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.bands = nn.Linear(config.hidden_size, len(config.bands) - 1, bias=False)

    def head(self, h: Float[Tensor, "*batch d"], tables: AdaptiveInput) -> Float[Tensor, "*batch head"]:
        """Unnormalised scores of the head: those of the first band's words, then one for each tail band."""
        return functional.linear(h, torch.cat([next(iter(tables)).words.weight, self.bands.weight]))

    @staticmethod
    def tail(h: Float[Tensor, "*batch d"], band: Band) -> Float[Tensor, "*batch words"]:
        """Unnormalised scores of the words of one tail band."""
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
        """The sum of -log p(target); a tail band is computed only for the rows whose target it holds.

        `tails`, as `tails_of` gives them, may be made on the host, so that nothing waits for the device.
        """
        first, *rest = tables
        within = targets
        for number, band in enumerate(rest, first.high):
            within = torch.where((targets >= band.low) & (targets < band.high), number, within)
        total = functional.cross_entropy(self.head(h, tables).float(), within.long(), reduction="sum", ignore_index=IGNORED)
        for band, (rows, inside) in zip(rest, tails if tails is not None else tails_of(targets, rest), strict=True):
            if len(rows):
                scores = self.tail(h[rows], band).float()
                total = total + functional.cross_entropy(scores, inside.long(), reduction="sum", ignore_index=IGNORED)
        return total


def tails_of(targets: Int[Tensor, " n"], bands: Sequence[Band | BandShape]) -> list[Tail]:
    """For each of these bands the rows whose target it holds, and those targets' indices in the band."""
    found = []
    for band in bands:
        rows = torch.nonzero((targets >= band.low) & (targets < band.high)).flatten()
        found.append((rows, targets[rows] - band.low))
    return found
