"""What the paper claims, what is so here, and whether the claim holds by a rule that is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ffmem.reports.curves import Axis, layers_of
from ffmem.reports.paper import the_paper
from ffmem.reports.ranks import spearman
from ffmem.results import Result
from ffmem.words import RunError

Verdict = Literal["holds", "does not hold", "not measured"]
FEWEST = 4
"""Layers (or bins) that a trend needs: two points always have one."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, judged: `verdict` follows from `here` by `rule`."""

    id: str
    figure: str
    claim: str
    paper: str
    here: str
    rule: str
    verdict: Verdict


Found = tuple[str, bool | None]
"""What was found, in words, and whether the rule is met; None where it cannot be told."""


@dataclass(frozen=True)
class _Rule:
    id: str
    figure: str
    experiment: str
    claim: str
    paper: str
    rule: str
    judge: Callable[[Result], Found]


def judge_claims(results: Mapping[str, Result]) -> list[Claim]:
    """Every claim, in the order of the figures; those whose experiment was not run are not measured."""
    found = []
    for one in _rules():
        here, holds = f"not run: ffmem experiments RUN {one.experiment}", None
        if one.experiment in results:
            try:
                here, holds = one.judge(results[one.experiment])
            except (KeyError, TypeError, ValueError) as error:  # of another version, or altered
                again = f"make it again with ffmem experiments RUN {one.experiment}"
                raise RunError(f"the result {one.experiment} lacks what {one.figure} needs ({error!r}): {again}") from error
        verdict: Verdict = "not measured" if holds is None else "holds" if holds else "does not hold"
        found.append(Claim(one.id, one.figure, one.claim, one.paper, here, one.rule, verdict))
    return found


def trend(
    column: str,
    above: float | None = None,
    below: float | None = None,
    *,
    size: bool = False,
    shown: Callable[[float], str] | None = None,
    **only: str,
) -> Callable[[Result], Found]:
    """A judge of whether a column (or its size) rises or falls with depth, in the rows that hold `only`."""
    say = shown or _share

    def judge(result: Result) -> Found:
        rows = [row for row in result.rows if row.get(column) is not None and only.items() <= row.items()]
        values = [abs(row[column]) if size else row[column] for row in rows]
        if len(rows) < FEWEST:
            return f"too few layers for a trend ({len(rows)}; {FEWEST} needed)", None
        rho = spearman([row["layer"] for row in rows], values)
        ends = f"{say(rows[0][column])} in layer {rows[0]['layer']}, {say(rows[-1][column])} in {rows[-1]['layer']}"
        if rho is None:
            return f"no trend, all layers are equal ({ends})", False
        return f"Spearman {_signed(rho)} ({ends})", (above is None or rho > above) and (below is None or rho < below)

    return judge


def _last_token(result: Result) -> Found:
    """Fig 3: in how many layers is the fall largest without the last token?"""
    means: dict[int, dict[str, float]] = {}
    for row in result.rows:
        if row["mean"] is not None:
            means.setdefault(row["layer"], {})[row["kind"]] = row["mean"]
    whole = [kinds for kinds in means.values() if len(kinds) == 3]
    if not whole:
        return "no layer has all three kinds of removal", None
    most = sum(kinds["last"] < min(kinds["first"], kinds["random"]) for kinds in whole)
    middle = ", ".join(f"{kind} {_share(median(kinds[kind] for kinds in whole))}" for kind in ("last", "random", "first"))
    return f"in {most} of {len(whole)} layers (median change: {middle})", most >= 0.8 * len(whole)


def _above_chance(result: Result) -> Found:
    best = max((row for row in result.rows if row["share"] is not None), key=lambda row: row["share"], default=None)
    if best is None:
        return "no cell could be judged", None
    baselines = result.facts["baselines"]
    own = {row["layer"]: row["shuffled"] for row in baselines["by_layer"]}
    chance = max(own.get(best["layer"]) or 0.0, baselines["uniform"])
    text = f"{_share(best['share'])} in layer {best['layer']}, chance {_share(chance)}"
    return text, best["share"] > 10 * chance


def _by_probability(result: Result) -> Found:
    shares = [one["share"] for one in result.facts["fig6"] if one["share"] is not None]
    if len(shares) < FEWEST:
        return f"too few bins with cells ({len(shares)}; {FEWEST} needed)", None
    rho = spearman(list(range(len(shares))), shares)
    if rho is None:
        return f"no trend, all {len(shares)} bins are equal ({_share(shares[0])})", False
    return f"Spearman {_signed(rho)} over {len(shares)} bins that hold cells", rho > 0.5


def _predictive(count: str, least: float) -> Callable[[Result], Found]:
    def judge(result: Result) -> Found:
        found = result.facts["predictive"]
        if not found["cells"]:
            return "no values", None
        layers = found["top_layers"]
        named = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        where = f" in {named}" if count == "in_top_layers" else ""
        return f"{found[count]} of {found['cells']}{where}", found[count] >= least * found["cells"]

    return judge


