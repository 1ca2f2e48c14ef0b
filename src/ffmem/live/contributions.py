"""Contributions: a token's logit as the sum of what every part of the network adds to it directly, signed and exact.

embedding + Σ over layers (attention + cells + value bias) + norm bias + unembedding bias = the logit before any soft cap.
Norms on the way are linear maps once their scale is frozen at its actual value, so what reads the logit off the stream is
pulled back through them, from the unembedding to the embedding, and every part is a dot product with it. An adaptive softmax
has two scores a rare word, each of which is such a sum.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ffmem.cells import Cell
from ffmem.errors import FfmemError, ModelError
from ffmem.model.memories import MemoryModel
from ffmem.model.vocabulary import Readout

Of = Literal["output", "layer"]
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""The relative error that a frozen norm may have against what the norm itself gave."""
HALF_TOLERANCE = 5e-2
"""The relative error that a frozen norm may have in bfloat16 and float16."""


@dataclass(frozen=True)
class Flow:
    """The tensors that flow through one layer at n positions. Without norms on the way, carried is before, joined is r,
    after is o."""

    before: Float[Tensor, "n d"]
    """The stream as it enters the layer."""
    carried: Float[Tensor, "n d"]
    """The stream to which attention is added."""
    joined: Float[Tensor, "n d"]
    """The sum of `carried` and attention."""
    r: Float[Tensor, "n d"]
    m: Float[Tensor, "n cells"]
    product: Float[Tensor, "n d"]
    """The value matrix's own output, m·V and the value bias, before any norm behind it."""
    y: Float[Tensor, "n d"]
    o: Float[Tensor, "n d"]
    """The sum r + y."""
    after: Float[Tensor, "n d"]
    """The stream as it leaves the layer."""

    def at(self, rows: Int[Tensor, " rows"]) -> Flow:
        """The flow at some of the positions."""
        return Flow(**{part.name: getattr(self, part.name)[rows.to(self.r.device)] for part in fields(self)})


@torch.inference_mode()
def capture(model: MemoryModel, ids: Int[Tensor, "1 pos"], columns: Int[Tensor, " n"]) -> list[Flow]:
    """Run one forward and keep a flow a layer at these columns of the ids. The vocabulary projection is not computed."""
    family = model.family
    spots = {
        "before": "block.in",
        "carried": family.carried,
        "joined": family.joined or family.r,
        "r": family.r,
        "m": f"{family.value}.in",
        "product": f"{family.value}.out",
        "y": family.y,
        "o": family.o,
        "after": "block.out",
    }

    def pick(tensor: Tensor) -> Tensor:
        return tensor[0, columns.to(tensor.device)]

    def forward(ids: Tensor) -> None:
        model.model.base_model(input_ids=ids.to(model.device), use_cache=False)

    found, _ = model.record_spots(ids, spots, pick, forward)
    return [Flow(**{name: tensors[layer] for name, tensors in found.items()}) for layer in range(model.layers)]


@dataclass(frozen=True)
class CellContribution:
    """The contribution of one cell at one position: its coefficient, and its part of each score."""

    cell: Cell
    coefficient: float
    parts: list[float]

    @property
    def total(self) -> float:
        """The cell's part of all scores together."""
        return sum(self.parts)


@dataclass(frozen=True)
class LayerParts:
    """The parts that one layer gives to each of k scores at n positions."""

    m: Float[Tensor, "n cells"]
    """The coefficients of the layer's cells."""
    before: Float[Tensor, "k n"]
    """The part of the stream that enters the layer."""
    attention: Float[Tensor, "k n"]
    cells: Float[Tensor, "k n cells"]
    """The part of each cell."""
    all_cells: Float[Tensor, "k n"]
    """The parts of all cells together."""
    value_bias: Float[Tensor, "k n"]
    norm_bias: Float[Tensor, "k n"]
    """The part of the biases of the norms on the stream's way inside the block; with `of="layer"` the final norm's too."""
    score: Float[Tensor, "k n"] | None = None
    """The score that the layer's own output gets with `of="layer"`, else None: all parts and the unembedding bias."""

    @property
    def added(self) -> Float[Tensor, "k n"]:
        """The part that the layer itself adds: attention, all cells, and the value bias."""
        return self.attention + self.all_cells + self.value_bias

    def to(self, device: torch.device) -> LayerParts:
        """The same numbers on another device."""
        return replace(self, **{name: one.to(device) for name, one in vars(self).items() if one is not None})


