"""Statistics of every cell of a layer, one class each, gathered in the same read as the cells' triggers.

Another package adds a statistic by a subclass of `Statistic` and an entry point in the group `ffmem.statistics`. Every run
that begins while it is installed gathers it and has its columns in the table of cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.indexing.coefficients import Coefficients
from ffmem.run.histogram import BINS, LOWEST, PER_OCTAVE, SIDE, ZERO

BYTE = 255
"""The number of columns up to which a sentence's firings fit into one byte."""


class Statistic:
    """One statistic of all cells of a layer: tensors with a row a cell, what adds to them, and the columns made of them.

    A subclass makes its tensors in `__init__`, as attributes whose names do not begin with an underscore, and overrides
    `columns` and `add` or `measure`, or both. Checkpoints keep the tensors. Those of two workers are added, unless `merge`
    says otherwise: in any order, so that they must be integers or, with a `merge` of its own, extremes. A tensor of floats
    that is added up has to be named in `sums`.
    """

    schema: ClassVar[pa.Schema]
    """The columns that the statistic adds to the table of cells."""
    sums: ClassVar[tuple[str, ...]] = ()
    """Tensors that hold sums of floats. Rounding depends on the order, so they are kept for each shard, and added in the
    order of shards when the run is finished."""
    in_kernel: ClassVar[tuple[str, ...]] = ()
    """Tensors that the fused GPU kernel adds to by itself, so that `add` is not called where it reads. It knows `active`,
    `maximum` and `minimum` only; what has none is read by plain torch on a GPU too."""
    row_bytes: ClassVar[int] = 8
    """About how many bytes the statistic's columns take for each cell."""

    def __init__(self, cells: int, device: torch.device | str) -> None:
        raise NotImplementedError

    def add(self, found: Coefficients) -> None:
        """Add a batch, every token of it."""

    def measure(self, x: Float[Tensor, "n cells"]) -> None:
        """Add some measured tokens (with `--stats full` all tokens, else a sample); `x` must not be changed in place."""

    def merge(self, other: Any) -> None:
        """Add what another worker has found in other shards, sums left out."""
        for name, tensor in self.state().items():
            tensor.add_(getattr(other, name))

    def columns(self, measured: int) -> list[pa.Array]:
        """The arrays of its columns, in the order of `schema`; `measured` is the number of measured tokens."""
        raise NotImplementedError

    def state(self) -> dict[str, Tensor]:
        """The tensors that add up in any order of shards, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and not name.startswith("_") and name not in self.sums
        }


class Firings(Statistic):
    """The number of tokens with a coefficient above 0, in the column `active`."""

    schema = pa.schema([("active", pa.int64())])
    in_kernel = ("active",)

    def __init__(self, cells: int, device: torch.device | str) -> None:
        self.active = torch.zeros(cells, dtype=torch.int64, device=device)

    def add(self, found: Coefficients) -> None:
        for m in found.unpadded:
            for columns in m.split(BYTE, dim=1):
                # Bytes are summed first: summing booleans as integers is ten times slower.
                fired = (columns > 0).view(torch.uint8).sum(1, dtype=torch.uint8)
                self.active += fired.sum(0, dtype=torch.int64)

    def columns(self, measured: int) -> list[pa.Array]:
        return [pa.array(self.active.cpu().numpy())]


class Extremes(Statistic):
    """The largest and the smallest coefficient of all tokens, in the columns `maximum` and `minimum`."""

    schema = pa.schema([("maximum", pa.float32()), ("minimum", pa.float32())])
    in_kernel = ("maximum", "minimum")

    def __init__(self, cells: int, device: torch.device | str) -> None:
        self.maximum = torch.full((cells,), -torch.inf, device=device)
        self.minimum = torch.full((cells,), torch.inf, device=device)

    def add(self, found: Coefficients) -> None:
        self._extend(found.highest.amax(0).float(), found.lowest.amin(0).float())

    def merge(self, other: Any) -> None:
        self._extend(other.maximum, other.minimum)

    def _extend(self, maximum: Tensor, minimum: Tensor) -> None:
        torch.maximum(self.maximum, maximum, out=self.maximum)
        torch.minimum(self.minimum, minimum, out=self.minimum)

    def columns(self, measured: int) -> list[pa.Array]:
        # Which of 0 and -0 is the larger depends on the order in which they come: one zero for all.
        return [pa.array(extreme.cpu().numpy() + 0.0) for extreme in (self.maximum, self.minimum)]


class Moments(Statistic):
    """Mean and variance of the measured tokens' coefficients, in columns of these names; 0 where none was measured."""

    schema = pa.schema([("mean", pa.float64()), ("variance", pa.float64())])
    sums = ("sum", "squares")
    row_bytes = 16

    def __init__(self, cells: int, device: torch.device | str) -> None:
        self.sum = torch.zeros(cells, dtype=torch.float64, device=device)
        self.squares = torch.zeros(cells, dtype=torch.float64, device=device)

    def measure(self, x: Float[Tensor, "n cells"]) -> None:
        self.sum += x.sum(0)
        self.squares += (x * x).sum(0)

    def columns(self, measured: int) -> list[pa.Array]:
        mean = (self.sum / max(1, measured)).cpu().numpy()
        variance = (self.squares / max(1, measured)).cpu().numpy() - mean**2
        return [pa.array(mean), pa.array(np.maximum(variance, 0.0))]


class Histogram(Statistic):
    """The number of measured tokens whose coefficient falls into each bin of `ffmem.run.histogram`.

    The columns are lists of equal length: `bins`, those in use in ascending order, and `counts`, of each of them.
    """

    schema = pa.schema([("bins", pa.list_(pa.int16())), ("counts", pa.list_(pa.int32()))])
    row_bytes = 1348

    def __init__(self, cells: int, device: torch.device | str) -> None:
        self.histogram = torch.zeros(cells, BINS, dtype=torch.int32, device=device)
        self._begin = torch.arange(cells, device=device) * BINS + ZERO
        self._one = torch.ones(1, dtype=torch.int32, device=device)

    def measure(self, x: Float[Tensor, "n cells"]) -> None:
        distance = x.abs().log2_().sub_(LOWEST).mul_(PER_OCTAVE).add_(1).clamp_(0, SIDE).copysign_(x)
        where = distance.long().add_(self._begin).view(-1)
        self.histogram.view(-1).scatter_add_(0, where, self._one.expand(len(where)))

    def columns(self, measured: int) -> list[pa.Array]:
        cells, bins = (column.cpu().numpy() for column in self.histogram.nonzero(as_tuple=True))
        counts = self.histogram.cpu().numpy()[cells, bins]
        offsets = np.searchsorted(cells, np.arange(len(self.histogram) + 1)).astype(np.int32)
        return [
            pa.ListArray.from_arrays(offsets, pa.array(bins.astype(np.int16))),
            pa.ListArray.from_arrays(offsets, pa.array(counts)),
        ]


BUILT_IN: Mapping[str, type[Statistic]] = {
    "firings": Firings,
    "extremes": Extremes,
    "moments": Moments,
    "histogram": Histogram,
}
"""ffmem's own statistics, by name, in the order of their columns."""
