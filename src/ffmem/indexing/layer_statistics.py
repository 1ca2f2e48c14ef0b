"""All statistics of a layer together: which there are, and how a batch, a shard and another worker's findings enter them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.errors import FfmemError
from ffmem.indexing.coefficients import Coefficients
from ffmem.indexing.statistics import BUILT_IN, Statistic
from ffmem.run.reader import CELL_COLUMNS
from ffmem.text import visible

GROUP = "ffmem.statistics"
"""The entry point group in which other packages name their statistics."""
EVERY, GPU_EVERY = 16, 1024
"""The divisors of (sentence + position) that choose the tokens a sample measures; a GPU reads much more text, and would
be held up by measuring more."""
ENOUGH = 1 << 15
"""The number of tokens that a GPU measures all the same, where the corpus has as many."""
STAGED = 1 << 23
"""The number of sampled coefficients that a GPU collects before it measures them: one batch at a time the steps would be
too small."""
CACHED = 1 << 20
"""The number of coefficients that are measured at a time on a CPU: few enough to stay in its cache."""


def sample_every(device: str, tokens: int | None) -> int:
    """The divisor with which a sample measures one token in so many, for a corpus of about `tokens`.

    >>> sample_every("cpu", 10**9), sample_every("cuda", 10**9), sample_every("cuda", 2**20)
    (16, 1024, 32)
    """
    if device == "cpu" or tokens is None:
        return EVERY if device == "cpu" else GPU_EVERY
    return min(GPU_EVERY, max(EVERY, 1 << max(1, tokens // ENOUGH).bit_length() - 1))


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
    """Raise at the beginning of a run the error that a statistic would cause at its end."""
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
    """The bytes of a cell's statistics in a worker's state, and in the sums that belong to a shard."""
    made = [kind(1, "cpu") for kind in kinds]
    state = sum(tensor.nbytes for one in made for tensor in one.state().values())
    return state, sum(getattr(one, name).nbytes for one in made for name in one.sums)


class LayerStatistics:
    """All statistics of a layer, of the shards that one worker has read; floats are summed for the latest shard only."""

    def __init__(self, kinds: Mapping[str, type[Statistic]], cells: int, device: torch.device | str) -> None:
        self.each = {name: kind(cells, device) for name, kind in kinds.items()}
        self.schema = pa.schema([field for kind in kinds.values() for field in kind.schema])
        self.measured = 0
        """The number of tokens that were measured."""
        self._latest = {name: tensor.clone() for name, tensor in self._running_sums().items()}
        self._staged: list[Tensor] = []

    @property
    def in_kernel(self) -> dict[str, Tensor]:
        """The tensors that the fused kernel adds to: `active`, `maximum` and `minimum`."""
        return {name: getattr(one, name) for one in self.each.values() for name in one.in_kernel}

    def add(self, found: Coefficients, *, every: int, fused: bool) -> None:
        """Add a batch, of which one token in `every` is measured; `fused` says that a kernel has read it too."""
        for one in self.each.values():
            if not (fused and one.in_kernel):
                one.add(found)
        if every == 1:
            for m in found.unpadded:
                self._measure(m.flatten(0, 1))
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
        """Give measured tokens to all statistics, as float32 and a part at a time."""
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
        """Merge in what another worker has found in other shards; sums of floats are left to `add_sums`."""
        for name, one in self.each.items():
            one.merge(other.each[name])
        self.measured += other.measured
        self._check()

    def _check(self) -> None:
        """Refuse more tokens than the 32-bit counts of a histogram hold."""
        if self.measured > torch.iinfo(torch.int32).max:
            raise FfmemError("more tokens were measured than a histogram's bins can count: use --stats sample")

    def state(self) -> dict[str, Tensor]:
        """The tensors that add up in any order of shards, by `statistic/tensor`."""
        self.flush()
        tensors = {f"{name}/{key}": tensor for name, one in self.each.items() for key, tensor in one.state().items()}
        return {**tensors, "measured": torch.tensor([self.measured])}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from tensors that `state` gave."""
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

    def _running_sums(self) -> dict[str, Tensor]:
        """The tensors into which floats are being summed, by `statistic/tensor`."""
        return {f"{name}/{key}": getattr(one, key) for name, one in self.each.items() for key in one.sums}

    def columns(self) -> list[pa.Array]:
        """The arrays of all columns, in the order of `schema`."""
        return [array for one in self.each.values() for array in one.columns(self.measured)]
