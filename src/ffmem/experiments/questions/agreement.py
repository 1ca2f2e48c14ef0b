"""The experiment: does a value predict what follows its key's top trigger? (Section 4 of the paper: Figs 4, 5 and 6,
Table 2.)

Here is what is asked and how it is shown; it is computed in `value_agreement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ffmem.experiments.experiment import Experiment, Figure, Section
from ffmem.experiments.markup import Raw, details, element, join, missing, table
from ffmem.experiments.numbers import share, signed, spearman, whole
from ffmem.experiments.panels import (
    COLOURS,
    HERE,
    INTERVALS,
    PAPER,
    QUARTILES,
    RANDOM,
    Axis,
    Curve,
    Form,
    Panel,
    Point,
    curve_of,
    paper_curve,
    random_curve,
)
from ffmem.experiments.paper import the_paper
from ffmem.experiments.readings import Read, ends, falls, not_measured, rises, row_of, trend
from ffmem.experiments.resampling import interval
from ffmem.experiments.rules import FEW, Claim, Measure, Reading, Rule
from ffmem.experiments.value_agreement import agreement
from ffmem.run.reader import Index
from ffmem.run.results import Result
from ffmem.text import shown_token

OPENED, TRIGGERS = 12, 5
"""The number of most predictive values that the report opens, and of triggers shown of each."""


def fig4(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 4."""
    curves = [
        curve_of(result, axis, "share"),
        paper_curve(the_paper().agreement, axis),
        random_curve(control, axis, "share"),
        curve_of(result, axis, "shuffled", "shuffled pairs", rows=_chance, dash=(1, 3)),
        curve_of(result, axis, "negative_share", "negative triggers"),
    ]
    return [Panel("", "cells that agree", curves, axis)]


def _chance(sample: Result) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = sample.facts.get("baselines", {}).get("by_layer", [])
    return found


