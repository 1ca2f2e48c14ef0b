"""The numbers that the paper reports, as shares between 0 and 1, one a layer of its sixteen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files


@dataclass(frozen=True)
class Paper:
    """The numbers in `paper.json`, by figure; how each number was read is said in the file."""

    source: str
    layers: int
    removal: dict[str, list[float]]
    """Fig 3: relative change of a coefficient without the first, the last or a random token."""
    agreement: list[float]
    """Fig 4: share of cells that agree."""
    rank_median: list[float]
    rank_q1: list[float]
    """Fig 5: rank of the next token; the paper's plot cuts the third quartile off."""
    agreement_by_probability: list[tuple[float, float]]
    """Fig 6: right edge of each bin, and the share that agrees."""
    predictive: dict[str, int]
    """The 100 most predictive values: how many are in layers 11 to 16, how many have an agreeing trigger."""
    table2: list[tuple[str, str, float]]
    """Table 2: cell, its value's top token and precision at 50."""
    active: list[float]
    """Fig 7: median share of cells with a coefficient above 0."""
    zero_agreement: list[float]
    """Fig 8: share of the 4,000 examples in which no memory agrees (the plot divides the same counts by 4,096)."""
    zero_agreement_text: dict[str, float]
    """The text beside Fig 8: the least share of examples without agreement; of the others, the shares of stop words and
    of short prefixes."""
    residual_matches: list[float]
    """Fig 9: share of examples whose residual puts the model's output first."""
    residual_probability: list[float]
    """Fig 10: median probability of the model's output in the residual."""
    cases: dict[str, list[float]]
    """Fig 11: shares of examples by who decides."""
    last_layer_distant: float
    """Share of the last layer's compositions whose new token is far from the residual's, by hand."""


@lru_cache(maxsize=1)
def the_paper() -> Paper:
    """The paper's numbers, from the file that is part of the package.

    >>> the_paper().layers, the_paper().removal["last"][0]
    (16, -0.717)
    """
    facts = json.loads(files(__name__.rpartition(".")[0]).joinpath("paper.json").read_text("utf-8"))
    fig3, fig5, fig6 = (
        facts[f"fig{name}"]
        for name in ("3_relative_change_percent", "5_rank_of_next_token", "6_agreement_by_max_probability")
    )
    fig8, fig11 = facts["fig8_zero_agreement_percent"], facts["fig11_prediction_cases_percent"]
    by_hand = facts["last_layer_manual_text"]
    precisions = facts["table2_precision_at_50_percent"].items()
    return Paper(
        source=facts["source"],
        layers=len(facts["layers"]),
        removal={kind: _shares(fig3[kind]) for kind in ("first", "last", "random")},
        agreement=[count / facts["model"]["cells_per_layer"] for count in facts["fig4_agreement_cells_of_4096"]["count"]],
        rank_median=[float(rank) for rank in fig5["median"]],
        rank_q1=[float(rank) for rank in fig5["q1"]],
        agreement_by_probability=list(zip(fig6["bin_right_edges"], fig6["agreement"], strict=True)),
        predictive={name: count for name, count in facts["predictive_values_text"].items() if name != "how_read"},
        table2=[
            (f"{layer}D{cell}", token, percent / 100)
            for name, percent in precisions
            if name != "how_read"
            for layer, cell, token in [name.split("_")]
        ],
        active=_shares(facts["fig7_active_memories_percent_median"]["median"]),
        zero_agreement=_shares(fig8["same_counts_over_4000"]),
        zero_agreement_text={name.removesuffix("_percent"): percent / 100 for name, percent in fig8["text"].items()},
        residual_matches=_shares(facts["fig9_residual_matches_output_percent"]["value"]),
        residual_probability=facts["fig10_residual_probability_of_output_median"]["value"],
        cases={name: _shares(fig11[name]) for name in ("residual", "composition", "agreement", "ffn")},
        last_layer_distant=by_hand["semantically_distant"] / by_hand["composition_cases_read"],
    )


def _shares(percents: list[int | float]) -> list[float]:
    return [round(percent / 100, 10) for percent in percents]
