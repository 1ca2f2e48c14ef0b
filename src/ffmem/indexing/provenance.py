"""What a run is made from: its settings, model, corpus and environment, and whether a later call means the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

import torch

import ffmem
from ffmem.corpus.plan import Corpus
from ffmem.corpus.sample import Sample
from ffmem.errors import RunError
from ffmem.indexing.statistics import sample_every
from ffmem.model.families import reads_wikitext
from ffmem.model.identity import tokenizer_hash
from ffmem.model.memories import MemoryModel
from ffmem.run.manifest import CorpusFacts, Manifest, ModelFacts, Settings, TokenizerFacts
from ffmem.run.model import check_same

BATCH_TOKENS = {"cpu": 4096, "cuda": 1 << 17}
SHARD_TOKENS = {"cpu": 1 << 18, "cuda": 1 << 23}
LAYER_BYTES = 1 << 30
"""Of a batch's coefficients in one layer, at most, on a GPU with enough memory: the model makes several such tensors."""
GPU_SHARE = 1 / 40
"""Of its memory that they may take on a smaller one."""
FULL_STATISTICS = 1 << 15
"""Tokens up to which statistics are full by default: a sample of fewer would be thin."""


@dataclass(frozen=True)
class Subject:
    """All that a run notes of its model and of where it is computed: whoever leads workers needs no weights."""

    facts: ModelFacts
    tokenizer: Any
    environment: dict[str, Any]
    layer_bytes: int
    """That a batch's coefficients in one layer may take."""

    @staticmethod
    def of(model: MemoryModel) -> Subject:
        return Subject(_model_facts(model), model.tokenizer, _environment(model), _layer_bytes(model))

    @cached_property
    def tokenizer_hash(self) -> str:
        return tokenizer_hash(self.tokenizer)

    @property
    def name(self) -> str:
        return self.facts.name

    def differs(self, manifest: Manifest) -> str:
        """How it is not what a run was begun with, in words; empty where it is. Threads are set to what they were."""
        before = {"model": manifest.model.hash, "tokenizer": manifest.tokenizer.hash, **manifest.environment}
        before.pop("threads", None)
        now = {"model": self.facts.hash, "tokenizer": self.tokenizer_hash, **self.environment}
        return ", ".join(
            f"{name} {now.get(name)} in place of {before[name]}" for name in before if before[name] != now.get(name)
        )


def _layer_bytes(model: MemoryModel) -> int:
    if model.device.type != "cuda":
        return LAYER_BYTES
    memory = min(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))
    return min(LAYER_BYTES, int(memory * GPU_SHARE))


def auto_batch_tokens(cells: Sequence[int], dtype: str, device: str, layer_bytes: int) -> int:
    """As many as keep the device busy and fit well into its memory: a power of two. `cells` are those of each layer."""
    width = max(cells) * getattr(torch, dtype).itemsize
    most = 1 << (max(1, layer_bytes // width).bit_length() - 1)
    return min(most, BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"]))


def resolve_wikitext(wikitext: str, plan: Corpus, subject: Subject) -> str:
    """What becomes of WikiText's marks, where that is to be found out: the paper's own models have read them."""
    if wikitext != "auto":
        return wikitext
    return "plain" if not reads_wikitext(subject.facts.family) and plan.shows_marks() else "keep"


def sample_of(manifest: Manifest) -> Sample | None:
    """The sample that a run was made from; None where it is of the whole corpus."""
    size, seed, records = manifest.settings.sample, manifest.settings.seed, manifest.corpus.records
    return None if size is None or seed is None or records is None else Sample(size, seed, records)


def resolve(wanted: dict[str, Any], about: Callable[[], int | None], subject: Subject) -> Settings:
    """Settings with every `auto` decided, once, when the run is created; `about` estimates the tokens of the corpus."""
    facts, kind = subject.facts, subject.facts.device
    settings = dict(wanted)
    if settings["batch_tokens"] == "auto":
        settings["batch_tokens"] = auto_batch_tokens(facts.cells, facts.dtype, facts.device, subject.layer_bytes)
    if settings["shard_tokens"] == "auto":
        settings["shard_tokens"] = SHARD_TOKENS.get(kind, SHARD_TOKENS["cpu"])
    if settings["stats"] == "auto":
        tokens = about()
        settings["stats"] = "sample" if tokens is None or tokens > FULL_STATISTICS else "full"
    if settings["stats"] == "sample":
        settings["stats_every"] = sample_every(kind, about())
    return Settings(**settings)


def new_manifest(subject: Subject, plan: Corpus, settings: Settings) -> Manifest:
    """The manifest of a run that begins."""
    return Manifest(
        state="building",
        ffmem=ffmem.__version__,
        model=subject.facts,
        tokenizer=TokenizerFacts(subject.tokenizer_hash),
        corpus=CorpusFacts([source.name for source in plan.sources], records=plan.sample.records if plan.sample else None),
        settings=settings,
        environment=subject.environment,
    )


def agree(run: Any, manifest: Manifest, wanted: dict[str, Any], subject: Subject, plan: Corpus) -> Settings:
    """The settings of a run that exists, if it was made from the same model, corpus and settings."""
    settings = manifest.settings
    check_same(run, manifest, subject.name, subject.facts.hash, subject.tokenizer_hash)
    pairs = {name: (getattr(settings, name), value) for name, value in wanted.items() if value != "auto"}
    pairs["corpus"] = (manifest.corpus.sources, [source.name for source in plan.sources])
    if not manifest.is_complete:
        # The rest of the run must be computed as its beginning was; threads are set to what they were.
        now = subject.environment
        pairs |= {name: (before, now.get(name)) for name, before in manifest.environment.items() if name != "threads"}
    for name, (before, now) in pairs.items():
        if before != now:
            raise RunError(
                f"{run} was made with {name.replace('_', '-')} {before}, now it is {now}: "
                "choose another folder, or start over with --overwrite"
            )
    return settings


def check_same_corpus(run: Any, manifest: Manifest, plan: Corpus) -> None:
    """A complete run asked for again must be of the same text: all of it, or as much as was read under a limit."""
    limited = manifest.settings.limit_tokens is not None
    if plan.digest(manifest.counts.records if limited else None) != manifest.corpus.hash:
        raise RunError(f"{run} is complete, but the corpus has changed since: use --overwrite or another folder")


def _model_facts(model: MemoryModel) -> ModelFacts:
    return ModelFacts(
        name=model.name,
        in_memory=model.in_memory,
        revision=model.revision,
        hash=model.fingerprint(),
        architecture=type(model.model).__name__,
        family=model.family.name,
        found_by_shape=model.found_by_shape,
        layers=model.layers,
        cells=model.cells,
        d=model.d,
        gated=model.family.gated,
        vocabulary=model.vocabulary.size,
        context=model.context,
        bos=model.bos,
        device=model.device.type,
        dtype=model.dtype_name,
    )


def _environment(model: MemoryModel) -> dict[str, Any]:
    """All that the last digits of a coefficient, or the cutting of the text, may depend on."""
    packages = ("numpy", "pyarrow", "sentencex", "tokenizers", "torch", "transformers")
    cuda = model.device.type == "cuda"
    return {
        "ffmem": ffmem.__version__,
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: metadata.version(name) for name in packages},
        "device": model.device.type,
        "device_name": torch.cuda.get_device_name(model.device) if cuda else torch.backends.cpu.get_cpu_capability(),
        "dtype": model.dtype_name,
        "attention": str(getattr(model.model.config, "_attn_implementation", None)),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
