"""How the paper's claims are read off a result: the numbers they are judged by, and why some cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from statistics import fmean, median
from typing import Any

from ffmem.reports.curves import Axis, layers_of
from ffmem.reports.numbers import plain, points, share, signed, whole
from ffmem.reports.ranks import spearman
from ffmem.reports.verdicts import FEW, Measure, Reading, Rule, Sample, interval, own, resamples
from ffmem.run.results import Result

FEWEST = 4
"""Layers that a trend needs: two points always have one."""
MOST = 0.8
"""The share of the layers in which a claim about most of them must be so."""
COIN_FLIP = (0.45, 0.55)
"""Shares of coefficients above zero, and of coefficients below it, that say no more than the toss of a coin."""

Row = dict[str, Any]
Read = Callable[[Result], Reading]


def not_measured(words: str) -> Reading:
    return Reading(words, verdict="not measured")


def units(result: Result) -> str:
    """How many cells or examples a result is from, with their name."""
    if result.experiment == "removal":
        count, name = result.facts.get("cells"), "cells"
    elif result.experiment == "agreement":
        count, name = sum(row["cells"] for row in result.rows), "cells"
    else:
        count, name = result.settings.get("examples"), "examples"
    return "" if count is None else f"{count:,} {name}"


def trend(
    column: str, *, above: int | float = -inf, below: int | float = inf, size: bool = False,
    say: Callable[[int | float], str] = share, difference: Callable[[int | float], str] = points,
    unit: str = "points", **only: str,
) -> Read:  # fmt: skip
    """A column (or its size) rises or falls with depth: by its ranks, and from the bottom quarter to the top quarter."""

    def values(sample: Sample) -> list[tuple[int, int | float]]:
        rows = [row for row in sample.rows if row.get(column) is not None and only.items() <= row.items()]
        return [(row["layer"], abs(row[column]) if size else row[column]) for row in rows]

    def ranks(sample: Sample) -> int | float | None:
        layers, found = [layer for layer, _ in values(sample)], [value for _, value in values(sample)]
        return (spearman(layers, found) or 0.0) if found else None  # where all are equal there is no trend

    def quarters(sample: Sample) -> tuple[int | float, int | float]:
        found = [value for _, value in values(sample)]
        quarter = max(1, len(found) // 4)
        return fmean(found[:quarter]), fmean(found[-quarter:])

    def step(sample: Sample) -> int | float | None:
        if not values(sample):
            return None
        bottom, top = quarters(sample)
        return top - bottom

    def read(result: Result) -> Reading:
        found = values(own(result))
        if len(found) < FEWEST:
            return not_measured(f"too few layers for a trend ({len(found)}; {FEWEST} needed)")
        (first, start), (last, end) = found[0], found[-1]
        bottom, top = quarters(own(result))
        words = f"{say(start)} in layer {first}, {say(end)} in {last}"
        ends = f"top quarter of the layers {say(top)}, bottom quarter {say(bottom)}, difference"
        measures = (
            Measure("Spearman", ranks, Rule(above=above, below=below), signed),
            Measure(ends, step, Rule(above=0) if above > -inf else Rule(below=0), difference, unit),
        )
        return Reading(words, measures, units(result))

    return read


def in_most_layers(
    number: Callable[[Row], int | float],
    rule: Rule,
    say: Callable[[Row], str],
    layers: Callable[[Sample], Sequence[Row]] = lambda sample: sample.rows,
) -> Read:
    """A number of a layer meets a rule in at least 80% of the layers. The layer that is farthest from it is named."""
    sign = 1 if min(rule.below, rule.most) < inf else -1

    def met(rows: Sequence[Row]) -> int:
        return sum(rule.verdict([number(row)]) == "holds" for row in rows)

    def part(sample: Sample) -> int | float | None:
        rows = layers(sample)
        return met(rows) / len(rows) if rows else None

    def read(result: Result) -> Reading:
        rows = layers(own(result))
        if not rows:
            return not_measured("no layer to judge")
        worst = max(rows, key=lambda row: sign * number(row))
        words = f"{met(rows)} of {len(rows)}, the weakest is layer {worst['layer']}: {say(worst)}"
        measure = Measure("", part, Rule(least=MOST), of="of layers")
        return Reading(words, [measure], units(result))

    return read


def layers_with(column: str, rule: Rule) -> Read:
    """A share meets a rule in most layers."""
    return in_most_layers(lambda row: row[column], rule, lambda row: share(row[column]))


def commonest(case: str, others: Sequence[str]) -> Read:
    """A case is commoner than each of the others in most of the layers that have any of them."""
    names = (case, *others)
    return in_most_layers(
        lambda row: row[case] - max(row[other] for other in others),
        Rule(above=0),
        lambda row: ", ".join(f"{name} {share(row[name])}" for name in names),
        lambda sample: [row for row in sample.rows if any(row[name] for name in names)],
    )


def last_token_most(result: Result) -> Reading:
    """Fig 3: the fall is largest without the last token in most layers."""
    return in_most_layers(
        lambda row: row["last"] - min(row["first"], row["random"]),
        Rule(below=0),
        lambda row: ", ".join(f"{kind} {share(row[kind])}" for kind in ("last", "random", "first")),
        removals,
    )(result)


def removals(sample: Sample) -> list[Row]:
    """Fig 3: of every layer with all three kinds of removal, their mean changes."""
    layers: dict[int, Row] = {}
    for row in sample.rows:
        if row["mean"] is not None:
            layers.setdefault(row["layer"], {"layer": row["layer"]})[row["kind"]] = row["mean"]
    return [row for row in layers.values() if len(row) == 4]


def above_chance(result: Result) -> Reading:
    """Fig 4: the layer that agrees most, against shuffled pairs of its own and one in the vocabulary.

    The layer is chosen once, in the result. That its whole interval must lie above the whole interval of shuffled pairs
    asks more than a difference above zero would, since the best of many layers is partly luck.
    """
    rows = [row for row in result.rows if row["share"] is not None]
    if not rows:
        return not_measured("no cell could be judged")
    best = max(rows, key=lambda row: row["share"])
    layer = best["layer"]

    def agreeing(sample: Sample) -> int | float | None:
        return _only(sample.rows, layer).get("share")

    def shuffled(sample: Sample) -> int | float | None:
        return _only(sample.facts["baselines"]["by_layer"], layer).get("shuffled")

    chance, uniform = shuffled(own(result)), result.facts["baselines"]["uniform"]
    try:
        ends = interval(shuffled(draw) for draw in resamples(result))
    except KeyError:  # resamples without shuffled pairs
        ends = None
    beside = "not there" if chance is None else share(chance) + (f" ({share(ends[0])} to {share(ends[1])})" if ends else "")
    words = f"shuffled pairs {beside}, one in the vocabulary {share(uniform)}"
    upper = max(chance or 0.0, uniform, *(ends or ()))
    return Reading(words, [Measure("", agreeing, Rule(above=upper), of=f"in layer {layer}")], f"{best['cells']:,} cells")


def _only(rows: Iterable[Row], layer: int) -> Row:
    return next((row for row in rows if row["layer"] == layer), {})


def surer(result: Result) -> Reading:
    """Fig 6: every cell counts with the share of its bin, so that a bin of one cell decides nothing."""

    def ranks(sample: Sample) -> int | float:
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
    """How many of the most predictive values are of a kind."""

    def part(sample: Sample) -> int | float | None:
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


def more_than_a_coin_flip(read: Read) -> Read:
    """A claim about active cells, where being active is more than the sign of a number that is never zero."""

    def judged(result: Result) -> Reading:
        said = result.facts.get("gated", result.settings.get("gated", False))
        flips = [row for row in result.rows if said or coin_flip(row, result.facts)]
        if 2 * len(flips) <= len(result.rows):
            return read(result)
        mass = [row["mass_median"] for row in result.rows if row.get("mass_median") is not None]
        carried = f"; 90% of the mass is in {share(median(mass))} of the cells" if mass else ""
        why = "the layers are gated" if said else "the others below: the toss of a coin"
        middle = share(median(row["active_median"] for row in result.rows))
        return Reading(f"{middle} of the coefficients are above 0, and {why}{carried}", verdict="does not apply")

    return judged


def coin_flip(row: Row, facts: dict[str, Any]) -> bool:
    """Whether about half of a layer's coefficients are above zero and the others below it."""
    zeros = row.get("exact_zeros", facts.get("exact_zeros")) or 0.0
    above = row["active_median"]
    return all(COIN_FLIP[0] <= part <= COIN_FLIP[1] for part in (above, 1 - above - zeros))