def fig5(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 5."""
    curves = [
        curve_of(result, axis, "rank_median", spread=QUARTILES),
        paper_curve(the_paper().rank_median, axis),
        paper_curve(the_paper().rank_q1, axis, "the paper, first quartile", dash=(1, 3)),
        random_curve(control, axis, "rank_median", spread=QUARTILES),
    ]
    return [Panel("", "rank of the next token", curves, axis, ",~r", log=True)]


def fig6(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 6."""
    paper = [
        Point(at, float(at), part, note=f"up to {share(edge)}")
        for at, (edge, part) in enumerate(the_paper().agreement_by_probability, 1)
    ]
    curves = [
        _bins(result, HERE, "bar"),
        Curve(PAPER, paper, dash=(5, 3), colour=COLOURS[PAPER]),
        _bins(control, RANDOM, "line", dash=(8, 3, 2, 3)),
    ]
    empty = [at for at, one in enumerate(result.facts.get("fig6", []), 1) if one["share"] is None]
    return [Panel("", "cells that agree", curves, None, empty=empty)]


def _bins(result: Result | None, name: str, form: Form, **more: Any) -> Curve:
    """A curve of Fig 6: bins with cells, each with its interval over the resamples; those of few cells are marked."""
    points = []
    for at, one in enumerate(result.facts.get("fig6", []) if result else [], 1):
        if one["share"] is not None and result is not None:
            drawn = [draw.facts.get("fig6", []) for draw in result.draws]
            low, high = interval(found[at - 1]["share"] for found in drawn if len(found) >= at) or (None, None)
            few = f"n {one['cells']}" if one["cells"] < FEW else ""
            note = f"{share(one['low'])} to {share(one['high'])}, {one['cells']:,} cells"
            points.append(Point(at, float(at), one["share"], low, high, note, few))
    return Curve(name, points, form, colour=COLOURS[name], interval=INTERVALS, **more)


def claims() -> list[Claim]:
    """The paper's claims on Figs 4, 5 and 6 and on Table 2."""
    paper = the_paper()
    bins = [part for _, part in paper.agreement_by_probability]
    return [
        Claim(
            "agreement-rises", "Fig 4",
            "Values agree with their keys' triggers more often in upper layers.",
            ends(paper.agreement), rises("agreement", 0.5),
            trend("share", above=0.5),
        ),
        Claim(
            "agreement-chance", "Fig 4",
            "At its best, agreement is above chance.",
            f"{share(max(paper.agreement))} in layer 16, chance 0.0004%",
            "the share in the best layer above that layer's shuffled pairs, the upper end of their interval, and above "
            "1/vocabulary",
            above_chance,
        ),
        Claim(
            "rank-falls", "Fig 5",
            "The next token climbs in the value's ranking towards upper layers.",
            ends(paper.rank_median, whole), falls("the median rank", -0.5),
            trend("rank_median", below=-0.5, say=whole, difference=ranks_apart, unit="ranks"),
        ),
        Claim(
            "agreement-probability", "Fig 6",
            "Values that are surer of a token agree more often.",
            f"Spearman {signed(spearman(list(range(len(bins))), bins) or 0.0)} over {len(bins)} bins",
            "Spearman of a cell's bin and the agreement of that bin above 0.5, over cells",
            surer,
        ),
        Claim(
            "predictive-upper", "Section 4",
            "The most predictive values sit in the upper layers.",
            f"{paper.predictive['in_layers_11_to_16']} of {paper.predictive['top_values']} in layers 11 to 16",
            "at least 80% of them in the top 6/16 of the layers",
            predictive("in_top_layers", 0.8),
        ),
        Claim(
            "predictive-agree", "Section 4",
            "Many of them agree with one of their top triggers.",
            f"{paper.predictive['with_an_agreeing_trigger_in_top_50']} of {paper.predictive['top_values']}",
            "at least 25% of them",
            predictive("with_agreeing_trigger", 0.25),
        ),
    ]  # fmt: skip


def above_chance(result: Result) -> Reading:
    """The claim on Fig 4: the layer that agrees most, against shuffled pairs of its own and one in the vocabulary.

    The layer is chosen once, in the result. That its whole interval must lie above the whole interval of shuffled pairs
    asks more than a difference above zero would, since the best of many layers is partly luck.
    """
    rows = [row for row in result.rows if row["share"] is not None]
    if not rows:
        return not_measured("no cell could be judged")
    best = max(rows, key=lambda row: row["share"])
    layer = best["layer"]

    def agreeing(sample: Result) -> int | float | None:
        return row_of(sample.rows, layer).get("share")

    def shuffled(sample: Result) -> int | float | None:
        return row_of(sample.facts["baselines"]["by_layer"], layer).get("shuffled")

    chance, uniform = shuffled(result), result.facts["baselines"]["uniform"]
    try:
        span = interval(shuffled(draw) for draw in result.draws)
    except KeyError:  # resamples without shuffled pairs
        span = None
    beside = "not there" if chance is None else share(chance) + (f" ({share(span[0])} to {share(span[1])})" if span else "")
    words = f"shuffled pairs {beside}, one in the vocabulary {share(uniform)}"
    upper = max(chance or 0.0, uniform, *(span or ()))
    return Reading(words, [Measure("", agreeing, Rule(above=upper), of=f"in layer {layer}")], f"{best['cells']:,} cells")


def surer(result: Result) -> Reading:
    """The claim on Fig 6: every cell counts with the share of its bin, so that a bin of one cell decides nothing."""

    def ranks(sample: Result) -> int | float:
        held = {at: one for at, one in enumerate(sample.facts["fig6"]) if one["cells"]}
        shares, cells = ([one[name] for one in held.values()] for name in ("share", "cells"))
        return spearman(list(held), shares, cells) or 0.0  # where all are equal there is no trend

    cells = [one["cells"] for one in result.facts["fig6"]]
    large = sum(count >= FEW for count in cells)
    if large < 2:
        return not_measured(f"too few bins of {FEW} cells or more ({large} of {len(cells)}; 2 needed)")
    words = f"{large} of {len(cells)} bins hold {FEW} cells or more, the fullest {share(max(cells) / sum(cells))} of all"
    return Reading(words, [Measure("Spearman", ranks, Rule(above=0.5), signed)], f"{sum(cells):,} cells")


def predictive(count: str, least: int | float) -> Read:
    """A measure that counts how many of the most predictive values are of a kind."""

    def part(sample: Result) -> int | float | None:
        found = sample.facts["predictive"]
        return found[count] / found["cells"] if found["cells"] else None

    def read(result: Result) -> Reading:
        found = result.facts["predictive"]
        if not found["cells"]:
            return not_measured("no values")
        layers = found["top_layers"]
        named = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        where = f"in {named}" if count == "in_top_layers" else ""
        return Reading("", [Measure("", part, Rule(least=least), of=where)], f"{found['cells']:,} values")

    return read


def ranks_apart(value: int | float) -> str:
    """A difference of ranks in words."""
    return ("+" if value > 0 else "") + whole(value)


def table2(index: Index, result: Result | None) -> list[Raw]:
    """The report's form of Table 2: cells of the paper's kind, and how many of their triggers agree."""
    intro = element(
        "p",
        "Cells of upper layers whose value puts first what followed many of their triggers. Precision is the share of "
        "a cell's triggers for which that is so.",
    )
    paper = table(
        "The paper's Table 2",
        ["cell", "value's top token", "precision at 50"],
        [[cell, shown_token(token), share(precision)] for cell, token, precision in the_paper().table2],
    )
    if result is None:
        return [intro, missing("agreement"), paper]
    found = result.facts["table2"]
    rows = [
        [
            one["cell"],
            shown_token(one["token"]),
            f"{share(one['precision_at_t'])} ({one['agreeing']} of {one['judged']})",
            join(element("p", _prefix(e["prefix"], e["next"]), class_="prefix") for e in one["examples"]),
        ]
        for one in found["cells"]
    ]
    columns = ["cell", "value's top token", "precision", "triggers that agree"]
    made = (
        table("Table 2 for this model", columns, rows)
        if rows
        else element("p", "No cell of the upper layers agrees with a trigger.")
    )
    rule = element("p", element("small", f"How they were chosen: {found['rule']}."))
    return [intro, made, rule, details("The paper's own", paper)]


def surest_values(index: Index, result: Result | None) -> list[Raw]:
    """The most predictive values, each with its first triggers."""
    heading = element("h3", "The values that are surest of a token")
    if result is None:
        return [heading, missing("agreement")]
    found = result.facts["predictive"]
    where = element("p", f"Of {found['cells']} values {found['in_top_layers']} are in {found['top_layers_rule']}.")
    return [heading, where, *(_surest(index, one) for one in found["values"][:OPENED])]


def _surest(index: Index, one: dict[str, Any]) -> Raw:
    title = f"{one['cell']} says {shown_token(one['token'])} (probability {share(one['max_probability'])}); "
    agrees = f"{one['agreeing']} of its {one['judged']} triggers agree"
    triggers = index[one["cell"]].triggers[:TRIGGERS]
    listed = [element("li", _prefix(trigger.prefix, trigger.next)) for trigger in triggers]
    return details(title + agrees, element("ol", *listed) if listed else element("p", "It has no trigger."))


def _prefix(prefix: str, following: str | None) -> Raw:
    return join([prefix, element("b", f"▸ {shown_token(following)}")])


EXPERIMENT = Experiment(
    name="agreement",
    order=4,
    question="Does a value predict what follows its key's top trigger?",
    columns={
        "layer": "from 1",
        "cells": "cells whose top trigger has a next token",
        "agreeing": "how many of them have a value that puts that token first",
        "share": "the same as a share",
        "rank_q1, rank_median, rank_q3": "rank of that token in what the value says, from 1",
        "negative_cells, negative_agreeing, negative_share": "the same for the top negative trigger, against the value "
        "turned round, where the run has negative triggers",
        "negative_left_out": "cells without a next token behind their top negative trigger",
    },
    run=agreement,
    figures=[
        Figure(
            "fig4",
            "Fig 4",
            "Does a value predict what follows its key's trigger?",
            "A cell agrees if the token that its value puts first is the one that followed the prefix that fires it most. "
            "In the paper hardly any cell of the lower layers agrees and a few in a hundred do at the top; the dotted curve "
            "is what pairing keys with other cells' values gives.",
            "Share of cells whose value predicts the next token of their top trigger, a point a layer, and the paper's.",
            fig4,
        ),
        Figure(
            "fig5",
            "Fig 5",
            "How far down does a value rank that token?",
            "Rank 1 is the token that the value puts first, so lower is better; the band is the middle half of a layer's "
            "cells. Ranks depend on the size of the vocabulary (267,744 words in the paper): compare the slopes, not the "
            "heights.",
            "Rank of the next token in the value's distribution, median and quartiles a layer, and the paper's median.",
            fig5,
        ),
        Figure(
            "fig6",
            "Fig 6",
            "Do values that are sure of a token agree more often?",
            "Cells are sorted into eight bins by the largest probability that their value gives to any token, the least "
            "sure on the left. In the paper agreement grows from bin to bin. Bins on the right often hold only a handful "
            "of cells: hollow bars are of fewer than 30 cells (n says how many), and a bin without cells says none.",
            "Share of agreeing cells in eight bins of the value's largest probability, and the paper's.",
            fig6,
        ),
    ],
    claims=claims,
    sections=[Section(0, "Table 2 for this model", table2), Section(2, "Examples to read", surest_values)],
)
