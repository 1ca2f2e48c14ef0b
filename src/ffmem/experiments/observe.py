"""The pass over the examples that all experiments share that watch a prediction come to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.experiments.examples import Examples, sample_examples
from ffmem.model.memories import MemoryModel
from ffmem.model.spots import LayerTensors
from ffmem.model.vocabulary import TokenScore
from ffmem.progress import reporting
from ffmem.run.model import model_of
from ffmem.run.reader import Index
from ffmem.run.results import Result, check_request

BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
"""The most tokens of a forward: all layers' vectors and coefficients of a batch's examples are held at a time."""


@dataclass
class Seen:
    """The tensors at the last token of some examples, and what each vector predicts, computed once however many ask."""

    model: MemoryModel
    numbers: list[int]
    """The numbers of the examples that were in the batch."""
    tensors: LayerTensors
    _tops: dict[tuple[str, int, bool], Int[np.ndarray, " n"]] = field(default_factory=dict)

    def vectors(self, name: str, layer: int, *, norm: bool) -> Float[Tensor, "n d"]:
        """r, y or o of a layer (from 1); to be normed, in a post-norm block, they go through the block's own norm first."""
        found = getattr(self.tensors, name)[layer - 1]
        return self.model.after_post_norm(found, layer) if norm else found

    @cached_property
    def said(self) -> Int[Tensor, " n"]:
        """The token that the model itself predicts at each example's end."""
        return torch.from_numpy(self.top("o", self.model.layers, norm=True))

    def top(self, name: str, layer: int, *, norm: bool) -> Int[np.ndarray, " n"]:
        """The token that r, y or o of a layer puts first."""
        key = (name, layer, norm and self.model.has_norm)
        if key not in self._tops:
            found = self.model.vocabulary.best(self.vectors(name, layer, norm=norm), norm=norm)[1]
            self._tops[key] = found.cpu().numpy()
        return self._tops[key]

    def residual(self, layer: int) -> TokenScore:
        """The token that r of a layer puts first, and the probability that it gives to the model's own prediction."""
        return self.model.vocabulary.score_token(self.vectors("r", layer, norm=True), self.said, norm=True)


@runtime_checkable
class Observer(Protocol):
    """An experiment that watches examples go by."""

    def see(self, seen: Seen) -> None:
        """Note what is wanted of a batch of examples."""
        ...

    def result(self, settings: dict[str, Any]) -> Result:
        """The result over all examples that were seen, with these settings."""
        ...


def follow(
    model: Any,
    index: Index,
    makers: Sequence[Callable[[MemoryModel, Examples], Observer]],
    eval: Any = None,
    *,
    examples: int,
    seed: int,
    quiet: bool = False,
) -> list[Result]:
    """Draw examples, show them to the observers in one pass, and keep the observers' results in the run."""
    check_request(seed=seed, examples=examples)
    loaded = model_of(index, model)
    drawn = sample_examples(loaded, index, eval, count=examples, seed=seed, quiet=quiet)
    observers = [make(loaded, drawn) for make in makers]
    results = observe(loaded, drawn, observers, bos=index.manifest.settings.bos, settings={"seed": seed}, quiet=quiet)
    return [result.saved(index) for result in results]


@torch.inference_mode()
def observe(
    model: MemoryModel,
    examples: Examples,
    observers: Sequence[Observer],
    *,
    bos: bool,
    settings: dict[str, Any],
    quiet: bool = False,
) -> list[Result]:
    """Send all examples through the model once, past every observer, and take their results."""
    done = 0
    first = model.bos if bos else None
    size = BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])
    with reporting("following predictions", quiet=quiet) as reporter:
        for numbers, ids in examples.batches(first, size):
            lengths = np.array([len(examples[number].ids) for number in numbers]) + int(bos) - 1
            seen = Seen(model, numbers, model.record_at(torch.from_numpy(ids), torch.from_numpy(lengths)))
            for observer in observers:
                observer.see(seen)
            done += len(numbers)
            reporter.update(done / len(examples), f"{done:,} of {len(examples):,} examples")
    return [observer.result(settings | examples.settings) for observer in observers]
