"""A trace as plain data: the numbers and texts of a position and of the grid, and what of them is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ffmem.cells import Cell, Sign, Trigger
from ffmem.live.blocks import WIDTH, Block, Column, HeatMap, Shown, Table, Text, Tile
from ffmem.run.pages import trigger_text
from ffmem.run.reader import TokenProbability
from ffmem.text import ending, shown_token, visible

SHOWN_VOTES = 3
"""The number of cells for and against a token that a line has room for."""


@dataclass(frozen=True)
class LogitPart:
    """A signed part of a token's logit. In an adaptive softmax it is in two scores, whose sum is the total."""

    total: float
    scores: dict[str, float]
    """The part of each score by its name; empty for a plain softmax."""

    @classmethod
    def of(cls, parts: Sequence[float], names: Sequence[str]) -> LogitPart:
        """A part from its share in each score; the names are dropped for a plain softmax, which has one score."""
        return cls(sum(parts), dict(zip(names, parts, strict=True)) if len(names) > 1 else {})

    def as_dict(self) -> dict[str, float]:
        """The total, and each score's share beside it, as a dict for JSON."""
        return {"total": self.total} | self.scores

    def __add__(self, other: LogitPart) -> LogitPart:
        return LogitPart(self.total + other.total, {name: one + other.scores[name] for name, one in self.scores.items()})

    def __sub__(self, other: LogitPart) -> LogitPart:
        return LogitPart(self.total - other.total, {name: one - other.scores[name] for name, one in self.scores.items()})


@dataclass(frozen=True)
class TokenRank:
    """The probability and the rank that a vector gives to a certain token."""

    probability: float
    rank: int
    """The number of tokens that are at least as likely, itself counted."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of r, y or o of a layer if it were the last word, behind the norms that follow."""

    top: tuple[TokenProbability, ...]
    """The likeliest tokens, the likeliest first."""
    final: TokenRank
    """The rank of the token that the model itself predicts."""
    target: TokenRank | None
    """The rank of the target, None where no target is followed."""


@dataclass(frozen=True)
class CellPart:
    """A cell that matters at a position, and what is known of it."""

    cell: Cell
    coefficient: float
    contribution: LogitPart
    value: tuple[TokenProbability, ...]
    """The tokens that the cell's value promotes most; with a negative coefficient, those of -v, which is what it adds."""
    trigger: Trigger | None
    """The cell's first trigger in a run (with a negative coefficient its first negative one), None without one."""
    label: str | None
    sign: Sign
    """The sign of the coefficient, which says whether `value` is of v or of -v."""


@dataclass(frozen=True)
class LayerTrace:
    """A layer at one position: its predictions, and its parts of the token's logit."""

    layer: int
    r: Prediction
    y: Prediction
    o: Prediction
    case: str
    """The case of the paper's Fig 11: residual, ffn, agreement or composition."""
    before: LogitPart
    """The part of the stream that enters the layer."""
    attention: LogitPart
    ffn: LogitPart
    """The part of all cells and the value bias."""
    attention_share: float
    """The share of attention, |attention| / (|attention| + |ffn|)."""
    cells: LogitPart
    """The part of all cells of the layer."""
    rest: LogitPart
    """The part of those cells of the layer that are not listed as promoting or suppressing."""
    value_bias: LogitPart
    norm_bias: LogitPart
    score: LogitPart | None
    """The score that the layer's own output gives the token with `of="layer"`, else None."""


@dataclass(frozen=True)
class Outvoted:
    """A layer in which memories promise the true next token, and the layer's sum does not."""

    layer: int
    said: TokenProbability
    """The token that the layer's y puts first."""
    cells: tuple[CellPart, ...]
    """The active cells whose value, with the sign of the coefficient, puts the true token first; contributions are to it."""
    suppressors: tuple[CellPart, ...]
    """The cells of the layer with the most negative contributions to the true token."""


