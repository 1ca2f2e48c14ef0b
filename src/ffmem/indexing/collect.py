"""The pass over one shard: every batch through the model, every layer's coefficients into triggers and statistics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.cells import SIGNS, Sign
from ffmem.corpus.ahead import ahead
from ffmem.corpus.batches import Batch
from ffmem.corpus.shards import Shard
from ffmem.errors import ModelError
from ffmem.indexing.statistics import SUMS, Statistics, extreme
from ffmem.indexing.top import TopTriggers, best_of_rows, every_prefix
from ffmem.model.activation import Activation
from ffmem.model.memories import MemoryModel
from ffmem.run.manifest import Distinct

UNMERGED = 1 << 14
"""Rows after which waiting hits are let in at the latest: stale thresholds let too much pass."""
READY = 2
"""Batches made before they are needed."""
GROUP = 16
"""Batches between two looks at what a GPU could not do by itself."""


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """An array as a tensor there; a copy to a GPU goes on behind the host's back."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def can_fuse(device: torch.device, t: int, distinct: Distinct) -> bool:
    """Whether the kernels are for this: a GPU, a sentence's best prefix, not too many triggers a cell."""
    if device.type != "cuda" or distinct == "none" or not find_spec("triton"):
        return False
    from ffmem.indexing.gpu import MOST

    return t <= MOST


def new_top(cells: int, t: int, distinct: Distinct, device: torch.device, *, fused: bool) -> TopTriggers:
    if not fused:
        return TopTriggers(cells, t, distinct, device)
    from ffmem.indexing.gpu import RoomyTop

    return RoomyTop(cells, t, distinct, device)


