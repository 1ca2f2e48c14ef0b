"""How many memories a layer uses for one prediction (Fig 7)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ffmem.experiments.examples import EXAMPLES, Examples
from ffmem.experiments.observe import Seen, follow, quartiles
from ffmem.experiments.resampling import as_draws, draw_counts, medians, resampling_settings, shares
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index
from ffmem.run.results import Result

MASS = 0.9
"""The share of a layer's mass that the mass-based variant asks for."""


class Activity:
    """Shares of cells with m > 0, and of cells that carry nine tenths of the mass, Σ |m|·‖v‖.

    The second says how many memories matter where an activation (GELU, a gate) is hardly ever exactly zero.
    """

    name = "activity"

    def __init__(self, model: MemoryModel, examples: Examples) -> None:
        self.layers = model.layers
        self.sizes = [torch.linalg.vector_norm(model.values(layer).float(), dim=1) for layer in range(1, model.layers + 1)]
        self.active = np.full((model.layers, len(examples)), np.nan)
        self.mass = np.full((model.layers, len(examples)), np.nan)
        self.zeros = np.full((model.layers, len(examples)), np.nan)
        self.gated = model.family.gated

    def see(self, seen: Seen) -> None:
        for layer in range(1, self.layers + 1):
            m = seen.places.m[layer - 1]
            self.active[layer - 1, seen.numbers] = (m > 0).float().mean(1).cpu().numpy()
            self.zeros[layer - 1, seen.numbers] = (m == 0).double().mean(1).cpu().numpy()
            self.mass[layer - 1, seen.numbers] = carriers(m.float().abs() * self.sizes[layer - 1].to(m.device)).cpu().numpy()

    def result(self, settings: dict[str, Any]) -> Result:
        rows = []
        for layer in range(1, self.layers + 1):
            named: dict[str, float] = {}
            for name, values in (("active", self.active), ("mass", self.mass)):
                found = quartiles(values[layer - 1])
                named |= {f"{name}_{q}": value for q, value in zip(("q1", "median", "q3"), found, strict=True)}
            zeros = float(self.zeros[layer - 1].mean())
            rows.append({"layer": layer, "examples": self.active.shape[1], **named, "exact_zeros": zeros})
        facts = {
            "exact_zeros": float(self.zeros.mean()),
            "gated": self.gated,
            "active": "share of cells with a coefficient above 0",
            "mass": f"share of cells that carry {MASS:.0%} of the sum of |coefficient| times the value's length",
        }
        seed = settings["seed"]
        return Result(self.name, seed, settings | resampling_settings("examples"), rows, facts, self._draws(seed))

    def _draws(self, seed: int) -> list[dict[str, Any]]:
        counts = draw_counts(self.active.shape[1], [seed])
        rows = [
            {
                "layer": layer,
                "examples": self.active.shape[1],
                "active_median": medians(counts, self.active[layer - 1]),
                "mass_median": medians(counts, self.mass[layer - 1]),
            }
            for layer in range(1, self.layers + 1)
        ]
        return as_draws(rows, {"exact_zeros": shares(counts, self.zeros.mean(0)), "gated": self.gated})


def activity(
    model: Any, index: Index, eval: Any = None, *, examples: int = EXAMPLES, seed: int = 0, quiet: bool = False
) -> Result:
    """How many memories of each layer are active at the last token of random prefixes."""
    return follow(model, index, [Activity], eval, examples=examples, seed=seed, quiet=quiet)[0]


def carriers(mass: torch.Tensor) -> torch.Tensor:
    """For each row, the share of entries, largest first, that together hold `MASS` of its sum; 0 of an empty row.

    >>> carriers(torch.tensor([[8.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    ordered = mass.sort(1, descending=True).values.double()
    total = ordered.sum(1, keepdim=True)
    # Those in front of the one that reaches the share, and that one; a little room for rounding.
    before = ordered.cumsum(1) - ordered
    return ((before < MASS * total * (1 - 1e-9)) & (ordered > 0)).double().mean(1)
