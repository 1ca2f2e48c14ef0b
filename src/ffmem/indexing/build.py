"""Build an index: one pass over a corpus, into a run folder, going on where an earlier pass was stopped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.readers import cores, getting_ready
from ffmem.corpus.record import MAX_RECORD
from ffmem.corpus.sample import Sample
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import can_be_read_again, open_sources
from ffmem.corpus.tokens import Encoder
from ffmem.errors import CorpusError, FfmemError, ModelError
from ffmem.indexing import checkpoint
from ffmem.indexing.cluster import Capacity, connected, get_ray
from ffmem.indexing.devices import Devices, crowded, share_out
from ffmem.indexing.estimate import Estimate, estimate, estimate_tokens
from ffmem.indexing.full_pass import Pass, Timing
from ffmem.indexing.provenance import ModelInfo, agree, check_same_corpus, new_manifest, sample_of
from ffmem.indexing.request import Request, resolve
from ffmem.indexing.workers import Workers
from ffmem.model.families import reads_wikitext
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.names import known_name
from ffmem.progress import reporting
from ffmem.run.folder import WORK, RunFolder
from ffmem.run.manifest import Manifest
from ffmem.run.reader import Index, open_index

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
    address: str | None = None,
    overwrite: bool = False,
    quiet: bool = False,
    announce: Callable[[str, Estimate], None] | None = None,
    **load: Any,
) -> Index:
    """Find every memory cell's triggers in one pass over a corpus; the index is written to `out` and returned.

    `model` is what `load_model` returns or takes (then `device`, `dtype` and so on may follow). `corpus` is a path, a
    list of `Path`s, a `hf:` name, a `Dataset` or an iterable of strings. The same call again continues a run that
    was stopped, and opens one that is complete. `announce` gets what the run will take before it starts. A record (a line
    of a file, a row) of more than `max_record` bytes is an error; with a larger one a run that was stopped by it goes on.

    Several workers share the parts of the corpus, by Ray, and the index is the same: `workers` processes on this machine
    (one a GPU where there are some, or one a share of them with a `device_map`), one for each of `devices` ("cuda:0,cuda:1",
    "cuda:0+cuda:1,cuda:2+cuda:3"), or on the cluster at `address` as many as it has GPUs, or machines if it has none, unless
    `workers` says otherwise. `out` may be a URL such as `s3://bucket/run`.
    """
    request = Request(
        top=top,
        unit=unit,
        distinct=distinct,
        layers=layers,
        limit_tokens=limit_tokens,
        sample=sample,
        seed=seed,
        batch_tokens=batch_tokens,
        shard_tokens=shard_tokens,
        bos=bos,
        negative=negative,
        stats=stats,
        column=column,
        language=language,
        wikitext=wikitext,
        max_record=max_record,
    )
    timing = Timing()
    folder = RunFolder(out)
    sources = open_sources(corpus, column=column, max_record=int(request.max_record))
    folder.check_own(overwrite=overwrite)  # before the model is loaded, which takes a while
    if (devices or address or workers not in (None, 1)) and not all(map(can_be_read_again, sources)):
        raise CorpusError("several workers read the text themselves: give files or a list, not an iterator")
    with ExitStack() as stack:
        several = stack.enter_context(_several(model, load, workers, devices, address, quiet))
        beside = stack.enter_context(ThreadPoolExecutor(1))
        readers = max(1, cores() - 2)
        if not several and torch.cuda.is_available() and load.get("device") != "cpu":
            stack.enter_context(getting_ready(readers))  # they start while the model is loaded
        loaded = None if several else load_model(model, **load)
        info = several.model_info() if several else ModelInfo.of(loaded, beside)  # type: ignore[arg-type]
        timing.mark("model")
        wanted = request.for_model(info)
        encoder = Encoder(info.tokenizer, request.window(info))
        if info.facts.device != "cuda":
            readers = 1  # a CPU is busy with the model; a GPU would wait for one process that reads text
        text = Corpus(sources, encoder, Unit.parse(unit), language, request.shard_size(info), limit_tokens, workers=readers)
        text.by_document = distinct == "document"
        if not overwrite and (found := folder.manifest()) and found.is_complete and not folder.parts(WORK):
            return _opened(folder, found, wanted, info, text, loaded)  # it may be one that can only be read
        with folder.locked(quiet=quiet):
            folder.check_own(overwrite=overwrite)  # somebody may have come first
            manifest = None if overwrite or not _worth_keeping(folder) else folder.manifest()
            if manifest is not None and manifest.is_complete:
                index = _opened(folder, manifest, wanted, info, text, loaded)
                folder.clear(WORK)
                return index
            timing.mark("folder")
            manifest, tokens = _begun(folder, manifest, request, wanted, info, text, quiet, announce)
            timing.mark("settings")
            with reporting("indexing", quiet=quiet) as reporter, closing(text):
                Pass(folder, manifest, text, reporter, tokens, timing).make(several, loaded, info)
    return open_index(folder.path, model=loaded)


def _begun(
    folder: RunFolder,
    manifest: Manifest | None,
    request: Request,
    wanted: dict[str, Any],
    info: ModelInfo,
    text: Corpus,
    quiet: bool,
    announce: Callable[[str, Estimate], None] | None,
) -> tuple[Manifest, int | None]:
    """The manifest of the run, new or as an earlier call has left it, and about how many tokens the corpus has.

    Sets what of the corpus is read, and how: its sample, its marks, the size of its shards.
    """
    about = cache(partial(estimate_tokens, text))
    if manifest is None:
        if wanted["wikitext"] == "auto":  # the paper's own models have read the marks
            wanted["wikitext"] = "plain" if not reads_wikitext(info.facts.family) and text.shows_marks() else "keep"
            if wanted["wikitext"] == "plain":
                _note(quiet, _TURNED_BACK)
        text.plain = wanted["wikitext"] == "plain"
        if request.sample is not None:
            text.sample = _drawn(text, request.sample, request.seed, quiet)
        settings = resolve(wanted | {"shard_tokens": text.shard_tokens}, info, about)
    else:
        settings = agree(folder.path, manifest, wanted, info, text)
        text.sample, text.plain = sample_of(manifest), settings.wikitext == "plain"
        text.shard_tokens = settings.shard_tokens
    tokens = None if quiet and not announce else about()
    if announce:
        cells = sum(info.facts.cells[layer - 1] for layer in settings.layers)
        signs, stats = 2 if settings.negative else 1, settings.has_stats
        announce(
            info.facts.name,
            estimate(tokens, cells=cells, t=settings.top, signs=signs, stats=stats, vocabulary=info.facts.vocabulary),
        )
    if manifest is None:
        manifest = new_manifest(info, text, settings)
        folder.clear()
    elif damaged := checkpoint.mend(folder, manifest.provenance):
        folder.log("damaged", files=damaged)
        names = ", ".join(damaged[:3]) + (", ..." if len(damaged) > 3 else "")
        _note(quiet, f"{folder.path}: damaged and left out: {names}; what they held is read again")
    # It decides only whether the text can be read, so it may grow.
    manifest = replace(manifest, corpus=replace(manifest.corpus, max_record=int(request.max_record)))
    folder.write_manifest(manifest)
    return manifest, tokens


@contextmanager
def _several(
    model: Any, load: dict[str, Any], workers: int | None, devices: str | None, address: str | None, quiet: bool
) -> Iterator[Workers | None]:
    """The workers that were asked for, started; None where this process does the work itself."""
    if workers is not None and workers < 1:
        raise FfmemError(f"expected at least 1 worker, found {workers}")
    if devices and address:
        raise FfmemError("--devices is for workers on this machine: a Ray cluster gives each worker its GPU")
    if not devices and not address and workers in (None, 1):
        yield None
        return
    if not isinstance(model, (str, Path)):
        raise ModelError("several workers load the model themselves: give its name or its folder, not a model in memory")
    model, threads = str(model), torch.get_num_threads()
    here: list[Devices] = []
    if not address and (devices or not get_ray().is_initialized()):
        here = share_out(load, workers, devices)
        if advice := crowded(here, threads):
            _note(quiet, advice)
    else:
        with suppress(ModelError):  # a folder may be there for the workers alone
            model = known_name(model)
    with connected(address, len(here)) as ray:
        if here:
            capacity = Capacity(ray, "cpu")
        else:
            capacity = Capacity(ray, load.get("device", "auto"), workers, spread=bool(load.get("device_map")))
        made = Workers(ray, model, here or [Devices(load, {})] * (workers or capacity.workers()), capacity, threads)
        with closing(made):
            yield made


def _note(quiet: bool, what: str) -> None:
    if not quiet:
        print(f"ffmem: {what}", file=sys.stderr, flush=True)


def _drawn(text: Corpus, size: int, seed: int, quiet: bool) -> Sample:
    """A sample of the corpus; the whole corpus is read once to draw it."""
    with reporting("counting records", quiet=quiet) as reporter:
        found = Sample(size, seed, text.count(reporter.update))
    if found.total <= size:
        _note(quiet, f"the text has {found.total:,} records: the sample is all of them")
    return found


def _worth_keeping(folder: RunFolder) -> bool:
    """Whether the run is complete or has a finished shard, so that overwriting it would lose something."""
    manifest = folder.manifest()
    return manifest is not None and (manifest.is_complete or checkpoint.begun(folder))


def _opened(
    folder: RunFolder,
    manifest: Manifest,
    wanted: dict[str, Any],
    info: ModelInfo,
    text: Corpus,
    model: MemoryModel | None,
) -> Index:
    """A complete run as an index, if it is of this model, corpus and settings; else an error."""
    text.shard_tokens = agree(folder.path, manifest, wanted, info, text).shard_tokens
    text.sample = sample_of(manifest)
    check_same_corpus(folder.path, manifest, text)
    return open_index(folder.path, model=model)
