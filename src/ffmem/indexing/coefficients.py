"""One layer's coefficients of a batch of sentences, and the batch's arrays beside them on the same device."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ffmem.corpus.batches import Batch


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device as a tensor; on a GPU the copy is queued and the host goes on."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class DeviceBatch:
    """The arrays of a batch as tensors on one device; they are copied once and serve all layers of that device.

    Columns are counted from a sentence's first token, which stands in column `start` of the model's input.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.batch = batch
        self.start = batch.start
        self.rows = len(batch.lengths)
        self.columns = batch.ids.shape[1] - batch.start
        self.shortest = int(batch.lengths.min())
        self.lengths = to_device(batch.lengths, device)
        self.sentences = to_device(batch.sentences, device)
        self.keys = to_device(batch.keys, device)
        self._samples: dict[int, Tensor] = {}

    @cached_property
    def padding(self) -> Bool[Tensor, "batch tail"]:
        """Whether a sentence has no token in a column, for the columns behind the shortest sentence's last token.

        Sentences of a batch have about equal length, so these are few, and no other column needs a mask.
        """
        return torch.arange(self.shortest, self.columns, device=self.lengths.device) >= self.lengths[:, None]

    @cached_property
    def tail(self) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """The row and the column of every token that stands behind the shortest sentence's last column."""
        row, column = (~self.padding).nonzero(as_tuple=True)
        return row, column + self.shortest

    def sample(self, every: int) -> Int[Tensor, "2 n"]:
        """The row and the column of every token whose sentence + position is a multiple of `every`."""
        if every not in self._samples:
            positions = np.arange(1, self.columns + 1)
            chosen = (self.batch.sentences[:, None] + positions) % every == 0
            found = np.stack(np.nonzero(chosen & (positions <= self.batch.lengths[:, None])))
            self._samples[every] = to_device(found, self.lengths.device)
        return self._samples[every]


class Coefficients:
    """One layer's coefficients of a batch, from the first token of each sentence on.

    `m` is padded on the right: what stands there is arbitrary and must not be read. The other attributes have no padding,
    and each is computed once, however many ask for it. Nobody may change any of them in place.
    """

    def __init__(self, m: Float[Tensor, "batch columns cells"], batch: DeviceBatch) -> None:
        self.m = m[:, batch.start :]
        self.batch = batch

    @cached_property
    def highest(self) -> Float[Tensor, "batch cells"]:
        """The largest coefficient of each cell in each sentence, as a tensor of sentences × cells."""
        return self._extreme(largest=True)

    @cached_property
    def lowest(self) -> Float[Tensor, "batch cells"]:
        """The smallest coefficient of each cell in each sentence, as a tensor of sentences × cells."""
        return self._extreme(largest=False)

    def _extreme(self, *, largest: bool) -> Float[Tensor, "batch cells"]:
        reduce, never = (torch.amax, -torch.inf) if largest else (torch.amin, torch.inf)
        shortest = self.batch.shortest
        found = reduce(self.m[:, :shortest], dim=1)
        if shortest < self.m.shape[1]:
            tail = reduce(self.m[:, shortest:].masked_fill(self.batch.padding[:, :, None], never), dim=1)
            found = torch.maximum(found, tail) if largest else torch.minimum(found, tail)
        return found

    @cached_property
    def unpadded(self) -> list[Float[Tensor, "rows columns cells"]]:
        """Every token's coefficients: the columns that all sentences have, then all other tokens in one column."""
        found = [self.m[:, : self.batch.shortest]]
        if self.batch.shortest < self.m.shape[1]:
            row, column = self.batch.tail
            found.append(self.m[row, column][:, None])
        return found

    def sample(self, every: int) -> Float[Tensor, "n cells"]:
        """The coefficients of the tokens whose sentence + position is a multiple of `every`."""
        row, column = self.batch.sample(every)
        return self.m[row, column]
