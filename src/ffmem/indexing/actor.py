"""A worker as an actor of Ray: in a process of its own, on whatever machine there is room.

Such a process imports this module before it knows which GPUs are its own, so nothing heavy is imported here.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ffmem.errors import CorpusError, FfmemError, RunError

if TYPE_CHECKING:
    from ffmem.corpus.corpus import Corpus
    from ffmem.corpus.parts import Part
    from ffmem.indexing.checkpoint import ShardId
    from ffmem.indexing.provenance import ModelInfo
    from ffmem.run.manifest import Manifest

TICK = 0.5
"""The number of seconds between two reports of a worker on how far it has come."""
PACKAGES = ("ffmem", "numpy", "pyarrow", "sentencex", "tokenizers", "transformers")
"""Packages that decide how the text is cut, so that their versions must be the same everywhere."""


@dataclass(frozen=True)
class Job:
    """The run that all workers make, as one that leads them sends it."""

    run: str
    writer: str | None
    """The name in which workers write a run that is in an object store; None for a folder."""
    manifest: Manifest
    corpus: Corpus
    parts: list[Part]
    coverage: dict[str, set[ShardId]]
    """The shards that each worker's state covered when the job was sent, by the worker's name."""


class Actor:
    """A worker in a process of its own. Whatever it is asked, Ray may ask again when it was lost and started anew."""

    def __init__(
        self, name: str, model: str, load: dict[str, Any], environment: dict[str, str], threads: int, sharing: int
    ) -> None:
        os.environ.update({"TOKENIZERS_PARALLELISM": "false", **environment})
        self.name, self.source, self.load, self.threads, self.sharing = name, model, load, threads, sharing
        self.model: Any = None
        self.job: Job | None = None
        self.worker: Any = None
        self.tokens = 0
        """The number of tokens that were read so far of the part that is being read."""

    def greet(self) -> tuple[str, int, dict[str, str]]:
        """The name of the machine, the number of the process, and the versions of the packages there."""
        return platform.node(), os.getpid(), {name: version(name) for name in PACKAGES}

    def progress(self) -> int:
        """The number of tokens read so far of the part that is being read; the answer comes a while after the call."""
        time.sleep(TICK)
        return self.tokens

    def forget(self) -> None:
        """Delete what was fetched from an object store."""
        from ffmem.run.store import forget

        forget()

    def model_info(self) -> ModelInfo:
        """Load the model, once, and give what a run notes of it."""
        import torch

        from ffmem.indexing.provenance import ModelInfo
        from ffmem.model.loading import load_model

        torch.set_num_threads(self.threads)  # as whoever leads: sums depend on it in the last digits
        if self.model is None:
            self.model = load_model(self.source, **self.load)
        return ModelInfo.of(self.model)

    def count(self, job: list[Any], part: Part, room: int) -> int:
        """The number of tokens of a part, or `room` + 1 where it has more than `room`."""
        tokens = 0
        for shard in self._job(job).corpus.shards(part, room=room):
            tokens = room + 1 if shard.full else shard.after.tokens
        return tokens

    def read(self, job: list[Any], part: Part, room: int | None) -> int:
        """Read a part, or what is left of it, until all of it is kept; gives the number of tokens read by this process."""
        corpus = self._job(job).corpus
        worker = self.worker or self._take_up()
        elsewhere = set().union(*(shards for name, shards in self.job.coverage.items() if name != self.name))  # type: ignore
        self.tokens = 0
        for _, tokens in worker.read(corpus, [part], elsewhere, room):
            self.tokens += tokens
        worker.wait()
        read, self.tokens = self.tokens, 0
        return read

    def _job(self, job: list[Any]) -> Job:
        """The job that was sent, which travels to this process only once."""
        if self.job is None:
            import ray

            from ffmem.corpus.readers import cores

            self.job = ray.get(job[0])
            here = self.job.corpus
            here.workers = max(1, min(here.workers, (cores() - 2) // self.sharing))
            if here.parts() != self.job.parts:
                raise CorpusError(
                    f"{platform.node()} does not see the same text as the machine that leads: every machine needs the "
                    "corpus under the same path"
                )
        return self.job

    def _take_up(self) -> Any:
        """Begin with the run, or go on from what an earlier process of this worker has left."""
        import ray

        from ffmem.indexing.worker import Worker
        from ffmem.run.folder import RunFolder

        assert self.job is not None
        job, info = self.job, self.model_info()
        if difference := info.differs(job.manifest):
            raise FfmemError(f"worker {self.name} is not like the one that the run began with: it has {difference}")
        folder = RunFolder(job.run)
        found = folder.manifest()
        if found is None or found.provenance != job.manifest.provenance:
            raise RunError(
                f"{platform.node()} does not see the run at {job.run}: give a folder that every node reaches under this "
                "path, or a URL such as s3://bucket/run"
            )
        folder.write_as(job.writer)
        self.worker = Worker(self.model, folder, job.manifest, self.name)
        if not ray.get_runtime_context().was_current_actor_reconstructed:
            self.worker.check_covered(job.coverage.get(self.name, set()))
        return self.worker


def version(package: str) -> str:
    """The version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
