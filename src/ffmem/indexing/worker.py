"""A worker: a model, and collectors that take in the shards of one part of the corpus after the other."""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

import torch

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.parts import Part
from ffmem.corpus.shards import Shard, Span
from ffmem.corpus.tokens import Encoder
from ffmem.errors import FfmemError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing.checkpoint import Finished, ShardId, State
from ffmem.indexing.collect import LayerCollector, read_shard
from ffmem.indexing.layer_statistics import statistics_named
from ffmem.model.memories import MemoryModel
from ffmem.model.process import Shared
from ffmem.run.folder import RunFolder
from ffmem.run.manifest import Manifest

SWITCH = 1e-4
"""Seconds after which a thread that has a GPU to feed gets its turn; Python's own 5 ms are long beside a launch."""


class Worker:
    """Reads parts of a corpus and leaves what it finds in the run folder, shard by shard.

    A shard's findings are written while the next ones are read. A GPU never waits for the disk: where a state takes longer
    to write than a shard to read, one state covers several. Whatever an earlier worker of the same name has left is taken
    over, so that a worker which is started again goes on from there.
    """

    def __init__(self, model: MemoryModel, folder: RunFolder, manifest: Manifest, name: str) -> None:
        self.model, self.folder, self.name = model, folder, name
        self.manifest, self.settings = manifest, manifest.settings
        self.devices = {layer: model.values(layer).device for layer in self.settings.layers}
        self.threads = int(manifest.environment["threads"])
        self.encoder = Encoder(model.tokenizer, model.context)
        self.snapshot = checkpoint.Snapshot()
        self.covered = sorted(checkpoint.covered_by(folder, name))
        """The shards whose triggers and counts are in the collectors."""
        self.collectors: dict[int, LayerCollector] = {}
        self._writer = ThreadPoolExecutor(1, "ffmem-checkpoint")
        self._written: Future[None] | None = None
        self.holds = model.device.type == "cuda"
        """Whether finished shards are held in memory while earlier ones are written, instead of waiting for the disk."""
        self._finished: list[Finished] = []
        """The shards that were read while earlier ones were being written."""

    def take_up(self) -> None:
        """Make the collectors, filled with what an earlier worker has left, and the memory for their snapshots."""
        if not self.collectors:
            with turns(self.model.device.type):
                self.collectors = self._collectors()
                self.check_covered(checkpoint.load(self.folder, self.name, self.collectors))
                self.snapshot.take(self.collectors.values())

    def _collectors(self) -> dict[int, LayerCollector]:
        found = make_collectors(self.manifest, self.devices)
        take_over_activations(self.model, found)
        return found

    def read(
        self,
        corpus: Corpus,
        parts: list[Part],
        elsewhere: Collection[ShardId] = (),
        room: int | None = None,
        *,
        ends: bool = False,
    ) -> Generator[tuple[Shard, int], None, None]:
        """Read parts, or what is left of them, `room` tokens at most; yields the shard and the tokens of each batch.

        `elsewhere` are shards that other workers' states cover. Finished shards are only compared with the text. A shard is
        kept for certain once `wait` has returned. With `ends` no text is behind these parts: where shards may be held,
        the last one is left for `end`, since the tables are made from it at once.
        """
        numbers = {part.number for part in parts}
        covered = {shard for shard in (*elsewhere, *self.covered) if shard[0] in numbers}
        kept = checkpoint.kept(self.folder, covered)
        damaged = covered - kept.keys()
        done: dict[int, dict[int, Span]] = {}
        for (part, number), one in kept.items():
            done.setdefault(part, {})[number] = one.span
        batches = self.settings.batch_tokens, int(self.settings.bos)
        with closing(corpus.stream(parts, done, batches, room)) as shards:
            ready = self._writer.submit(self.take_up)  # while the first text is read
            for shard in shards:
                ready.result()
                for count in self._read(shard, damaged=(shard.part, shard.number) in damaged):
                    yield shard, count
                is_last = shard.full or (shard.last and shard.part == parts[-1].number)
                is_writing = self._written is not None and not self._written.done()
                if not (self.holds and (is_writing or (ends and is_last))):
                    self._save(self.name)
            ready.result()

    def _read(self, shard: Shard, *, damaged: bool) -> Iterator[int]:
        """Read a shard. A damaged one is read into collectors of its own: what it gives to others is in a state already."""
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
        sums = {name: tensor.to("cpu", copy=True) for one in collectors.values() for name, tensor in one.sums().items()}
        finished = Finished(shard, sums, {"padded": padded, "read_again": _overflows(collectors) - before})
        if damaged:
            snapshot.take(collectors.values())
            checkpoint.save(self.folder, None, [], [finished], snapshot, self.encoder, self.manifest.provenance)
            return
        self.covered = [*self.covered, (shard.part, shard.number)]
        self._finished.append(finished)

    def _save(self, name: str | None) -> None:
        """Write the finished shards, and with a name the state of all that was read."""
        self._wait()
        if self._finished:
            self.snapshot.take(self.collectors.values())
            finished, self._finished = self._finished, []
            self._written = self._writer.submit(
                checkpoint.save,
                self.folder,
                name,
                self.covered,
                finished,
                self.snapshot,
                self.encoder,
                self.manifest.provenance,
            )

    def check_covered(self, others: Collection[ShardId]) -> None:
        """An error where others see this worker's state cover other shards: somebody else still writes it."""
        if more := set(self.covered) ^ set(others):
            raise RunError(
                f"{self.folder.path}: another process has written shard {min(more)[1]} of part {min(more)[0]} meanwhile; "
                "when it has ended, give the same command again"
            )

    def wait(self) -> None:
        """Wait until all that was read is written."""
        self._save(self.name)
        self._wait()

    def end(self) -> State:
        """The state from which the run's tables are made, once the last shard is read: nobody needs it on disk."""
        self._save(None)
        self._wait()
        self.take_up()
        return State(self.name, self.covered, self.snapshot.state)

    def _wait(self) -> None:
        if self._written is not None:
            self._written.result()
            self._written = None

    def close(self) -> None:
        """Wait for what is being written; an error in writing was raised already, or is by `wait`."""
        self._writer.shutdown()


def _overflows(collectors: dict[int, LayerCollector]) -> int:
    return sum(collector.overflows for collector in collectors.values())


def make_collectors(manifest: Manifest, devices: dict[int, torch.device]) -> dict[int, LayerCollector]:
    """A collector for each layer of a run, by layer, on these devices."""
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
            statistics=statistics,
            device=device,
        )
        for layer, device in devices.items()
    }


def take_over_activations(model: MemoryModel, collectors: dict[int, LayerCollector]) -> None:
    """Let kernels that read the coefficients compute the activation too, where they can."""
    if any(collector.fused for collector in collectors.values()):
        found = model.find_activations()
        for layer, collector in collectors.items():
            collector.activation = found[layer - 1] if collector.fused else None


def turns(device: str) -> AbstractContextManager[None]:
    """Make threads that read text and write files give way at once to this thread's calls, where a GPU waits for them."""
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
