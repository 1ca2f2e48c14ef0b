"""Train a language model of the paper's kind: one GPU (or a CPU, for a try), a budget of minutes or steps."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, fields
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ffmem.atomic import refused
from ffmem.corpus.record import MAX_RECORD, parse_size
from ffmem.corpus.sources import open_sources
from ffmem.errors import CorpusError, FfmemError, RunError
from ffmem.indexing.sealed import as_os_errors
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.tokenizer import WikiTokenizer, wiki_tokenizer
from ffmem.model.loading import device_of, quiet_transformers
from ffmem.progress import reporting
from ffmem.run.folder import RunFolder
from ffmem.training.batches import Reader
from ffmem.training.perplexity import Perplexity, perplexity
from ffmem.training.recipe import Recipe, recipe_of
from ffmem.training.state import Counters
from ffmem.training.stream import MARK, Ids, read_stream, vocabulary, write_stream
from ffmem.training.trainer import LOG, STATE, Trainer

STREAM, VOCABULARY = "work/stream.i32", "work/words.txt"
WORK = (STATE, STREAM, VOCABULARY)
"""The files that a training keeps only until its model is written."""
PLAN, CARD = "plan.json", "training.json"
PLANNED = {"recipe", "minutes", "steps", "min_count", "seed", "column", "corpus", "corpus_bytes", "valid"}
"""The fields of a training's plan: a file of that name without them belongs to somebody else and is left alone."""
MODEL = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
HELD_OUT = 200_000
"""Tokens kept for validation where no text is given for it, but never more than a tenth of the corpus."""


