"""The experiment: how does the residual stream refine a prediction from layer to layer (Figs 9 to 11, the last layer's
cases)?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float

from ffmem.experiments.experiment import Experiment, Figure, Section, followed
from ffmem.experiments.markup import Raw, details, element, missing, table
from ffmem.experiments.numbers import share
from ffmem.experiments.panels import (
    COLOURS,
    HERE,
    PAPER,
    QUARTILES,
    RANDOM,
    Axis,
    Curve,
    Panel,
    Point,
    curve_of,
    layers_of,
    paper_curve,
    random_curve,
)
from ffmem.experiments.paper import the_paper
from ffmem.experiments.readings import (
    Read,
    Row,
    ends,
    in_most_layers,
    layers_with,
    not_measured,
    rises,
    row_of,
    trend,
    units,
)
from ffmem.experiments.resampling import as_draws, draw_counts, medians, quartiles, resampling_settings, shares
from ffmem.experiments.rules import FEW, Claim, Measure, Reading, Rule
from ffmem.run.reader import Index
from ffmem.run.results import Result
from ffmem.text import shown_token

if TYPE_CHECKING:
    from torch import Tensor

    from ffmem.experiments.examples import Examples
    from ffmem.experiments.observe import Seen
    from ffmem.model.memories import MemoryModel

CASES = 100
"""The number of the last layer's composition cases that are kept to be read."""
RELATED = 0.3
"""The least cosine of two tokens' embeddings, the mean embedding taken off, at which the tokens are related."""


