"""A model that trains in a fraction of a second, and the call that trains it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ffmem.training.recipe import Recipe
from ffmem.training.stream import MARK
from ffmem.training.train import train

RECIPE = Recipe(
    d=16, cells=32, heads=2, layers=2, cutoffs=(20, 40), context=64, windows=((16, 4), (8, 4)), warmup=5, rate=1e-2
)
STEPS = 12
SETTINGS = {"size": RECIPE, "min_count": 2, "device": "cpu", "quiet": True, "log_every": 2}


class Crash(BaseException):
    """Stands for the moment of a kill."""


def fit(text, out, **others) -> Path:
    """Train the small model on the CPU, for `STEPS` steps unless told."""
    settings = SETTINGS | ({} if "minutes" in others else {"steps": STEPS}) | others
    return train(text, out=out, **settings)


def stream_of(*sentences):
    """A stream from sentences of word ids, each behind its mark."""
    return np.array([id for sentence in sentences for id in (MARK, *sentence)], np.int32)


def log_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


def card_of(folder) -> dict:
    return json.loads((folder / "training.json").read_text("utf-8"))


def content(folder) -> dict:
    """Every file's bytes by its name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
