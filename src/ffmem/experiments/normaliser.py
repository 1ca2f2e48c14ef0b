"""How far a feed-forward layer is from a neural memory: the softmax that it lacks, put in (section 2 of the paper)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ffmem.errors import CorpusError
from ffmem.experiments.examples import Examples, sample_examples
from ffmem.experiments.observe import quartiles
from ffmem.experiments.resampling import as_draws, draw_counts, resampling_settings, shares
from ffmem.experiments.substitution import Factors, Rule, recorded, replayed, substituted
from ffmem.model.memories import MemoryModel
from ffmem.model.spots import hooked, record_spot
from ffmem.progress import Reporter, reporting
from ffmem.run.model import model_of
from ffmem.run.reader import Index
from ffmem.run.results import Result, check_request

NORMALISED = 200
"""Examples, each of which runs through the model twice for every layer."""
BATCH_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens a forward: a layer's scores and coefficients are held a few times over."""


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
    alone = {name: [each[name, layer] for layer in index.layers] for name in RULES}
    together = {name: each[name] for name in RULES}
    rows = []
    for at, layer in enumerate(index.layers):
        row: dict[str, Any] = {"layer": layer, "cells": loaded.cells[layer - 1], "examples": len(drawn)}
        row["tokens_predicted"] = int(tokens.sum())
        for name, kept in (("effective_memories", watch.activation), ("softmax_effective", watch.softmax)):
            found = quartiles(np.concatenate(kept[layer]))
            row |= {f"{name}_{q}": value for q, value in zip(("q1", "median", "q3"), found, strict=True)}
        row |= {"loss": base} | {f"loss_{name}": alone[name][at] for name in RULES}
        rows.append(row | {f"change_{name}": alone[name][at] - base for name in RULES})
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


def softmax(factors: Factors) -> Float[Tensor, "*pos cells"]:
    """softmax(scores), in a gated layer times up; in float32."""
    weights = torch.softmax(factors.scores.float(), dim=-1)
    return weights if factors.up is None else weights * factors.up.float()


def softmax_scaled(factors: Factors) -> Float[Tensor, "*pos cells"]:
    """The same, as long as the original coefficients."""
    new = softmax(factors)
    length, own = (torch.linalg.vector_norm(part, dim=-1, keepdim=True) for part in (factors.m.float(), new))
    return new * (length / own.clamp_min(torch.finfo(torch.float32).tiny))


RULES: dict[str, Rule] = {"softmax": softmax, "softmax_scaled": softmax_scaled}


def effective_memories(m: Float[Tensor, "n cells"]) -> Float[Tensor, " n"]:
    """exp of the entropy of |m|/Σ|m|: k equal coefficients count as k memories, none as 0.

    >>> effective_memories(torch.tensor([[2.0, -2.0, 0.0], [0.0, 0.0, 0.0]])).tolist()
    [2.0, 0.0]
    """
    size = m.float().abs()
    total = size.sum(-1, keepdim=True)
    share = size / total.clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp(-torch.xlogy(share, share).sum(-1)) * (total[:, 0] > 0)


@dataclass(frozen=True)
class Feed:
    """A batch: what goes in, which columns hold tokens, which predict one, and what they should predict, row by row."""

    ids: Int[Tensor, "batch pos"]
    tokens: Bool[Tensor, "batch pos"]
    """The beginning-of-sentence token and the padding are none."""
    predicting: Bool[Tensor, "batch pos"]
    targets: Int[Tensor, " n"]
    examples: Int[np.ndarray, " n"]
    """Which example each target is of."""


def _feeds(examples: Examples, model: MemoryModel, bos: bool) -> list[Feed]:
    """Every token is predicted once from those in front of it; a first token only behind the beginning of sentence."""
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
    """Effective memories of every layer at every token, under the model's own activation and under a softmax."""

    def __init__(self, model: MemoryModel) -> None:
        self.activation: dict[int, list[np.ndarray]] = {layer: [] for layer in range(1, model.layers + 1)}
        self.softmax: dict[int, list[np.ndarray]] = {layer: [] for layer in range(1, model.layers + 1)}
        self.tokens: Tensor | None = None
        """Of the batch that is run."""

    def see(self, factors: Factors) -> None:
        assert self.tokens is not None
        wanted = self.tokens.flatten().to(factors.m.device)
        for kept, m in ((self.activation, factors.m), (self.softmax, softmax(factors))):
            kept[factors.layer].append(effective_memories(m.reshape(len(wanted), -1)[wanted]).cpu().numpy())


def _losses(
    model: MemoryModel, feeds: list[Feed], examples: int, layers: list[int], watch: _Watch, reporter: Reporter
) -> dict[Any, Float[np.ndarray, " examples"]]:
    """The loss of each example in nats: as it is ("base"), with a rule in all layers (its name), in one (name, layer).

    Batch by batch, so that what the untouched blocks below a layer give need not be computed again.
    """
    lost: dict[Any, np.ndarray] = defaultdict(lambda: np.zeros(examples))
    everywhere = range(1, model.layers + 1)

    def loss_of(feed: Feed) -> np.ndarray:
        return np.bincount(feed.examples, weights=batch_losses(model, feed), minlength=examples)

    for done, feed in enumerate(feeds):
        watch.tokens = feed.tokens
        with substituted(model, everywhere, watch.see), recorded(model) as outputs:
            lost["base"] += loss_of(feed)
        for name, rule in RULES.items():
            with substituted(model, everywhere, rule):
                lost[name] += loss_of(feed)
            for layer in layers:
                with replayed(model, outputs[: layer - 1]), substituted(model, [layer], rule):
                    lost[name, layer] += loss_of(feed)
        reporter.update((done + 1) / len(feeds), f"{done + 1:,} of {len(feeds):,} batches")
    return dict(lost)


def _draws(losses: dict[Any, np.ndarray], tokens: np.ndarray, layers: list[int], seed: int) -> list[dict[str, Any]]:
    """What is judged, on draws of the examples: a loss is per token of the draw."""
    counts = draw_counts(len(tokens), [seed])
    drawn = {of: shares(counts, lost, tokens) for of, lost in losses.items()}
    changes = {of: loss - drawn["base"] for of, loss in drawn.items()}
    rows = [
        {"layer": layer, "examples": len(tokens)} | {f"change_{name}": changes[name, layer] for name in RULES}
        for layer in layers
    ]
    return as_draws(rows, {"loss": drawn["base"]} | {f"change_{name}_all": changes[name] for name in RULES})


@torch.inference_mode()
def batch_losses(model: MemoryModel, feed: Feed) -> Float[np.ndarray, " n"]:
    """The loss at every target of a batch; never more than a chunk of logits at a time."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> None:
        kept.append(tensor.reshape(*feed.ids.shape, -1)[feed.predicting.to(tensor.device)])

    # What leaves the last block is what the final norm takes, in a post-norm block too.
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
