"""Statistics of every cell of a layer, one class each, gathered in the same read as the cells' triggers.

Another package adds a statistic by a subclass of `Statistic` and an entry point in the group `ffmem.statistics`. Every run
that begins while it is installed gathers it and has its columns in the table of cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.errors import FfmemError
from ffmem.indexing.coefficients import Coefficients
from ffmem.run.histogram import BINS, LOWEST, PER_OCTAVE, SIDE, ZERO
from ffmem.run.reader import CELL_COLUMNS
from ffmem.text import visible

GROUP = "ffmem.statistics"
"""The entry point group in which other packages name their statistics."""
EVERY, GPU_EVERY = 16, 1024
"""A sample measures the tokens with (sentence + position) divisible by this. A GPU reads much more text, and would be held
up by more."""
ENOUGH = 1 << 15
"""Tokens that a GPU measures all the same, where the corpus has them."""
STAGED = 1 << 23
"""Coefficients of a sample that a GPU collects before it measures them: one batch at a time the steps would be too small."""
CACHED = 1 << 20
"""Coefficients that are measured at a time on a CPU: few enough to stay in its cache."""
BYTE = 255
"""Columns whose firings fit into one byte."""


def sample_every(device: str, tokens: int | None) -> int:
    """Of how many tokens a sample takes one, for a corpus of about so many.

    >>> sample_every("cpu", 10**9), sample_every("cuda", 10**9), sample_every("cuda", 2**20)
    (16, 1024, 32)
    """
    if device == "cpu" or tokens is None:
        return EVERY if device == "cpu" else GPU_EVERY
    return min(GPU_EVERY, max(EVERY, 1 << max(1, tokens // ENOUGH).bit_length() - 1))


class Statistic:
    """One statistic of all cells of a layer: tensors with a row a cell, what adds to them, and the columns made of them.

    A subclass makes its tensors in `__init__`, as attributes whose names do not begin with an underscore, and overrides
    `columns` and `add` or `measure`, or both. Checkpoints keep the tensors. Those of two workers are added, unless `merge`
    says otherwise: in any order, so that they must be integers or, with a `merge` of its own, extremes. A tensor of floats
    that is added up has to be named in `sums`.
    """

    schema: ClassVar[pa.Schema]
    """The columns that it adds to the table of cells."""
    sums: ClassVar[tuple[str, ...]] = ()
    """Tensors that hold sums of floats. Rounding depends on the order, so they are kept for each shard, and added in the
    order of shards when the run is finished."""
    in_kernel: ClassVar[tuple[str, ...]] = ()
    """Tensors that the fused GPU kernel adds to by itself, so that `add` is not called where it reads. It knows `active`,
    `maximum` and `minimum` only; what has none is read by plain torch on a GPU too."""
    row_bytes: ClassVar[int] = 8
    """About how many bytes its columns take for each cell."""

    def __init__(self, cells: int, device: torch.device | str) -> None:
        raise NotImplementedError

    def add(self, found: Coefficients) -> None:
        """Take in a batch: every token of it."""

    def measure(self, x: Float[Tensor, "n cells"]) -> None:
        """Take in some measured tokens (with `--stats full` all tokens, else a sample); `x` must not be changed in place."""

    def merge(self, other: Any) -> None:
        """Take in what another worker has found in other shards, sums left out."""
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
    """How many tokens have a coefficient above 0, in the column `active`."""

    schema = pa.schema([("active", pa.int64())])
    in_kernel = ("active",)

    def __init__(self, cells: int, device: torch.device | str) -> None:
        self.active = torch.zeros(cells, dtype=torch.int64, device=device)

    def add(self, found: Coefficients) -> None:
        for block in found.blocks:
            for part in block.split(BYTE, dim=1):
                # Bytes are summed first: summing booleans as integers is ten times slower.
                fired = (part > 0).view(torch.uint8).sum(1, dtype=torch.uint8)
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
    """How many measured tokens' coefficients fall into each bin of `ffmem.run.histogram`.

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