@dataclass(frozen=True, repr=False)
class PositionTrace(Shown):
    """A position in full: how the layers come to a prediction, and which parts of the network make one token's logit."""

    position: int
    """The index in the prompt, from 0, of the last token that the model has read."""
    prefix: str
    next: TokenProbability | None
    """The token that follows in the prompt, or the target at its end, and what the model gives it."""
    final: TokenProbability
    """The token that the model itself predicts."""
    token: TokenProbability
    """The token that contributions are of: the target, else the model's own prediction."""
    rank: int
    """The rank of that token in the model's prediction, from 1."""
    of: str
    layers: tuple[LayerTrace, ...]
    embedding: LogitPart | None
    norm_bias: LogitPart | None
    unembedding_bias: LogitPart
    logit: LogitPart
    """The token's logit before any soft cap; in an adaptive softmax, its score or scores before they are normalised."""
    error: float
    """The rounding error: by how much the parts miss the logit."""
    promoting: tuple[CellPart, ...]
    suppressing: tuple[CellPart, ...]
    rest: LogitPart | None
    """The part of all cells that are not listed, of all layers; None with `of="layer"`, where each layer has its own."""
    rest_cells: int
    frozen: tuple[str, ...]
    """Norms whose scales are held at their actual values; without any, a cell's part is m·(v·e)."""
    outvoted: tuple[Outvoted, ...]

    def blocks(self) -> list[Block]:
        """The blocks shown: the prediction, the layers, what the logit is made of, the cells, and those outvoted."""
        found: list[Block] = [Text(self._heading()), self._layer_table(), Text(self._sum())]
        found += [_cell_table("promoting", self.promoting), _cell_table("suppressing", self.suppressing)]
        if self.rest is not None:
            found.append(Text([f"the other {self.rest_cells:,} cells add {_signed(self.rest)}"]))
        if self.outvoted and self.next is not None:
            found.append(Text(self._outvoted(shown_token(self.next.token))))
        return found

    def _heading(self) -> list[str]:
        words = [f"predicts {_text(self.final)}"]
        if self.next is not None:
            words.append(f"next {_text(self.next)}")
        if self.token.id not in (self.final.id, None if self.next is None else self.next.id):
            words.append(f"target {_text(self.token)}, rank {self.rank:,}")
        title = f"position {self.position}: "
        return [title + ending(visible(self.prefix), WIDTH - len(title)), "  ".join(words)]

    def _layer_table(self) -> Table:
        name = shown_token(self.token.token)
        columns = [Column("layer", 5, right=True, gap=0), *(Column(name, 15) for name in ("residual", "ffn", "output"))]
        columns += [Column("case", 11), Column("p", 7, right=True), Column("rank", 7, right=True)]
        columns += [Column("attention", 9, right=True), Column("ffn adds", 8, right=True)]
        rows = []
        for layer in self.layers:
            given = layer.o.target or layer.o.final
            tokens = [_text(one.top[0]) for one in (layer.r, layer.y, layer.o)]
            numbers = [f"{given.probability:.2g}", _count(given.rank), _signed(layer.attention), _signed(layer.ffn)]
            rows.append([str(layer.layer), *tokens, layer.case, *numbers])
        return Table(columns, rows, f"residual + ffn = output; the rank of {name} there, and what its logit gets")

    def _sum(self) -> list[str]:
        """Lines on the parts of the logit and on the norms that are held at their scales."""
        name = shown_token(self.token.token)
        if self.embedding is None or self.norm_bias is None:
            lines = [f"contributions are to the logit of {name} in each layer's own output"]
        else:
            parts = {"embedding": self.embedding.total}
            parts["attention"] = sum(layer.attention.total for layer in self.layers)
            parts["cells"] = sum(layer.cells.total for layer in self.layers)
            parts["value bias"] = sum(layer.value_bias.total for layer in self.layers)
            parts |= {"norm bias": self.norm_bias.total, "unembedding bias": self.unembedding_bias.total}
            shown = "  ".join(f"{part} {size:+.3g}" for part, size in parts.items() if size)
            lines = [f"{name} has {self.logit.total:.4g} = {shown}"]
        if self.logit.scores:
            scores = " and ".join(f"{size:.4g} in the {score}" for score, size in self.logit.scores.items())
            lines.append(f"an adaptive softmax: {scores}, before each is normalised")
        how = f"held at their actual scales: {', '.join(self.frozen)}" if self.frozen else "no norm in the way: exact"
        return [*lines, how]

    def _outvoted(self, name: str) -> list[str]:
        lines = [f"outvoted: cells whose value puts {name} first, in layers whose FFN does not"]
        for one in self.outvoted:
            lines.append(f"  layer {one.layer} says {_text(one.said)}")
            lines += [f"    for {name}: {_votes(one.cells)}", f"    against it: {_votes(one.suppressors)}"]
        return lines


