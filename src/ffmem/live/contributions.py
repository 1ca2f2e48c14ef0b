"""Contributions: a token's logit as the sum of what every part of the network adds to it directly, signed and exact.

embedding + Σ over layers (attention + cells + value bias) + norm bias + unembedding bias = the logit before any soft cap.
Norms on the way are linear maps once their scale is frozen at its actual value, so what reads the logit off the stream is
pulled back through them, from the unembedding to the embedding, and every part is a dot product with it. An adaptive softmax
has two scores a rare word, each of which is such a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ffmem.errors import FfmemError
from ffmem.live.capture import Flow
from ffmem.live.frozen import Frozen
from ffmem.model.memories import MemoryModel
from ffmem.model.vocabulary import Readout

Of = Literal["output", "layer"]
Visit = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Largest:
    """Some cells of a layer, by their parts of the summed scores."""

    index: Int[Tensor, "n c"]
    coefficient: Float[Tensor, "n c"]
    parts: Float[Tensor, "k n c"]


@dataclass(frozen=True)
class LayerParts:
    """What one layer gives to each of k scores at n positions."""

    before: Float[Tensor, "k n"]
    """What the stream brings that enters the layer."""
    attention: Float[Tensor, "k n"]
    cells: Float[Tensor, "k n"]
    """All cells together."""
    value_bias: Float[Tensor, "k n"]
    norm_bias: Float[Tensor, "k n"]
    """Of the norms inside the block that stand on the stream's way; with `of="layer"` of the final norm too."""
    score: Float[Tensor, "k n"] | None
    """With `of="layer"`, the score that the layer's own output gets: all of the above and the unembedding bias."""
    promoting: Largest
    suppressing: Largest


@dataclass(frozen=True)
class Contributions:
    """Parts of k scores of one token at each of n positions."""

    scores: tuple[str, ...]
    """`logit`; of an adaptive softmax `head`, the score of the word or of its band, and `tail`, a rare word's inside it."""
    layers: list[LayerParts]
    norm_bias: Float[Tensor, "k n"]
    """Of all norms on the way to the output."""
    unembedding_bias: Float[Tensor, "k n"]
    score: Float[Tensor, "k n"]
    """What the token gets from the model itself, before any soft cap."""

    @property
    def embedding(self) -> Float[Tensor, "k n"]:
        return self.layers[0].before

    @property
    def total(self) -> Float[Tensor, "k n"]:
        """The sum of all parts, for `of="output"`."""
        added = torch.stack([parts.attention + parts.cells + parts.value_bias for parts in self.layers]).sum(0)
        return self.embedding + added + self.norm_bias + self.unembedding_bias


def check_of(of: str) -> None:
    if of not in get_args(Of):
        raise FfmemError(f"expected of {' or '.join(get_args(Of))}, found {of!r}")


@torch.inference_mode()
def contributions(
    model: MemoryModel,
    flows: list[Flow],
    token: Int[Tensor, " n"],
    *,
    cells: int = 10,
    of: str = "output",
    visit: Visit | None = None,
) -> Contributions:
    """The parts of each position's token: of its final logit, or of the logit that each layer's own output gives it.

    `visit` is given every layer (the last one first) and the parts of all its cells, which are not kept.
    """
    check_of(of)
    readouts = model.vocabulary.readouts(token)
    g, constant, score = _closing(model, readouts, flows[-1].after)
    layers: list[LayerParts] = []
    for layer in range(model.layers, 0, -1):
        flow = flows[layer - 1]
        if of == "layer":
            g, behind, own = _closing(model, readouts, flow.after)
            parts, all_cells, _ = _layer(model, layer, flow, g, cells)
            parts = replace(parts, norm_bias=parts.norm_bias + behind.to(parts.norm_bias.device), score=own)
        else:
            parts, all_cells, g = _layer(model, layer, flow, g, cells)
            constant = constant.to(g.device) + parts.norm_bias
        if visit is not None:
            visit(layer, all_cells)
        layers.insert(0, _moved(parts, score.device))
    bias = torch.stack([readout.bias for readout in readouts]).to(score.device)
    return Contributions(tuple(readout.name for readout in readouts), layers, constant.to(score.device), bias, score)


