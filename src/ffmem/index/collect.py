"""The pass over one shard: every batch through the model, every layer's coefficients into triggers and statistics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.corpus.plan import Batch, Shard
from ffmem.index.statistics import SAMPLE, Statistics, Stats, extreme
from ffmem.index.top import Distinct, TopTriggers, best_of_rows, every_prefix
from ffmem.model.memories import MemoryModel
from ffmem.words import SIGNS, ModelError, Sign


class DeviceBatch:
    """A batch's arrays as tensors beside the coefficients."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self.start = batch.start
        self.shortest = int(batch.lengths.min())
        self.first_sentence = int(batch.sentences.min())
        self.lengths = torch.from_numpy(batch.lengths).to(device)
        self.sentences = torch.from_numpy(batch.sentences).to(device)
        self.keys = torch.from_numpy(batch.keys).to(device)

    @cached_property
    def sample(self) -> Int[Tensor, "2 n"]:
        """Rows and columns of the tokens whose sentence + position is a multiple of `SAMPLE`."""
        positions = torch.arange(1, int(self.lengths.max()) + 1, device=self.lengths.device)
        chosen = (self.sentences[:, None] + positions) % SAMPLE == 0
        return torch.stack((chosen & (positions <= self.lengths[:, None])).nonzero(as_tuple=True))


class LayerCollector:
    """Triggers and statistics of one layer."""

    def __init__(
        self, layer: int, cells: int, *, t: int, distinct: Distinct, negative: bool, stats: Stats, device: torch.device
    ) -> None:
        self.layer = layer
        self.stats = stats
        signs: tuple[Sign, ...] = SIGNS if negative else SIGNS[:1]
        self.top = {sign: TopTriggers(cells, t, distinct, device) for sign in signs}
        self.total = Statistics(cells, device) if stats != "off" else None
        self.shard = Statistics(cells, device) if stats != "off" else None

    def add(self, m: Float[Tensor, "batch pos cells"], batch: DeviceBatch) -> None:
        """Take one batch's coefficients; what stands before the first token is not looked at."""
        m = m[:, batch.start :]
        high = extreme(m, batch.lengths, batch.shortest, largest=True)
        low = extreme(m, batch.lengths, batch.shortest, largest=False) if self.shard or "-" in self.top else None
        if not torch.isfinite(high).all() or not (low is None or torch.isfinite(low).all()):
            raise ModelError(
                f"layer {self.layer} gives coefficients that are not finite in {m.dtype} (in sentence "
                f"{batch.first_sentence} or one of its batch): try --dtype float32 or bfloat16"
            )
        for sign, top in self.top.items():
            self._offer(top, m, high if sign == "+" else -low, batch, negative=sign == "-")  # type: ignore[operator]
        if self.shard:
            assert low is not None
            chosen = batch.sample if self.stats == "sample" else None
            self.shard.add(m, high=high, low=low, lengths=batch.lengths, shortest=batch.shortest, chosen=chosen)

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
        """Let in what waits. A shard's sums are made apart and added in the order of shards."""
        for top in self.top.values():
            top.settle()
        if self.total and self.shard:
            self.total.merge(self.shard)
            self.shard = Statistics(len(self.total.active), self.total.active.device)

    def state(self) -> dict[str, Tensor]:
        found = {
            f"L{self.layer}.{sign}.{name}": tensor for sign, top in self.top.items() for name, tensor in top.state().items()
        }
        if self.total:
            found |= {f"L{self.layer}.{name}": tensor for name, tensor in self.total.state().items()}
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        for sign, top in self.top.items():
            top.load({name: state[f"L{self.layer}.{sign}.{name}"] for name in ("coefficient", "place", "key")})
        if self.total:
            self.total.load({name: state[f"L{self.layer}.{name}"] for name in self.total.state()})


def read_batch(model: MemoryModel, batch: Batch, collectors: dict[int, LayerCollector]) -> None:
    """Send one batch through the model and every wanted layer's coefficients into its collector."""
    on: dict[torch.device, DeviceBatch] = {}

    def visit(layer: int, m: Tensor) -> None:
        if m.device not in on:
            on[m.device] = DeviceBatch(batch, m.device)
        collectors[layer].add(m, on[m.device])

    with model.reading(visit, collectors) as forward:
        forward(torch.from_numpy(batch.ids))


def read_shard(
    model: MemoryModel, shard: Shard, collectors: dict[int, LayerCollector], *, batch_tokens: int, bos: int | None
) -> Iterator[Batch]:
    """Read a shard batch by batch; yields each once it is done."""
    for batch in shard.batches(batch_tokens, bos):
        read_batch(model, batch, collectors)
        yield batch
    for collector in collectors.values():
        collector.end_shard()