@dataclass(frozen=True)
class Contributions:
    """The parts of k scores of one token at each of n positions."""

    scores: tuple[str, ...]
    """The names of the scores: `logit`; of an adaptive softmax `head`, the score of the word or of its band, and `tail`,
    a rare word's inside it."""
    layers: list[LayerParts]
    norm_bias: Float[Tensor, "k n"]
    """The part of the biases of all norms on the way to the output."""
    unembedding_bias: Float[Tensor, "k n"]
    score: Float[Tensor, "k n"]
    """The score that the token gets from the model itself, before any soft cap."""

    @property
    def embedding(self) -> Float[Tensor, "k n"]:
        """The part of the embedding: the stream before the first layer."""
        return self.layers[0].before

    @property
    def total(self) -> Float[Tensor, "k n"]:
        """The sum of all parts, for `of="output"`."""
        added = torch.stack([parts.added for parts in self.layers]).sum(0)
        return self.embedding + added + self.norm_bias + self.unembedding_bias

    def of_cells(self, layer: int, row: int, cells: Int[Tensor, " c"]) -> list[CellContribution]:
        """Some cells of a layer (counted from 1) at one of the positions, in the order given."""
        parts = self.layers[layer - 1]
        columns = zip(cells.tolist(), parts.m[row, cells].tolist(), parts.cells[:, row, cells].T.tolist(), strict=True)
        return [CellContribution(Cell(layer, index), m, scores) for index, m, scores in columns]

    def largest(self, layer: int, row: int, count: int, *, sign: int) -> list[CellContribution]:
        """The cells of a layer that promote the token most (`sign` 1) or suppress it most (-1), at most `count` of them."""
        total = sign * self.layers[layer - 1].cells[:, row].sum(0)
        order = total.topk(min(count, len(total))).indices
        return self.of_cells(layer, row, order[total[order] > 0])


def check_of(of: str) -> None:
    """An error where `of` is neither `output` nor `layer`."""
    if of not in get_args(Of):
        raise FfmemError(f"expected of {' or '.join(get_args(Of))}, found {of!r}")


@torch.inference_mode()
def contributions(model: MemoryModel, flows: list[Flow], token: Int[Tensor, " n"], *, of: str = "output") -> Contributions:
    """The parts of each position's token: of its final logit, or of the logit that each layer's own output gives it.

    All cells' parts are held in float32, so ask for some positions at a time where there are many.
    """
    check_of(of)
    readouts = model.vocabulary.readouts(token)
    g, constant, score = _output_readout(model, readouts, flows[-1].after)
    layers: list[LayerParts] = []
    for layer in range(model.layers, 0, -1):
        flow = flows[layer - 1]
        if of == "layer":
            g, behind, own = _output_readout(model, readouts, flow.after)
            parts, _ = _layer_parts(model, layer, flow, g)
            parts = replace(parts, norm_bias=parts.norm_bias + behind.to(parts.norm_bias.device), score=own)
        else:
            parts, g = _layer_parts(model, layer, flow, g)
            constant = constant.to(g.device) + parts.norm_bias
        layers.insert(0, parts.to(score.device))
    bias = torch.stack([readout.bias for readout in readouts]).to(score.device)
    return Contributions(tuple(readout.name for readout in readouts), layers, constant.to(score.device), bias, score)


def _output_readout(
    model: MemoryModel, readouts: tuple[Readout, ...], h: Float[Tensor, "n d"]
) -> tuple[Float[Tensor, "k n d"], Float[Tensor, "k n"], Float[Tensor, "k n"]]:
    """The vectors that read the scores off a block's output, the final norm frozen; that norm's bias; and the scores."""
    vocabulary = model.vocabulary
    g = torch.stack([readout.vectors for readout in readouts])
    bias = torch.stack([readout.bias for readout in readouts])
    h = h.to(g.device)
    if vocabulary.norm is None:
        return g, torch.zeros_like(bias), (g * h.float()).sum(-1) + bias
    normed = vocabulary.norm(h)
    frozen = FrozenNorm.of(vocabulary.norm, h, normed, "the final norm")
    return frozen.pulled(g), frozen.constant(g), (g * normed.float()).sum(-1) + bias