def _active(result: Result) -> Found:
    middle = median(row["active_median"] for row in result.rows)
    mass = [row["mass_median"] for row in result.rows if row.get("mass_median") is not None]
    carried = f"; {_share(median(mass))} carry 90% of the mass" if mass else ""
    return f"median over layers {_share(middle)}{carried}", 0.05 <= middle <= 0.6


def within(column: str, low: float, high: float, *, what: str) -> Callable[[Result], Found]:
    """A judge of whether a fact lies in a range."""

    def judge(result: Result) -> Found:
        value = result.facts.get(column)
        return ("no case to judge", None) if value is None else (f"{_share(value)} {what}", low <= value <= high)

    return judge


def _middle(column: str, holds: Callable[[float], bool]) -> Callable[[Result], Found]:
    def judge(result: Result) -> Found:
        values = [row[column] for row in result.rows]
        text = f"median over layers {_share(median(values))} (from {_share(min(values))} to {_share(max(values))})"
        return text, holds(median(values))

    return judge


def _early(result: Result) -> Found:
    """Fig 9 at the layers nearest to a quarter and to half of the depth."""
    deep = layers_of([result])
    axis = Axis(0)  # always from 0 to 1

    def near(depth: float) -> dict[str, Any]:
        return min(result.rows, key=lambda row: (abs(axis.x(row["layer"], deep) - depth), row["layer"]))

    quarter, half = near(0.25), near(0.5)
    column = "residual_matches_output"
    text = (
        f"{_share(quarter[column])} in layer {quarter['layer']} of {deep}; {_share(half[column])} in layer {half['layer']}"
    )
    return text, quarter[column] >= 0.2


def _commonest(case: str, others: tuple[str, ...]) -> Callable[[Result], Found]:
    def judge(result: Result) -> Found:
        most = sum(all(row[case] > row[other] for other in others) for row in result.rows)
        middle = ", ".join(f"{name} {_share(median(row[name] for row in result.rows))}" for name in (case, *others))
        return f"in {most} of {len(result.rows)} layers (medians: {middle})", most >= 0.8 * len(result.rows)

    return judge


def _distant(result: Result) -> Found:
    found = result.facts["last_layer"]
    if found["distant"] is None:
        return "no composition in the last layer", None
    return f"{_share(found['distant'])} of {found['compositions']:,}, by embedding distance", found["distant"] > 0.5


def _normaliser(result: Result) -> Found:
    plain, scaled = (result.facts[f"change_{name}_all"] for name in ("softmax", "softmax_scaled"))
    text = f"{_signed(scaled)} nats a token with coefficients of the same length, {_signed(plain)} without"
    return f"{text}; the loss is {result.facts['loss']:.3g}", abs(scaled) > 0.1


def _share(value: int | float) -> str:
    return f"{100 * value:.3g}%".replace("-", "−")


def _rank(value: int | float) -> str:
    return f"{value:,.0f}"


