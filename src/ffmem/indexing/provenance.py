"""The provenance of a run: its model, corpus and environment, and whether a later call means the same."""

from __future__ import annotations

import sys
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from typing import Any

import torch

import ffmem
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sample import Sample
from ffmem.errors import RunError
from ffmem.model.identity import tokenizer_hash
from ffmem.model.memories import MemoryModel
from ffmem.run.manifest import CorpusFacts, Manifest, ModelFacts, Settings, TokenizerFacts
from ffmem.run.model import check_same

LAYER_BYTES = 1 << 30
"""The most bytes that a batch's coefficients in one layer may take on a GPU with enough memory: the model makes several
such tensors."""
GPU_SHARE = 1 / 40
"""The share of a smaller GPU's memory that a batch's coefficients in one layer may take."""


@dataclass(frozen=True)
class ModelInfo:
    """All that a run notes of its model and of where it computes, so that whoever leads workers needs no weights."""

    facts: ModelFacts
    tokenizer: Any
    environment: dict[str, Any]
    layer_bytes: int
    """The most bytes that the coefficients of a batch in one layer may take."""
    hashing: Future[str] | None = field(default=None, repr=False)
    """The hash of the weights while it is still being computed, when the facts lack it; else None."""

    @staticmethod
    def of(model: MemoryModel, pool: Executor | None = None) -> ModelInfo:
        """The information on a model; hashing its weights takes a second for every few gigabytes, and goes on in the pool
        if one is given."""
        hashing = pool.submit(model.fingerprint) if pool else None
        facts = _model_facts(model, "" if hashing else model.fingerprint())
        return ModelInfo(facts, model.tokenizer, _environment(model), _layer_bytes(model), hashing)

    @property
    def hash(self) -> str:
        """The hash of the model; waits for it where it is still being computed."""
        return self.hashing.result() if self.hashing else self.facts.hash

    @cached_property
    def tokenizer_hash(self) -> str:
        """The hash of all that the tokenizer makes of texts."""
        return tokenizer_hash(self.tokenizer)

    def differs(self, manifest: Manifest) -> str:
        """The differences from what a run was begun with, in words, empty without any; sets torch's threads to what they
        were then."""
        before = {"model": manifest.model.hash, "tokenizer": manifest.tokenizer.hash, **manifest.environment}
        before.pop("threads", None)
        now = {"model": self.hash, "tokenizer": self.tokenizer_hash, **self.environment}
        return ", ".join(
            f"{name} {now.get(name)} in place of {before[name]}" for name in before if before[name] != now.get(name)
        )


def _layer_bytes(model: MemoryModel) -> int:
    if model.device.type != "cuda":
        return LAYER_BYTES
    memory = min(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))
    return min(LAYER_BYTES, int(memory * GPU_SHARE))


def sample_of(manifest: Manifest) -> Sample | None:
    """The sample that a run was made from; None where it is of the whole corpus."""
    size, seed, records = manifest.settings.sample, manifest.settings.seed, manifest.corpus.records
    return None if size is None or seed is None or records is None else Sample(size, seed, records)


def new_manifest(model: ModelInfo, corpus: Corpus, settings: Settings) -> Manifest:
    """The manifest of a run that begins."""
    records = list(corpus.sample.records) if corpus.sample else None
    return Manifest(
        state="building",
        ffmem=ffmem.__version__,
        model=replace(model.facts, hash=model.hash),
        tokenizer=TokenizerFacts(model.tokenizer_hash),
        corpus=CorpusFacts([source.name for source in corpus.sources], records=records),
        settings=settings,
        environment=model.environment,
    )


def agree(run: Any, manifest: Manifest, wanted: dict[str, Any], model: ModelInfo, corpus: Corpus) -> Settings:
    """The settings of a run that exists, if it was made from the same model, corpus and settings; else an error."""
    settings = manifest.settings
    check_same(run, manifest, model.facts.name, model.hash, model.tokenizer_hash)
    pairs = {name: (getattr(settings, name), value) for name, value in wanted.items() if value != "auto"}
    pairs["corpus"] = (manifest.corpus.sources, [source.name for source in corpus.sources])
    if not manifest.is_complete:
        # The rest of the run must be computed as its beginning was; threads are set to what they were.
        now = model.environment
        pairs |= {name: (before, now.get(name)) for name, before in manifest.environment.items() if name != "threads"}
    for name, (before, now) in pairs.items():
        if before != now:
            raise RunError(
                f"{run} was made with {name.replace('_', '-')} {before}, now it is {now}: "
                "choose another folder, or start over with --overwrite"
            )
    return settings


def check_same_corpus(run: Any, manifest: Manifest, corpus: Corpus) -> None:
    """A complete run asked for again must be of the same text: all of it, or as much as was read under a limit."""
    limited = manifest.settings.limit_tokens is not None
    if corpus.digest(manifest.counts.records if limited else None) != manifest.corpus.hash:
        raise RunError(f"{run} is complete, but the corpus has changed since: use --overwrite or another folder")


def _model_facts(model: MemoryModel, digest: str) -> ModelFacts:
    return ModelFacts(
        name=model.name,
        in_memory=model.in_memory,
        revision=model.revision,
        hash=digest,
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
