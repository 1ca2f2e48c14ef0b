"""One pass over a corpus: its parts are read, by this process or by several, and what was found becomes the tables."""

from __future__ import annotations

import platform
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.parts import Part
from ffmem.corpus.shards import Progress
from ffmem.errors import CorpusError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing.actor import Job
from ffmem.indexing.checkpoint import SENTENCE_SCHEMA, Kept, ShardId, State
from ffmem.indexing.provenance import ModelInfo
from ffmem.indexing.tables import (
    TOKEN_SCHEMA,
    TRIGGER_SCHEMA,
    cell_batches,
    cell_schema,
    kept_sentences,
    merged,
    referenced_sentences,
    renumber,
    shifts,
    token_batch,
    trigger_batches,
)
from ffmem.indexing.worker import Worker, make_collectors
from ffmem.indexing.workers import Workers
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import vocabulary_texts
from ffmem.progress import Reporter
from ffmem.run.folder import CELLS, SENTENCES, TOKENS, TRIGGERS, WORK, RunFolder, write_table
from ffmem.run.manifest import Counts, Manifest


class Timing:
    """The seconds between the marks of a run's steps, by their names, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, step: str) -> None:
        """Note that a step ends now; one that has ended before is not noted again."""
        if step not in self.seconds:
            now = time.monotonic()
            self.seconds[step], self._last = round(now - self._last, 3), now


class Pass:
    """The making of one run from first batch to tables; its manifest is already written and its folder locked."""

    def __init__(
        self,
        folder: RunFolder,
        manifest: Manifest,
        corpus: Corpus,
        reporter: Reporter,
        tokens: int | None,
        timing: Timing,
    ) -> None:
        self.timing = timing
        self.folder, self.manifest, self.corpus, self.reporter = folder, manifest, corpus, reporter
        self.tokens = tokens
        """About how many tokens there are to read in all; None where that is unknown."""
        self.settings = manifest.settings
        self.parts = corpus.parts()
        kept = checkpoint.kept(folder)
        if kept and max(kept)[0] >= len(self.parts):
            raise CorpusError("the corpus has changed since the run began: restore it, or start over with --overwrite")
        self.state: State | None = None
        """The state of this process once it has read the last shard, if it reads alone; it is not written to disk."""
        self.shards = len(kept)
        self.before = sum(one.tokens for one in kept.values())
        """The number of tokens that earlier calls have read."""
        self.read = self.shown = 0
        self.began = time.monotonic()

    def make(self, workers: Workers | None, model: MemoryModel | None, info: ModelInfo) -> None:
        """Read what is left to read, write the tables and, last, the manifest that makes them a run."""
        self.folder.log("continued" if self.shards else "started", shards=self.shards, host=platform.node())
        with ThreadPoolExecutor(1, "ffmem-tokens") as beside:
            # The first text takes a while: enough for what depends on the tokenizer alone.
            written = beside.submit(self.write_tokens, info)
            with closing(self.by_many(workers) if workers else self.alone(model)) as work:  # type: ignore[arg-type]
                for _ in work:
                    self.timing.mark("first batch")
                    self.folder.check_writer()
            self.timing.mark("read")
            seconds = time.monotonic() - self.began
            self.folder.log("finished", seconds=round(seconds, 2), tokens=self.read)
            written.result()
        self.finish()

    def alone(self, model: MemoryModel) -> Generator[None, None, None]:
        """Read all parts in this process; yields after every batch."""
        coverage = checkpoint.coverage(self.folder)
        name = min(coverage, default="0")
        elsewhere = set().union(*(shards for other, shards in coverage.items() if other != name))
        with closing(Worker(model, self.folder, self.manifest, name)) as worker:
            worker.check_covered(coverage.get(name, set()))
            with closing(worker.read(self.corpus, self.parts, elsewhere, self.settings.limit_tokens, ends=True)) as batches:
                for shard, tokens in batches:
                    self.read += tokens
                    part = f"part {shard.part + 1} of {len(self.parts)}, " if len(self.parts) > 1 else ""
                    self.report(shard.fraction, f"{part}shard {shard.number + 1}")
                    yield
            self.state = worker.end()

    def by_many(self, workers: Workers) -> Generator[None, None, None]:
        """Have all parts read by workers; yields often, whether or not a part was finished."""
        job = workers.send(
            Job(
                run=str(self.folder.path.absolute() if isinstance(self.folder.path, Path) else self.folder.path),
                writer=self.folder.writer,
                manifest=self.manifest,
                corpus=self.corpus,
                parts=self.parts,
                coverage=checkpoint.coverage(self.folder),
            )
        )
        to_read = yield from self.parts_to_read(workers, job)
        done = lost = 0
        for answered in workers.each("read", job, to_read):
            if answered:
                self.read += answered[1]
                done += 1
            for what in workers.lost[lost:]:
                self.folder.log("lost", what=what)
            lost = len(workers.lost)
            names = f"{workers.working} of {workers.size} worker{'s' if workers.size > 1 else ''}"
            self.report(done / len(to_read), names + (f", {lost} lost" if lost else ""), workers.tokens)
            yield

    def parts_to_read(self, workers: Workers, job: Any) -> Generator[None, None, list[tuple[Part, int | None]]]:
        """The parts that are to be read, each with the most tokens that may be read of it (None without a limit on tokens).

        Only those are counted that the limit may fall in.
        """
        limit = self.settings.limit_tokens
        if limit is None:
            return [(part, None) for part in self.parts]
        counted: dict[int, int] = {}
        needed = ((part, limit) for part in self.parts if sum(counted.values()) <= limit)
        for answered in workers.each("count", job, needed):
            if answered:
                counted[answered[0][0].number] = answered[1]
            self.reporter.update(None, f"counting tokens, {sum(counted.values()):,}")
            yield
        to_read: list[tuple[Part, int | None]] = []
        for part in self.parts:
            to_read.append((part, limit))
            limit -= counted[part.number]
            if limit < 0:
                break
        return to_read

    def report(self, fraction: float | None, doing: str, reading: int = 0) -> None:
        """Show how many tokens were read, and how fast; `reading` are tokens of parts that are not finished yet."""
        self.shown = max(self.shown, self.read + reading)  # a worker that is lost loses what it has read
        speed = self.shown / max(1e-9, time.monotonic() - self.began)
        read = self.before + self.shown
        share = min(1.0, read / self.tokens) if self.tokens else fraction
        self.reporter.update(share, f"{doing}, {read:,} tokens, {speed:,.0f} tokens/s")

    def write_tokens(self, info: ModelInfo) -> None:
        """Write the table of tokens, which depends on the tokenizer alone."""
        size = max(info.facts.vocabulary, len(info.tokenizer))
        self.write(TOKENS, TOKEN_SCHEMA, [token_batch(vocabulary_texts(info.tokenizer, size))])

    def write(self, name: str, schema: Any, batches: Iterable[Any]) -> None:
        """Write a table of the run under its name, whole or not at all."""
        with self.folder.writing(name) as path:
            write_table(path, schema, batches)

    def finish(self) -> None:
        """Write the other tables and, last, the manifest that makes them a run."""
        began = time.monotonic()
        self.reporter.update(1.0, "writing the run folder")
        kept = checkpoint.kept(self.folder, self.covered())
        read = sum(self.ends(kept), Progress())
        if not read.sentences:
            self.folder.clear(WORK)  # the text may be put right
            raise CorpusError(self.nothing_to_read(read))
        make = partial(make_collectors, self.manifest, dict.fromkeys(self.settings.layers, torch.device("cpu")))
        collectors = list(merged(self.folder, make, kept, self.state).values())
        shift = shifts(kept)
        renumber(collectors, shift)
        numbers = referenced_sentences(collectors)
        tables = {
            SENTENCES: (SENTENCE_SCHEMA, kept_sentences(self.folder, kept, shift, numbers)),
            TRIGGERS: (TRIGGER_SCHEMA, trigger_batches(collectors, numbers)),
            CELLS: (cell_schema(collectors[0].statistics), cell_batches(collectors)),
        }
        with ThreadPoolExecutor(len(tables)) as pool:
            list(pool.map(self.write, tables, *zip(*tables.values(), strict=True)))
        real = read.tokens + read.sentences * self.settings.bos
        padded = sum(one.padded for one in kept.values())
        counts = Counts(
            records=read.records,
            sentences=read.sentences,
            tokens=read.tokens,
            shards=len(kept),
            cells=sum(len(collector.top["+"].coefficient) for collector in collectors),
            triggers=sum(int((top.coefficient > 0).sum()) for c in collectors for top in c.top.values()),
            sentences_kept=len(numbers),
            cut_to_context=read.cut,
            padding_share=round(1 - real / padded, 6) if padded else 0.0,
            measured_tokens=collectors[0].measured,
        )
        skipped = dict(read.skipped)
        if read.without_tokens:
            skipped["units without tokens"] = read.without_tokens
        self.manifest = replace(
            self.manifest,
            state="complete",
            corpus=replace(self.manifest.corpus, hash=read.digest),
            counts=counts,
            skipped=skipped,
            files=self.folder.described(TRIGGERS, CELLS, SENTENCES, TOKENS),
        )
        self.folder.write_manifest(self.manifest)
        self.folder.clear(WORK)
        again = sum(one.read_again for one in kept.values())
        self.timing.mark("tables")
        self.folder.log("written", seconds=round(time.monotonic() - began, 2), read_again=again)
        self.folder.log("timing", **self.timing.seconds)

    def covered(self) -> set[ShardId]:
        """The shards that some worker's state covers, on disk or in this process."""
        coverage = checkpoint.coverage(self.folder)
        if self.state is not None:
            coverage[self.state.worker] = set(self.state.covered)
        return set().union(*coverage.values())

    def ends(self, kept: dict[ShardId, Kept]) -> Iterator[Progress]:
        """The progress at the end of each part, up to the one with the limit; an error where shards are missing."""
        for part in self.parts:
            numbers = [number for at, number in kept if at == part.number]
            last = kept[part.number, numbers[-1]].span if numbers else None
            if last is None or not last.last or numbers != list(range(len(numbers))):
                raise RunError(
                    f"{self.folder.location(WORK)}: not all shards are there that were kept: another process may have "
                    "written this run meanwhile, or workers elsewhere; see that it is one place for all, then give the same "
                    "command again"
                )
            yield last.after
            if last.full:
                return

    def nothing_to_read(self, read: Progress) -> str:
        """The error message for a corpus without any sentence to read: what was expected, found and left out."""
        names = ", ".join(source.name for source in self.corpus.sources)
        if self.settings.limit_tokens is not None and read.records:
            return f"the first sentence of {names} has more than the {self.settings.limit_tokens} tokens of --limit-tokens"
        left_out = ", ".join(f"{count} {what}" for what, count in read.skipped.items())
        return f"expected text in {names}, found none" + (f" (left out: {left_out})" if left_out else " (empty)")
