"""The number of memories that a layer uses for one prediction (Fig 7)."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from ffmem.experiments.experiment import Experiment, Figure, followed
from ffmem.experiments.numbers import share
from ffmem.experiments.panels import COLOURS, QUARTILES, Axis, Panel, curve_of, paper_curve, random_curve
from ffmem.experiments.paper import the_paper
from ffmem.experiments.readings import Read, Row, ends, falls, trend, units
from ffmem.experiments.resampling import as_draws, draw_counts, medians, quartiles, resampling_settings, shares
from ffmem.experiments.rules import Claim, Measure, Reading, Rule
from ffmem.run.results import Result

if TYPE_CHECKING:
    from torch import Tensor

    from ffmem.experiments.examples import Examples
    from ffmem.experiments.observe import Seen
    from ffmem.model.memories import MemoryModel

MASS = 0.9
"""The share of a layer's mass, Σ |m|·‖v‖, that the mass-based variant asks for."""
COIN_FLIP = (0.45, 0.55)
"""The range in which the share of coefficients above zero, or below it, says no more than the toss of a coin."""


class Activity:
    """The observer of two shares of a layer's cells: those with m > 0, and those with nine tenths of the mass, Σ |m|·‖v‖.

    The second says how many memories matter where an activation (GELU, a gate) is hardly ever exactly zero.
    """

    name = "activity"

    def __init__(self, model: MemoryModel, examples: Examples) -> None:
        import torch

        self.layers = model.layers
        self.sizes = [torch.linalg.vector_norm(model.values(layer).float(), dim=1) for layer in range(1, model.layers + 1)]
        self.active = np.full((model.layers, len(examples)), np.nan)
        self.mass = np.full((model.layers, len(examples)), np.nan)
        self.zeros = np.full((model.layers, len(examples)), np.nan)
        self.gated = model.family.gated

    def see(self, seen: Seen) -> None:
        """Note, for a batch of examples, the shares of each layer's cells."""
        for layer in range(1, self.layers + 1):
            m = seen.tensors.m[layer - 1]
            self.active[layer - 1, seen.numbers] = (m > 0).float().mean(1).cpu().numpy()
            self.zeros[layer - 1, seen.numbers] = (m == 0).double().mean(1).cpu().numpy()
            self.mass[layer - 1, seen.numbers] = carriers(m.float().abs() * self.sizes[layer - 1].to(m.device)).cpu().numpy()

    def result(self, settings: dict[str, Any]) -> Result:
        """The result over all examples that were seen."""
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


activity = followed(Activity)


def carriers(mass: Tensor) -> Tensor:
    """For each row, the share of entries, largest first, that together hold `MASS` of its sum; 0 of an empty row.

    >>> import torch
    >>> carriers(torch.tensor([[8.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])).tolist()
    [0.5, 0.0]
    """
    ordered = mass.sort(1, descending=True).values.double()
    total = ordered.sum(1, keepdim=True)
    # Those in front of the one that reaches the share, and that one; a little room for rounding.
    before = ordered.cumsum(1) - ordered
    return ((before < MASS * total * (1 - 1e-9)) & (ordered > 0)).double().mean(1)


def panels(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 7."""
    random_mass = "90% of the mass, random weights"
    curves = [
        curve_of(result, axis, "active_median", spread=QUARTILES),
        paper_curve(the_paper().active, axis),
        curve_of(result, axis, "mass_median", "cells with 90% of the mass", spread=QUARTILES),
        random_curve(control, axis, "active_median", spread=QUARTILES),
        random_curve(control, axis, "mass_median", random_mass, spread=QUARTILES, colour=COLOURS["first token"]),
    ]
    return [Panel("", "cells of the layer", curves, axis)]


def claims() -> list[Claim]:
    """The paper's claims on Fig 7."""
    return [
        Claim(
            "active-part", "Fig 7",
            "Only a part of the memories takes part in a prediction: 10% to 50%.",
            f"median over layers {share(median(the_paper().active))}",
            "median over layers of the active share from 5% to 60%",
            more_than_a_coin_flip(active_part),
        ),
        Claim(
            "active-depth", "Fig 7",
            "Fewer memories are active in upper layers.",
            ends(the_paper().active), falls("the active share", -0.5),
            more_than_a_coin_flip(trend("active_median", below=-0.5)),
        ),
    ]  # fmt: skip


def more_than_a_coin_flip(read: Read) -> Read:
    """A reading that applies only where being active is more than the sign of a number that is never zero."""

    def reading(result: Result) -> Reading:
        gated = result.facts.get("gated", result.settings.get("gated", False))
        flips = [row for row in result.rows if gated or coin_flip(row, result.facts)]
        if 2 * len(flips) <= len(result.rows):
            return read(result)
        mass = [row["mass_median"] for row in result.rows if row.get("mass_median") is not None]
        carried = f"; 90% of the mass is in {share(median(mass))} of the cells" if mass else ""
        why = "the layers are gated" if gated else "the others below: the toss of a coin"
        middle = share(median(row["active_median"] for row in result.rows))
        return Reading(f"{middle} of the coefficients are above 0, and {why}{carried}", verdict="does not apply")

    return reading


def coin_flip(row: Row, facts: dict[str, Any]) -> bool:
    """Whether about half of a layer's coefficients are above zero and the others below it."""
    zeros = row.get("exact_zeros", facts.get("exact_zeros")) or 0.0
    above = row["active_median"]
    return all(COIN_FLIP[0] <= part <= COIN_FLIP[1] for part in (above, 1 - above - zeros))


def active_part(result: Result) -> Reading:
    """The median over the layers of the share of active cells."""

    def middle(sample: Result) -> int | float:
        return median(row["active_median"] for row in sample.rows)

    mass = [row["mass_median"] for row in result.rows if row.get("mass_median") is not None]
    words = f"{share(median(mass))} of the cells carry 90% of the mass" if mass else ""
    return Reading(words, [Measure("median over layers", middle, Rule(least=0.05, most=0.6))], units(result))


EXPERIMENT = Experiment(
    name="activity",
    order=7,
    question="How many memories does one prediction use?",
    columns={
        "layer": "from 1",
        "examples": "prefixes that were followed",
        "active_q1, active_median, active_q3": "share of cells with a coefficient above 0",
        "mass_q1, mass_median, mass_q3": "share of cells that carry 90% of the sum of coefficient × length of value",
        "exact_zeros": "share of coefficients that are exactly 0",
    },
    run=activity,
    observer=Activity,
    figures=[
        Figure(
            "fig7",
            "Fig 7",
            "How many memories take part in one prediction?",
            "The share of a layer's cells with a coefficient above zero, median and middle half over the examples. Where an "
            "activation is hardly ever zero that says little, so a second curve counts the cells that carry nine tenths of "
            "the mass (size of coefficient × length of value).",
            "Share of active cells, median and quartiles a layer, the cells with most of the mass, and the paper's median.",
            panels,
        )
    ],
    claims=claims,
)
