"""A worker: a model, and collectors that take in one shard after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ffmem.corpus.shards import Shard
from ffmem.corpus.tokens import Encoder
from ffmem.errors import FfmemError
from ffmem.indexing import checkpoint
from ffmem.indexing.collect import LayerCollector, read_shard
from ffmem.indexing.layer_statistics import statistics_named
from ffmem.indexing.provenance import Subject
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.process import Shared
from ffmem.run.folder import RunFolder
from ffmem.run.manifest import Manifest

SWITCH = 1e-4
"""Seconds after which a thread that has a GPU to feed gets its turn; Python's own 5 ms are long beside a launch."""


class Worker:
    """Reads shards and leaves its findings in the run folder, written while the next shard is read."""

    def __init__(
        self, model: MemoryModel, folder: RunFolder, manifest: Manifest, name: str, damaged: Iterable[int] = ()
    ) -> None:
        self.model, self.folder, self.name = model, folder, name
        self.manifest, self.settings = manifest, manifest.settings
        self.devices = {layer: model.values(layer).device for layer in self.settings.layers}
        self.threads = int(manifest.environment["threads"])
        self.encoder = Encoder(model.tokenizer, model.context)
        self.snapshot = checkpoint.Snapshot()
        with turns(model.device.type):
            self.collectors = self._collectors()
            self.covered = checkpoint.load(folder, name, self.collectors)
            self.snapshot.take(self.collectors.values())  # the memory for it, before there is any text
        self.damaged = set(damaged)
        """Shards that some worker's state covers, but whose own files are to be made again."""
        self.mended: list[int] = []
        """Damaged shards that this worker has read again."""
        self._writer = ThreadPoolExecutor(1, "ffmem-checkpoint")
        self._written: Future[None] | None = None

    def _collectors(self) -> dict[int, LayerCollector]:
        found = make_collectors(self.manifest, self.devices)
        take_over_activations(self.model, found)
        return found

    @property
    def kept(self) -> list[int]:
        """The shards that this worker has read and that need no reading any more, once all is written."""
        return [number for number in [*self.covered, *self.mended] if number not in self.damaged]

    def read(self, shard: Shard) -> Iterator[int]:
        """Read a shard; yields the tokens of each batch. It is kept for certain once the next one, or `wait`, returns.

        A damaged one is read into collectors of its own: what it gives to all others is in a state already.
        """
        damaged = shard.number in self.damaged
        collectors, snapshot = (self._collectors(), checkpoint.Snapshot()) if damaged else (self.collectors, self.snapshot)
        padded, size, before = 0, self.settings.batch_tokens, _overflows(collectors)
        bos = self.model.bos if self.settings.bos else None
        try:
            with threads(self.threads), turns(self.model.device.type):
                for batch in read_shard(self.model, shard, collectors, batch_tokens=size, bos=bos):
                    padded += batch.ids.size
                    yield batch.tokens
        except torch.OutOfMemoryError as error:
            raise FfmemError(
                f"{self.model.device} is out of memory with batches of {size:,} tokens: start over with a smaller "
                "--batch-tokens (and --overwrite)"
            ) from error
        self.wait()
        snapshot.take(collectors.values())
        if damaged:
            self.damaged.discard(shard.number)
            self.mended.append(shard.number)
        else:
            self.covered = [*self.covered, shard.number]
        counted = {"padded": padded, "read_again": _overflows(collectors) - before}
        name, origin = None if damaged else self.name, self.manifest.provenance
        self._written = self._writer.submit(
            checkpoint.save, self.folder, name, self.covered, shard, snapshot, self.encoder, counted, origin
        )

    def wait(self) -> list[int]:
        """Until all that was read is kept; the shards that are."""
        if self._written is not None:
            self._written.result()
            self._written = None
        return self.kept

    def close(self) -> None:
        """Wait for what is being written; an error in it has been told, or is told by `wait`."""
        self._writer.shutdown()


def _overflows(collectors: dict[int, LayerCollector]) -> int:
    return sum(collector.overflows for collector in collectors.values())


class Service:
    """A worker as others call it, from another process or another machine. Every answer is small."""

    def __init__(self, model: Any, load: dict[str, Any], threads: int) -> None:
        torch.set_num_threads(threads)  # as whoever leads: sums depend on it in the last digits
        self.model = load_model(model, **load)
        self.worker: Worker | None = None
        self.told: Callable[[int], None] = lambda tokens: None
        """Told of the tokens of a shard as they are read."""

    def subject(self) -> Subject:
        return Subject.of(self.model)

    def begin(self, run: str, manifest: Manifest, name: str, writer: str | None, damaged: set[int]) -> list[int]:
        """Take up a run, or what an earlier worker of this name has left of it; the shards that it covers.

        `writer` is who leads, as the run's folder knows it; `damaged` are the shards that are covered, but to be made again.
        """
        folder = RunFolder(run)
        folder.write_as(writer)
        self.worker = Worker(self.model, folder, manifest, name, damaged)
        return self.worker.kept

    def read(self, shard: Shard) -> list[int]:
        """Read a shard; the shards that are kept so far."""
        assert self.worker is not None
        kept, read = self.worker.kept, 0
        for tokens in self.worker.read(shard):
            self.told(read := read + tokens)
        return kept

    def keep(self) -> list[int]:
        """The shards that are kept, all that were read."""
        assert self.worker is not None
        return self.worker.wait()


def make_collectors(manifest: Manifest, devices: dict[int, torch.device]) -> dict[int, LayerCollector]:
    """A collector a layer of a run, on these devices."""
    settings, cells = manifest.settings, manifest.model.cells
    statistics = statistics_named(settings.statistics)
    return {
        layer: LayerCollector(
            layer,
            cells[layer - 1],
            t=settings.top,
            distinct=settings.distinct,
            negative=settings.negative,
            every=settings.every,
            device=device,
            statistics=statistics,
        )
        for layer, device in devices.items()
    }


def take_over_activations(model: MemoryModel, collectors: dict[int, LayerCollector]) -> None:
    """Let kernels that read the coefficients make them too, where they can."""
    if any(collector.fused for collector in collectors.values()):
        found = model.find_activations()
        for layer, collector in collectors.items():
            collector.activation = found[layer - 1] if collector.fused else None


def turns(device: str) -> AbstractContextManager[None]:
    """Where a GPU waits for this thread's calls, threads that read text and write files give way to it at once."""
    return _short_turns() if device == "cuda" else nullcontext()


@Shared
@contextmanager
def _short_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with as many threads as the run began with: sums depend on it in the last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
