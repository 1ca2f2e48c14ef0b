"""Reading a trace: from the tensors of a forward to the plain data of positions and of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.cells import Cell, Sign, Trigger, sign_of
from ffmem.live.contributions import CellContribution, Contributions, Flow, contributions, frozen_norms
from ffmem.live.outvoted import outvoted
from ffmem.live.position import (
    CellPart,
    GridTile,
    LayerTrace,
    LogitPart,
    Outvoted,
    PositionTrace,
    Prediction,
    TokenRank,
    case_of,
)
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import token_texts
from ffmem.run.reader import Index, TokenProbability

SHOWN = 5
"""The number of tokens kept of each prediction of r, y and o, and of a value's promoted tokens."""


@torch.inference_mode()
def read_positions(
    model: MemoryModel,
    flows: list[Flow],
    ids: Sequence[int],
    positions: Sequence[int],
    *,
    target: int | None,
    cells: int,
    of: str,
    index: Index | None,
) -> list[PositionTrace]:
    """Some positions of a prompt (`ids`) in full; flows have a row for each of them."""
    vocabulary, after = model.vocabulary, flows[-1].after
    final = vocabulary.best(after, norm=True)[1]
    wanted = final if target is None else torch.full_like(final, target)
    following = [*ids[1:], -1 if target is None else target]
    truth = torch.tensor([following[position] for position in positions])
    predictions = _predictions(model, flows, final, target)
    parts = contributions(model, flows, wanted, of=of)
    y_top = torch.tensor([[y.top[0].id for _, y, _ in layers] for layers in predictions])
    votes = outvoted(model, flows, truth, y_top, cells=cells, of=of)
    listed = [[_largest(parts, row, cells, sign) for sign in (1, -1)] for row in range(len(positions))]
    every = [one for both in listed for side in both for one in side]
    every += [one for found in votes.values() for vote in found for one in (*vote.promised, *vote.suppressed)]
    known = _known(model, index, {(one.cell, sign_of(one.coefficient)) for one in every})
    errors = _errors(parts, of)
    target_text = "" if target is None else token_texts(model, [target])[0]
    nexts = _as_tokens(model, vocabulary.log_prob(after, truth.clamp(min=0), norm=True), truth.clamp(min=0))

    def described(cells: Sequence[CellContribution]) -> tuple[CellPart, ...]:
        return tuple(_cell_part(one, parts.scores, known) for one in cells)

    found = []
    for row, position in enumerate(positions):
        promoting, suppressing = map(described, listed[row])
        layers = _layers(parts, row, predictions[row], (*promoting, *suppressing))
        last, whole = layers[-1].o, of == "output"
        token, rank = last.top[0], last.final.rank
        if last.target is not None and target is not None:
            token, rank = TokenProbability(target_text, target, last.target.probability), last.target.rank
        found.append(
            PositionTrace(
                position=position,
                prefix=model.tokenizer.decode(list(ids[: position + 1])),
                next=nexts[row] if truth[row] >= 0 else None,
                final=last.top[0],
                token=token,
                rank=rank,
                of=of,
                layers=layers,
                embedding=_part(parts, parts.embedding, row) if whole else None,
                norm_bias=_part(parts, parts.norm_bias, row) if whole else None,
                unembedding_bias=_part(parts, parts.unembedding_bias, row),
                logit=_part(parts, parts.score, row),
                error=errors[row],
                promoting=promoting,
                suppressing=suppressing,
                rest=sum((layer.rest for layer in layers[1:]), layers[0].rest) if whole else None,
                rest_cells=sum(model.cells) - len(promoting) - len(suppressing),
                frozen=frozen_norms(model),
                outvoted=tuple(
                    Outvoted(
                        vote.layer,
                        predictions[row][vote.layer - 1][1].top[0],
                        described(vote.promised),
                        described(vote.suppressed),
                    )
                    for vote in votes.get(row, [])
                ),
            )
        )
    return found