def active_part(result: Result) -> Reading:
    def middle(sample: Sample) -> int | float:
        return median(row["active_median"] for row in sample.rows)

    mass = [row["mass_median"] for row in result.rows if row.get("mass_median") is not None]
    words = f"{share(median(mass))} of the cells carry 90% of the mass" if mass else ""
    return Reading(words, [Measure("median over layers", middle, Rule(least=0.05, most=0.6))], units(result))


def within(fact: str, low: int | float, high: int | float, *, what: str) -> Read:
    """Whether a fact lies in a range."""

    def read(result: Result) -> Reading:
        if result.facts.get(fact) is None:
            return not_measured("no case to judge")
        cases = result.facts.get("agreeing_cases")
        if cases is not None and cases < FEW:
            return not_measured(f"too few cases ({cases}; {FEW} needed)")
        n = units(result) if cases is None else f"{cases:,} cases"
        return Reading("", [Measure("", lambda sample: sample.facts[fact], Rule(least=low, most=high), of=what)], n)

    return read


def decided_early(result: Result) -> Reading:
    """Fig 9 at the layers nearest to a quarter and to half of the depth."""
    deep, axis, column = layers_of([result]), Axis(0), "residual_matches_output"  # an axis from 0 to 1

    def near(depth: float) -> Row:
        return min(result.rows, key=lambda row: (abs(axis.x(row["layer"], deep) - depth), row["layer"]))

    quarter, half = near(0.25), near(0.5)
    where = f"in layer {quarter['layer']} of {deep}"
    measure = Measure("", lambda sample: _only(sample.rows, quarter["layer"])[column], Rule(least=0.2), of=where)
    return Reading(f"{share(half[column])} in layer {half['layer']}", [measure], units(result))


def distant(result: Result) -> Reading:
    last = result.facts["last_layer"]
    if last["distant"] is None:
        return not_measured("no composition in the last layer")
    if last["compositions"] < FEW:
        return not_measured(f"too few compositions in the last layer ({last['compositions']}; {FEW} needed)")
    by = "by the distance of embeddings"
    measure = Measure("", lambda sample: sample.facts["last_layer"]["distant"], Rule(above=0.5), of=by)
    return Reading("", [measure], f"{last['compositions']:,} compositions")


def softmax_matters(result: Result) -> Reading:
    loss, free = result.facts["loss"], result.facts["change_softmax_all"]
    same = result.facts["change_softmax_scaled_all"]
    words = f"{signed(same)} nats a token at the same length, {signed(free)} without; the loss is {plain(loss)}"
    measure = Measure("", lambda sample: abs(sample.facts["change_softmax_scaled_all"]), Rule(above=0.1), _nats)
    return Reading(words, [measure], units(result))


def _nats(value: int | float) -> str:
    return f"{value:.2f} nats"


def ranks_apart(value: int | float) -> str:
    return ("+" if value > 0 else "") + whole(value)
