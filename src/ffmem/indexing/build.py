"""Build an index: one pass over a corpus, into a run folder, going on where an earlier pass was stopped."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ffmem.cells import parse_layers
from ffmem.corpus.plan import Corpus, Shard
from ffmem.corpus.record import MAX_RECORD, parse_size
from ffmem.corpus.sample import Sample
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder
from ffmem.corpus.workers import cores, get_ready
from ffmem.errors import CorpusError, FfmemError, ModelError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing.crew import Crew, check_known
from ffmem.indexing.devices import crowded, share_out
from ffmem.indexing.estimate import Estimate, estimate, estimate_tokens
from ffmem.indexing.lane import ProcessLane
from ffmem.indexing.provenance import Subject, agree, check_same_corpus, new_manifest, resolve, resolve_wikitext, sample_of
from ffmem.indexing.tables import (
    SENTENCE_SCHEMA,
    TOKEN_SCHEMA,
    TRIGGER_SCHEMA,
    cell_batches,
    cell_schema,
    referenced_sentences,
    token_batch,
    trigger_batches,
    write_table,
)
from ffmem.indexing.top import DISTINCT, POSITION_BITS
from ffmem.indexing.worker import Worker, make_collectors
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.names import known_name
from ffmem.model.tokens import check_bos, vocabulary_texts
from ffmem.progress import Reporter, reporting
from ffmem.run.folder import CELLS, SENTENCES, TOKENS, TRIGGERS, WORK, RunFolder
from ffmem.run.manifest import MOST, Counts, Manifest
from ffmem.run.reader import Index, open_index

ENGINES = ("local", "ray")
_TURNED_BACK = "the text has WikiText's marks: turned back to plain text (--wikitext keep to leave them)"


def build_index(
    model: MemoryModel | Any,
    corpus: Any,
    *,
    out: str | Path,
    top: int = 50,
    unit: str = "sentence",
    distinct: str = "text",
    layers: Any = None,
    limit_tokens: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    batch_tokens: int | str = "auto",
    shard_tokens: int | str = "auto",
    bos: str = "auto",
    negative: str = "auto",
    stats: str = "auto",
    column: str = "text",
    language: str = "en",
    wikitext: str = "auto",
    max_record: int | str = MAX_RECORD,
    workers: int | None = None,
    devices: str | None = None,
    engine: str = "local",
    address: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    announce: Callable[[str, Estimate], None] | None = None,
    **load: Any,
) -> Index:
    """Find every memory cell's triggers in one pass over a corpus; the index is written to `out` and returned.

    `model` is what `load_model` returns or takes (then `device`, `dtype` and so on may follow). `corpus` is a path, a
    list of `Path`s, a `hf:` name, a `Dataset` or an iterable of strings. The same call again continues a run that
    was stopped, and opens one that is complete. `announce` is told what the run will take before it starts. A record (a line
    of a file, a row) of more than `max_record` bytes is an error; with a larger one a run that was stopped by it goes on.

    Several workers share the work, and the index is the same: `workers` processes (one a GPU where there are some, or one a
    share of them with a `device_map`), one for each of `devices` ("cuda:0,cuda:1", "cuda:0+cuda:1,cuda:2+cuda:3"), or with
    `engine="ray"` actors on the cluster at `address`. `out` may be a URL such as `s3://bucket/run`.
    """
    _choice("distinct", distinct, DISTINCT)
    _choice("negative", negative, ("auto", "on", "off"))
    _choice("stats", stats, ("auto", "full", "sample", "off"))
    _choice("engine", engine, ENGINES)
    _choice("wikitext", wikitext, ("auto", "keep", "plain"))
    for name, number, least, most in (
        ("top", top, 1, 10_000),
        ("limit-tokens", limit_tokens, 1, MOST - 1),
        ("sample", sample, 1, MOST - 1),
        ("seed", seed, 0, MOST - 1),
    ):
        if number is not None and (type(number) is not int or not least <= number <= most):
            raise FfmemError(f"expected {name} as a whole number from {least:,} to {most:,}, found {number!r}")
    parsed = Unit.parse(unit)
    max_record = parse_size(max_record)
    sources = open_sources(corpus, column=column, max_record=max_record)
    folder = RunFolder(out)
    folder.check_own(overwrite=overwrite)  # before the model is loaded, which takes a while
    with _crew(model, load, workers, devices, engine, address, quiet) as crew:
        loaded = None if crew else load_model(model, **load)
        subject = Subject.of(loaded) if loaded else crew.subject()  # type: ignore[union-attr]
        facts = subject.facts
        wanted: dict[str, Any] = {
            "top": top,
            "unit": str(parsed),
            "distinct": distinct,
            "layers": parse_layers(layers, facts.layers),
            "limit_tokens": limit_tokens,
            "sample": sample,
            "seed": None if sample is None else seed,
            "batch_tokens": _count("batch-tokens", batch_tokens),
            "shard_tokens": _count("shard-tokens", shard_tokens),
            "bos": check_bos(bos, facts.bos, subject.name),
            "negative": facts.gated if negative == "auto" else negative == "on",
            "stats": stats,
            "language": language,
            "column": column,
            "wikitext": wikitext,
        }
        context = min(facts.context - int(wanted["bos"]), (1 << POSITION_BITS) - 1)
        if parsed.tokens > context:
            raise FfmemError(f"expected windows of at most {context:,} tokens, the model's context, found {parsed}")
        encoder = Encoder(subject.tokenizer, min(context, parsed.tokens or context))
        # A CPU is busy with the model; a GPU would wait for one process that reads text.
        readers = max(1, cores() - 2) if facts.device == "cuda" else 1
        plan = Corpus(sources, encoder, parsed, language, shard_tokens=1, limit_tokens=limit_tokens, workers=readers)
        if not overwrite and (found := folder.manifest()) and found.is_complete and not folder.parts(WORK):
            return _opened(folder, found, wanted, subject, plan, loaded)  # it may be one that can only be read
        if plan.is_fed:
            get_ready()
        with folder.locked(quiet=quiet):
            folder.check_own(overwrite=overwrite)  # somebody may have come first
            manifest = None if overwrite or not _worth_keeping(folder) else folder.manifest()
            if manifest is not None and manifest.is_complete:
                index = _opened(folder, manifest, wanted, subject, plan, loaded)
                folder.clear(WORK)
                return index
            about = cache(partial(estimate_tokens, plan))
            if manifest is None:
                wanted["wikitext"] = resolve_wikitext(wikitext, plan, subject)
                plan.plain = wanted["wikitext"] == "plain"
                if plan.plain and wikitext == "auto" and not quiet:
                    print(f"ffmem: {_TURNED_BACK}", file=sys.stderr, flush=True)
                if sample is not None:
                    plan.sample = _drawn(plan, sample, seed, quiet)
                resolved = resolve(wanted, about, subject)
            else:
                resolved = agree(folder.path, manifest, wanted, subject, plan)
                plan.sample = sample_of(manifest)
                plan.plain = resolved.wikitext == "plain"
            plan.shard_tokens = resolved.shard_tokens
            tokens = None if quiet and not announce else about()
            if announce:
                cells = sum(facts.cells[layer - 1] for layer in resolved.layers)
                signs = 2 if resolved.negative else 1
                disk = estimate(
                    tokens, cells=cells, t=top, signs=signs, stats=resolved.has_stats, vocabulary=facts.vocabulary
                )
                announce(subject.name, disk)
            if manifest is None:
                manifest = new_manifest(subject, plan, resolved)
                folder.clear()
            elif damaged := checkpoint.mend(folder, manifest.origin):
                folder.log("damaged", files=damaged)
                names = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
                if not quiet:
                    lost = f"{folder.path}: damaged and left out: {names}; what they held is read again"
                    print(f"ffmem: {lost}", file=sys.stderr, flush=True)
            # It decides only whether the text can be read, so it may grow.
            manifest = replace(manifest, corpus=replace(manifest.corpus, max_record=max_record))
            folder.write_manifest(manifest)
            with reporting("indexing", quiet=quiet) as reporter:
                run = _Run(folder, manifest, plan, reporter, tokens)
                with ThreadPoolExecutor(1, "ffmem-tokens") as beside:
                    # The first text takes a while: enough for what depends on the tokenizer alone.
                    written = beside.submit(run.write_tokens, subject)
                    run.go(run.by_many(crew) if crew else run.alone(loaded))  # type: ignore[arg-type]
                    written.result()
                run.finish()
    return open_index(folder.path, model=loaded)


@contextmanager
def _crew(
    model: Any,
    load: dict[str, Any],
    workers: int | None,
    devices: str | None,
    engine: str,
    address: str | None,
    quiet: bool,
) -> Iterator[Crew | None]:
    """The workers that are asked for, started; None where this process does the work itself."""
    if workers is not None and workers < 1:
        raise FfmemError(f"expected at least 1 worker, found {workers}")
    if address is not None and engine != "ray":
        raise FfmemError("an address is for --engine ray")
    if engine == "local" and not devices and workers in (None, 1):
        yield None
        return
    if not isinstance(model, (str, Path)):
        raise ModelError("several workers load the model themselves: give its name or its folder, not a model in memory")
    model, threads = str(model), torch.get_num_threads()
    if engine == "ray":
        from ffmem.indexing.cluster import Cluster, connected

        if devices:
            raise FfmemError("--devices is for workers on this machine: a Ray cluster gives each worker its GPU")
        with suppress(ModelError):  # a folder may be there for the workers alone
            model = known_name(model)
        with connected(address) as ray:
            cluster = Cluster(ray, load.get("device", "auto"), workers, spread=bool(load.get("device_map")))
            crew = Crew(lambda _: cluster.hire(model, load, threads), workers or cluster.places())
            with closing(crew):
                yield crew
    else:
        here = share_out(load, workers, devices)
        if not quiet and (advice := crowded(here, threads)):
            print(f"ffmem: {advice}", file=sys.stderr, flush=True)
        crew = Crew(lambda number: ProcessLane(model, here[number].load, threads, here[number].environment), len(here))
        with closing(crew):
            yield crew


def _drawn(plan: Corpus, size: int, seed: int, quiet: bool) -> Sample:
    """A sample of the corpus, all of which is read once for it."""
    with reporting("counting records", quiet=quiet) as reporter:
        found = Sample(size, seed, plan.count(reporter.update))
    if found.records <= size and not quiet:
        print(f"ffmem: the text has {found.records:,} records: the sample is all of them", file=sys.stderr, flush=True)
    return found


def _worth_keeping(folder: RunFolder) -> bool:
    """Whether a run has anything to lose: it is complete, or a shard of it is."""
    manifest = folder.manifest()
    return manifest is not None and (manifest.is_complete or checkpoint.begun(folder))


def _opened(
    folder: RunFolder,
    manifest: Manifest,
    wanted: dict[str, Any],
    subject: Subject,
    plan: Corpus,
    model: MemoryModel | None,
) -> Index:
    """A complete run, if it is of this model, corpus and settings."""
    plan.shard_tokens = agree(folder.path, manifest, wanted, subject, plan).shard_tokens
    plan.sample = sample_of(manifest)
    check_same_corpus(folder.path, manifest, plan)
    return open_index(folder.path, model=model)


class _Run:
    """One run being built."""

    def __init__(self, folder: RunFolder, manifest: Manifest, plan: Corpus, reporter: Reporter, tokens: int | None) -> None:
        self.folder, self.manifest, self.plan, self.reporter = folder, manifest, plan, reporter
        self.tokens = tokens
        """About how many there are."""
        self.settings = manifest.settings
        self.kept = checkpoint.kept(folder)
        self.before = self.read = sum(kept.span.after.tokens - kept.span.since.tokens for kept in self.kept.values())
        self.began = time.monotonic()

    def go(self, work: Generator[None, None, None]) -> None:
        """Read what is left to read."""
        shards = len(self.kept)
        self.folder.log("continued" if shards else "started", shards=shards, host=platform.node())
        with closing(work):
            for _ in work:
                self.folder.check_writer()
        seconds = time.monotonic() - self.began
        self.folder.log("finished", seconds=round(seconds, 2), tokens=self.read - self.before)

    @contextmanager
    def shards(self) -> Iterator[Iterator[Shard]]:
        """Those that are left; where a process reads them, it begins at once."""
        done = {number: kept.span for number, kept in self.kept.items()}
        batches = self.settings.batch_tokens, int(self.settings.bos)
        with closing(self.plan.shards_ahead(done, batches)) as shards:
            yield map(self.checked, shards)

    def checked(self, shard: Shard) -> Shard:
        if shard.last and not shard.first and not shard.sentences:
            raise CorpusError(_nothing_to_read(self.plan, shard.after))
        return shard

    def alone(self, model: MemoryModel) -> Generator[None, None, None]:
        """By this process."""
        names, damaged = checkpoint.workers(self.folder), checkpoint.damaged_shards(self.folder)
        with (
            self.shards() as shards,
            closing(Worker(model, self.folder, self.manifest, names[0] if names else "0", damaged)) as worker,
        ):
            check_known(self.folder, worker.kept, self.kept)
            for shard in shards:
                for tokens in worker.read(shard):
                    self.read += tokens
                    self.report(shard.fraction, f"shard {shard.number + 1}")
                    yield
            worker.wait()

    def by_many(self, crew: Crew) -> Generator[None, None, None]:
        """By others."""
        fraction, lost = None, 0
        with self.shards() as shards, closing(crew.read(shards, self.folder, self.manifest)) as standings:
            for standing in standings:
                for shard in standing.kept:
                    self.read += shard.tokens
                    fraction = max(fraction or 0.0, shard.fraction or 0.0)
                for what in crew.lost[lost:]:
                    self.folder.log("lost", what=what)
                lost = standing.lost
                places = len(crew.members)
                workers = f"{standing.working} of {places} worker{'s' if places > 1 else ''}"
                self.report(fraction, workers + (f", {lost} lost" if lost else ""), standing.reading)
                yield

    def report(self, fraction: float | None, doing: str, reading: int = 0) -> None:
        read = self.read + reading
        speed = (read - self.before) / max(1e-9, time.monotonic() - self.began)
        share = min(1.0, read / self.tokens) if self.tokens else fraction
        self.reporter.update(share, f"{doing}, {read:,} tokens, {speed:,.0f} tokens/s")

    def write_tokens(self, subject: Subject) -> None:
        size = max(subject.facts.vocabulary, len(subject.tokenizer))
        self.write(TOKENS, TOKEN_SCHEMA, [token_batch(vocabulary_texts(subject.tokenizer, size))])

    def write(self, name: str, schema: Any, batches: Iterable[Any]) -> None:
        with self.folder.writing(name) as path:
            write_table(path, schema, batches)

    def finish(self) -> None:
        """Write the other tables and, last, the manifest that makes them a run."""
        began = time.monotonic()
        self.reporter.update(1.0, "writing the run folder")
        kept = checkpoint.kept(self.folder)
        if list(kept) != list(range(len(kept))) or not (kept and kept[len(kept) - 1].span.last):
            raise RunError(
                f"{self.folder.place(WORK)}: not all shards are there that were kept: another process may have written this "
                "run meanwhile; give the same command again"
            )
        cpu = torch.device("cpu")
        make = partial(make_collectors, self.manifest, dict.fromkeys(self.settings.layers, cpu))
        collectors = list(checkpoint.merged(self.folder, make, kept).values())
        numbers = referenced_sentences(collectors)
        stats = self.settings.has_stats
        tables = {
            SENTENCES: (SENTENCE_SCHEMA, checkpoint.kept_sentences(self.folder, kept, numbers)),
            TRIGGERS: (TRIGGER_SCHEMA, trigger_batches(collectors, numbers)),
            CELLS: (cell_schema(stats), cell_batches(collectors, stats)),
        }
        with ThreadPoolExecutor(len(tables)) as pool:
            list(pool.map(self.write, tables, *zip(*tables.values(), strict=True)))
        progress = kept[len(kept) - 1].span.after
        padded = sum(one.padded for one in kept.values())
        real = progress.tokens + progress.sentences * self.settings.bos
        measured = int(collectors[0].total.measured) if collectors[0].total else 0
        counts = Counts(
            records=progress.records,
            sentences=progress.sentences,
            tokens=progress.tokens,
            shards=len(kept),
            cells=sum(len(collector.top["+"].coefficient) for collector in collectors),
            triggers=sum(int((top.coefficient > 0).sum()) for c in collectors for top in c.top.values()),
            sentences_kept=len(numbers),
            cut_to_context=progress.cut,
            padding_share=round(1 - real / padded, 6) if padded else 0.0,
            measured_tokens=measured,
        )
        skipped = dict(progress.skipped)
        if progress.without_tokens:
            skipped["units without tokens"] = progress.without_tokens
        self.manifest = replace(
            self.manifest,
            state="complete",
            corpus=replace(self.manifest.corpus, hash=progress.digest),
            counts=counts,
            skipped=skipped,
            files=self.folder.described(TRIGGERS, CELLS, SENTENCES, TOKENS),
        )
        self.folder.write_manifest(self.manifest)
        self.folder.clear(WORK)
        again = sum(one.read_again for one in kept.values())
        self.folder.log("written", seconds=round(time.monotonic() - began, 2), read_again=again)


def _nothing_to_read(plan: Corpus, after: Any) -> str:
    names = ", ".join(source.name for source in plan.sources)
    left_out = ", ".join(f"{count} {what}" for what, count in after.skipped.items())
    if plan.limit_tokens is not None and after.records:
        return f"the first sentence of {names} has more than the {plan.limit_tokens} tokens of --limit-tokens"
    return f"expected text in {names}, found none" + (f" (left out: {left_out})" if left_out else " (empty)")


def _choice(name: str, value: str, options: tuple[str, ...]) -> None:
    if value not in options:
        raise FfmemError(f"expected {name} {', '.join(options[:-1])} or {options[-1]}, found {value!r}")


def _count(name: str, value: int | str) -> int | str:
    if value == "auto":
        return value
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise FfmemError(f"expected {name} auto or a number of at least 1, found {value!r}")
    return count
