"""The pass over one shard: every batch through the model, every layer's coefficients into triggers and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.cells import SIGNS, Sign
from ffmem.corpus.ahead import ahead
from ffmem.corpus.batches import Batch
from ffmem.corpus.parts import SENTENCE_BITS
from ffmem.corpus.shards import Shard
from ffmem.errors import ModelError
from ffmem.indexing.coefficients import Coefficients, DeviceBatch, to_device
from ffmem.indexing.layer_statistics import LayerStatistics
from ffmem.indexing.statistics import BUILT_IN, Statistic
from ffmem.indexing.top import TopTriggers, best_of_rows, every_prefix
from ffmem.model.activation import Activation
from ffmem.model.memories import MemoryModel
from ffmem.run.manifest import Distinct

UNMERGED = 1 << 14
"""The most sentences after which a GPU merges its pending hits: thresholds that are old let too many hits pass."""
READY = 2
"""The number of batches that are made before they are needed."""
GROUP = 16
"""The number of batches that a GPU reads between two looks at its flags."""


def can_fuse(device: torch.device, t: int, distinct: Distinct) -> bool:
    """Whether the fused kernels can be used: on a GPU with Triton, for one prefix a sentence, and t not too large."""
    if device.type != "cuda" or distinct == "none" or not find_spec("triton"):
        return False
    from ffmem.indexing.gpu import MOST

    return t <= MOST


def new_top(cells: int, t: int, distinct: Distinct, device: torch.device, *, fused: bool) -> TopTriggers:
    """Empty triggers for one layer and sign, with slots that kernels can fill if it is `fused`."""
    if not fused:
        return TopTriggers(cells, t, distinct, device)
    from ffmem.indexing.gpu import GpuTopTriggers

    return GpuTopTriggers(cells, t, distinct, device)


class LayerCollector:
    """Triggers and statistics of one layer, of all shards that one worker has read.

    `every` says which tokens are measured: those with (sentence + position) divisible by it; with 0 there are no statistics.
    On a GPU fused kernels do the reading and tell the host nothing: where they could not do all, a flag is raised, and
    `read_again` looks at the flags of all layers now and then.
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
        statistics: Mapping[str, type[Statistic]] = BUILT_IN,
    ) -> None:
        self.layer = layer
        self.distinct = distinct
        self.every = every
        self.fused = can_fuse(device, t, distinct) if fused is None else fused
        signs: tuple[Sign, ...] = SIGNS if negative else SIGNS[:1]
        self.top: dict[Sign, Any] = {sign: new_top(cells, t, distinct, device, fused=self.fused) for sign in signs}
        self.statistics = LayerStatistics(statistics, cells, device) if every else None
        self.activation: Activation | None = None
        """The function that makes the coefficients, where a kernel may compute it: see `activate`."""
        self.nonfinite = torch.zeros(1, dtype=torch.int32, device=device)
        """A flag that a kernel raises when it has met a coefficient that is infinite or not a number."""
        self.overflows = 0
        """The number of groups of batches that were read again because a hit was lost."""
        self.merged = self.unmerged = 0
        """The number of sentences that a GPU's thresholds know of, and the number read since the last merge."""

    @property
    def measured(self) -> int:
        """The number of tokens that were measured for moments and histogram."""
        return self.statistics.measured if self.statistics else 0

    def add(self, m: Float[Tensor, "batch pos cells"], batch: DeviceBatch) -> None:
        """Add one batch's coefficients; what stands in front of the first token is not looked at."""
        found = Coefficients(m, batch)
        if self.fused:
            self._add_by_kernel(m, batch)
        else:
            self._offer(found)
        if self.statistics:
            self.statistics.add(found, every=self.every, fused=self.fused)

    def activate(self, x: Float[Tensor, "batch pos cells"], batch: DeviceBatch) -> Float[Tensor, "batch pos cells"]:
        """Make a batch's coefficients from what enters the activation, and take them in, in the same read."""
        x = x.contiguous()
        m = torch.empty_like(x)
        self._add_by_kernel(m, batch, x)
        if self.statistics:
            self.statistics.add(Coefficients(m, batch), every=self.every, fused=True)
        return m

    def add_again(self, m: Float[Tensor, "batch pos cells"], batch: DeviceBatch) -> None:
        """Offer a batch's triggers once more, without kernels; those that are held already change nothing."""
        self._offer(Coefficients(m, batch))

    def _offer(self, found: Coefficients) -> None:
        """Offer a batch to the triggers by plain torch, which is also what the kernels are tested against."""
        extremes = [found.highest, found.lowest] if self.statistics or "-" in self.top else [found.highest]
        if not all(torch.isfinite(extreme).all() for extreme in extremes):
            raise not_finite(self.layer, found.m.dtype, [found.batch.batch])
        offer = every_prefix if self.distinct == "none" else best_of_rows
        for sign, top in self.top.items():
            offer(top, found, negative=sign == "-")

    def _add_by_kernel(self, m: Tensor, batch: DeviceBatch, x: Tensor | None = None) -> None:
        """Read a batch by the kernels, in as many steps as the pending slots allow.

        A sentence offers a cell one hit, so as many sentences as there are slots find room. Later, sentences as many
        as all before bring about t·ln 2 new hits a cell, so the steps grow with what has been read.
        """
        from ffmem.indexing.gpu import ROWS, sift

        tops = list(self.top.values())
        at = 0
        while at < batch.rows:
            growth = self.merged * 3 * tops[0].pending_slots // (4 * tops[0].t)
            allowed = min(UNMERGED, max(tops[0].pending_slots, growth)) - self.unmerged
            if allowed < ROWS:
                self.merge_pending()
                continue
            rows = range(at, min(batch.rows, at + allowed // ROWS * ROWS))
            with torch.cuda.device_of(m):
                sift(
                    m,
                    rows,
                    batch,
                    tops=tops,
                    counts=self.statistics.in_kernel if self.statistics else {},
                    nonfinite=self.nonfinite,
                    activation=None if x is None else self.activation,
                    x=x,
                )
            self.unmerged += len(rows)
            at = rows.stop

    def merge_pending(self) -> None:
        """Merge the hits that are pending on a GPU into the triggers, so that thresholds rise."""
        if self.fused and self.unmerged:
            for top in self.top.values():
                top.merge_pending()
            self.merged, self.unmerged = self.merged + self.unmerged, 0

    @property
    def flags(self) -> list[Int[Tensor, "1"]]:
        """The flags that kernels raise: first `nonfinite`, then for each sign whether a hit was lost for want of a slot."""
        return [self.nonfinite, *(top.lost for top in self.top.values())]

    def end_shard(self) -> None:
        """Merge all pending hits, and put the shard's sums of floats aside: they have to be added in the order of shards."""
        for top in self.top.values():
            top.flush()
        if self.statistics:
            self.statistics.end_shard()

    def merge(self, other: LayerCollector) -> None:
        """Add what another worker has found in other shards, in any order of workers; sums are left to `add_sums`."""
        for sign, top in self.top.items():
            top.merge(other.top[sign])
            top.flush()
        if self.statistics and other.statistics:
            self.statistics.merge(other.statistics)

    def state(self) -> dict[str, Tensor]:
        """All tensors that add up in any order of shards, by `layer/...` names."""
        found = {f".{sign}.{name}": tensor for sign, top in self.top.items() for name, tensor in top.state().items()}
        if self.statistics:
            found |= {f"/{name}": tensor for name, tensor in self.statistics.state().items()}
        return {f"L{self.layer}{name}": tensor for name, tensor in found.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave; it may hold other layers' tensors too."""
        for sign, top in self.top.items():
            top.load(_below(f"L{self.layer}.{sign}.", state))
        if self.statistics:
            self.statistics.load(_below(f"L{self.layer}/", state))

    def sums(self) -> dict[str, Tensor]:
        """The sums of floats of the shard that was read last, by name."""
        sums = self.statistics.sums() if self.statistics else {}
        return {f"L{self.layer}/{name}": tensor for name, tensor in sums.items()}

    def add_sums(self, sums: dict[str, Tensor]) -> None:
        """Add the sums of the next shard, in the order of shards, to those of a collector that has read no shard itself."""
        if self.statistics:
            self.statistics.add_sums(_below(f"L{self.layer}/", sums))


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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

    What a GPU could not do by itself is most likely early, so the first looks at its flags are close together.
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


def raised_flags(collectors: dict[int, LayerCollector]) -> tuple[list[int], list[int]]:
    """The layers in which, since the last call, a coefficient was not finite, and those in which a hit was lost.

    Merges all pending hits, and waits for the GPU once for all layers.
    """
    fused = {layer: collector for layer, collector in collectors.items() if collector.fused}
    for collector in fused.values():
        collector.merge_pending()
    flags = [(layer, flag) for layer, collector in fused.items() for flag in collector.flags]
    if not flags:
        return [], []
    raised = torch.cat([flag.to(flags[0][1].device) for _, flag in flags]).tolist()
    found: tuple[list[int], list[int]] = [], []
    for (layer, flag), is_raised in zip(flags, raised, strict=True):
        if is_raised:
            flag.zero_()
            found[flag is not fused[layer].nonfinite].append(layer)
    return found


def read_again(model: MemoryModel, group: list[Batch], collectors: dict[int, LayerCollector]) -> int:
    """Read these batches once more, without kernels, for the layers where a hit was lost; gives the number of layers."""
    nonfinite, lost = raised_flags(collectors)
    if nonfinite:
        raise not_finite(nonfinite[0], model.dtype, group)
    overflowed = {layer: collectors[layer] for layer in lost}
    for collector in overflowed.values():
        collector.overflows += 1
    for batch in group if overflowed else []:
        read_batch(model, batch, overflowed, again=True)
    return len(overflowed)


def not_finite(layer: int, dtype: torch.dtype, batches: list[Batch]) -> ModelError:
    """The error that says in which layer a coefficient is infinite or not a number, and in which sentences to look."""
    part, first = divmod(min(int(batch.sentences.min()) for batch in batches), 1 << SENTENCE_BITS)
    where = f"sentence {first} of part {part + 1} of the corpus" if part else f"sentence {first}"
    return ModelError(
        f"layer {layer} gives coefficients that are not finite in {dtype} (in {where} or one of those read with it): "
        "try --dtype float32 or bfloat16"
    )
