"""How the residual stream refines a prediction from layer to layer (Figs 9, 10 and 11, and the last layer's cases)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float

from ffmem.experiments.examples import EXAMPLES, Examples
from ffmem.experiments.observe import Seen, follow, quartiles
from ffmem.experiments.resampling import as_draws, draw_counts, medians, resampling_settings, shares
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index
from ffmem.run.results import Result

CASES = 100
"""Composition cases of the last layer that are kept to be read."""
RELATED = 0.3
"""Two tokens are related where the cosine of their embeddings, the mean embedding taken off, is at least this."""


class Refinement:
    """Top tokens of r, y and o in every layer, and the probability that r gives to the model's final word."""

    name = "refinement"

    def __init__(self, model: MemoryModel, examples: Examples) -> None:
        self.model, self.examples, self.layers = model, examples, model.layers
        shape = (model.layers, len(examples))
        self.tops = {name: np.full(shape, -1, np.int64) for name in ("r", "y", "o")}
        self.probability = np.full(shape, np.nan)

    def see(self, seen: Seen) -> None:
        for layer in range(1, self.layers + 1):
            residual = seen.residual(layer)
            self.tops["r"][layer - 1, seen.numbers] = residual.top.cpu().numpy()
            self.probability[layer - 1, seen.numbers] = residual.log_prob.exp().cpu().numpy()
            for name in ("y", "o"):
                self.tops[name][layer - 1, seen.numbers] = seen.top(name, layer, norm=True)

    def result(self, settings: dict[str, Any]) -> Result:
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
        """What is judged of a layer, on draws of the examples."""
        flags = self._flags(layer)
        del flags["violations"]
        return {
            "layer": layer,
            "examples": len(self.examples),
            "residual_probability_median": medians(counts, self.probability[layer - 1]),
            **{name: shares(counts, found) for name, found in flags.items()},
        }

    def _flags(self, layer: int) -> dict[str, Bool[np.ndarray, " examples"]]:
        """Which examples a column of the rows counts."""
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
        """Composition cases of the last layer: is the new token far from the residual's, or related to it?

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

    @torch.inference_mode()
    def _cosines(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Of the input embeddings of pairs of tokens, each less the mean over the vocabulary."""
        if not len(first):
            return np.zeros(0)
        table = torch.cat(list(self._embeddings(torch.from_numpy(np.concatenate([first, second])))))
        total, size = torch.zeros_like(table[0]), self.model.vocabulary.size
        for rows in self._embeddings(torch.arange(size)):
            total += rows.sum(0)
        one, other = torch.nn.functional.normalize(table - total / size, dim=1).chunk(2)
        return (one * other).sum(1).cpu().numpy()

    def _embeddings(self, ids: torch.Tensor) -> Iterator[torch.Tensor]:
        table = self.model.model.get_input_embeddings()
        for chunk in ids.split(8192):
            yield table(chunk[None].to(self.model.device))[0].float()


def refinement(
    model: Any, index: Index, eval: Any = None, *, examples: int = EXAMPLES, seed: int = 0, quiet: bool = False
) -> Result:
    """Where, from layer to layer, a prediction is decided: in the residual, in the feed-forward layer, or in their sum."""
    return follow(model, index, [Refinement], eval, examples=examples, seed=seed, quiet=quiet)[0]
