"""Build an index: one pass over a corpus, into a run folder, going on where an earlier pass was stopped."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ffmem.corpus.plan import Corpus
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder
from ffmem.corpus.workers import cores
from ffmem.index import checkpoint
from ffmem.index.collect import LayerCollector, read_shard
from ffmem.index.estimate import Estimate, estimate, estimate_tokens
from ffmem.index.folder import CELLS, SENTENCES, TOKENS, TRIGGERS, RunFolder
from ffmem.index.origin import agree, check_same_corpus, new_manifest, resolve
from ffmem.index.reader import Index, open_index
from ffmem.index.tables import (
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
from ffmem.index.top import DISTINCT, POSITION_BITS
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.pieces import token_texts
from ffmem.progress import Reporter, reporting
from ffmem.words import CorpusError, FfmemError, parse_layers


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
    batch_tokens: int | str = "auto",
    shard_tokens: int | str = "auto",
    bos: str = "auto",
    negative: str = "auto",
    stats: str = "auto",
    column: str = "text",
    language: str = "en",
    overwrite: bool = False,
    quiet: bool = False,
    announce: Callable[[MemoryModel, Estimate], None] | None = None,
    **load: Any,
) -> Index:
    """Find every memory cell's triggers in one pass over a corpus; the index is written to `out` and returned.

    `model` is what `load_model` returns or takes (then `device`, `dtype` and so on may follow). `corpus` is a path, a
    list of `Path`s, a `hf:` name, a `Dataset` or an iterable of strings. The same call again continues a run that
    was stopped, and opens one that is complete. `announce` is told what the run will take before it starts.
    """
    _choice("distinct", distinct, DISTINCT)
    _choice("negative", negative, ("auto", "on", "off"))
    _choice("stats", stats, ("auto", "full", "sample", "off"))
    if not isinstance(top, int) or not 1 <= top <= 10_000:
        raise FfmemError(f"expected top from 1 to 10,000, found {top!r}")
    if limit_tokens is not None and limit_tokens < 1:
        raise FfmemError(f"expected limit-tokens of at least 1, found {limit_tokens}")
    parsed = Unit.parse(unit)
    sources = open_sources(corpus, column=column)
    loaded = load_model(model, **load)
    wanted: dict[str, Any] = {
        "top": top,
        "unit": str(parsed),
        "distinct": distinct,
        "layers": parse_layers(layers, loaded.layers),
        "limit_tokens": limit_tokens,
        "batch_tokens": _count("batch-tokens", batch_tokens),
        "shard_tokens": _count("shard-tokens", shard_tokens),
        "bos": loaded.check_bos(bos),
        "negative": loaded.family.gated if negative == "auto" else negative == "on",
        "stats": stats,
        "language": language,
        "column": column,
    }
    context = min(loaded.context - int(wanted["bos"]), (1 << POSITION_BITS) - 1)
    if parsed.tokens > context:
        raise FfmemError(f"expected windows of at most {context:,} tokens, the model's context, found {parsed}")
    encoder = Encoder(loaded.tokenizer, min(context, parsed.tokens or context))
    # A CPU is busy with the model; a GPU would wait for one process that reads text.
    workers = max(1, cores() - 2) if loaded.device.type == "cuda" else 1
    plan = Corpus(sources, encoder, parsed, language, shard_tokens=1, limit_tokens=limit_tokens, workers=workers)
    folder = RunFolder(out)
    with folder.locked():
        if overwrite or not checkpoint.worth_keeping(folder):
            folder.clear()
        manifest = folder.manifest()
        about = cache(partial(estimate_tokens, plan))
        resolved = resolve(wanted, about, loaded) if manifest is None else agree(folder.path, manifest, wanted, loaded, plan)
        plan.shard_tokens = resolved["shard_tokens"]
        if manifest is not None and manifest["state"] == "complete":
            check_same_corpus(folder.path, manifest, plan)
            checkpoint.clear(folder)
            return open_index(folder.path, model=loaded)
        tokens = None if quiet and not announce else about()
        if announce:
            cells = sum(loaded.cells[layer - 1] for layer in resolved["layers"])
            signs = 2 if resolved["negative"] else 1
            announce(loaded, estimate(tokens, cells=cells, t=top, signs=signs, stats=resolved["stats"] != "off"))
        if manifest is None:
            manifest = new_manifest(loaded, plan, resolved)
            folder.write_manifest(manifest)
        run = _Run(folder, manifest, plan, loaded)
        with reporting("indexing", quiet=quiet) as reporter, threads(manifest["environment"]["threads"]):
            run.go(reporter, tokens)
    return open_index(folder.path, model=loaded)


class _Run:
    """One run being built."""

    def __init__(self, folder: RunFolder, manifest: dict[str, Any], plan: Corpus, model: MemoryModel) -> None:
        self.folder, self.manifest, self.plan, self.model = folder, manifest, plan, model
        self.settings = manifest["settings"]
        self.bos = model.bos if self.settings["bos"] else None
        self.collectors = {
            layer: LayerCollector(
                layer,
                model.cells[layer - 1],
                t=self.settings["top"],
                distinct=self.settings["distinct"],
                negative=self.settings["negative"],
                every=self.settings.get("stats_every", int(self.settings["stats"] == "full")),
                device=model.value_modules[layer - 1].weight.device,
            )
            for layer in self.settings["layers"]
        }

    def go(self, reporter: Reporter, tokens: int | None) -> None:
        done = checkpoint.load(self.folder, self.collectors)
        self.folder.log("started" if not done.shards else "continued", shards=done.shards, host=platform.node())
        began, at_start = time.monotonic(), done.progress.tokens
        if not done.last:
            for shard in self.plan.shards_ahead(done.progress, done.shards):
                done = self._shard(shard, done, reporter, tokens, began, at_start)
        seconds = time.monotonic() - began
        reporter.update(1.0, "writing the run folder")
        self._finish(done)
        self.folder.log("finished", seconds=round(seconds, 2), tokens=done.progress.tokens - at_start)

    def _shard(
        self, shard: Any, done: checkpoint.Done, reporter: Reporter, tokens: int | None, began: float, at_start: int
    ) -> checkpoint.Done:
        if shard.last and not shard.first and not shard.sentences:
            raise CorpusError(_nothing_to_read(self.plan, shard.after))
        padded, read, size = done.padded, done.progress.tokens, self.settings["batch_tokens"]
        try:
            for batch in read_shard(self.model, shard, self.collectors, batch_tokens=size, bos=self.bos):
                padded += batch.ids.size
                read += batch.tokens
                speed = (read - at_start) / max(1e-9, time.monotonic() - began)
                share = min(1.0, read / tokens) if tokens else shard.fraction
                reporter.update(share, f"shard {shard.number + 1}, {read:,} tokens, {speed:,.0f} tokens/s")
        except torch.OutOfMemoryError as error:
            raise FfmemError(
                f"{self.model.device} is out of memory with batches of {size:,} tokens: start over with a smaller "
                "--batch-tokens (and --overwrite)"
            ) from error
        after = checkpoint.Done(shard.number + 1, shard.after, padded, shard.last)
        checkpoint.save(self.folder, self.collectors, shard, self.plan.encoder, after)
        return after

    def _finish(self, done: checkpoint.Done) -> None:
        """Write the tables and, last, the manifest that makes them a run."""
        collectors = list(self.collectors.values())
        numbers = referenced_sentences(collectors)
        stats = self.settings["stats"] != "off"
        with self.folder.writing(SENTENCES) as path:
            write_table(path, SENTENCE_SCHEMA, checkpoint.kept_sentences(self.folder, done.shards, numbers))
        with self.folder.writing(TRIGGERS) as path:
            write_table(path, TRIGGER_SCHEMA, trigger_batches(collectors, numbers))
        with self.folder.writing(CELLS) as path:
            write_table(path, cell_schema(stats), cell_batches(collectors, stats))
        size = max(self.model.vocabulary.size, len(self.model.tokenizer))
        with self.folder.writing(TOKENS) as path:
            write_table(path, TOKEN_SCHEMA, [token_batch(token_texts(self.model.tokenizer, size))])
        progress = done.progress
        real = progress.tokens + progress.sentences * bool(self.settings["bos"])
        measured = int(collectors[0].total.measured) if collectors[0].total else 0
        counts = {
            "records": progress.records,
            "sentences": progress.sentences,
            "tokens": progress.tokens,
            "shards": done.shards,
            "cells": sum(len(collector.top["+"].coefficient) for collector in collectors),
            "triggers": sum(int((top.coefficient > 0).sum()) for c in collectors for top in c.top.values()),
            "sentences_kept": len(numbers),
            "cut_to_context": progress.cut,
            "padding_share": round(1 - real / done.padded, 6) if done.padded else 0.0,
            "measured_tokens": measured,
        }
        skipped = dict(progress.skipped)
        if progress.without_tokens:
            skipped["units without tokens"] = progress.without_tokens
        self.manifest = {
            **self.manifest,
            "state": "complete",
            "corpus": {**self.manifest["corpus"], "hash": progress.digest},
            "counts": counts,
            "skipped": skipped,
            "files": self.folder.described(TRIGGERS, CELLS, SENTENCES, TOKENS),
        }
        self.folder.write_manifest(self.manifest)
        checkpoint.clear(self.folder)


def _nothing_to_read(plan: Corpus, after: Any) -> str:
    names = ", ".join(source.name for source in plan.sources)
    left_out = ", ".join(f"{count} {what}" for what, count in after.skipped.items())
    if plan.limit_tokens is not None and after.records:
        return f"the first sentence of {names} has more than the {plan.limit_tokens} tokens of --limit-tokens"
    return f"expected text in {names}, found none" + (f" (left out: {left_out})" if left_out else " (empty)")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with as many threads as the run began with: sums depend on it in the last digits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