@dataclass(frozen=True)
class GridTile:
    """A layer at one position as the grid has it."""

    r: TokenProbability
    y: TokenProbability
    o: TokenProbability
    case: str
    final: TokenRank
    """The rank that o gives to the token that the model predicts at this position."""
    target: TokenRank | None
    attention: float
    """The signed direct contribution of attention to the logit of the target, else of the token predicted here."""
    ffn: float
    """The same contribution of all cells and the value bias together."""


@dataclass(frozen=True, repr=False)
class Grid(Shown):
    """The predictions of every layer at every position: a row a layer, the first layer first; a column a position."""

    tokens: tuple[str, ...]
    rows: tuple[tuple[GridTile, ...], ...]

    def blocks(self) -> list[Block]:
        """A heat map with the last layer on top; a tile is what o says, the darker the likelier; all else is in its hint."""
        rows = [(str(layer), [_tile(layer, one) for one in tiles]) for layer, tiles in enumerate(self.rows, 1)]
        return [HeatMap("layer", [visible(token) for token in self.tokens], rows[::-1])]


def case_of(r: int, y: int, o: int) -> str:
    """The name in Fig 11 for the top tokens of a layer's r, y and o.

    >>> case_of(5, 5, 5), case_of(5, 6, 5), case_of(5, 6, 6), case_of(5, 6, 7)
    ('agreement', 'residual', 'ffn', 'composition')
    """
    if o == r:
        return "agreement" if o == y else "residual"
    return "ffn" if o == y else "composition"


def _cell_table(title: str, cells: Sequence[CellPart]) -> Block:
    """Cells with what they add, what that says, and their best trigger."""
    if not cells:
        return Text([f"{title}: no cell"])
    turned = ", or −v where m is negative," if any(one.sign == "-" for one in cells) else ""
    z = ", with z" if any(token.z is not None for one in cells for token in one.value) else ""
    columns = [Column(title, 12, gap=0), Column("m", 8, right=True), Column("adds", 8, right=True)]
    columns += [Column(f"what v{turned} promotes{z}", gap=2), Column("best trigger", gap=34, below=True)]
    rows = []
    for one in cells:
        side = "−v" if one.sign == "-" else " v"
        tokens = [
            f"{shown_token(token.token)} {token.z:.1f}" if token.z is not None else _text(token) for token in one.value
        ]
        value = [f"{side} {tokens[0]}", *tokens[1:]] if tokens else [side]
        trigger = "" if one.trigger is None else trigger_text(one.trigger, WIDTH)
        rows.append([f"  {one.cell}", f"{one.coefficient:.3g}", _signed(one.contribution), value, trigger])
    return Table(columns, rows)


def _votes(cells: Sequence[CellPart]) -> str:
    shown = ", ".join(f"{one.cell} {_signed(one.contribution)}" for one in cells[:SHOWN_VOTES])
    more = len(cells) - SHOWN_VOTES
    return (shown or "none") + (f" and {more} more" if more > 0 else "")


def _tile(layer: int, tile: GridTile) -> Tile:
    lines = [f"layer {layer}, {tile.case}", f"residual {_text(tile.r)}", f"ffn {_text(tile.y)}", f"output {_text(tile.o)}"]
    lines.append(f"final token {tile.final.probability:.2g}, rank {tile.final.rank:,}")
    if tile.target is not None:
        lines.append(f"target {tile.target.probability:.2g}, rank {tile.target.rank:,}")
    lines.append(f"adds to the logit: attention {tile.attention:+.3g}, ffn {tile.ffn:+.3g}")
    return Tile(visible(tile.o.token), tile.o.probability, "\n".join(lines))


def _text(token: TokenProbability) -> str:
    return f"{shown_token(token.token)} {token.probability:.2g}"


def _signed(part: LogitPart) -> str:
    """A signed part in at most eight columns: a logit's thousandths are enough for the eye."""
    return f"{part.total:+.3f}" if abs(part.total) < 100 else f"{part.total:+.2e}"


def _count(rank: int) -> str:
    """A count in at most seven columns.

    >>> _count(283429), _count(1234567)
    ('283,429', '1.2e+06')
    """
    return f"{rank:,}" if rank < 10**6 else f"{rank:.1e}"
