"""The tokens behind the triggers of a layer, and the triggers' own last tokens, straight from a run's tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from ffmem.cells import SIGNS, Cell, Sign
from ffmem.corpus.sentences import Unit
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index

NONE = -1
"""The number that stands for a token where there is no trigger, or no token behind it."""


@dataclass(frozen=True)
class NextTokens:
    """The tokens behind the triggers of a layer: a row a cell, a column a rank; t is the run's own."""

    ids: Int[np.ndarray, "cells t"]
    """The token behind each trigger; -1 where there is no trigger, or where it ends its sentence and no mark is given."""
    last: Int[np.ndarray, "cells t"]
    """The prefix's own last token, which the released script took for the next one: a control, nothing else."""
    counts: Int[np.ndarray, " cells"]
    """The number of triggers of each cell."""
    at_end: Bool[np.ndarray, "cells t"]
    """True for triggers that end their sentence, whatever stands for the token behind them."""

    @property
    def cells(self) -> int:
        """The number of cells."""
        return len(self.counts)

    @property
    def with_next(self) -> Int[np.ndarray, " cells"]:
        """The number of triggers of each cell that have a next token."""
        return (self.ids != NONE).sum(1)

    @property
    def ended(self) -> int:
        """The number of triggers that end their sentence."""
        return int(self.at_end.sum())


def next_tokens(index: Index, layer: int, sign: Sign = "+", end: int | None = None) -> NextTokens:
    """The tokens behind the triggers of every cell of a layer (from 1); `end` stands behind a sentence's last token."""
    count = index.manifest.model.cells[layer - 1]
    cells = index.table("cells").slice(index[Cell(layer, 0)].row, count)
    positive, negative = (cells.column(f"{name}_triggers").to_numpy().astype(np.int64) for name in ("positive", "negative"))
    own, skipped = (positive, 0) if sign == SIGNS[0] else (negative, positive)
    begin = cells.column("first_trigger").to_numpy() + skipped
    used = np.arange(index.manifest.settings.top) < own[:, None]
    # A layer's triggers lie together: only their part of the table is read.
    first, stop = (int(begin.min()), int((begin + own).max())) if own.any() else (0, 0)
    triggers = index.table("triggers").slice(first, stop - first)
    rows = (begin[:, None] - first + np.arange(used.shape[1]))[used]
    row, position = (triggers.column(name).to_numpy()[rows].astype(np.int64) for name in ("row", "position"))

    def spread(found: np.ndarray) -> np.ndarray:
        """Spread values of the used triggers back to a row a cell; the rest is `NONE`."""
        whole = np.full(used.shape, NONE, found.dtype)
        whole[used] = found
        return whole

    following = token_at(index, row, position)
    at_end = np.zeros(used.shape, bool)
    at_end[used] = following == NONE
    if end is not None:
        following[following == NONE] = end
    return NextTokens(spread(following), spread(token_at(index, row, position - 1)), own, at_end)


def token_at(index: Index, row: Int[np.ndarray, " n"], position: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The token at a position (from 0) of a row of the table of sentences; -1 behind the sentence's end."""
    found = np.full(len(row), NONE, np.int32)
    batches = index.table("sentences").column("tokens").chunks
    begins = np.cumsum([0, *map(len, batches)])
    # Each batch is looked into where it is mapped: putting them together would copy every sentence of the run.
    within = np.searchsorted(begins, row, side="right") - 1
    for number in np.unique(within).tolist():
        here = np.flatnonzero(within == number)
        offsets, tokens = batches[number].offsets.to_numpy(), batches[number].values.to_numpy()
        at = row[here] - begins[number]
        entry = offsets[at] + position[here]
        inside = entry < offsets[at + 1]
        found[here[inside]] = tokens[entry[inside]]
    return found


def token_counts(index: Index, size: int, end: int | None = None) -> Int[np.ndarray, " vocab"]:
    """The number of times that each token stands in the sentences that the run has kept; `end` is added once a sentence."""
    counts = np.zeros(size, np.int64)
    for batch in index.table("sentences").column("tokens").chunks:
        counts += np.bincount(batch.flatten().to_numpy(), minlength=size)
        if end is not None:
            counts[end] += len(batch)
    return counts


def end_token(model: MemoryModel, index: Index) -> int | None:
    """The token behind a sentence's last one: its end mark in a model that predicts one, as the paper's does, else None.

    A window of tokens ends where it was cut, so nothing stands there in any model.
    """
    if not model.family.wikitext or Unit.parse(index.manifest.settings.unit).tokens:
        return None
    return model.tokenizer.eos_token_id
