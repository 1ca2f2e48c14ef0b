"""Coefficients replaced while a model runs, by hooks that are always taken off again: no weight is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.errors import ModelError
from ffmem.model.memories import MemoryModel
from ffmem.model.spots import Hook, first_tensor, hooked, module_at


@dataclass(frozen=True)
class Factors:
    """The factors of a layer's coefficients: m = f(scores), in a gated layer f(scores)·up."""

    layer: int
    scores: Float[Tensor, "*pos cells"]
    """The scores x·Kᵀ plus the key bias; in a gated layer the gate's."""
    up: Float[Tensor, "*pos cells"] | None
    m: Float[Tensor, "*pos cells"]


Rule = Callable[[Factors], Tensor | None]
"""A function that gives new coefficients for a layer; None leaves them as they are."""


def softmax(factors: Factors) -> Float[Tensor, "*pos cells"]:
    """The coefficients softmax(scores), in a gated layer times up; in float32."""
    weights = torch.softmax(factors.scores.float(), dim=-1)
    return weights if factors.up is None else weights * factors.up.float()


def softmax_scaled(factors: Factors) -> Float[Tensor, "*pos cells"]:
    """The coefficients softmax(scores), scaled to the length (L2) of the layer's own coefficients at each position."""
    new = softmax(factors)
    length, own = (torch.linalg.vector_norm(part, dim=-1, keepdim=True) for part in (factors.m.float(), new))
    return new * (length / own.clamp_min(torch.finfo(torch.float32).tiny))


def effective_memories(m: Float[Tensor, "n cells"]) -> Float[Tensor, " n"]:
    """The number of memories in effect, exp of the entropy of |m|/Σ|m|: k equal coefficients count as k, none as 0.

    >>> effective_memories(torch.tensor([[2.0, -2.0, 0.0], [0.0, 0.0, 0.0]])).tolist()
    [2.0, 0.0]
    """
    size = m.float().abs()
    total = size.sum(-1, keepdim=True)
    share = size / total.clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp(-torch.xlogy(share, share).sum(-1)) * (total[:, 0] > 0)


@contextmanager
def substituted(model: MemoryModel, layers: Iterable[int], rule: Rule) -> Iterator[None]:
    """Run the model inside with `rule`'s coefficients in these layers (from 1)."""
    with hooked(*(hook for layer in layers for hook in _hooks(model, layer, rule))):
        yield


@contextmanager
def recorded(model: MemoryModel) -> Iterator[list[Any]]:
    """A list that collects the output of every block in the one forward made inside."""
    outputs: list[Any] = []

    def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        outputs.append(output)

    with hooked(*(Hook(block, "out", keep) for block in model.blocks)):
        yield outputs


@contextmanager
def replayed(model: MemoryModel, outputs: list[Any]) -> Iterator[None]:
    """Run the model inside with its first blocks giving these outputs of an earlier forward instead of computing them.

    For the same ids: a change in a layer reaches nothing below it.
    """
    pairs = zip(model.blocks[: len(outputs)], outputs, strict=True)
    with hooked(*(Hook(block, "instead", lambda *_, output=output, **__: output) for block, output in pairs)):
        yield


def _hooks(model: MemoryModel, layer: int, rule: Rule) -> Iterator[Hook]:
    """The hooks of one layer: they keep what the key and up matrices give, and change what enters the value matrix."""
    family, block = model.family, model.block(layer)
    kept: dict[str, Tensor] = {}

    def keeper(path: str) -> Callable[..., None]:
        def keep(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                kept[path] = tensor.detach().clone()  # an activation may work in place

        return keep

    def part(spot: str, m: Tensor) -> Tensor:
        path, half = _module_and_half(spot)
        if path not in kept:
            raise ModelError(f"{model.name}: {path!r} in layer {layer} was not called in front of its value matrix")
        tensor = kept[path] if half is None else kept[path].chunk(2, dim=-1)[half]
        if tensor.shape != m.shape:
            shapes = f"{tuple(m.shape)}, found {tuple(tensor.shape)}"
            raise ModelError(f"{model.name}: expected {spot!r} in layer {layer} to give a number a cell, {shapes}")
        return tensor

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        m = args[0]
        up = None if family.up is None else part(family.up, m)
        new = rule(Factors(layer, part(family.key, m), up, m))
        kept.clear()
        return None if new is None else ((new.to(m.dtype), *args[1:]), kwargs)

    paths = dict.fromkeys(_module_and_half(spot)[0] for spot in (family.key, family.up) if spot is not None)
    for path in paths:
        yield Hook(module_at(block, path, "the keys"), "out", keeper(path))
    yield Hook(model.value_module(layer), "in", enter)


def _module_and_half(spot: str) -> tuple[str, int | None]:
    """The module of a spot, and the half of its output that is meant (None for all).

    >>> _module_and_half("mlp.gate_up_proj[1]"), _module_and_half("mlp.c_fc")
    (('mlp.gate_up_proj', 1), ('mlp.c_fc', None))
    """
    path, _, half = spot.partition("[")
    return path, int(half.rstrip("]")) if half else None