def _closing(
    model: MemoryModel, readouts: tuple[Readout, ...], h: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, "k n d"], Float[Tensor, "k n"], Float[Tensor, "k n"]]:
    """What reads the scores off a block's output, the final norm frozen; that norm's bias in them; and the scores."""
    vocabulary = model.vocabulary
    g = torch.stack([readout.vectors for readout in readouts])
    bias = torch.stack([readout.bias for readout in readouts])
    h = h.to(g.device)
    if vocabulary.norm is None:
        return g, torch.zeros_like(bias), (g * h.float()).sum(-1) + bias
    normed = vocabulary.norm(h)
    frozen = Frozen.of(vocabulary.norm, h, normed, "the final norm")
    return frozen.pulled(g), frozen.constant(g), (g * normed.float()).sum(-1) + bias


def _layer(
    model: MemoryModel, layer: int, flow: Flow, g: Float[Tensor, "k n d"], count: int
) -> tuple[LayerParts, Float[Tensor, "k n cells"], Float[Tensor, "k n d"]]:
    """A layer's parts, given what reads its output; all its cells' parts; and what reads its input."""
    family, block = model.family, model.blocks[layer - 1]
    g = g.to(flow.after.device)
    constant = torch.zeros_like(g[..., 0])

    def through(spot: str, x: Tensor, out: Tensor) -> None:
        """Past the norm at a spot on the stream's own way."""
        nonlocal g, constant
        frozen = Frozen.of(_module(block, spot), x, out, f"{spot} of layer {layer}")
        constant, g = constant + frozen.constant(g), frozen.pulled(g)

    if family.o != "block.out":
        through(family.o, flow.o, flow.after)
    inner = g
    if not torch.equal(flow.product, flow.y):
        frozen = Frozen.of(_norm_behind(model, layer), flow.product, flow.y, f"{family.y} of layer {layer}")
        constant, inner = constant + frozen.constant(g), frozen.pulled(g)
    m, bias = flow.m.float(), model.value_bias(layer)
    parts = m * (inner @ model.values(layer).T.to(inner))
    value_bias = torch.zeros_like(constant) if bias is None else inner @ bias.to(inner)
    if family.joined is not None:
        through(family.joined, flow.joined, flow.r)
    attention = (g * (flow.joined.float() - flow.carried.float())).sum(-1)
    if family.carried != "block.in":
        through(family.carried, flow.before, flow.carried)
    found = LayerParts(
        before=(g * flow.before.float()).sum(-1),
        attention=attention,
        cells=parts.sum(-1),
        value_bias=value_bias,
        norm_bias=constant,
        score=None,
        promoting=_largest(m, parts, count, 1),
        suppressing=_largest(m, parts, count, -1),
    )
    return found, parts, g


def _largest(m: Float[Tensor, "n cells"], parts: Float[Tensor, "k n cells"], count: int, sign: int) -> Largest:
    """The cells with the largest parts (`sign` 1) or the most negative ones (-1) of all scores together."""
    order = (sign * parts.sum(0)).topk(min(count, m.shape[1]), dim=1).indices
    return Largest(order, m.gather(1, order), parts.gather(2, order.expand(len(parts), -1, -1)))


def _moved(parts: LayerParts, device: torch.device) -> LayerParts:
    """On one device, wherever the layer is."""
    if parts.before.device == device:
        return parts

    def moved(value: object) -> object:
        if isinstance(value, Largest):
            return Largest(**{name: one.to(device) for name, one in vars(value).items()})
        return value.to(device) if isinstance(value, Tensor) else value

    return LayerParts(**{name: moved(value) for name, value in vars(parts).items()})  # type: ignore[arg-type]


def _module(block: nn.Module, spot: str) -> nn.Module:
    return block.get_submodule(spot.rsplit(".", 1)[0])


def _norm_behind(model: MemoryModel, layer: int) -> nn.Module | None:
    """The norm between the value matrix and the stream; None where y comes from the value matrix or what holds it."""
    path = model.family.y.rsplit(".", 1)[0]
    if f"{model.family.value}.".startswith(f"{path}."):
        return None
    return model.blocks[layer - 1].get_submodule(path)


def frozen_norms(model: MemoryModel) -> tuple[str, ...]:
    """The norms that contributions hold at their actual scales, in words; none where every part is exact as it is."""
    family = model.family
    found = []
    if model.vocabulary.norm is not None:
        found.append("the final norm")
    if family.o != "block.out" or family.joined is not None or family.carried != "block.in":
        found.append("the norms on the stream inside the blocks")
    if _norm_behind(model, 1) is not None:
        found.append("the norms behind the FFN")
    return tuple(found)