def _signed(value: int | float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _rules() -> list[_Rule]:
    paper = the_paper()
    layers = list(range(1, paper.layers + 1))

    def ends(values: list[float], say: Callable[[float], str] = _share) -> str:
        rho = spearman(layers, values)
        return f"Spearman {_signed(rho or 0.0)} ({say(values[0])} in layer 1, {say(values[-1])} in {paper.layers})"

    rank, active, zero, text = paper.rank_median, paper.active, paper.zero_agreement, paper.zero_agreement_text
    cases, first, last = paper.cases, paper.removal["first"], paper.removal["last"]
    bins = [share for _, share in paper.agreement_by_probability]
    changes = f"last {_share(median(last))}, random {_share(median(paper.removal['random']))}, first {_share(median(first))}"
    kept = sum(residual > composition for residual, composition in zip(cases["residual"], cases["composition"], strict=True))
    falls = spearman(layers, [abs(change) for change in last]) or 0.0
    return [
        _Rule("last-token", "Fig 3", "removal", "Removing the last token changes the coefficient most.",
              f"in every layer (median change: {changes})", "mean(last) below mean(first) and mean(random) in at least 80% "
              "of layers", _last_token),
        _Rule("last-token-depth", "Fig 3", "removal", "The last token matters less in upper layers.",
              f"Spearman {_signed(falls)} ({_share(last[0])} in layer 1, {_share(last[-1])} in {paper.layers})",
              "Spearman of |mean(last)| and layer below −0.5", trend("mean", below=-0.5, size=True, kind="last")),
        _Rule("agreement-rises", "Fig 4", "agreement", "Values agree with their keys' triggers more often in upper layers.",
              ends(paper.agreement), "Spearman of agreement and layer above 0.5", trend("share", above=0.5)),
        _Rule("agreement-chance", "Fig 4", "agreement", "At its best, agreement is far above chance.",
              f"{_share(max(paper.agreement))} in layer 16, chance 0.0004%", "share in the best layer above 10 times chance "
              "(that layer's shuffled pairs, at least 1/vocabulary)", _above_chance),
        _Rule("rank-falls", "Fig 5", "agreement", "The next token climbs in the value's ranking towards upper layers.",
              ends(rank, _rank), "Spearman of the median rank and layer below −0.5",
              trend("rank_median", below=-0.5, shown=_rank)),
        _Rule("agreement-probability", "Fig 6", "agreement", "Values that are surer of a token agree more often.",
              f"Spearman {_signed(spearman(list(range(len(bins))), bins) or 0.0)} over {len(bins)} bins",
              "Spearman of agreement and bin above 0.5, over bins that hold cells", _by_probability),
        _Rule("predictive-upper", "Section 4", "agreement", "The most predictive values sit in the upper layers.",
              f"{paper.predictive['in_layers_11_to_16']} of {paper.predictive['top_values']} in layers 11 to 16",
              "at least 80% of them in the top 6/16 of the layers", _predictive("in_top_layers", 0.8)),
        _Rule("predictive-agree", "Section 4", "agreement", "Many of them agree with one of their top triggers.",
              f"{paper.predictive['with_an_agreeing_trigger_in_top_50']} of {paper.predictive['top_values']}",
              "at least 25% of them", _predictive("with_agreeing_trigger", 0.25)),
        _Rule("active-part", "Fig 7", "activity", "Only a part of the memories takes part in a prediction: 10% to 50%.",
              f"median over layers {_share(median(active))}", "median over layers of the active share from 5% to 60%",
              _active),
        _Rule("active-depth", "Fig 7", "activity", "Fewer memories are active in upper layers.",
              ends(active), "Spearman of the active share and layer below −0.5", trend("active_median", below=-0.5)),
        _Rule("zero-agreement", "Fig 8", "composition", "In most examples no memory predicts what its layer predicts.",
              f"at least {_share(text['at_least'])} in every layer; median {_share(median(zero))}",
              "median over layers at least 68%", _middle("zero_agreement", lambda middle: middle >= 0.68)),
        _Rule("stop-words", "Fig 8", "composition", "Where a memory agrees, the target is often a stop word.",
              f"{_share(text['agreeing_target_is_stop_word'])}", "share of stop words from 40% to 80%",
              within("stop_word_share", 0.4, 0.8, what="are stop words")),
        _Rule("short-prefixes", "Fig 8", "composition", "Where a memory agrees, the prefix is often shorter than 5 tokens.",
              f"{_share(text['agreeing_prefix_shorter_than_5'])}", "share of short prefixes from 23% to 63%",
              within("short_prefix_share", 0.23, 0.63, what="are short")),
        _Rule("residual-rises", "Fig 9", "refinement", "Layer by layer the stream holds the final word more often.",
              ends(paper.residual_matches), "Spearman of the share and layer above 0.9",
              trend("residual_matches_output", above=0.9)),
        _Rule("decided-early", "Fig 9", "refinement", "About a third of predictions is decided in the bottom layers.",
              f"{_share(paper.residual_matches[4])} in layer 5 of 16", "share at the layer nearest to a quarter of the "
              "depth at least 20%", _early),
        _Rule("probability-rises", "Fig 10", "refinement", "The stream gives the final word more probability with depth.",
              ends(paper.residual_probability), "Spearman of the median probability and layer above 0.5",
              trend("residual_probability_median", above=0.5)),
        _Rule("residual-commonest", "Fig 11", "refinement", "Most often a layer keeps the stream's word.",
              f"in {kept} of {paper.layers} layers (median {_share(median(cases['residual']))})",
              "residual above each other case in at least 80% of layers",
              _commonest("residual", ("composition", "agreement", "ffn"))),
        _Rule("composition-changes", "Fig 11", "refinement", "Where the word changes, it is mostly a composition.",
              f"composition {_share(median(cases['composition']))}, ffn {_share(median(cases['ffn']))} (medians)",
              "composition above ffn in at least 80% of layers", _commonest("composition", ("ffn",))),
        _Rule("ffn-rare", "Fig 11", "refinement", "The memories' own word rarely wins.",
              f"median over layers {_share(median(cases['ffn']))}", "median over layers of ffn at most 5%",
              _middle("ffn", lambda middle: middle <= 0.05)),
        _Rule("last-layer-distant", "Section 5", "refinement",
              "In the last layer most compositions are unrelated to the stream.",
              f"{_share(paper.last_layer_distant)} of 100, by hand", "distant in more than 50% of them", _distant),
        _Rule("normaliser", "Section 2", "normaliser", "The missing normaliser matters: a softmax changes the loss.",
              "no number: that it is missing is the only difference named", "loss with the softmax in all layers, at the "
              "same length, differs by more than 0.1 nats a token", _normaliser),
    ]  # fmt: skip