class DeviceBatch:
    """A batch's arrays as tensors beside the coefficients."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.batch = batch
        self.start = batch.start
        self.rows = len(batch.lengths)
        self.shortest = int(batch.lengths.min())
        self.lengths = to_device(batch.lengths, device)
        self.sentences = to_device(batch.sentences, device)
        self.keys = to_device(batch.keys, device)
        self._samples: dict[int, Tensor] = {}

    def sample(self, every: int) -> Int[Tensor, "2 n"]:
        """Rows and columns of the tokens whose sentence + position is a multiple of `every`; found once."""
        if every not in self._samples:
            positions = np.arange(1, self.batch.keys.shape[1] + 1)
            chosen = (self.batch.sentences[:, None] + positions) % every == 0
            places = np.stack(np.nonzero(chosen & (positions <= self.batch.lengths[:, None])))
            self._samples[every] = to_device(places, self.lengths.device)
        return self._samples[every]


class LayerCollector:
    """Triggers and statistics of one layer.

    On a GPU a fused kernel does the reading and tells the host nothing: what it could not do shows in `flags`, at which
    `troubles` looks now and then.
    """

    def __init__(
        self,
        layer: int,
        cells: int,
        *,
        t: int,
        distinct: Distinct,
        negative: bool,
        every: int,
        device: torch.device,
        fused: bool | None = None,
    ) -> None:
        self.layer = layer
        self.distinct = distinct
        self.every = every
        self.fused = can_fuse(device, t, distinct) if fused is None else fused
        signs: tuple[Sign, ...] = SIGNS if negative else SIGNS[:1]
        self.top: dict[Sign, Any] = {sign: new_top(cells, t, distinct, device, fused=self.fused) for sign in signs}
        self.total = Statistics(cells, device) if every else None
        self.shard = Statistics(cells, device) if every else None
        self.latest = _sums(self.total) if self.total else {}
        """The sums of the shard that was read last."""
        self.activation: Activation | None = None
        """What makes the coefficients, where this may: see `activate`."""
        self.odd = torch.zeros(1, dtype=torch.int32, device=device)
        self.overflows = 0
        """Groups of batches in which a hit was lost, so that they were read again."""
        self.merged = self.unmerged = 0
        """Rows that the thresholds know of, and rows read since then."""

    def add(self, m: Float[Tensor, "batch pos cells"], batch: DeviceBatch) -> None:
        """Take one batch's coefficients; what stands before the first token is not looked at."""
        if self.fused:
            self._sift(m, batch)
        else:
            self._read(m[:, batch.start :], batch, self.shard)
        self._measure(m, batch)

    def activate(self, x: Float[Tensor, "batch pos cells"], batch: DeviceBatch) -> Float[Tensor, "batch pos cells"]:
        """Make a batch's coefficients and take them in the same read."""
        x = x.contiguous()
        m = torch.empty_like(x)
        self._sift(m, batch, x)
        self._measure(m, batch)
        return m

    def _measure(self, m: Tensor, batch: DeviceBatch) -> None:
        if self.shard:
            chosen = batch.sample(self.every) if self.every > 1 else None
            self.shard.measure(m[:, batch.start :], batch.lengths, batch.shortest, chosen)

    def add_again(self, m: Float[Tensor, "batch pos cells"], batch: DeviceBatch) -> None:
        """Offer a batch's triggers once more, by the plain path; what is held already stays as it is."""
        self._read(m[:, batch.start :], batch, None)

    def _sift(self, m: Tensor, batch: DeviceBatch, x: Tensor | None = None) -> None:
        """By the kernels, in as many steps as the waiting places allow.

        A sentence offers a cell one hit, so as many sentences as there are places find room. Later, sentences as many
        as all before bring about t·ln 2 new hits a cell, so the steps grow with what has been read.
        """
        from ffmem.indexing.gpu import ROWS, sift

        tops = list(self.top.values())
        at = 0
        while at < batch.rows:
            growth = self.merged * 3 * tops[0].places // (4 * tops[0].t)
            allowed = min(UNMERGED, max(tops[0].places, growth)) - self.unmerged
            if allowed < ROWS:
                self.merge_waiting()
                continue
            rows = range(at, min(batch.rows, at + allowed // ROWS * ROWS))
            with torch.cuda.device_of(m):
                sift(
                    m,
                    rows,
                    start=batch.start,
                    lengths=batch.lengths,
                    sentences=batch.sentences,
                    keys=batch.keys,
                    tops=tops,
                    statistics=self.shard,
                    odd=self.odd,
                    activation=None if x is None else self.activation,
                    x=x,
                )
            self.unmerged += len(rows)
            at = rows.stop

    def merge_waiting(self) -> None:
        """Let in what waits at a GPU's waiting places."""
        if self.fused and self.unmerged:
            for top in self.top.values():
                top.merge_waiting()
            self.merged, self.unmerged = self.merged + self.unmerged, 0

    @property
    def flags(self) -> list[Int[Tensor, "1"]]:
        """Raised by the kernels: a coefficient is infinite or no number; a hit of either sign was lost for want of room."""
        return [self.odd, *(top.lost for top in self.top.values())]

    def _read(self, m: Tensor, batch: DeviceBatch, statistics: Statistics | None) -> None:
        """By plain torch."""
        high = extreme(m, batch.lengths, batch.shortest, largest=True)
        low = extreme(m, batch.lengths, batch.shortest, largest=False) if statistics or "-" in self.top else None
        if not torch.isfinite(high).all() or not (low is None or torch.isfinite(low).all()):
            raise not_finite(self.layer, m.dtype, [batch.batch])
        for sign, top in self.top.items():
            self._offer(top, m, high if sign == "+" else -low, batch, negative=sign == "-")  # type: ignore[operator]
        if statistics:
            assert low is not None
            statistics.count(m, high=high, low=low, lengths=batch.lengths, shortest=batch.shortest)

    def _offer(self, top: TopTriggers, m: Tensor, best: Tensor, batch: DeviceBatch, *, negative: bool) -> None:
        if top.distinct == "none":
            every_prefix(top, m, negative=negative, lengths=batch.lengths, sentences=batch.sentences)
        else:
            best_of_rows(
                top,
                m,
                best,
                negative=negative,
                lengths=batch.lengths,
                shortest=batch.shortest,
                sentences=batch.sentences,
                keys=batch.keys,
            )

    def end_shard(self) -> None:
        """Let in what waits. The sums of a shard are kept apart, since they have to be added in the order of shards."""
        for top in self.top.values():
            top.settle()
        if self.total and self.shard:
            self.shard.settle()
            self.total.merge(self.shard)
            self.latest, self.shard = _sums(self.shard), Statistics(len(self.total.active), self.total.active.device)

    def merge(self, other: LayerCollector) -> None:
        """Take in what another worker found in other shards."""
        for sign, top in self.top.items():
            top.merge(other.top[sign])
            top.settle()
        if self.total and other.total:
            self.total.merge(other.total)

    def state(self) -> dict[str, Tensor]:
        """All that adds up in any order of shards."""
        found = {
            f"L{self.layer}.{sign}.{name}": tensor for sign, top in self.top.items() for name, tensor in top.state().items()
        }
        if self.total:
            found |= {f"L{self.layer}.{name}": tensor for name, tensor in self.total.state().items() if name not in SUMS}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        for sign, top in self.top.items():
            top.load({name: state[f"L{self.layer}.{sign}.{name}"] for name in ("coefficient", "place", "key")})
        if self.total:
            self.total.load({name: state[f"L{self.layer}.{name}"] for name in self.total.state() if name not in SUMS})

    def sums(self) -> dict[str, Tensor]:
        """The sums of the shard that was read last."""
        return {f"L{self.layer}.{name}": tensor for name, tensor in self.latest.items()}

    def clear_sums(self) -> None:
        for name in SUMS if self.total else ():
            getattr(self.total, name).zero_()

    def add_sums(self, sums: dict[str, Tensor]) -> None:
        """Add those of the next shard."""
        for name in SUMS if self.total else ():
            getattr(self.total, name).add_(sums[f"L{self.layer}.{name}"])


def _sums(statistics: Statistics) -> dict[str, Tensor]:
    return {name: getattr(statistics, name) for name in SUMS}


def read_batch(model: MemoryModel, batch: Batch, collectors: dict[int, LayerCollector], *, again: bool = False) -> None:
    """Send one batch through the model and every wanted layer's coefficients into its collector."""

    @cache
    def on(device: torch.device) -> DeviceBatch:
        return DeviceBatch(batch, device)

    def visit(layer: int, m: Tensor) -> None:
        (collectors[layer].add_again if again else collectors[layer].add)(m, on(m.device))

    def activate(collector: LayerCollector, x: Tensor) -> Tensor:
        return collector.activate(x, on(x.device))

    activating = {
        layer: (collector.activation, partial(activate, collector))
        for layer, collector in collectors.items()
        if collector.activation and not again
    }
    with model.reading(visit, collectors, activating) as forward:
        forward(to_device(batch.ids, model.device))


def read_shard(
    model: MemoryModel, shard: Shard, collectors: dict[int, LayerCollector], *, batch_tokens: int, bos: int | None
) -> Iterator[Batch]:
    """Read a shard batch by batch; yields each once it is done.

    What a GPU could not do by itself is most likely early, so the first looks at it are close together.
    """
    group: list[Batch] = []
    size = GROUP if any(collector.merged for collector in collectors.values()) else 1
    by_document = any(collector.distinct == "document" for collector in collectors.values())
    for batch in ahead(lambda _: shard.batches(batch_tokens, bos, by_document=by_document), READY, name="ffmem-batches"):
        read_batch(model, batch, collectors)
        group.append(batch)
        if len(group) == size:
            read_again(model, group, collectors)
            group, size = [], min(GROUP, 2 * size)
        yield batch
    read_again(model, group, collectors)
    for collector in collectors.values():
        collector.end_shard()


def troubles(collectors: dict[int, LayerCollector]) -> tuple[list[int], list[int]]:
    """The layers in which, since the last time, a coefficient was not finite, and those in which a hit was lost.

    Waits for the GPU, once for all layers.
    """
    fused = {layer: collector for layer, collector in collectors.items() if collector.fused}
    for collector in fused.values():
        collector.merge_waiting()
    flags = [(layer, flag) for layer, collector in fused.items() for flag in collector.flags]
    if not flags:
        return [], []
    raised = torch.cat([flag.to(flags[0][1].device) for _, flag in flags]).tolist()
    found: tuple[list[int], list[int]] = [], []
    for (layer, flag), is_raised in zip(flags, raised, strict=True):
        if is_raised:
            flag.zero_()
            found[flag is not fused[layer].odd].append(layer)
    return found


def read_again(model: MemoryModel, group: list[Batch], collectors: dict[int, LayerCollector]) -> int:
    """Read these batches by the plain path for layers where a hit was lost; how many layers that were."""
    odd, lost = troubles(collectors)
    if odd:
        raise not_finite(odd[0], model.dtype, group)
    overflowed = {layer: collectors[layer] for layer in lost}
    for collector in overflowed.values():
        collector.overflows += 1
    for batch in group if overflowed else []:
        read_batch(model, batch, overflowed, again=True)
    return len(overflowed)


def not_finite(layer: int, dtype: torch.dtype, batches: list[Batch]) -> ModelError:
    first = min(int(batch.sentences.min()) for batch in batches)
    return ModelError(
        f"layer {layer} gives coefficients that are not finite in {dtype} (in sentence {first} or one of those read with "
        "it): try --dtype float32 or bfloat16"
    )