def train(
    corpus: Any,
    *,
    out: str | Path,
    size: str | Recipe = "medium",
    minutes: int | float | None = None,
    steps: int | None = None,
    valid: Any = None,
    min_count: int = 3,
    seed: int = 0,
    device: str = "auto",
    compiled: bool | None = None,
    checkpoint_minutes: int | float = 5,
    log_every: int = 50,
    column: str = "text",
    max_record: int | str = MAX_RECORD,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Train on a corpus and leave a model folder at `out`; the same call continues a training that was stopped.

    The schedule ends after `steps` steps, or after `minutes` (15 unless told). By steps, a training that was stopped and
    continued on the same kind of machine ends as an uninterrupted one; by minutes, the clock decides the number of steps.
    """
    recipe = recipe_of(size)
    if (minutes is not None and not 0 < minutes < inf) or (steps is not None and steps < 1) or (minutes and steps):
        raise FfmemError(f"expected minutes or steps above 0, one of the two, found minutes {minutes} and steps {steps}")
    if minutes is None and steps is None:
        minutes = 15
    if min_count < 1 or log_every < 1 or seed < 0 or not checkpoint_minutes >= 0:
        raise FfmemError(
            "expected min_count and log_every from 1, seed and checkpoint_minutes from 0, found "
            f"{min_count}, {log_every}, {seed} and {checkpoint_minutes}"
        )
    if isinstance(corpus, Iterator):
        raise CorpusError("expected a corpus that can be read twice, found an iterator; give a list or a file")
    folder = RunFolder(out)
    target = device_of(device)
    reading: dict[str, Any] = {"column": column, "headings": True, "max_record": parse_size(max_record)}
    sources = open_sources(corpus, **reading)
    valid_sources = None if valid is None else open_sources(valid, **reading)
    plan = {
        "recipe": json.loads(json.dumps(asdict(recipe))),
        "minutes": minutes,
        "steps": steps,
        "min_count": min_count,
        "seed": seed,
        "column": column,
        "corpus": [source.name for source in sources],
        "corpus_bytes": [source.size() for source in sources],
        "valid": None if valid_sources is None else [source.name for source in valid_sources],
    }
    with folder.locked():
        _begin(folder, plan, overwrite)
        if (folder / CARD).exists():
            folder.remove(*WORK)
            return folder.path
        folder.work.mkdir(exist_ok=True)
        tokenizer = _prepare(folder, sources, min_count, recipe.context, quiet)
        stream: Ids = np.memmap(folder / STREAM, np.int32, "r")
        if valid_sources is not None:
            held = read_stream(valid_sources, tokenizer)
        else:
            held, stream = _hold_out(stream)
        if len(stream) < 3 * max(length for length, _ in recipe.windows):
            _clear(folder)
            folder.remove(PLAN)  # so that more text may come under the same name
            raise CorpusError(f"expected a corpus of many windows, found {len(stream):,} tokens; give more text")
        torch.manual_seed(seed)
        model = AdaptiveLM(recipe.config(len(tokenizer))).to(target)
        trainer = Trainer(model, recipe, folder, minutes=minutes, steps=steps, compiled=compiled)
        trainer.run(Reader(stream, model.config.bands, seed=seed), held, checkpoint_minutes, log_every, quiet)
        found = perplexity(model.eval(), held)
        _save(folder, model, tokenizer, plan, trainer.counters, found)
    return folder.path


def _begin(folder: RunFolder, plan: dict[str, Any], overwrite: bool) -> None:
    """A fresh folder with its plan, or the same plan in the folder that is there."""
    before = _plan(folder)
    if before is None and folder.store.entries():
        raise RunError(f"{folder.path} exists and is no training: choose another folder")
    if before is not None and overwrite:
        _clear(folder)
    elif before is not None:
        for name, wanted in plan.items():
            if before.get(name) != wanted:
                raise RunError(
                    f"{folder.path}: was begun with {name} {before.get(name)}, found {wanted}; "
                    "give the same command, another folder, or --overwrite"
                )
        return
    with folder.writing(PLAN) as temporary:
        temporary.write_text(json.dumps(plan, indent=2) + "\n", "utf-8")


def _plan(folder: RunFolder) -> dict[str, Any] | None:
    """The plan of the training in a folder, None where there is none: others call files so too."""
    try:
        plan = json.loads((folder / PLAN).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(plan, dict) and plan.keys() >= PLANNED and isinstance(plan["recipe"], dict)
    return plan if ours and plan["recipe"].keys() == {part.name for part in fields(Recipe)} else None


def _clear(folder: RunFolder) -> None:
    """Delete a training and its model, and nothing else; the plan stays, it says whose the folder is."""
    folder.remove(*WORK, CARD, *MODEL, LOG)


def _prepare(folder: RunFolder, sources: Any, min_count: int, context: int, quiet: bool) -> WikiTokenizer:
    """The tokenizer, from the corpus's own words; the stream is written beside them, once."""
    path = folder / VOCABULARY
    with reporting("reading the corpus", quiet=quiet) as reporter:
        if not path.exists():
            words = "\n".join(vocabulary(sources, min_count=min_count, reporter=reporter))
            with folder.writing(VOCABULARY) as temporary:
                temporary.write_text(words, "utf-8")
        tokenizer = wiki_tokenizer(path.read_text("utf-8").split("\n"), context=context)
        if not (folder / STREAM).exists():
            write_stream(sources, tokenizer, folder / STREAM, reporter)
    return tokenizer


def _hold_out(stream: Ids) -> tuple[Ids, Ids]:
    """The end of the stream for validation, from a sentence on, and what is before it."""
    wanted = len(stream) - min(HELD_OUT, len(stream) // 10)
    starts = np.flatnonzero(stream[: wanted + 1] == MARK)
    at = int(starts[-1]) if len(starts) else 0
    return np.asarray(stream[at:]), stream[:at]


def _save(
    folder: RunFolder,
    model: AdaptiveLM,
    tokenizer: WikiTokenizer,
    plan: dict[str, Any],
    counters: Counters,
    found: Perplexity,
) -> None:
    """The model folder, then its card; the card's name makes it count, and the work is cleared."""
    with refused(folder / "model.safetensors"), as_os_errors(), quiet_transformers():
        model.save_pretrained(folder.path)
        tokenizer.save_pretrained(folder.path)
    card = plan | asdict(counters) | {"perplexity": asdict(found), "vocabulary": len(tokenizer)}
    card["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    card["machine"] = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or "cpu"
    with folder.writing(CARD) as path:
        path.write_text(json.dumps(card, indent=2) + "\n", "utf-8")
    folder.remove(*WORK)