def _layer_parts(
    model: MemoryModel, layer: int, flow: Flow, g: Float[Tensor, "k n d"]
) -> tuple[LayerParts, Float[Tensor, "k n d"]]:
    """A layer's parts, given the vectors that read the scores off its output; and those that read them off its input."""
    family, block = model.family, model.blocks[layer - 1]
    g = g.to(flow.after.device)
    constant = torch.zeros_like(g[..., 0])

    def pull_through(spot: str, x: Tensor, out: Tensor) -> None:
        """Move the readout to before the norm at a spot on the stream's own way."""
        nonlocal g, constant
        norm = block.get_submodule(spot.rsplit(".", 1)[0])
        frozen = FrozenNorm.of(norm, x, out, f"{spot} of layer {layer}")
        constant, g = constant + frozen.constant(g), frozen.pulled(g)

    if family.o != "block.out":
        pull_through(family.o, flow.o, flow.after)
    inner = g
    if not torch.equal(flow.product, flow.y):
        frozen = FrozenNorm.of(_norm_behind(model, layer), flow.product, flow.y, f"{family.y} of layer {layer}")
        constant, inner = constant + frozen.constant(g), frozen.pulled(g)
    bias = model.value_bias(layer)
    cells = flow.m.float() * (inner @ model.values(layer).T.to(inner))
    value_bias = torch.zeros_like(constant) if bias is None else inner @ bias.to(inner)
    if family.joined is not None:
        pull_through(family.joined, flow.joined, flow.r)
    attention = (g * (flow.joined.float() - flow.carried.float())).sum(-1)
    if family.carried != "block.in":
        pull_through(family.carried, flow.before, flow.carried)
    before = (g * flow.before.float()).sum(-1)
    return LayerParts(flow.m, before, attention, cells, cells.sum(-1), value_bias, norm_bias=constant), g


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


@dataclass(frozen=True)
class FrozenNorm:
    """x -> scale · (x - its mean, where centred) + bias, a scale for each of n positions; it may also be a plain factor."""

    scale: Float[Tensor, "n d"]
    centred: bool
    bias: Float[Tensor, " d"]

    @classmethod
    def of(cls, norm: nn.Module | None, x: Float[Tensor, "n d"], out: Float[Tensor, "n d"], what: str) -> FrozenNorm:
        """The frozen form of `norm` at the time when it made `out` of `x`; without a norm, `out` may be `x` times a number.

        The norm is asked and not read, so that neither its class nor how it writes its weight matters: zeros give its
        bias, a vector of mean zero its weight, ones tell whether it centres. Its scale is then fitted to `out`, and a
        module that is no norm at all does not fit.
        """
        kind, x, out = out.dtype, x.float(), out.float()
        d = x.shape[1]
        weight, bias, centred = torch.ones_like(x[0]), torch.zeros_like(x[0]), False
        if norm is not None:
            flat, probe = torch.ones_like(x[0]), _balanced(d).to(x)
            zeros, ones, made = norm(torch.stack([0 * flat, 16 * flat, 16 * probe]).to(kind)).float()
            weight, bias = (made - zeros) / probe, zeros
            centred = bool(torch.linalg.vector_norm(ones - bias) < 0.5 * torch.linalg.vector_norm(weight))
        shaped = weight * (x - x.mean(1, keepdim=True) if centred else x)
        wanted = out - bias
        fitted = (shaped * wanted).sum(1) / shaped.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)
        error = torch.linalg.vector_norm(fitted[:, None] * shaped - wanted, dim=1)
        bound = TOLERANCE.get(kind, HALF_TOLERANCE) * torch.linalg.vector_norm(out, dim=1)
        if not bool((error <= bound).all()):
            kinds = "a norm that scales its input" if norm is not None else "the FFN's own output times a number"
            raise ModelError(f"expected {kinds} at {what}, found something else: contributions cannot be told apart")
        return cls(fitted[:, None] * weight, centred, bias)

    def pulled(self, g: Float[Tensor, "k n d"]) -> Float[Tensor, "k n d"]:
        """The vectors that read the norm's output, as vectors that read the same off its input."""
        g = g * self.scale
        return g - g.mean(-1, keepdim=True) if self.centred else g

    def constant(self, g: Float[Tensor, "k n d"]) -> Float[Tensor, "k n"]:
        """The part of the bias alone in each readout."""
        return g @ self.bias


def _balanced(d: int) -> Float[Tensor, " d"]:
    """A vector of mean zero without a zero in it.

    >>> _balanced(5).tolist()
    [1.0, -1.0, 1.0, 1.0, -2.0]
    """
    found = torch.ones(d)
    found[1::2] = -1
    if d % 2:
        found[-3:] = torch.tensor([1.0, 1.0, -2.0])
    return found
