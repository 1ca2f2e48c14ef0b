"""What a run is made from: its settings, model, corpus and environment, and whether a later call means the same."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ffmem
from ffmem.corpus.plan import Corpus
from ffmem.index.statistics import EVERY
from ffmem.model.identity import tokenizer_hash
from ffmem.model.memories import MemoryModel
from ffmem.words import RunError

BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
SHARD_TOKENS = {"cpu": 1 << 18, "cuda": 1 << 23}
FULL_STATISTICS = 1 << 15
"""Tokens up to which statistics are full by default: a sample of fewer would be thin."""


def resolve(wanted: dict[str, Any], about: Callable[[], int | None], model: MemoryModel) -> dict[str, Any]:
    """Settings with every `auto` decided, once, when the run is created; `about` estimates the tokens of the corpus."""
    kind = model.device.type
    settings = dict(wanted)
    if settings["batch_tokens"] == "auto":
        settings["batch_tokens"] = BATCH_TOKENS.get(kind, BATCH_TOKENS["cpu"])
    if settings["shard_tokens"] == "auto":
        settings["shard_tokens"] = SHARD_TOKENS.get(kind, SHARD_TOKENS["cpu"])
    if settings["stats"] == "auto":
        tokens = about()
        settings["stats"] = "sample" if tokens is None or tokens > FULL_STATISTICS else "full"
    if settings["stats"] == "sample":
        settings["stats_every"] = EVERY.get(kind, EVERY["cpu"])
        settings["stats_sample"] = f"tokens with (sentence + position) divisible by {settings['stats_every']}"
    return settings


def new_manifest(model: MemoryModel, plan: Corpus, settings: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a run that begins."""
    return {
        "state": "building",
        "ffmem": ffmem.__version__,
        "model": _model_facts(model),
        "tokenizer": {"hash": tokenizer_hash(model.tokenizer)},
        "corpus": {"sources": [source.name for source in plan.sources]},
        "settings": settings,
        "settings_hash": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "environment": _environment(model),
    }


def agree(run: Path, manifest: dict[str, Any], wanted: dict[str, Any], model: MemoryModel, plan: Corpus) -> dict[str, Any]:
    """The settings of a run that exists, if it was made from the same model, corpus and settings."""
    settings = manifest["settings"]
    check_same_model(run, manifest, model)
    pairs = {name: (settings.get(name), value) for name, value in wanted.items() if value != "auto"}
    pairs["corpus"] = (manifest["corpus"]["sources"], [source.name for source in plan.sources])
    if manifest["state"] != "complete":
        # The rest of the run must be computed as its beginning was; threads are set to what they were.
        now = _environment(model)
        pairs |= {name: (before, now.get(name)) for name, before in manifest["environment"].items() if name != "threads"}
    for name, (before, now) in pairs.items():
        if before != now:
            raise RunError(
                f"{run} was made with {name.replace('_', '-')} {before}, now it is {now}: "
                "choose another folder, or start over with --overwrite"
            )
    return settings


def check_same_model(run: Path, manifest: dict[str, Any], model: MemoryModel) -> None:
    """An error that names both where a model is not the one a run was made with."""
    for what, before, now in (
        ("model", manifest["model"]["hash"], model.fingerprint()),
        ("tokenizer", manifest["tokenizer"]["hash"], tokenizer_hash(model.tokenizer)),
    ):
        if before != now:
            raise RunError(
                f"{run} was made with {what} {manifest['model']['name']} ({before[:12]}), but {model.name} has "
                f"{now[:12]}: give the {what} it was made with, or build another run"
            )


def check_same_corpus(run: Path, manifest: dict[str, Any], plan: Corpus) -> None:
    """A complete run asked for again must be of the same text: all of it, or as much as was read under a limit."""
    limited = manifest["settings"]["limit_tokens"] is not None
    if plan.digest(manifest["counts"]["records"] if limited else None) != manifest["corpus"]["hash"]:
        raise RunError(f"{run} is complete, but the corpus has changed since: use --overwrite or another folder")


def _model_facts(model: MemoryModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "in_memory": model.in_memory,
        "revision": model.revision,
        "hash": model.fingerprint(),
        "architecture": type(model.model).__name__,
        "family": model.family.name,
        "found_by_shape": model.found_by_shape,
        "layers": model.layers,
        "cells": model.cells,
        "d": model.d,
        "gated": model.family.gated,
        "vocabulary": model.vocabulary.size,
        "context": model.context,
        "bos": model.bos,
        "device": model.device.type,
        "dtype": model.dtype_name,
    }


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