@torch.inference_mode()
def read_grid(model: MemoryModel, flows: list[Flow], target: int | None, of: str) -> list[list[GridTile]]:
    """The tiles of every layer at the positions that flows have a row for: a list a position, a tile a layer."""
    vocabulary = model.vocabulary
    final = vocabulary.best(flows[-1].after, norm=True)[1]
    wanted = final if target is None else torch.full_like(final, target)
    parts = contributions(model, flows, wanted, of=of)
    columns: list[list[GridTile]] = [[] for _ in range(len(final))]
    for layer, (flow, share) in enumerate(zip(flows, parts.layers, strict=True), 1):
        r, y = (_as_tokens(model, *vocabulary.best(model.after_post_norm(h, layer), norm=True)) for h in (flow.r, flow.y))
        scored = vocabulary.score_token(flow.after, final, norm=True)
        o = _as_tokens(model, scored.top_log_prob, scored.top)
        ranks = _ranks(scored.log_prob, scored.rank)
        targets = [None] * len(o) if target is None else _token_ranks(model, flow.after, wanted)
        attention, ffn = share.attention.sum(0).tolist(), (share.all_cells + share.value_bias).sum(0).tolist()
        rows = zip(columns, r, y, o, ranks, targets, attention, ffn, strict=True)
        for column, in_r, in_y, in_o, *rest in rows:
            column.append(GridTile(in_r, in_y, in_o, case_of(in_r.id, in_y.id, in_o.id), *rest))
    return columns


