"""Perplexity per word: over windows of running text, and over sentences alone, as the analysis feeds them."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np
import torch
from torch import Tensor

from ffmem.corpus.batches import plan_batches
from ffmem.model.adaptive.bands import IGNORED
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.training.stream import MARK, UNKNOWN, Ids

WINDOW = 256
BATCH = 32768
"""Number of tokens that go through the model in one forward."""


@dataclass(frozen=True)
class Perplexity:
    """Perplexities in which every word counts, unknown ones too, and one mark a sentence."""

    windows: float
    """Perplexity over windows of 256 tokens without overlap."""
    sentences: float
    """Perplexity of each sentence alone behind its mark."""
    unknown: float
    """Share of the words that are unknown, from 0 to 1."""
    tokens: int


def perplexity(model: AdaptiveLM, stream: Ids) -> Perplexity:
    """The perplexity of a stream of word ids over windows and over single sentences, and its share of unknown words."""
    words = stream[stream != MARK]
    return Perplexity(
        windows=window_perplexity(model, stream),
        sentences=sentence_perplexity(model, stream),
        unknown=float((words == UNKNOWN).mean()),
        tokens=len(stream),
    )


def window_perplexity(model: AdaptiveLM, stream: Ids, length: int = WINDOW) -> float:
    """Perplexity over windows without overlap: tokens 0 to 255 predict 1 to 256, and so on, so that every token behind the
    first mark is predicted once, and the last mark too."""
    whole = np.append(stream, MARK).astype(np.int64)
    rows = -(-len(stream) // length)
    ids = np.full(rows * length, MARK)
    targets = np.full(rows * length, IGNORED)
    ids[: len(stream)], targets[: len(stream)] = stream, whole[1:]
    return _perplexity(model, [(ids.reshape(rows, length), targets.reshape(rows, length))])


def sentence_perplexity(model: AdaptiveLM, stream: Ids) -> float:
    """Perplexity of each sentence by itself: its mark and words predict its words and the next mark. A sentence longer than
    the context is fed in pieces."""
    limit = model.config.max_position_embeddings
    starts = np.flatnonzero(stream == MARK)
    ends = np.append(starts[1:], len(stream))
    whole = np.append(stream, MARK).astype(np.int64)
    parts = [(at, min(at + limit, end)) for start, end in zip(starts, ends, strict=True) for at in range(start, end, limit)]
    lengths = np.array([end - at for at, end in parts])
    batches = []
    for rows in plan_batches(lengths, BATCH):
        width = int(lengths[rows].max())
        ids, targets = np.full((len(rows), width), MARK), np.full((len(rows), width), IGNORED)
        for row, number in enumerate(rows.tolist()):
            at, end = parts[number]
            ids[row, : end - at], targets[row, : end - at] = whole[at:end], whole[at + 1 : end + 1]
        batches.append((ids, targets))
    return _perplexity(model, batches)


@torch.inference_mode()
def _perplexity(model: AdaptiveLM, batches: list[tuple[np.ndarray, np.ndarray]]) -> float:
    total, count = 0.0, 0
    for ids, targets in batches:
        step = max(1, BATCH // ids.shape[1])
        for start in range(0, len(ids), step):
            wanted = torch.from_numpy(targets[start : start + step]).to(model.device)
            total += float(_nll(model, torch.from_numpy(ids[start : start + step]).to(model.device), wanted))
            count += int((wanted != IGNORED).sum())
    return exp(total / count)


def _nll(model: AdaptiveLM, ids: Tensor, targets: Tensor) -> Tensor:
    """Summed loss of one batch, a few thousand rows of the head at a time."""
    h = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    parts = zip(h.split(4096), targets.flatten().split(4096), strict=True)
    return torch.stack([model.nll(rows, wanted) for rows, wanted in parts]).sum()
