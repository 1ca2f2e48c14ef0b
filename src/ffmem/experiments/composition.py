"""Is a layer's prediction that of one of its memories (Fig 8)?"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float

from ffmem.cells import Sign
from ffmem.experiments.examples import EXAMPLES, Examples
from ffmem.experiments.observe import Seen, follow
from ffmem.experiments.predictions import Known, predictions_of
from ffmem.experiments.resampling import as_draws, draw_counts, resampling_settings, shares
from ffmem.experiments.stop_words import LIST, STOP_WORDS
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index
from ffmem.run.results import Result

SHORT = 5
"""A prefix of fewer tokens than this is short."""
COLUMNS = {"zero_agreement": "y", "zero_agreement_active": "active", "zero_agreement_output": "o"}
"""Whose prediction, and by which cells, a column of the rows says no memory agrees with."""


class Composition:
    """For every example and layer: does some cell's value put first what the layer's output y (or o) puts first?

    A cell with a negative coefficient promotes what its value suppresses, so it counts with the prediction of -v.
    """

    name = "composition"

    def __init__(self, model: MemoryModel, examples: Examples, *, norm: bool = False, known: Known | None = None) -> None:
        self.model, self.examples, self.norm, self.layers = model, examples, norm, model.layers
        self.known: Known = {} if known is None else known
        shape = (model.layers, len(examples))
        self.agrees = {name: np.zeros(shape, bool) for name in ("y", "active", "o")}
        self.targets = np.zeros(shape, np.int64)

    def see(self, seen: Seen) -> None:
        for layer in range(1, self.layers + 1):
            m = seen.places.m[layer - 1].float().cpu().numpy()
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
        """What each value of a layer puts first, or what it does turned round; projected when first asked for."""
        found = predictions_of(self.model, layer, norm=self.norm, sign=sign, known=self.known)
        self.known[layer, self.norm, sign] = found
        return found.top

    def result(self, settings: dict[str, Any]) -> Result:
        rows = [
            {"layer": layer, "examples": len(self.examples)}
            | {name: float(1 - self.agrees[kind][layer - 1].mean()) for name, kind in COLUMNS.items()}
            for layer in range(1, self.layers + 1)
        ]
        seed = settings["seed"]
        settings = settings | {"norm": self.norm} | resampling_settings("examples")
        return Result(self.name, seed, settings, rows, *self._facts(draw_counts(len(self.examples), [seed])))

    def _facts(self, counts: Float[np.ndarray, "draws examples"]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Pooled over layers, of the cases in which some cell agrees; and all that is judged, on draws of the examples."""
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


def composition(
    model: Any,
    index: Index,
    eval: Any = None,
    *,
    norm: bool = False,
    examples: int = EXAMPLES,
    seed: int = 0,
    quiet: bool = False,
) -> Result:
    """How often no memory of a layer predicts what the layer predicts. `norm` reads values and outputs through it alike."""
    made = partial(Composition, norm=norm)
    return follow(model, index, [made], eval, examples=examples, seed=seed, quiet=quiet)[0]


def _share(found: np.ndarray) -> float | None:
    return float(found.mean()) if len(found) else None
