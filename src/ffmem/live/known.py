"""What is known of a cell: what its value says at a coefficient and, with a run, what fires it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ffmem.cells import Cell, Sign, Trigger, sign_of
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import token_texts
from ffmem.run.reader import Index, Said

SHOWN = 5
"""Tokens of a value."""


class Known:
    """Facts about cells, from a run where it has them, else from the model; each looked up once."""

    def __init__(self, model: MemoryModel, index: Index | None) -> None:
        self.model, self.index = model, index
        self._stored = index is not None and index.has_values
        self._norm = index is not None and index.manifest.values is not None and index.manifest.values.norm
        self._values: dict[tuple[Cell, Sign], tuple[Said, ...]] = {}

    def prepare(self, cells: Iterable[tuple[Cell, float]]) -> None:
        """Look up what some cells say at these coefficients: what no run has is projected in one go, as the run's were.

        At a negative coefficient that is always the model's own projection of -v: what a run has is both ends of v, and
        under a bias or an adaptive softmax the lower one, turned round, is not what -v promotes.
        """
        new = sorted({(cell, sign_of(coefficient)) for cell, coefficient in cells} - self._values.keys())
        live = [(cell, sign) for cell, sign in new if sign == "-" or not (self._stored and self._in_run(cell))]
        for cell, sign in set(new).difference(live):
            assert self.index is not None
            value = self.index[cell].value
            self._values[cell, sign] = tuple(value.top(min(SHOWN, value.kept)))
        if not live:
            return
        rows = [self.model.values(cell.layer)[cell.index].to(self.model.device) for cell, _ in live]
        signed = torch.stack([row if sign == "+" else -row for row, (_, sign) in zip(rows, live, strict=True)])
        found = self.model.vocabulary.extremes(signed, SHOWN, norm=self._norm)
        texts = token_texts(self.model, found.promoted.flatten().tolist())
        columns = (found.promoted, found.promoted_log_prob.exp(), found.promoted_z)
        said = [Said(*one) for one in zip(texts, *(column.flatten().tolist() for column in columns), strict=True)]
        width = found.promoted.shape[1]
        for at, key in enumerate(live):
            self._values[key] = tuple(said[at * width : (at + 1) * width])

    def value(self, cell: Cell, coefficient: float) -> tuple[Said, ...]:
        """What v promotes most, or -v where the coefficient is negative: what the cell then adds to the stream."""
        self.prepare([(cell, coefficient)])
        return self._values[cell, sign_of(coefficient)]

    def trigger(self, cell: Cell, coefficient: float) -> Trigger | None:
        """The best trigger on the side of the coefficient's sign."""
        if self.index is None or not self._in_run(cell):
            return None
        view = self.index[cell]
        triggers = view.negative_triggers if sign_of(coefficient) == "-" else view.triggers
        return triggers[0] if triggers else None

    def _in_run(self, cell: Cell) -> bool:
        return self.index is not None and cell.layer in self.index.layers
