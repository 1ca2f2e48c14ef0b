"""A place: one position of a prompt, read in full. Plain data, without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from math import isfinite
from typing import Any

from ffmem.cells import Cell, Sign, Trigger, sign_of
from ffmem.live import trace_pages
from ffmem.run.reader import TokenProbability


@dataclass(frozen=True)
class Standing:
    """How a vector thinks of a given token."""

    probability: float
    rank: int
    """From 1."""


@dataclass(frozen=True)
class Reading:
    """What r, y or o of a layer says, behind the norms that follow."""

    top: tuple[TokenProbability, ...]
    final: Standing
    """of the model's own prediction"""
    target: Standing | None


@dataclass(frozen=True)
class Amount:
    """A signed part of a token's logit. Of an adaptive softmax it is in two scores, whose sum is the total."""

    total: float
    scores: dict[str, float]
    """Empty for a plain softmax."""


@dataclass(frozen=True)
class CellPart:
    """A cell that matters at a place, and what is known of it."""

    cell: Cell
    coefficient: float
    contribution: Amount
    value: tuple[TokenProbability, ...]
    """What the cell's value promotes most; with a negative coefficient, what -v does, which is what it adds."""
    trigger: Trigger | None = None
    """What fires the cell most, in a run (of a negative coefficient: what drives it furthest below zero)."""
    label: str | None = None
    sign: Sign = field(init=False)
    """Of the coefficient: whether `value` is what v says or what -v does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sign", sign_of(self.coefficient))


@dataclass(frozen=True)
class LayerTrace:
    """One layer at a place."""

    layer: int
    r: Reading
    y: Reading
    o: Reading
    case: str
    """of Fig 11: residual, ffn, agreement or composition"""
    before: Amount
    """What the stream that enters the layer contributes."""
    attention: Amount
    ffn: Amount
    """All cells and the value bias."""
    attention_share: float
    """|attention| / (|attention| + |ffn|)"""
    cells: Amount
    """All cells of the layer."""
    rest: Amount
    """Those cells of the layer that are not listed as promoting or suppressing."""
    value_bias: Amount
    norm_bias: Amount
    score: Amount | None
    """With `of="layer"`, what the layer's own output gives the token."""


@dataclass(frozen=True)
class Outvoted:
    """A layer in which memories promise the true next token, and the layer's sum does not."""

    layer: int
    said: TokenProbability
    """What the layer's y puts first."""
    cells: tuple[CellPart, ...]
    """Active cells whose value, with the sign of the coefficient, puts the true token first; contributions to it."""
    suppressors: tuple[CellPart, ...]
    """The cells of the layer with the most negative contributions to the true token."""


@dataclass(frozen=True)
class Place:
    """One position: how the layers come to a prediction, and which parts of the network make one token's logit."""

    position: int
    """In the prompt, from 0."""
    prefix: str
    next: TokenProbability | None
    """The token that follows in the prompt, or the target at its end, and what the model gives it."""
    final: TokenProbability
    """The model's own prediction."""
    token: TokenProbability
    """The token that contributions are of: the target, else the model's own prediction."""
    rank: int
    """Of that token in the model's prediction."""
    of: str
    layers: tuple[LayerTrace, ...]
    embedding: Amount | None
    norm_bias: Amount | None
    unembedding_bias: Amount
    logit: Amount
    """Before any soft cap; of an adaptive softmax, the token's score or scores before they are normalised."""
    error: float
    """By how much the parts miss the logit: rounding."""
    promoting: tuple[CellPart, ...]
    suppressing: tuple[CellPart, ...]
    rest: Amount | None
    """All cells that are not listed, of all layers; with `of="layer"` see the layers, whose sums are apart."""
    rest_cells: int
    frozen: tuple[str, ...]
    """Norms whose scales are held at their actual values; without any, a cell's part is m·(v·e)."""
    outvoted: tuple[Outvoted, ...]

    def as_dict(self) -> dict[str, Any]:
        return plain(self)

    def lines(self) -> list[str]:
        """For a terminal of 100 columns."""
        return trace_pages.place_lines(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        return trace_pages.place_page(self)


def amount(parts: Sequence[float], names: Sequence[str]) -> Amount:
    return Amount(sum(parts), dict(zip(names, parts, strict=True)) if len(names) > 1 else {})


def case_of(r: int, y: int, o: int) -> str:
    """Fig 11's name for the top tokens of a layer's r, y and o.

    >>> case_of(5, 5, 5), case_of(5, 6, 5), case_of(5, 6, 6), case_of(5, 6, 7)
    ('agreement', 'residual', 'ffn', 'composition')
    """
    if o == r:
        return "agreement" if o == y else "residual"
    return "ffn" if o == y else "composition"


def plain(value: Any) -> Any:
    """For JSON: numbers to six digits, what is not finite as None, a cell by its name.

    >>> plain(Amount(1 / 3, {}))
    {'total': 0.333333}
    """
    if isinstance(value, Cell):
        return str(value)
    if isinstance(value, Amount):
        return plain({"total": value.total} | value.scores)
    if isinstance(value, Trigger):
        return plain(value.as_dict())
    if isinstance(value, TokenProbability) and value.z is None:  # a prediction's, where only a value's tokens have one
        return plain({"token": value.token, "id": value.id, "probability": value.probability})
    if is_dataclass(value):
        return {part.name: plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else None
    return value
