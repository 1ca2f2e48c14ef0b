"""The token that each value of a layer predicts, and what follows its key's triggers; cells × vocabulary is never held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from ffmem.cells import Cell, Sign
from ffmem.experiments.next_tokens import NONE, next_tokens
from ffmem.model.memories import MemoryModel
from ffmem.progress import Reporter
from ffmem.run.reader import Index

CELLS_A_REPORT = 1024
"""The number of cells whose values are projected between two reports of progress."""


@dataclass(frozen=True)
class ValueScores:
    """The predictions of a layer's values, and what follows the triggers of their keys: a handful of numbers a cell."""

    layer: int
    top: Int[np.ndarray, " cells"]
    """The token that each value puts first, the smaller id among equals."""
    probability: Float[np.ndarray, " cells"]
    """The probability of that top token, the largest that the value gives to any token."""
    rank: Int[np.ndarray, " cells"]
    """The rank of the first trigger's next token, from 1; of no meaning where there is none."""
    next: Int[np.ndarray, " cells"]
    """The first trigger's next token."""
    last: Int[np.ndarray, " cells"]
    """The first trigger's own last token."""
    triggers: Int[np.ndarray, " cells"]
    with_next: Int[np.ndarray, " cells"]
    """The number of triggers of each cell that have a next token."""
    matches: Int[np.ndarray, " cells"]
    """The number of triggers of each cell whose next token is the value's top token."""
    first_at_end: Bool[np.ndarray, " cells"]
    at_end: int
    negative_next: Int[np.ndarray, " cells"] | None = None
    """The first negative trigger's next token, where the run has looked for them."""
    negative_top: Int[np.ndarray, " cells"] | None = None
    """The token that each value turned round puts first."""

    @property
    def known(self) -> Bool[np.ndarray, " cells"]:
        """True for cells that have a first trigger with a next token."""
        return self.next != NONE

    @property
    def fired(self) -> Bool[np.ndarray, " cells"]:
        """True for cells that have a trigger."""
        return self.triggers > 0

    @property
    def agreeing(self) -> Bool[np.ndarray, " cells"]:
        """True for cells whose value puts the first trigger's next token first."""
        return self.next == self.top

    @property
    def negative_known(self) -> Bool[np.ndarray, " cells"] | None:
        """True for cells that have a first negative trigger with a next token."""
        return None if self.negative_next is None else self.negative_next != NONE

    @property
    def negative_agreeing(self) -> Bool[np.ndarray, " cells"] | None:
        """True for cells whose value turned round puts the first negative trigger's next token first."""
        return None if self.negative_next is None else self.negative_next == self.negative_top

    @property
    def agreeing_last(self) -> Bool[np.ndarray, " cells"]:
        """True for cells whose value puts the first trigger's own last token first."""
        return self.last == self.top


def read_layer(model: MemoryModel, index: Index, layer: int, end: int | None, norm: bool, reporter: Reporter) -> ValueScores:
    """Project the values of a layer and look at their triggers; `end` stands behind a sentence's last token."""
    tokens = next_tokens(index, layer, "+", end)
    values = model.values(layer)
    following = torch.from_numpy(np.maximum(tokens.ids[:, 0], 0)).long()
    before = index[Cell(layer, 0)].row
    parts = []
    for start in range(0, len(values), CELLS_A_REPORT):
        rows = slice(start, start + CELLS_A_REPORT)
        parts.append(model.vocabulary.score_token(values[rows], following[rows], norm=norm))
        done = before + min(start + CELLS_A_REPORT, len(values))
        reporter.update(done / len(index), f"layer {layer}, {done:,} of {len(index):,} cells")
    top, log_prob, rank = (
        torch.cat([getattr(part, name) for part in parts]).cpu().numpy() for name in ("top", "top_log_prob", "rank")
    )
    negative_next = negative_top = None
    if index.manifest.settings.negative:
        negative_next = next_tokens(index, layer, "-", end).ids[:, 0].copy()
        negative_top = top_tokens(model, layer, norm=norm, sign="-")
    return ValueScores(
        layer,
        top,
        np.exp(log_prob),
        rank,
        next=tokens.ids[:, 0].copy(),  # or all ranks would be held for every layer
        last=tokens.last[:, 0].copy(),
        triggers=tokens.counts,
        with_next=tokens.with_next,
        matches=(tokens.ids == top[:, None]).sum(1),
        first_at_end=tokens.at_end[:, 0].copy(),
        at_end=tokens.ended,
        negative_next=negative_next,
        negative_top=negative_top,
    )


def top_tokens(model: MemoryModel, layer: int, *, norm: bool = False, sign: Sign = "+") -> Int[np.ndarray, " cells"]:
    """The token that each value of a layer (from 1) puts first, the smaller id among equals; with sign "-", what it
    promotes at a negative coefficient.

    There the vector is turned round, not its ranking: under a bias or an adaptive softmax they differ.
    """
    values = model.values(layer)
    # Not `top`, which leaves open what comes first among equals: in half precision the best are often equal.
    return model.vocabulary.best(values if sign == "+" else -values, norm=norm)[1].cpu().numpy()