class Refinement:
    """The observer of the top tokens of r, y and o in every layer, and of the probability of the model's final word in r."""

    name = "refinement"

    def __init__(self, model: MemoryModel, examples: Examples) -> None:
        self.model, self.examples, self.layers = model, examples, model.layers
        shape = (model.layers, len(examples))
        self.tops = {name: np.full(shape, -1, np.int64) for name in ("r", "y", "o")}
        self.probability = np.full(shape, np.nan)

    def see(self, seen: Seen) -> None:
        """Note a batch's top tokens and probabilities, layer by layer."""
        for layer in range(1, self.layers + 1):
            residual = seen.residual(layer)
            self.tops["r"][layer - 1, seen.numbers] = residual.top.cpu().numpy()
            self.probability[layer - 1, seen.numbers] = residual.log_prob.exp().cpu().numpy()
            for name in ("y", "o"):
                self.tops[name][layer - 1, seen.numbers] = seen.top(name, layer, norm=True)

    def result(self, settings: dict[str, Any]) -> Result:
        """The result over all examples that were seen."""
        rows = [self._row(layer) for layer in range(1, self.layers + 1)]
        counts = draw_counts(len(self.examples), [settings["seed"]])
        last, drawn = self._last_layer(counts)
        rows_drawn = [self._drawn_row(layer, counts) for layer in range(1, self.layers + 1)]
        settings = settings | {"norm": True} | resampling_settings("examples")
        draws = as_draws(rows_drawn, {"last_layer": drawn})
        return Result(self.name, settings["seed"], settings, rows, {"last_layer": last}, draws)

    def _row(self, layer: int) -> dict[str, Any]:
        low, middle, high = quartiles(self.probability[layer - 1])
        found = {name: float(flags.mean()) for name, flags in self._flags(layer).items()}
        return {
            "layer": layer,
            "examples": len(self.examples),
            "residual_matches_output": found.pop("residual_matches_output"),
            "residual_probability_q1": low,
            "residual_probability_median": middle,
            "residual_probability_q3": high,
            **found,
        }

    def _drawn_row(self, layer: int, counts: Float[np.ndarray, "draws examples"]) -> dict[str, Any]:
        """A layer's numbers that claims are judged by, on draws of the examples."""
        flags = self._flags(layer)
        del flags["violations"]
        return {
            "layer": layer,
            "examples": len(self.examples),
            "residual_probability_median": medians(counts, self.probability[layer - 1]),
            **{name: shares(counts, found) for name, found in flags.items()},
        }

    def _flags(self, layer: int) -> dict[str, Bool[np.ndarray, " examples"]]:
        """True for the examples that a column of the rows counts."""
        r, y, o = (self.tops[name][layer - 1] for name in ("r", "y", "o"))
        composition = (o != r) & (o != y)
        return {
            "residual_matches_output": r == self.tops["o"][-1],
            "residual": (o == r) & (o != y),
            "ffn": (o == y) & (o != r),
            "agreement": (o == r) & (o == y),
            "composition": composition,
            "violations": composition & (r == y),
        }

    def _last_layer(self, counts: Float[np.ndarray, "draws examples"]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The last layer's composition cases: whether the new token is far from the residual's, or related to it. Also
        how many of them are, on draws of the examples.

        And how many of them are, on draws of the examples.
        """
        r, y, o = (self.tops[name][-1] for name in ("r", "y", "o"))
        found = np.flatnonzero((o != r) & (o != y))
        cosine = self._cosines(r[found], o[found])
        texts = self.model.tokenizer.batch_decode
        words = {
            name: texts([[int(token)] for token in tops[found[:CASES]]]) for name, tops in (("r", r), ("y", y), ("o", o))
        }
        cases = [
            {
                "prefix": self.examples[number].text,
                "residual": words["r"][at],
                "ffn": words["y"][at],
                "output": words["o"][at],
                "cosine": float(cosine[at]),
                "related": bool(cosine[at] >= RELATED),
            }
            for at, number in enumerate(found[:CASES].tolist())
        ]
        distant = shares(counts[:, found], cosine < RELATED)
        drawn = {
            "compositions": np.rint(counts[:, found].sum(1)).astype(np.int64),
            "related": 1 - distant,
            "distant": distant,
        }
        last = {
            "compositions": len(found),
            "related": float((cosine >= RELATED).mean()) if len(found) else None,
            "distant": float((cosine < RELATED).mean()) if len(found) else None,
            "rule": f"related: cosine of the two tokens' embeddings, less the mean embedding, of at least {RELATED}",
            "cases": cases,
        }
        return last, drawn

    def _cosines(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The cosines of the input embeddings of pairs of tokens, each less the mean over the vocabulary."""
        import torch

        if not len(first):
            return np.zeros(0)
        with torch.inference_mode():
            pairs = torch.cat(list(self._embeddings(torch.from_numpy(np.concatenate([first, second])))))
            total, size = torch.zeros_like(pairs[0]), self.model.vocabulary.size
            for rows in self._embeddings(torch.arange(size)):
                total += rows.sum(0)
            one, other = torch.nn.functional.normalize(pairs - total / size, dim=1).chunk(2)
            return (one * other).sum(1).cpu().numpy()

    def _embeddings(self, ids: Tensor) -> Iterator[Tensor]:
        """The rows of the input embeddings, a few thousand at a time."""
        table = self.model.model.get_input_embeddings()
        for chunk in ids.split(8192):
            yield table(chunk[None].to(self.model.device))[0].float()


refinement = followed(Refinement)


def fig9(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 9."""
    curves = [
        curve_of(result, axis, "residual_matches_output", form="bar"),
        paper_curve(the_paper().residual_matches, axis),
        random_curve(control, axis, "residual_matches_output"),
    ]
    return [Panel("", "examples", curves, axis, half_bar=axis.half_bar(axis.layers))]


def fig10(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 10."""
    curves = [
        curve_of(result, axis, "residual_probability_median", spread=QUARTILES),
        paper_curve(the_paper().residual_probability, axis),
        random_curve(control, axis, "residual_probability_median", spread=QUARTILES),
    ]
    return [Panel("", "probability", curves, axis)]


def fig11(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 11, stacked bars: this model's, the paper's and random weights', on the same scale."""
    cases = the_paper().cases
    paper: list[dict[str, Any]] = [
        {"layer": layer} | {case: cases[case][layer - 1] for case in cases} for layer in range(1, the_paper().layers + 1)
    ]
    found = []
    shown = [(HERE, result.rows, axis.layers), (PAPER, paper, the_paper().layers)]
    if control is not None:
        shown.append((RANDOM, control.rows, axis.layers))
    for title, rows, of in shown:
        curves: list[Curve] = []
        bottom: list[int | float] = [0.0] * len(rows)
        for case in cases:
            points = [Point(row["layer"], axis.x(row["layer"], of), row[case]) for row in rows]
            curves.append(Curve(case, points, "bar", colour=COLOURS[case], base=bottom))
            bottom = [low + point.value for low, point in zip(bottom, points, strict=True)]
        found.append(Panel(title, "examples", curves, axis, half_bar=axis.half_bar(of), limits={"domain": [0, 1]}))
    return found


def claims() -> list[Claim]:
    """The paper's claims on Figs 9 to 11."""
    paper, cases = the_paper(), the_paper().cases
    kept = sum(residual > composition for residual, composition in zip(cases["residual"], cases["composition"], strict=True))
    return [
        Claim(
            "residual-rises", "Fig 9",
            "Layer by layer the stream holds the final word more often.",
            ends(paper.residual_matches), rises("the share", 0.9),
            trend("residual_matches_output", above=0.9),
        ),
        Claim(
            "decided-early", "Fig 9",
            "About a third of predictions is decided in the bottom layers.",
            f"{share(paper.residual_matches[4])} in layer 5 of 16",
            "share at the layer nearest to a quarter of the depth at least 20%",
            decided_early,
        ),
        Claim(
            "probability-rises", "Fig 10",
            "The stream gives the final word more probability with depth.",
            ends(paper.residual_probability), rises("the median probability", 0.5),
            trend("residual_probability_median", above=0.5),
        ),
        Claim(
            "residual-commonest", "Fig 11",
            "Most often a layer keeps the stream's word.",
            f"in {kept} of {paper.layers} layers; median {share(median(cases['residual']))}",
            "residual above each other case in at least 80% of layers",
            commonest("residual", ("composition", "agreement", "ffn")),
        ),
        Claim(
            "composition-changes", "Fig 11",
            "Where the word changes, it is mostly a composition.",
            f"medians: composition {share(median(cases['composition']))}, ffn {share(median(cases['ffn']))}",
            "composition above ffn in at least 80% of the layers that have either",
            commonest("composition", ("ffn",)),
        ),
        Claim(
            "ffn-rare", "Fig 11",
            "The memories' own word rarely wins.",
            f"median over layers {share(median(cases['ffn']))}, at most {share(max(cases['ffn']))}",
            "ffn in at most 5% of examples in at least 80% of layers",
            layers_with("ffn", Rule(most=0.05)),
        ),
        Claim(
            "last-layer-distant", "Section 5",
            "In the last layer most compositions are unrelated to the stream.",
            f"{share(paper.last_layer_distant)} of 100, by hand",
            "distant in more than 50% of them",
            distant,
        ),
    ]  # fmt: skip


def commonest(case: str, others: Sequence[str]) -> Read:
    """A reading that asks whether a case is commoner than each other one in most of the layers that have any of them."""
    names = (case, *others)
    return in_most_layers(
        lambda row: row[case] - max(row[other] for other in others),
        Rule(above=0),
        lambda row: ", ".join(f"{name} {share(row[name])}" for name in names),
        lambda sample: [row for row in sample.rows if any(row[name] for name in names)],
    )


def decided_early(result: Result) -> Reading:
    """A reading of Fig 9 at the layers nearest to a quarter and to half of the depth."""
    deep, axis, column = layers_of([result]), Axis(0), "residual_matches_output"  # an axis from 0 to 1

    def near(depth: float) -> Row:
        return min(result.rows, key=lambda row: (abs(axis.x(row["layer"], deep) - depth), row["layer"]))

    quarter, half = near(0.25), near(0.5)
    where = f"in layer {quarter['layer']} of {deep}"
    measure = Measure("", lambda sample: row_of(sample.rows, quarter["layer"])[column], Rule(least=0.2), of=where)
    return Reading(f"{share(half[column])} in layer {half['layer']}", [measure], units(result))


def distant(result: Result) -> Reading:
    """A reading of how many compositions of the last layer are far from what the stream predicted."""
    last = result.facts["last_layer"]
    if last["distant"] is None:
        return not_measured("no composition in the last layer")
    if last["compositions"] < FEW:
        return not_measured(f"too few compositions in the last layer ({last['compositions']}; {FEW} needed)")
    by = "by the distance of embeddings"
    measure = Measure("", lambda sample: sample.facts["last_layer"]["distant"], Rule(above=0.5), of=by)
    return Reading("", [measure], f"{last['compositions']:,} compositions")


def last_layer_cases(index: Index, result: Result | None) -> list[Raw]:
    """The report's list of the last layer's compositions, to be read."""
    heading = element("h3", "Where the last layer said something new")
    if result is None:
        return [heading, missing("refinement")]
    last = result.facts["last_layer"]
    rows = [
        [case["prefix"], *(shown_token(case[name]) for name in ("residual", "ffn", "output")),
         f"{'related' if case['related'] else 'distant'} ({case['cosine']:.2f})"]
        for case in last["cases"][:CASES]
    ]  # fmt: skip
    columns = ["prefix", "stream", "memories", "sum", "stream and sum (cosine)"]
    made = table(f"Compositions of the last layer; {last['rule']}", columns, rows, class_="cases")
    return [
        heading,
        element("p", "In these cases the stream said one token, the memories another, and their sum a third."),
        details(f"{len(rows)} of {last['compositions']:,} cases", made) if rows else element("p", "There is none."),
    ]


EXPERIMENT = Experiment(
    name="refinement",
    order=9,
    question="Where is a prediction decided: in the residual, in the feed-forward layer, or in their sum?",
    columns={
        "layer": "from 1",
        "examples": "prefixes that were followed",
        "residual_matches_output": "share of examples in which r puts first what the model does",
        "residual_probability_q1, residual_probability_median, residual_probability_q3": "what r gives to that token",
        "residual": "share of examples in which o puts first what r does and y does not",
        "ffn": "what y does and r does not",
        "agreement": "what both do",
        "composition": "what neither does",
        "violations": "compositions in which r and y put the same token first",
    },
    run=refinement,
    observer=Refinement,
    figures=[
        Figure(
            "fig9",
            "Fig 9",
            "When does the stream already hold the final word?",
            "A bar is the share of examples in which the residual stream, read before a layer's memories are added, already "
            "puts the model's final word first. In the paper a third is decided in the bottom layers, and the share grows "
            "to the top.",
            "Share of examples where the residual's top token is the model's output, a bar a layer, and the paper's.",
            fig9,
        ),
        Figure(
            "fig10",
            "Fig 10",
            "How sure is the stream of the final word?",
            "The probability that the residual stream gives to the model's final word, median and middle half over "
            "examples. In the paper it rises from layer to layer: predictions are refined rather than made in one place.",
            "Probability of the model's output in the residual, median and quartiles a layer, and the paper's median.",
            fig10,
        ),
        Figure(
            "fig11",
            "Fig 11",
            "Who decides in a layer: the stream, the memories, or their sum?",
            "Each example is one of four cases: the layer keeps the stream's word (residual), takes its memories' (ffn), "
            "both said the same (agreement), or the sum says something that neither did (composition). In the paper "
            "memories hardly ever win alone; where the word changes, it is mostly a compromise.",
            "Stacked bars of residual, composition, agreement and ffn cases a layer, for this model and for the paper.",
            fig11,
        ),
    ],
    claims=claims,
    sections=[Section(1, "Examples to read", last_layer_cases)],
)
