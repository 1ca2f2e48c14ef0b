"""What the paper claims: its sentences, its numbers, and how each is judged on another model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ffmem.reports.numbers import share, signed, whole
from ffmem.reports.paper import the_paper
from ffmem.reports.ranks import spearman
from ffmem.reports.readings import (
    Read,
    above_chance,
    active_part,
    commonest,
    decided_early,
    distant,
    last_token_most,
    layers_with,
    more_than_a_coin_flip,
    predictive,
    ranks_apart,
    softmax_matters,
    surer,
    trend,
    within,
)
from ffmem.reports.verdicts import Rule


@dataclass(frozen=True)
class Question:
    """A claim, the experiment that answers it, what the paper found, the rule in words, and how a result is read by it."""

    id: str
    figure: str
    experiment: str
    claim: str
    paper: str
    rule: str
    read: Read


def questions() -> list[Question]:
    """All claims, in the order of the figures."""
    paper = the_paper()
    layers = list(range(1, paper.layers + 1))

    def ends(values: list[float], say: Callable[[float], str] = share) -> str:
        rho = spearman(layers, values)
        return f"Spearman {signed(rho or 0.0)}; {say(values[0])} in layer 1, {say(values[-1])} in {paper.layers}"

    def rises(what: str, above: float) -> str:
        return f"Spearman of {what} and layer above {above}, and the top quarter of the layers above the bottom quarter"

    def falls(what: str, below: float) -> str:
        return f"Spearman of {what} and layer below −{-below}, and the top quarter of the layers below the bottom quarter"

    text, cases, removal = paper.zero_agreement_text, paper.cases, paper.removal
    last = [abs(change) for change in removal["last"]]
    bins = [part for _, part in paper.agreement_by_probability]
    changes = ", ".join(f"{kind} {share(median(removal[kind]))}" for kind in ("last", "random", "first"))
    kept = sum(residual > composition for residual, composition in zip(cases["residual"], cases["composition"], strict=True))
    return [
        Question(
            "last-token", "Fig 3", "removal",
            "Removing the last token changes the coefficient most.",
            f"in every layer; median change: {changes}",
            "mean(last) below mean(first) and mean(random) in at least 80% of layers",
            last_token_most,
        ),
        Question(
            "last-token-depth", "Fig 3", "removal",
            "The last token matters less in upper layers.",
            ends(last), falls("|mean(last)|", -0.5),
            trend("mean", below=-0.5, size=True, kind="last"),
        ),
        Question(
            "agreement-rises", "Fig 4", "agreement",
            "Values agree with their keys' triggers more often in upper layers.",
            ends(paper.agreement), rises("agreement", 0.5),
            trend("share", above=0.5),
        ),
        Question(
            "agreement-chance", "Fig 4", "agreement",
            "At its best, agreement is above chance.",
            f"{share(max(paper.agreement))} in layer 16, chance 0.0004%",
            "the share in the best layer above that layer's shuffled pairs, the upper end of their interval, and above "
            "1/vocabulary",
            above_chance,
        ),
        Question(
            "rank-falls", "Fig 5", "agreement",
            "The next token climbs in the value's ranking towards upper layers.",
            ends(paper.rank_median, whole), falls("the median rank", -0.5),
            trend("rank_median", below=-0.5, say=whole, difference=ranks_apart, unit="ranks"),
        ),
        Question(
            "agreement-probability", "Fig 6", "agreement",
            "Values that are surer of a token agree more often.",
            f"Spearman {signed(spearman(list(range(len(bins))), bins) or 0.0)} over {len(bins)} bins",
            "Spearman of a cell's bin and the agreement of that bin above 0.5, over cells",
            surer,
        ),
        Question(
            "predictive-upper", "Section 4", "agreement",
            "The most predictive values sit in the upper layers.",
            f"{paper.predictive['in_layers_11_to_16']} of {paper.predictive['top_values']} in layers 11 to 16",
            "at least 80% of them in the top 6/16 of the layers",
            predictive("in_top_layers", 0.8),
        ),
        Question(
            "predictive-agree", "Section 4", "agreement",
            "Many of them agree with one of their top triggers.",
            f"{paper.predictive['with_an_agreeing_trigger_in_top_50']} of {paper.predictive['top_values']}",
            "at least 25% of them",
            predictive("with_agreeing_trigger", 0.25),
        ),
        Question(
            "active-part", "Fig 7", "activity",
            "Only a part of the memories takes part in a prediction: 10% to 50%.",
            f"median over layers {share(median(paper.active))}",
            "median over layers of the active share from 5% to 60%",
            more_than_a_coin_flip(active_part),
        ),
        Question(
            "active-depth", "Fig 7", "activity",
            "Fewer memories are active in upper layers.",
            ends(paper.active), falls("the active share", -0.5),
            more_than_a_coin_flip(trend("active_median", below=-0.5)),
        ),
        Question(
            "zero-agreement", "Fig 8", "composition",
            "In most examples no memory predicts what its layer predicts.",
            f"at least {share(text['at_least'])} in every layer; median {share(median(paper.zero_agreement))}",
            "at least 68% of examples in at least 80% of layers",
            layers_with("zero_agreement", Rule(least=0.68)),
        ),
        Question(
            "stop-words", "Fig 8", "composition",
            "Where a memory agrees, the target is often a stop word.",
            share(text["agreeing_target_is_stop_word"]),
            "share of stop words from 40% to 80%",
            within("stop_word_share", 0.4, 0.8, what="are stop words"),
        ),
        Question(
            "short-prefixes", "Fig 8", "composition",
            "Where a memory agrees, the prefix is often shorter than 5 tokens.",
            share(text["agreeing_prefix_shorter_than_5"]),
            "share of short prefixes from 23% to 63%",
            within("short_prefix_share", 0.23, 0.63, what="are short"),
        ),
        Question(
            "residual-rises", "Fig 9", "refinement",
            "Layer by layer the stream holds the final word more often.",
            ends(paper.residual_matches), rises("the share", 0.9),
            trend("residual_matches_output", above=0.9),
        ),
        Question(
            "decided-early", "Fig 9", "refinement",
            "About a third of predictions is decided in the bottom layers.",
            f"{share(paper.residual_matches[4])} in layer 5 of 16",
            "share at the layer nearest to a quarter of the depth at least 20%",
            decided_early,
        ),
        Question(
            "probability-rises", "Fig 10", "refinement",
            "The stream gives the final word more probability with depth.",
            ends(paper.residual_probability), rises("the median probability", 0.5),
            trend("residual_probability_median", above=0.5),
        ),
        Question(
            "residual-commonest", "Fig 11", "refinement",
            "Most often a layer keeps the stream's word.",
            f"in {kept} of {paper.layers} layers; median {share(median(cases['residual']))}",
            "residual above each other case in at least 80% of layers",
            commonest("residual", ("composition", "agreement", "ffn")),
        ),
        Question(
            "composition-changes", "Fig 11", "refinement",
            "Where the word changes, it is mostly a composition.",
            f"medians: composition {share(median(cases['composition']))}, ffn {share(median(cases['ffn']))}",
            "composition above ffn in at least 80% of the layers that have either",
            commonest("composition", ("ffn",)),
        ),
        Question(
            "ffn-rare", "Fig 11", "refinement",
            "The memories' own word rarely wins.",
            f"median over layers {share(median(cases['ffn']))}, at most {share(max(cases['ffn']))}",
            "ffn in at most 5% of examples in at least 80% of layers",
            layers_with("ffn", Rule(most=0.05)),
        ),
        Question(
            "last-layer-distant", "Section 5", "refinement",
            "In the last layer most compositions are unrelated to the stream.",
            f"{share(paper.last_layer_distant)} of 100, by hand",
            "distant in more than 50% of them",
            distant,
        ),
        Question(
            "normaliser", "Section 2", "normaliser",
            "The missing normaliser matters: a softmax changes the loss.",
            "no number: that it is missing is the only difference named",
            "loss with the softmax in all layers, at the same length, differs by more than 0.1 nats a token",
            softmax_matters,
        ),
    ]  # fmt: skip
