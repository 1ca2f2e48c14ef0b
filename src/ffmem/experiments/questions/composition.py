"""The experiment: is a layer's prediction that of one of its memories (Fig 8)?"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from ffmem.cells import Sign
from ffmem.experiments.experiment import Experiment, Figure, followed
from ffmem.experiments.numbers import share
from ffmem.experiments.panels import Axis, Panel, curve_of, paper_curve, random_curve
from ffmem.experiments.paper import the_paper
from ffmem.experiments.readings import Read, layers_with, not_measured, units
from ffmem.experiments.resampling import as_draws, draw_counts, resampling_settings, shares
from ffmem.experiments.rules import FEW, Claim, Measure, Reading, Rule
from ffmem.run.results import Result

if TYPE_CHECKING:
    from ffmem.experiments.examples import Examples
    from ffmem.experiments.observe import Seen
    from ffmem.model.memories import MemoryModel

SHORT = 5
"""The number of tokens below which a prefix is short."""
COLUMNS = {"zero_agreement": "y", "zero_agreement_active": "active", "zero_agreement_output": "o"}
"""For each column of the rows: whose prediction, and by which cells, no memory agrees with."""

LIST = "ffmem-en-1: English articles, pronouns, prepositions, conjunctions, auxiliaries and punctuation"

_WORDS = """
a an the this that these those
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself
it its itself they them their theirs themselves who whom whose which what
about above across after against along among around as at before behind below beneath beside between beyond by despite
down during except for from in inside into like near of off on onto out outside over past per since through throughout to
toward towards under until up upon via with within without
and but or nor so yet if because although though while whereas unless than when where whether why how
am is are was were be been being have has had having do does did doing can could may might must shall should will would
not no any all both each few more most other some such only own same too very just also then there here once again further
's 't 'm 're 've 'd 'll s t m re ve d ll
"""
_MARKS = ", . ; : ! ? ( ) [ ] { } \" ' ` “ ” ‘ ’ - – — ... … / @-@ @,@ @.@ </s> <eos> <|endoftext|> <unk> ="

STOP_WORDS = frozenset((_WORDS + _MARKS).split())
"""English function words and punctuation marks, in small letters: a prediction among them is a stop word."""


class Composition:
    """The observer of agreement: for every example and layer, whether some cell's value puts first what the layer's
    output y (or o) puts first.

    A cell with a negative coefficient promotes what its value suppresses, so it counts with the prediction of -v.
    """

    name = "composition"

    def __init__(self, model: MemoryModel, examples: Examples, *, norm: bool = False) -> None:
        self.model, self.examples, self.norm, self.layers = model, examples, norm, model.layers
        self.predicted: dict[tuple[int, Sign], np.ndarray] = {}
        shape = (model.layers, len(examples))
        self.agrees = {name: np.zeros(shape, bool) for name in ("y", "active", "o")}
        self.targets = np.zeros(shape, np.int64)

    def see(self, seen: Seen) -> None:
        """Note, for a batch of examples, in which layers some cell predicts what the layer's output predicts."""
        for layer in range(1, self.layers + 1):
            m = seen.tensors.m[layer - 1].float().cpu().numpy()
            y = seen.top("y", layer, norm=self.norm)
            o = seen.top("o", layer, norm=self.norm)
            self.targets[layer - 1, seen.numbers] = y
            self.agrees["y"][layer - 1, seen.numbers] = self._some_cell(layer, m, y, active=False)
            self.agrees["active"][layer - 1, seen.numbers] = self._some_cell(layer, m, y, active=True)
            self.agrees["o"][layer - 1, seen.numbers] = self._some_cell(layer, m, o, active=False)

    def _some_cell(self, layer: int, m: np.ndarray, target: np.ndarray, *, active: bool) -> np.ndarray:
        """For each example, whether a cell predicts `target`: any cell, or only those with a coefficient above 0."""
        plus = self._predictions(layer, "+")
        minus = self._predictions(layer, "-") if not active and (m < 0).any() else None
        found = np.zeros(len(target), bool)
        for row, token in enumerate(target):
            above = m[row, plus == token]
            found[row] = bool((above > 0).any() if active else (above >= 0).any())
            if minus is not None and not found[row]:
                found[row] = bool((m[row, minus == token] < 0).any())
        return found

    def _predictions(self, layer: int, sign: Sign) -> np.ndarray:
        """The token that each value of a layer puts first, or that -v does; projected when first asked for."""
        from ffmem.experiments.value_scores import top_tokens

        if (layer, sign) not in self.predicted:
            self.predicted[layer, sign] = top_tokens(self.model, layer, norm=self.norm, sign=sign)
        return self.predicted[layer, sign]

    def result(self, settings: dict[str, Any]) -> Result:
        """The result over all examples that were seen."""
        rows = [
            {"layer": layer, "examples": len(self.examples)}
            | {name: float(1 - self.agrees[kind][layer - 1].mean()) for name, kind in COLUMNS.items()}
            for layer in range(1, self.layers + 1)
        ]
        seed = settings["seed"]
        settings = settings | {"norm": self.norm} | resampling_settings("examples")
        return Result(self.name, seed, settings, rows, *self._facts(draw_counts(len(self.examples), [seed])))

    def _facts(self, counts: Float[np.ndarray, "draws examples"]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The facts on the cases, of all layers together, in which some cell agrees, and all that claims need on draws of
        the examples."""
        layer, number = np.nonzero(self.agrees["y"])
        words = self.model.tokenizer.batch_decode([[int(token)] for token in self.targets[layer, number]])
        stop = np.array([word.strip().lower() in STOP_WORDS for word in words], bool)
        true = [self.examples[at].next for at in number.tolist()]
        known = [at for at, token in enumerate(true) if token is not None]
        followed = self.model.tokenizer.batch_decode([[true[at]] for at in known])
        true_stop = np.array([word.strip().lower() in STOP_WORDS for word in followed], bool)
        short = np.array([len(self.examples[at].ids) < SHORT for at in number.tolist()], bool)

        def pooled(found: np.ndarray, among: np.ndarray) -> Float[np.ndarray, " draws"]:
            """The share of `found` among cases, an entry a case; an example is drawn with all its layers."""
            cases = np.bincount(among, minlength=len(self.examples))
            return shares(counts, np.bincount(among, weights=found, minlength=len(self.examples)), cases)

        rows: list[dict[str, Any]] = [
            {"layer": layer, "examples": len(self.examples)}
            | {name: 1 - shares(counts, self.agrees[kind][layer - 1]) for name, kind in COLUMNS.items()}
            for layer in range(1, self.layers + 1)
        ]
        drawn = {
            "agreeing_cases": np.rint(counts @ np.bincount(number, minlength=len(self.examples))).astype(np.int64),
            "stop_word_share": pooled(stop, number),
            "next_token_stop_word_share": pooled(true_stop, number[known]),
            "short_prefix_share": pooled(short, number),
        }
        facts = {
            "agreeing_cases": len(number),
            "next_token_cases": len(known),
            "stop_word_share": _share(stop),
            "next_token_stop_word_share": _share(true_stop),
            "short_prefix_share": _share(short),
            "short_prefix_share_of_all": _share(np.array([len(one.ids) < SHORT for one in self.examples.examples])),
            "stop_words": LIST,
            "short": f"fewer than {SHORT} tokens",
        }
        return facts, as_draws(rows, drawn)


composition = followed(Composition)


def _share(found: np.ndarray) -> float | None:
    return float(found.mean()) if len(found) else None


def panels(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 8."""
    curves = [
        curve_of(result, axis, "zero_agreement", form="bar"),
        paper_curve(the_paper().zero_agreement, axis),
        random_curve(control, axis, "zero_agreement"),
        curve_of(result, axis, "zero_agreement_active", "active cells only", spread=""),
        curve_of(result, axis, "zero_agreement_output", "block's output", spread=""),
    ]
    return [Panel("", "examples without agreement", curves, axis, half_bar=axis.half_bar(axis.layers))]


def claims() -> list[Claim]:
    """The paper's claims on Fig 8."""
    text = the_paper().zero_agreement_text
    return [
        Claim(
            "zero-agreement", "Fig 8",
            "In most examples no memory predicts what its layer predicts.",
            f"at least {share(text['at_least'])} in every layer; median {share(median(the_paper().zero_agreement))}",
            "at least 68% of examples in at least 80% of layers",
            layers_with("zero_agreement", Rule(least=0.68)),
        ),
        Claim(
            "stop-words", "Fig 8",
            "Where a memory agrees, the target is often a stop word.",
            share(text["agreeing_target_is_stop_word"]),
            "share of stop words from 40% to 80%",
            within("stop_word_share", 0.4, 0.8, what="are stop words"),
        ),
        Claim(
            "short-prefixes", "Fig 8",
            "Where a memory agrees, the prefix is often shorter than 5 tokens.",
            share(text["agreeing_prefix_shorter_than_5"]),
            "share of short prefixes from 23% to 63%",
            within("short_prefix_share", 0.23, 0.63, what="are short"),
        ),
    ]  # fmt: skip


def within(fact: str, low: int | float, high: int | float, *, what: str) -> Read:
    """A reading that asks whether a fact about the cases in which some cell agrees lies in a range."""

    def read(result: Result) -> Reading:
        if result.facts.get(fact) is None:
            return not_measured("no case to judge")
        cases = result.facts.get("agreeing_cases")
        if cases is not None and cases < FEW:
            return not_measured(f"too few cases ({cases}; {FEW} needed)")
        n = units(result) if cases is None else f"{cases:,} cases"
        return Reading("", [Measure("", lambda sample: sample.facts[fact], Rule(least=low, most=high), of=what)], n)

    return read


EXPERIMENT = Experiment(
    name="composition",
    order=8,
    question="Is a layer's prediction that of one of its memories?",
    columns={
        "layer": "from 1",
        "examples": "prefixes that were followed",
        "zero_agreement": "share of examples in which no cell's value puts first what y does",
        "zero_agreement_active": "the same, of cells with a coefficient above 0 alone",
        "zero_agreement_output": "the same with the block's output in the place of y",
    },
    run=composition,
    observer=Composition,
    figures=[
        Figure(
            "fig8",
            "Fig 8",
            "Does a layer say something that none of its memories says?",
            "A bar is the share of examples in which no cell's own top token is the top token of the layer's output: the "
            "layer composed a new prediction. In the paper that happens in at least 68% of examples in every layer.",
            "Share of examples where no memory agrees with the layer's prediction, a bar a layer, and the paper's.",
            panels,
        )
    ],
    claims=claims,
)
