"""The experiment: how far is a feed-forward layer from a neural memory, once the softmax that it lacks is put in (section
2)?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from ffmem.errors import CorpusError
from ffmem.experiments.experiment import Experiment, Figure
from ffmem.experiments.numbers import plain, signed
from ffmem.experiments.panels import COLOURS, HERE, QUARTILES, RANDOM, Axis, Panel, curve_of, random_curve
from ffmem.experiments.readings import units
from ffmem.experiments.resampling import as_draws, draw_counts, quartiles, resampling_settings, shares
from ffmem.experiments.rules import Claim, Measure, Reading, Rule
from ffmem.progress import Reporter, reporting
from ffmem.run.reader import Index
from ffmem.run.results import Result, check_request

if TYPE_CHECKING:
    from torch import Tensor

    from ffmem.experiments.examples import Examples
    from ffmem.experiments.substitution import Factors
    from ffmem.model.memories import MemoryModel

NORMALISED = 200
"""The number of examples, each of which runs through the model twice for every layer."""
CONTROL_NORMALISED = 10
"""The number of examples for the control."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""The most tokens of a forward: a layer's scores and coefficients are held a few times over."""
SOFTMAXES = ("softmax", "softmax_scaled")
"""The two ways to put a softmax in: as it is, and with coefficients of the length that the layer's own have."""


def normaliser(
    model: MemoryModel | Any,
    index: Index,
    eval: Any = None,
    *,
    examples: int = NORMALISED,
    seed: int = 0,
    quiet: bool = False,
) -> Result:
    """Replace FF(x) = f(x·Kᵀ)·V by MN(x) = softmax(x·Kᵀ)·V, in one layer at a time and in all at once.

    In a gated layer the softmax stands for the gate's activation: softmax(gate)·up. `softmax_scaled` gives the new
    coefficients the length of the old ones at every position, so that only their shape differs; where a norm follows the
    layer (gemma2, olmo2) lengths hardly matter anyway. A row a layer; losses in nats per token.
    """
    from ffmem.experiments.examples import sample_examples
    from ffmem.run.model import model_of

    check_request(seed=seed, examples=examples)
    loaded = model_of(index, model)
    bos = bool(index.manifest.settings.bos)
    drawn = sample_examples(loaded, index, eval, count=examples, seed=seed, quiet=quiet)
    feeds = _feeds(drawn, loaded, bos)
    watch = _Watch(loaded)
    with reporting("normalising", quiet=quiet) as reporter:
        losses = _losses(loaded, feeds, len(drawn), index.layers, watch, reporter)
    tokens = np.zeros(len(drawn))
    for feed in feeds:
        tokens += np.bincount(feed.examples, minlength=len(drawn))
    each = {of: float(lost.sum() / tokens.sum()) for of, lost in losses.items()}
    base = each["base"]
    alone = {name: [each[name, layer] for layer in index.layers] for name in SOFTMAXES}
    together = {name: each[name] for name in SOFTMAXES}
    rows = []
    for at, layer in enumerate(index.layers):
        row: dict[str, Any] = {"layer": layer, "cells": loaded.cells[layer - 1], "examples": len(drawn)}
        row["tokens_predicted"] = int(tokens.sum())
        for name, kept in (("effective_memories", watch.activation), ("softmax_effective", watch.softmax)):
            found = quartiles(np.concatenate(kept[layer]))
            row |= {f"{name}_{q}": value for q, value in zip(("q1", "median", "q3"), found, strict=True)}
        row |= {"loss": base} | {f"loss_{name}": alone[name][at] for name in SOFTMAXES}
        rows.append(row | {f"change_{name}": alone[name][at] - base for name in SOFTMAXES})
    settings = drawn.settings | {
        "bos": bos,
        "gated": loaded.family.gated,
        "effective_memories": "exp of the entropy of |m|/Σ|m| at every token, in the untouched model",
        "softmax": f"of the {'gate' if loaded.family.gated else 'scores'} over a layer's cells, key bias included",
        "softmax_scaled": "the same, given the length (L2) of the original coefficients at each position",
        "dtype": loaded.dtype_name,
        "device": loaded.device.type,
        **resampling_settings("examples"),
    }
    facts = _facts(loaded, feeds, watch, base, together, rows)
    return Result("normaliser", seed, settings, rows, facts, _draws(losses, tokens, index.layers, seed)).saved(index)


@dataclass(frozen=True)
class Feed:
    """A batch of sequences: the ids, the columns that hold tokens, those that predict one, and the tokens they should
    predict, row by row."""

    ids: Int[Tensor, "batch pos"]
    tokens: Bool[Tensor, "batch pos"]
    """True where a column holds a token; the beginning-of-sentence token and the padding are none."""
    predicting: Bool[Tensor, "batch pos"]
    targets: Int[Tensor, " n"]
    examples: Int[np.ndarray, " n"]
    """The number of the example that each target is of."""