def installed_statistics() -> dict[str, type[Statistic]]:
    """The statistics of other packages that are installed here, by the name of their entry point, in order of names."""
    found: dict[str, type[Statistic]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            kind = point.load()
            _check(point.name, kind, {**BUILT_IN, **found})
        except Exception as error:
            package = point.dist.name if point.dist else point.value
            raise FfmemError(
                f"the statistic {visible(point.name)} of {visible(package)} cannot be used ({visible(str(error))}): "
                "mend or remove that package"
            ) from error
        found[point.name] = kind
    return found


def _check(name: str, kind: Any, known: Mapping[str, type[Statistic]]) -> None:
    """Find out at the beginning of a run what would stop it at its end."""
    if not (isinstance(kind, type) and issubclass(kind, Statistic)):
        raise TypeError(f"expected a Statistic, found {kind}")
    columns = {*CELL_COLUMNS, *(column for one in known.values() for column in one.schema.names)}
    if taken := {name}.intersection(known) or columns.intersection(kind.schema.names):
        raise ValueError(f"expected a name of its own, found {min(taken)!r}, which is another's")
    made = pa.RecordBatch.from_arrays(kind(2, "cpu").columns(0), schema=kind.schema)
    if made.num_rows != 2:
        raise ValueError(f"expected a row a cell, found {made.num_rows} for 2 cells")


def statistics_named(names: Sequence[str]) -> dict[str, type[Statistic]]:
    """ffmem's own statistics, and those of other packages that a run was begun with, by their names."""
    others = installed_statistics() if names else {}
    if missing := [name for name in names if name not in others]:
        raise FfmemError(
            f"the run gathers the statistic {visible(missing[0])}, found no package that has it: install the one that had"
        )
    return {**BUILT_IN, **{name: others[name] for name in names}}


def cell_bytes(kinds: Iterable[type[Statistic]]) -> tuple[int, int]:
    """Bytes of a cell's statistics in a worker's state, and in the sums that belong to a shard."""
    made = [kind(1, "cpu") for kind in kinds]
    state = sum(tensor.nbytes for one in made for tensor in one.state().values())
    return state, sum(getattr(one, name).nbytes for one in made for name in one.sums)


class LayerStatistics:
    """All statistics of a layer, of the shards that one worker has read; floats are summed for the latest shard only."""

    def __init__(self, kinds: Mapping[str, type[Statistic]], cells: int, device: torch.device | str) -> None:
        self.each = {name: kind(cells, device) for name, kind in kinds.items()}
        self.schema = pa.schema([field for kind in kinds.values() for field in kind.schema])
        self.measured = 0
        """Tokens that were measured."""
        self._latest = {name: tensor.clone() for name, tensor in self._running_sums().items()}
        self._staged: list[Tensor] = []

    @property
    def in_kernel(self) -> dict[str, Tensor]:
        """The tensors that the fused kernel adds to: `active`, `maximum` and `minimum`."""
        return {name: getattr(one, name) for one in self.each.values() for name in one.in_kernel}

    def add(self, found: Coefficients, *, every: int, fused: bool) -> None:
        """Take in a batch, of which one token in `every` is measured; `fused` says that a kernel has read it too."""
        for one in self.each.values():
            if not (fused and one.in_kernel):
                one.add(found)
        if every == 1:
            for block in found.blocks:
                self._measure(block.flatten(0, 1))
        elif found.m.device.type == "cpu":
            self._measure(found.sample(every))
        else:
            self._staged.append(found.sample(every))
            if sum(part.numel() for part in self._staged) >= STAGED:
                self.flush()

    def flush(self) -> None:
        """Measure the sampled tokens that were collected on a GPU."""
        if self._staged:
            self._measure(torch.cat(self._staged))
            self._staged = []

    def _measure(self, x: Float[Tensor, "n cells"]) -> None:
        on_cpu = x.device.type == "cpu"
        for part in x.split(max(1, (CACHED if on_cpu else STAGED) // x.shape[1])):
            # A kernel tells later of what is not a number, and no bin is for it.
            part = part.float() if on_cpu else part.float().nan_to_num_()
            for one in self.each.values():
                one.measure(part)
        self.measured += len(x)

    def end_shard(self) -> None:
        """Put the shard's sums of floats aside, for `sums`, and begin the next shard's at 0."""
        self.flush()
        self._check()
        for name, tensor in self._running_sums().items():
            self._latest[name].copy_(tensor)
            tensor.zero_()

    def merge(self, other: LayerStatistics) -> None:
        """Take in what another worker has found in other shards; sums of floats are left to `add_sums`."""
        for name, one in self.each.items():
            one.merge(other.each[name])
        self.measured += other.measured
        self._check()

    def _check(self) -> None:
        if self.measured > torch.iinfo(torch.int32).max:
            raise FfmemError("more tokens were measured than a histogram's bins can count: use --stats sample")

    def state(self) -> dict[str, Tensor]:
        """What adds up in any order of shards, by `statistic/tensor`."""
        self.flush()
        tensors = {f"{name}/{key}": tensor for name, one in self.each.items() for key, tensor in one.state().items()}
        return {**tensors, "measured": torch.tensor([self.measured])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        self.measured = int(state["measured"])

    def sums(self) -> dict[str, Tensor]:
        """The sums of floats of the shard that was read last, by `statistic/tensor`."""
        return self._latest

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Add the sums of the next shard, in the order of shards."""
        for name, tensor in self._running_sums().items():
            tensor.add_(sums[name])

    def _running_sums(self) -> dict[str, Any]:
        return {f"{name}/{key}": getattr(one, key) for name, one in self.each.items() for key in one.sums}

    def columns(self) -> list[pa.Array]:
        """The arrays of all columns, in the order of `schema`."""
        return [array for one in self.each.values() for array in one.columns(self.measured)]
