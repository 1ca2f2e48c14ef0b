"""What is known of a cell: what its value says and, with a run, what fires it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ffmem.index.reader import Index, Said
from ffmem.model.memories import MemoryModel
from ffmem.model.prompts import token_texts
from ffmem.words import Cell, Trigger

SHOWN = 5
"""Tokens of a value."""


class Known:
    """Facts about cells, from a run where it has them, else from the model; each looked up once."""

    def __init__(self, model: MemoryModel, index: Index | None) -> None:
        self.model, self.index = model, index
        self._values: dict[Cell, tuple[Said, ...]] = {}

    def prepare(self, cells: Iterable[Cell]) -> None:
        """Look up the values of some cells together: those that no run has are projected in one go."""
        new = sorted(set(cells) - self._values.keys())
        stored = [cell for cell in new if self._in_run(cell) and self.index is not None and self.index.has_values]
        for cell in stored:
            assert self.index is not None
            value = self.index[cell].value
            self._values[cell] = tuple(value.top(min(SHOWN, value.kept)))
        live = sorted(set(new) - set(stored))
        if live:
            rows = torch.stack([self.model.values(cell.layer)[cell.index].to(self.model.device) for cell in live])
            log_probs, ids = self.model.vocabulary.top(rows, SHOWN)
            for cell, values, tokens in zip(live, log_probs.exp().tolist(), ids.tolist(), strict=True):
                texts = token_texts(self.model, tokens)
                self._values[cell] = tuple(Said(*one) for one in zip(texts, tokens, values, strict=True))

    def value(self, cell: Cell) -> tuple[Said, ...]:
        self.prepare([cell])
        return self._values[cell]

    def trigger(self, cell: Cell, coefficient: float) -> Trigger | None:
        """The best trigger on the side of the coefficient's sign."""
        if self.index is None or not self._in_run(cell):
            return None
        view = self.index[cell]
        triggers = view.negative_triggers if coefficient < 0 else view.triggers
        return triggers[0] if triggers else None

    def _in_run(self, cell: Cell) -> bool:
        return self.index is not None and cell.layer in self.index.layers