def _feeds(examples: Examples, model: MemoryModel, bos: bool) -> list[Feed]:
    """The batches, in which every token is predicted once from those in front of it; a first token only behind the
    beginning of sentence."""
    import torch

    feeds = []
    size = BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])
    for numbers, ids in examples.batches(model.bos if bos else None, size):
        ends = np.array([len(examples[number].ids) for number in numbers])[:, None] + int(bos)
        columns = np.arange(ids.shape[1])
        predicting = columns < ends - 1
        targets = ids[:, 1:][predicting[:, :-1]]
        feeds.append(
            Feed(
                ids=torch.from_numpy(ids),
                tokens=torch.from_numpy((columns >= int(bos)) & (columns < ends)),
                predicting=torch.from_numpy(predicting),
                targets=torch.from_numpy(targets),
                examples=np.repeat(np.array(numbers), predicting.sum(1)),
            )
        )
    if not any(len(feed.targets) for feed in feeds):
        raise CorpusError("expected examples of two tokens or more to measure a loss on, found none: use more examples")
    return feeds


class _Watch:
    """The effective memories of every layer at every token, under the model's own activation and under a softmax."""

    def __init__(self, model: MemoryModel) -> None:
        self.activation: dict[int, list[np.ndarray]] = {layer: [] for layer in range(1, model.layers + 1)}
        self.softmax: dict[int, list[np.ndarray]] = {layer: [] for layer in range(1, model.layers + 1)}
        self.tokens: Tensor | None = None
        """True where a column of the batch that runs now holds a token; None before the first batch."""

    def see(self, factors: Factors) -> None:
        """Note the effective memories of one layer at the batch's tokens."""
        from ffmem.experiments.substitution import effective_memories, softmax

        assert self.tokens is not None
        wanted = self.tokens.flatten().to(factors.m.device)
        for kept, m in ((self.activation, factors.m), (self.softmax, softmax(factors))):
            kept[factors.layer].append(effective_memories(m.reshape(len(wanted), -1)[wanted]).cpu().numpy())


def _losses(
    model: MemoryModel, feeds: list[Feed], examples: int, layers: list[int], watch: _Watch, reporter: Reporter
) -> dict[Any, Float[np.ndarray, " examples"]]:
    """The loss of each example in nats: as it is ("base"), with a softmax in all layers (its name), in one (name, layer).

    Batch by batch, so that what the untouched blocks below a layer give need not be computed again.
    """
    from ffmem.experiments.substitution import recorded, replayed, softmax, softmax_scaled, substituted

    lost: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(examples))
    everywhere = range(1, model.layers + 1)

    def loss_of(feed: Feed) -> np.ndarray:
        return np.bincount(feed.examples, weights=batch_losses(model, feed), minlength=examples)

    for done, feed in enumerate(feeds):
        watch.tokens = feed.tokens
        with substituted(model, everywhere, watch.see), recorded(model) as outputs:
            lost["base"] += loss_of(feed)
        for name, rule in zip(SOFTMAXES, (softmax, softmax_scaled), strict=True):
            with substituted(model, everywhere, rule):
                lost[name] += loss_of(feed)
            for layer in layers:
                with replayed(model, outputs[: layer - 1]), substituted(model, [layer], rule):
                    lost[name, layer] += loss_of(feed)
        reporter.update((done + 1) / len(feeds), f"{done + 1:,} of {len(feeds):,} batches")
    return dict(lost)


def _draws(losses: dict[Any, np.ndarray], tokens: np.ndarray, layers: list[int], seed: int) -> list[dict[str, Any]]:
    """The rows and facts that claims are judged by, on draws of the examples: a loss is per token of the draw."""
    counts = draw_counts(len(tokens), [seed])
    drawn = {of: shares(counts, lost, tokens) for of, lost in losses.items()}
    changes = {of: loss - drawn["base"] for of, loss in drawn.items()}
    rows = [
        {"layer": layer, "examples": len(tokens)} | {f"change_{name}": changes[name, layer] for name in SOFTMAXES}
        for layer in layers
    ]
    return as_draws(rows, {"loss": drawn["base"]} | {f"change_{name}_all": changes[name] for name in SOFTMAXES})


def batch_losses(model: MemoryModel, feed: Feed) -> Float[np.ndarray, " n"]:
    """The loss at every target of a batch; never more than a chunk of logits at a time."""
    import torch

    from ffmem.model.spots import hooked, record_spot

    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> None:
        kept.append(tensor.reshape(*feed.ids.shape, -1)[feed.predicting.to(tensor.device)])

    # What leaves the last block is what the final norm takes, in a post-norm block too.
    with torch.inference_mode():
        with hooked(record_spot(model.blocks[-1], "block", "out", keep)):
            model.model.base_model(input_ids=feed.ids.to(model.device), use_cache=False)
        (h,) = kept
        return -model.vocabulary.log_prob(h, feed.targets, norm=True).double().cpu().numpy()


