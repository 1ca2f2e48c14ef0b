"""Statistics of every cell of a layer, gathered in the same read as its triggers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.errors import FfmemError
from ffmem.run.histogram import BINS, LOWEST, PER_OCTAVE, SIDE, ZERO

EVERY, GPU_EVERY = 16, 1024
"""A sample takes the moments and the histogram from tokens with (sentence + position) divisible by this. A GPU reads
much more text, and would be held up by more."""
ENOUGH = 1 << 15
"""Tokens that a GPU measures all the same, where the corpus has them."""
SUMS = ("sum", "squares")
"""What depends on the order in which it is added."""
STAGED = 1 << 23
"""Coefficients of a sample that a GPU collects before it measures them: one by one the steps would be too small."""
CHUNK = 1 << 20
"""Coefficients that go through the histogram at a time on a CPU: few enough to stay in its cache."""
ROW = 255
"""Rows whose firings fit into one byte."""


def sample_every(device: str, tokens: int | None) -> int:
    """Of how many tokens a sample takes one, for a corpus of about so many.

    >>> sample_every("cpu", 10**9), sample_every("cuda", 10**9), sample_every("cuda", 2**20)
    (16, 1024, 32)
    """
    if device == "cpu" or tokens is None:
        return EVERY if device == "cpu" else GPU_EVERY
    return min(GPU_EVERY, max(EVERY, 1 << max(1, tokens // ENOUGH).bit_length() - 1))


class Statistics:
    """Counts, extremes, moments and a histogram of each cell; what it holds adds up over batches and shards.

    Firings (m > 0), maximum and minimum are of all tokens; moments and histogram of all or of a systematic sample.
    """

    def __init__(self, cells: int, device: torch.device | str = "cpu") -> None:
        self.active = torch.zeros(cells, dtype=torch.int64, device=device)
        self.maximum = torch.full((cells,), -torch.inf, device=device)
        self.minimum = torch.full((cells,), torch.inf, device=device)
        self.sum = torch.zeros(cells, dtype=torch.float64, device=device)
        self.squares = torch.zeros(cells, dtype=torch.float64, device=device)
        self.histogram = torch.zeros(cells, BINS, dtype=torch.int32, device=device)
        self.measured = torch.zeros(1, dtype=torch.int64, device=device)
        self._staged: list[Tensor] = []

    def count(
        self,
        m: Float[Tensor, "batch pos cells"],
        *,
        high: Float[Tensor, "batch cells"],
        low: Float[Tensor, "batch cells"],
        lengths: Int[Tensor, " batch"],
        shortest: int,
    ) -> None:
        """Firings and extremes of a batch."""
        self.maximum = torch.maximum(self.maximum, high.amax(0).float())
        self.minimum = torch.minimum(self.minimum, low.amin(0).float())
        for block in _blocks(m, lengths, shortest):
            self.active += _firings(block)

    def measure(
        self,
        m: Float[Tensor, "batch pos cells"],
        lengths: Int[Tensor, " batch"],
        shortest: int,
        chosen: Int[Tensor, "2 n"] | None,
    ) -> None:
        """Moments and histogram of a batch; `chosen` are rows and columns of the sample, None for all tokens."""
        if chosen is None:
            for block in _blocks(m, lengths, shortest):
                self._measure(block.flatten(0, 1))
        elif m.device.type == "cpu":
            self._measure(m[chosen[0], chosen[1]])
        else:
            self._staged.append(m[chosen[0], chosen[1]])
            if sum(part.numel() for part in self._staged) >= STAGED:
                self.settle()

    def settle(self) -> None:
        """Measure what has been collected."""
        if self._staged:
            self._measure(torch.cat(self._staged))
            self._staged = []

    def _measure(self, x: Float[Tensor, "n cells"]) -> None:
        offset = torch.arange(x.shape[1], device=x.device) * BINS + ZERO
        flat = self.histogram.view(-1)
        for part in x.split(max(1, (CHUNK if x.device.type == "cpu" else STAGED) // x.shape[1])):
            # A kernel tells of what is not a number only later, and no bin is for it.
            part = part.float() if x.device.type == "cpu" else part.float().nan_to_num_()
            self.sum += part.sum(0)
            self.squares += (part * part).sum(0)
            distance = part.abs().log2_().sub_(LOWEST).mul_(PER_OCTAVE).add_(1).clamp_(0, SIDE).copysign_(part)
            where = distance.long().add_(offset).view(-1)
            flat.scatter_add_(0, where, torch.ones(1, dtype=torch.int32, device=x.device).expand(len(where)))
        self.measured += len(x)

    def merge(self, other: Statistics) -> None:
        """Take in the statistics of later tokens."""
        if int(self.measured) + int(other.measured) > torch.iinfo(torch.int32).max:
            raise FfmemError("more tokens were measured than a histogram's bins can count: use --stats sample")
        self.maximum = torch.maximum(self.maximum, other.maximum)
        self.minimum = torch.minimum(self.minimum, other.minimum)
        for name in ("active", "sum", "squares", "histogram", "measured"):
            getattr(self, name).add_(getattr(other, name))

    def state(self) -> dict[str, Tensor]:
        """All there is to keep, once what was collected is measured."""
        self.settle()
        return {name: tensor for name, tensor in vars(self).items() if not name.startswith("_")}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what `state` gave, or a part of it."""
        for name, tensor in state.items():
            getattr(self, name).copy_(tensor)


def extreme(
    m: Float[Tensor, "batch pos cells"], lengths: Int[Tensor, " batch"], shortest: int, *, largest: bool
) -> Float[Tensor, "batch cells"]:
    """The largest or smallest coefficient of each row's tokens, padding left out.

    Rows have about equal length, so only the few columns behind the shortest row need a mask.
    """
    reduce = torch.amax if largest else torch.amin
    found = reduce(m[:, :shortest], dim=1)
    if shortest < m.shape[1]:
        padding = torch.arange(shortest, m.shape[1], device=m.device) >= lengths[:, None]
        tail = m[:, shortest:].masked_fill(padding[:, :, None], -torch.inf if largest else torch.inf)
        found = (torch.maximum if largest else torch.minimum)(found, reduce(tail, dim=1))
    return found


def _blocks(
    m: Float[Tensor, "batch pos cells"], lengths: Int[Tensor, " batch"], shortest: int
) -> Iterator[Float[Tensor, "rows columns cells"]]:
    """A batch's tokens without its padding: the columns that all rows have, then the others as rows of one."""
    yield m[:, :shortest]
    if shortest < m.shape[1]:
        row, column = (torch.arange(shortest, m.shape[1], device=m.device) < lengths[:, None]).nonzero(as_tuple=True)
        yield m[row, column + shortest][:, None]


def _firings(block: Float[Tensor, "rows columns cells"]) -> Int[Tensor, " cells"]:
    """How often each cell fires. Bytes are summed first: summing booleans as integers is ten times slower."""
    total = torch.zeros(block.shape[2], dtype=torch.int64, device=block.device)
    for part in block.split(ROW, dim=1):
        fired = (part > 0).view(torch.uint8).sum(1, dtype=torch.uint8)
        total += fired.sum(0, dtype=torch.int64)
    return total
