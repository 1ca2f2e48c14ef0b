"""Places read off captured flows: predictions of every layer, contributions to a token, outvoted memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.cells import Cell
from ffmem.live.capture import Flow
from ffmem.live.contributions import Contributions, Largest, contributions, frozen_norms
from ffmem.live.grid import standing
from ffmem.live.known import Known
from ffmem.live.outvoted import Vote, Votes, outvoted
from ffmem.live.place import Amount, CellPart, LayerTrace, Outvoted, Place, Reading, Standing, amount, case_of
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import token_texts
from ffmem.run.reader import Said

PREDICTIONS = 5
"""Tokens that are kept of what r, y and o say."""


@dataclass(frozen=True)
class Question:
    """What is asked about some positions of a prompt."""

    positions: Sequence[int]
    prefixes: Sequence[str]
    truth: Int[Tensor, " n"]
    """The token that follows each; -1 where none is known."""
    target: int | None
    cells: int
    of: str


class _Reader:
    """The predictions of r, y and o of all layers at n positions: every vector is projected once a question."""

    def __init__(self, model: MemoryModel, flows: list[Flow], target: int | None) -> None:
        vocabulary = model.vocabulary
        self.model, self.n = model, len(flows[0].r)
        where = flows[-1].after.device
        h = torch.cat(
            [
                vectors.to(where)
                for layer, flow in enumerate(flows, 1)
                for vectors in (model.after_post_norm(flow.r, layer), model.after_post_norm(flow.y, layer), flow.after)
            ]
        )
        self.final = vocabulary.best(flows[-1].after, norm=True)[1]
        self.wanted = self.final if target is None else torch.full_like(self.final, target)
        judged = vocabulary.score_token(h, self.final.repeat(3 * model.layers), norm=True)
        self.first = self._shaped(judged.top)
        self.final_standing = standing(judged.log_prob, judged.rank)
        self.target_standing: list[Standing | None] = [None] * len(h)
        if target is not None:
            judged = vocabulary.score_token(h, self.wanted.repeat(3 * model.layers), norm=True)
            self.target_standing = [*standing(judged.log_prob, judged.rank)]
        log_probs, ids = vocabulary.top(h, PREDICTIONS, norm=True)
        self.top = [
            list(zip(row, values, strict=True)) for row, values in zip(ids.tolist(), log_probs.exp().tolist(), strict=True)
        ]
        distinct = sorted({id for row in self.top for id, _ in row})
        self.texts = dict(zip(distinct, token_texts(model, distinct), strict=True))

    def _shaped(self, found: Tensor) -> Int[Tensor, "layer 3 n"]:
        return found.reshape(self.model.layers, 3, self.n).cpu()

    def reading(self, layer: int, which: int, row: int) -> Reading:
        at = ((layer - 1) * 3 + which) * self.n + row
        said = tuple(Said(self.texts[id], id, p) for id, p in self.top[at])
        return Reading(said, self.final_standing[at], self.target_standing[at])

    def case(self, layer: int, row: int) -> str:
        return case_of(*self.first[layer - 1, :, row].tolist())


@torch.inference_mode()
def read_places(model: MemoryModel, flows: list[Flow], question: Question, known: Known) -> list[Place]:
    """Every asked position in full; flows have a row for each of them."""
    reader = _Reader(model, flows, question.target)
    parts = contributions(model, flows, reader.wanted, cells=question.cells, of=question.of)
    truth = question.truth
    votes = outvoted(model, flows, truth, reader.first[:, 1], cells=question.cells, of=question.of)
    judged = model.vocabulary.score_token(flows[-1].after, reader.wanted, norm=True)
    following = model.vocabulary.score_token(flows[-1].after, truth.clamp(min=0), norm=True)
    listed = [_listed(parts, row, question.cells) for row in range(reader.n)]
    known.prepare((cell, m) for sides in listed for side in sides for cell, m, _ in side)
    known.prepare(
        (Cell(one.layer, vote.cell), vote.coefficient) for one in votes for vote in (*one.promised, *one.suppressed)
    )
    total = sum(model.cells)
    places = []
    for row in range(reader.n):
        promoting, suppressing = (tuple(_cell(known, parts.scores, *one) for one in side) for side in listed[row])
        layers = tuple(_layer(reader, parts, layer, row, (*promoting, *suppressing)) for layer in range(1, model.layers + 1))
        error, whole = _error(parts, row, question.of), question.of == "output"
        wanted, next_id = int(reader.wanted[row]), int(truth[row])
        places.append(
            Place(
                position=question.positions[row],
                prefix=question.prefixes[row],
                next=None if next_id < 0 else _said(model, next_id, following.log_prob[row]),
                final=_said(model, int(reader.final[row]), judged.top_log_prob[row]),
                token=_said(model, wanted, judged.log_prob[row]),
                rank=int(judged.rank[row]),
                of=question.of,
                layers=layers,
                embedding=_amount(parts.embedding, row, parts.scores) if whole else None,
                norm_bias=_amount(parts.norm_bias, row, parts.scores) if whole else None,
                unembedding_bias=_amount(parts.unembedding_bias, row, parts.scores),
                logit=_amount(parts.score, row, parts.scores),
                error=error,
                promoting=promoting,
                suppressing=suppressing,
                rest=_summed([layer.rest for layer in layers]) if whole else None,
                rest_cells=total - len(promoting) - len(suppressing),
                frozen=frozen_norms(model),
                outvoted=tuple(_outvoted(known, reader, parts.scores, one) for one in votes if one.row == row),
            )
        )
    return places


def _listed(parts: Contributions, row: int, count: int) -> list[list[tuple[Cell, float, list[float]]]]:
    """The cells of all layers that promote most and suppress most at a position: (cell, coefficient, parts)."""
    sides = []
    for name, sign in (("promoting", 1), ("suppressing", -1)):
        found = []
        for layer, share in enumerate(parts.layers, 1):
            side: Largest = getattr(share, name)
            columns = zip(
                side.index[row].tolist(), side.coefficient[row].tolist(), side.parts[:, row].T.tolist(), strict=True
            )
            found += [(Cell(layer, index), m, scores) for index, m, scores in columns if sign * sum(scores) > 0]
        found.sort(key=lambda one: (-sign * sum(one[2]), one[0]))
        sides.append(found[:count])
    return sides


def _cell(known: Known, names: tuple[str, ...], cell: Cell, coefficient: float, parts: Sequence[float]) -> CellPart:
    return CellPart(
        cell, coefficient, amount(parts, names), known.value(cell, coefficient), known.trigger(cell, coefficient)
    )


def _layer(reader: _Reader, parts: Contributions, layer: int, row: int, cells: tuple[CellPart, ...]) -> LayerTrace:
    share, names = parts.layers[layer - 1], parts.scores
    before, attention, all_cells, value_bias, norm_bias = (
        _amount(tensor, row, names)
        for tensor in (share.before, share.attention, share.cells, share.value_bias, share.norm_bias)
    )
    ffn = _summed([all_cells, value_bias])
    sizes = abs(attention.total), abs(ffn.total)
    listed = [one.contribution for one in cells if one.cell.layer == layer]
    rest = [all_cells, *(Amount(-one.total, {name: -part for name, part in one.scores.items()}) for one in listed)]
    return LayerTrace(
        layer=layer,
        r=reader.reading(layer, 0, row),
        y=reader.reading(layer, 1, row),
        o=reader.reading(layer, 2, row),
        case=reader.case(layer, row),
        before=before,
        attention=attention,
        ffn=ffn,
        attention_share=sizes[0] / sum(sizes) if any(sizes) else 0.0,
        cells=all_cells,
        rest=_summed(rest),
        value_bias=value_bias,
        norm_bias=norm_bias,
        score=None if share.score is None else _amount(share.score, row, names),
    )


def _outvoted(known: Known, reader: _Reader, names: tuple[str, ...], votes: Votes) -> Outvoted:
    def cells(side: tuple[Vote, ...]) -> tuple[CellPart, ...]:
        return tuple(_cell(known, names, Cell(votes.layer, one.cell), one.coefficient, one.parts) for one in side)

    said = reader.reading(votes.layer, 1, votes.row).top[0]
    return Outvoted(votes.layer, said, cells(votes.promised), cells(votes.suppressed))


def _error(parts: Contributions, row: int, of: str) -> float:
    """By how much the sums miss what they add up to, at worst."""
    if of == "output":
        return float((parts.total - parts.score)[:, row].sum().abs())
    misses = []
    for share in parts.layers:
        assert share.score is not None
        added = share.before + share.attention + share.cells + share.value_bias + share.norm_bias + parts.unembedding_bias
        misses.append(float((added - share.score)[:, row].sum().abs()))
    return max(misses)


def _said(model: MemoryModel, id: int, log_prob: Tensor) -> Said:
    return Said(token_texts(model, [id])[0], id, float(log_prob.exp()))


def _amount(tensor: Tensor, row: int, names: tuple[str, ...]) -> Amount:
    return amount(tensor[:, row].tolist(), names)


def _summed(amounts: Sequence[Amount]) -> Amount:
    names = amounts[0].scores
    return Amount(sum(one.total for one in amounts), {name: sum(one.scores[name] for one in amounts) for name in names})