def _facts(
    model: MemoryModel, feeds: list[Feed], watch: _Watch, base: float, together: dict[str, float], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The answer in numbers, and what it was counted over."""
    every = np.concatenate([part for parts in watch.activation.values() for part in parts])
    facts: dict[str, Any] = {
        "loss": base,
        "loss_uniform": log(model.vocabulary.size),
        "tokens_predicted": sum(len(feed.targets) for feed in feeds),
        "tokens_watched": sum(int(feed.tokens.sum()) for feed in feeds),
        "layers_replaced_together": model.layers,
        "without_any_memory": int((every == 0).sum()),
    }
    for name, loss in together.items():
        changes = [row[f"change_{name}"] for row in rows]
        facts |= {
            f"loss_{name}_all": loss,
            f"change_{name}_all": loss - base,
            f"change_{name}_median": float(np.median(changes)),
            f"change_{name}_largest": max(changes),
            f"change_{name}_largest_layer": rows[int(np.argmax(changes))]["layer"],
        }
    return facts


EFFECTIVE = {"effective_memories": HERE, "softmax_effective": "softmax"}


def panels(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of the figure: the change of loss, and the effective memories."""
    loss = [
        curve_of(result, axis, "change_softmax", "softmax"),
        curve_of(result, axis, "change_softmax_scaled", "softmax, same length"),
        random_curve(control, axis, "change_softmax_scaled", "same length, random weights", colour=COLOURS[RANDOM]),
    ]
    effective = [
        curve_of(result, axis, f"{column}_median", name, spread=QUARTILES, rows=_effective)
        for column, name in EFFECTIVE.items()
    ]
    effective.append(random_curve(control, axis, "effective_memories_median", spread=QUARTILES, rows=_effective))
    return [
        Panel("change of loss, one layer replaced", "nats a token", loss, axis, "~g"),
        Panel("memories that effectively take part", "share of the layer's cells", effective, axis),
    ]


def _effective(sample: Result) -> Sequence[Mapping[str, Any]]:
    """The rows with effective memories as shares of their layer's cells, of the layers that have all of them."""
    names = [f"{name}_{q}" for name in EFFECTIVE for q in ("q1", "median", "q3")]
    whole = [row for row in sample.rows if all(row.get(name) is not None for name in names)]
    return [{"layer": row["layer"]} | {name: row[name] / row["cells"] for name in names} for row in whole]


def claims() -> list[Claim]:
    """The claims on the missing softmax."""
    return [
        Claim(
            "normaliser", "Section 2",
            "The missing normaliser matters: a softmax changes the loss.",
            "no number: that it is missing is the only difference named",
            "loss with the softmax in all layers, at the same length, differs by more than 0.1 nats a token",
            softmax_matters,
        ),
    ]  # fmt: skip


def softmax_matters(result: Result) -> Reading:
    """The claim on the change of loss with a softmax in all layers at once, at the same length."""
    loss, free = result.facts["loss"], result.facts["change_softmax_all"]
    same = result.facts["change_softmax_scaled_all"]
    words = f"{signed(same)} nats a token at the same length, {signed(free)} without; the loss is {plain(loss)}"
    measure = Measure("", lambda sample: abs(sample.facts["change_softmax_scaled_all"]), Rule(above=0.1), _nats)
    return Reading(words, [measure], units(result))


def _nats(value: int | float) -> str:
    return f"{value:.2f} nats"


EXPERIMENT = Experiment(
    name="normaliser",
    order=12,
    question="Does the missing softmax matter? The activation is replaced by a softmax over all keys, in one layer at a "
    "time and in all.",
    columns={
        "layer": "from 1",
        "cells": "cells of the layer",
        "examples": "prefixes that ran through the model",
        "tokens_predicted": "tokens over which the loss is taken",
        "effective_memories_q1, effective_memories_median, effective_memories_q3": "exp of the entropy of the sizes of "
        "coefficients",
        "softmax_effective_q1, softmax_effective_median, softmax_effective_q3": "the same under the softmax",
        "loss": "of the untouched model, in nats a token",
        "loss_softmax, loss_softmax_scaled": "with the softmax in this layer; as long as the coefficients were",
        "change_softmax, change_softmax_scaled": "by how much these differ from the loss",
    },
    run=normaliser,
    most_examples=NORMALISED,
    most_control_examples=CONTROL_NORMALISED,
    figures=[
        Figure(
            "normaliser",
            "Section 2",
            "Does the missing softmax matter?",
            "A neural memory shares attention out among its cells by a softmax; a feed-forward layer is the same without "
            "it. First the loss when one layer is given the softmax (as it is, or with coefficients of the same length), "
            "then how many cells effectively take part, with and without; the paper has no numbers for this.",
            "Change of loss with a softmax in one layer at a time, and the effective number of memories with and without.",
            panels,
        )
    ],
    claims=claims,
)