def _predictions(
    model: MemoryModel, flows: list[Flow], final: Int[Tensor, " n"], target: int | None
) -> list[list[tuple[Prediction, Prediction, Prediction]]]:
    """The predictions of r, y and o of every layer at every position: a list a position, an entry a layer."""
    h = torch.cat(
        [
            vectors.to(flows[-1].after.device)
            for layer, flow in enumerate(flows, 1)
            for vectors in (model.after_post_norm(flow.r, layer), model.after_post_norm(flow.y, layer), flow.after)
        ]
    )
    n = len(final)
    log_probs, ids = model.vocabulary.top(h, SHOWN, norm=True)
    top = _rows(_as_tokens(model, log_probs.flatten(), ids.flatten()), ids.shape[1])
    finals = _token_ranks(model, h, final.repeat(len(h) // n))
    targets = [None] * len(h) if target is None else _token_ranks(model, h, torch.full_like(ids[:, 0], target))
    every = [Prediction(*given) for given in zip(top, finals, targets, strict=True)]
    return [[(r, y, o) for r, y, o in _rows(every[row::n], 3)] for row in range(n)]


def _layers(
    parts: Contributions,
    row: int,
    predictions: list[tuple[Prediction, Prediction, Prediction]],
    listed: Sequence[CellPart],
) -> tuple[LayerTrace, ...]:
    """The trace of every layer at a position; `listed` are the cells that the position names."""
    found = []
    for layer, (share, (r, y, o)) in enumerate(zip(parts.layers, predictions, strict=True), 1):
        attention, cells, value_bias = (
            _part(parts, tensor, row) for tensor in (share.attention, share.all_cells, share.value_bias)
        )
        ffn, rest = cells + value_bias, cells
        for one in listed:
            rest = rest - one.contribution if one.cell.layer == layer else rest
        both = abs(attention.total) + abs(ffn.total)
        found.append(
            LayerTrace(
                layer=layer,
                r=r,
                y=y,
                o=o,
                case=case_of(r.top[0].id, y.top[0].id, o.top[0].id),
                before=_part(parts, share.before, row),
                attention=attention,
                ffn=ffn,
                attention_share=abs(attention.total) / both if both else 0.0,
                cells=cells,
                rest=rest,
                value_bias=value_bias,
                norm_bias=_part(parts, share.norm_bias, row),
                score=None if share.score is None else _part(parts, share.score, row),
            )
        )
    return tuple(found)


def _largest(parts: Contributions, row: int, count: int, sign: int) -> list[CellContribution]:
    """The cells of all layers that promote most (`sign` 1) or suppress most (-1) at a position, the largest first."""
    found = [one for layer in range(1, len(parts.layers) + 1) for one in parts.largest(layer, row, count, sign=sign)]
    return sorted(found, key=lambda one: (-sign * one.total, one.cell))[:count]


Known = dict[tuple[Cell, Sign], tuple[tuple[TokenProbability, ...], Trigger | None]]
"""The tokens that a cell promotes on one side of its coefficient, and its first trigger on that side (None if unknown)."""


def _known(model: MemoryModel, index: Index | None, cells: set[tuple[Cell, Sign]]) -> Known:
    """Look cells up in a run where it has them; what is not there is projected in one go, as the run's values were.

    At a negative coefficient that is always the model's own projection of -v: what a run has is both ends of v, and
    under a bias or an adaptive softmax the lower one, turned round, is not what -v promotes.
    """
    in_run = set() if index is None else {(cell, sign) for cell, sign in cells if cell.layer in index.layers}
    stored = {key for key in in_run if key[1] == "+"} if index is not None and index.has_values else set()
    values: dict[tuple[Cell, Sign], tuple[TokenProbability, ...]] = {}
    triggers: dict[tuple[Cell, Sign], Trigger | None] = {}
    for cell, sign in in_run:
        assert index is not None
        view = index[cell]
        triggers[cell, sign] = next(iter(view.negative_triggers if sign == "-" else view.triggers), None)
        if (cell, sign) in stored:
            values[cell, sign] = tuple(view.value.top(min(SHOWN, view.value.kept)))
    if live := sorted(cells - stored):
        vectors = [model.values(cell.layer)[cell.index].to(model.device) * (-1 if sign == "-" else 1) for cell, sign in live]
        norm = index is not None and index.manifest.values is not None and index.manifest.values.norm
        found = model.vocabulary.extremes(torch.stack(vectors), SHOWN, norm=norm)
        columns = (found.promoted_log_prob, found.promoted, found.promoted_z)
        tokens = _as_tokens(model, *(column.flatten() for column in columns))
        values |= zip(live, _rows(tokens, found.promoted.shape[1]), strict=True)
    return {key: (values[key], triggers.get(key)) for key in cells}


def _cell_part(one: CellContribution, scores: tuple[str, ...], known: Known) -> CellPart:
    sign = sign_of(one.coefficient)
    value, trigger = known[one.cell, sign]
    return CellPart(one.cell, one.coefficient, LogitPart.of(one.parts, scores), value, trigger, label=None, sign=sign)


def _errors(parts: Contributions, of: str) -> list[float]:
    """The largest error of the sums against what they add up to, at every position."""
    if of == "output":
        return (parts.total - parts.score).sum(0).abs().tolist()
    misses = [
        share.before + share.added + share.norm_bias + parts.unembedding_bias - share.score
        for share in parts.layers
        if share.score is not None
    ]
    return torch.stack(misses).sum(1).abs().amax(0).tolist()


def _part(parts: Contributions, tensor: Float[Tensor, "k n"], row: int) -> LogitPart:
    return LogitPart.of(tensor[:, row].tolist(), parts.scores)


def _as_tokens(
    model: MemoryModel, log_prob: Float[Tensor, " n"], ids: Int[Tensor, " n"], z: Float[Tensor, " n"] | None = None
) -> list[TokenProbability]:
    """Tokens with their texts and probabilities."""
    distinct = ids.unique().tolist()
    texts = dict(zip(distinct, token_texts(model, distinct), strict=True))
    zs = [None] * len(ids) if z is None else z.tolist()
    return [
        TokenProbability(texts[id], id, p, one) for id, p, one in zip(ids.tolist(), log_prob.exp().tolist(), zs, strict=True)
    ]


def _rows(flat: list[Any], width: int) -> list[tuple[Any, ...]]:
    """A list cut into rows of `width` items."""
    return [tuple(flat[at : at + width]) for at in range(0, len(flat), width)]


def _token_ranks(model: MemoryModel, h: Float[Tensor, "n d"], token: Int[Tensor, " n"]) -> list[TokenRank]:
    """The probability and rank that each vector gives to its token."""
    scored = model.vocabulary.score_token(h, token, norm=True)
    return _ranks(scored.log_prob, scored.rank)


def _ranks(log_prob: Float[Tensor, " n"], rank: Int[Tensor, " n"]) -> list[TokenRank]:
    return [TokenRank(p, found) for p, found in zip(log_prob.exp().tolist(), rank.tolist(), strict=True)]
