"""The control: a model of the same shape with fresh random weights, and a small index of its own.

What an experiment finds on it is due to the architecture and to the text, not to anything that was learned.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from hashlib import sha256
from inspect import getsourcefile
from pathlib import Path
from typing import Any

import torch

from ffmem import __version__
from ffmem.corpus.sources import Texts, open_sources
from ffmem.errors import RunError
from ffmem.experiments.examples import corpus_of
from ffmem.indexing.build import build_index
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index
from ffmem.run.registry import all_experiments
from ffmem.run.results import CONTROL, Result, load_result, saved_results

CONTROL_TOKENS = 20_000
"""The number of tokens of the run's corpus that the control's index is made from."""


def random_model(model: MemoryModel, seed: int) -> MemoryModel:
    """A model of the same class and config with the weights that its architecture begins a training with.

    It has the same tokenizer, dtype and device. The same seed gives the same weights.
    """
    config = deepcopy(model.model.config)
    config._name_or_path = f"{model.name} with random weights"
    with torch.random.fork_rng(devices=[]):  # a caller's own random numbers go on as they would have
        torch.manual_seed(seed)
        network = type(model.model)(config)
    made = load_model(network.to(model.device, model.dtype), tokenizer=model.tokenizer)
    # Nobody else holds this model: its hash is computed once.
    return replace(made, fingerprint=cache(made.fingerprint))


@contextmanager
def control_index(index: Index, model: MemoryModel, *, quiet: bool = False) -> Iterator[Index]:
    """A small index of a control, made as the run was from the beginning of its corpus; it is gone afterwards."""
    settings = index.manifest.settings
    corpus, unit = corpus_of(index), settings.unit
    if corpus is None:
        corpus, unit = index.table("sentences").column("text").to_pylist(), "line"
    with tempfile.TemporaryDirectory(prefix="ffmem-control-") as folder:
        yield build_index(
            model,
            corpus,
            out=Path(folder) / "run",
            unit=unit,
            layers=index.layers,
            limit_tokens=min(CONTROL_TOKENS, settings.limit_tokens or CONTROL_TOKENS),
            stats="off",
            quiet=quiet,
            top=settings.top,
            distinct=settings.distinct,
            column=settings.column,
            language=settings.language,
            wikitext=settings.wikitext,
            max_record=index.manifest.corpus.max_record,
            bos="on" if settings.bos else "off",
            negative="on" if settings.negative else "off",
        )


def control_settings(index: Index, eval: Any, **sizes: int) -> dict[str, Any]:
    """The settings on which a control's results depend: they are made again where any of it differs.

    That is the sizes and the seed, the text, the run, and the code of the experiments.
    """
    sources = [] if eval is None else open_sources(eval, **index.manifest.reading)
    return {
        "weights": CONTROL,
        **sizes,
        "tokens": CONTROL_TOKENS,
        "eval": [[source.name, source.size(), _changed(source.name)] for source in sources],
        "run": index.manifest.identity,
        "code": _code(),
    }


def cacheable(eval: Any) -> bool:
    """Whether a text has a name by which it can be told from others; texts in memory have none."""
    return eval is None or not any(isinstance(source, Texts) for source in open_sources(eval))


def kept_controls(index: Index, names: list[str], settings: dict[str, Any]) -> dict[str, Result]:
    """The control's results in a run that were made with these settings."""
    kept = {}
    for name in set(names) & set(saved_results(index, CONTROL)):
        try:
            result = load_result(index, name, CONTROL)
        except RunError:  # damaged, or of another version: made again
            continue
        if result.settings.get("control") == settings:
            kept[name] = result
    return kept


def _changed(name: str) -> int | None:
    path = Path(name)
    return path.stat().st_mtime_ns if path.is_file() else None


@cache
def _code() -> str:
    """The hash of ffmem's version and of all code of experiments, its own and other packages'."""
    digest = sha256(__version__.encode())
    others = [Path(file) for one in all_experiments().values() if (file := getsourcefile(one.observer or one.run))]
    for path in sorted({*Path(__file__).parent.rglob("*.py"), *others}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
