"""The numbers that the paper reports, as shares between 0 and 1, one a layer of its sixteen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Paper:
    """What `paper.json` holds, by name; how each number was read is said in the file."""

    facts: dict[str, Any]

    @property
    def source(self) -> str:
        return self.facts["source"]

    @property
    def layers(self) -> int:
        return len(self.facts["layers"])

    @cached_property
    def removal(self) -> dict[str, list[float]]:
        """Fig 3: relative change of a coefficient without the first, the last or a random token."""
        found = self.facts["fig3_relative_change_percent"]
        return {kind: _shares(found[kind]) for kind in ("first", "last", "random")}

    @cached_property
    def agreement(self) -> list[float]:
        """Fig 4."""
        cells = self.facts["model"]["cells_per_layer"]
        return [count / cells for count in self.facts["fig4_agreement_cells_of_4096"]["count"]]

    @property
    def rank_median(self) -> list[float]:
        """Fig 5."""
        return [float(rank) for rank in self.facts["fig5_rank_of_next_token"]["median"]]

    @property
    def rank_q1(self) -> list[float]:
        """Fig 5; the paper's plot cuts the third quartile off."""
        return [float(rank) for rank in self.facts["fig5_rank_of_next_token"]["q1"]]

    @property
    def agreement_by_probability(self) -> list[tuple[float, float]]:
        """Fig 6: right edge of each bin, and the share that agrees."""
        found = self.facts["fig6_agreement_by_max_probability"]
        return list(zip(found["bin_right_edges"], found["agreement"], strict=True))

    @property
    def predictive(self) -> dict[str, int]:
        """The 100 most predictive values: how many are in layers 11 to 16, how many have an agreeing trigger."""
        return {name: count for name, count in self.facts["predictive_values_text"].items() if name != "how_read"}

    @cached_property
    def table2(self) -> list[tuple[str, str, float]]:
        """Cell, its value's top token and precision at 50."""
        found = []
        for name, percent in self.facts["table2_precision_at_50_percent"].items():
            if name != "how_read":
                layer, cell, token = name.split("_")
                found.append((f"{layer}D{cell}", token, percent / 100))
        return found

    @cached_property
    def active(self) -> list[float]:
        """Fig 7: median share of cells with a coefficient above 0."""
        return _shares(self.facts["fig7_active_memories_percent_median"]["median"])

    @cached_property
    def zero_agreement(self) -> list[float]:
        """Fig 8, over its 4,000 examples (the plot divides the same counts by 4,096)."""
        return _shares(self.facts["fig8_zero_agreement_percent"]["same_counts_over_4000"])

    @cached_property
    def zero_agreement_text(self) -> dict[str, float]:
        """At least so many without agreement; stop words and short prefixes among the rest."""
        return {
            name.removesuffix("_percent"): x / 100 for name, x in self.facts["fig8_zero_agreement_percent"]["text"].items()
        }

    @cached_property
    def residual_matches(self) -> list[float]:
        """Fig 9."""
        return _shares(self.facts["fig9_residual_matches_output_percent"]["value"])

    @property
    def residual_probability(self) -> list[float]:
        """Fig 10: median."""
        return self.facts["fig10_residual_probability_of_output_median"]["value"]

    @cached_property
    def cases(self) -> dict[str, list[float]]:
        """Fig 11."""
        found = self.facts["fig11_prediction_cases_percent"]
        return {name: _shares(found[name]) for name in ("residual", "composition", "agreement", "ffn")}

    @cached_property
    def last_layer_distant(self) -> float:
        """Share of the last layer's compositions whose new token is far from the residual's, by hand."""
        found = self.facts["last_layer_manual_text"]
        return found["semantically_distant"] / found["composition_cases_read"]


@lru_cache(maxsize=1)
def the_paper() -> Paper:
    """The paper's numbers, from the file that is part of the package.

    >>> the_paper().layers, the_paper().removal["last"][0]
    (16, -0.717)
    """
    return Paper(json.loads(files(__name__.rpartition(".")[0]).joinpath("paper.json").read_text("utf-8")))


def _shares(percents: list[int | float]) -> list[float]:
    return [round(percent / 100, 10) for percent in percents]
