"""The grid: what every layer says at every position of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.live.capture import Flow
from ffmem.live.contributions import contributions
from ffmem.live.place import Standing, case_of, plain
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import token_texts
from ffmem.run.reader import Said


@dataclass(frozen=True)
class Tile:
    """One layer at one position."""

    r: Said
    y: Said
    o: Said
    case: str
    final: Standing
    """How o stands to what the model says at this position."""
    target: Standing | None
    attention: float
    """Signed direct contribution to the target's logit, else to that of what the model says here."""
    ffn: float
    """The same of all cells and the value bias."""


@dataclass(frozen=True)
class Grid:
    """A row a layer, the first layer first; a column a position."""

    tokens: tuple[str, ...]
    rows: tuple[tuple[Tile, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        return plain(self)


@torch.inference_mode()
def grid_of(model: MemoryModel, flows: list[Flow], tokens: tuple[str, ...], target: int | None, of: str) -> Grid:
    """Read the grid off flows that were captured at every token of a prompt."""
    vocabulary = model.vocabulary
    last = vocabulary.best(flows[-1].after, norm=True)[1]
    wanted = last if target is None else torch.full_like(last, target)
    parts = contributions(model, flows, wanted, cells=1, of=of)
    ids: list[dict[str, Tensor]] = []
    probabilities: list[dict[str, Tensor]] = []
    standings: list[tuple[list[Standing], list[Standing | None]]] = []
    for layer, flow in enumerate(flows, 1):
        judged = vocabulary.score_token(flow.after, last, norm=True)
        top, likely = {"o": judged.top}, {"o": judged.top_log_prob.exp()}
        for name, h in (("r", flow.r), ("y", flow.y)):
            log_prob, top[name] = vocabulary.best(model.after_post_norm(h, layer), norm=True)
            likely[name] = log_prob.exp()
        ids.append(top)
        probabilities.append(likely)
        own = standing(judged.log_prob, judged.rank)
        theirs: list[Standing | None] = [None] * len(own)
        if target is not None:
            aim = vocabulary.score_token(flow.after, wanted, norm=True)
            theirs = [*standing(aim.log_prob, aim.rank)]
        standings.append((own, theirs))
    distinct = torch.unique(torch.stack([one for top in ids for one in top.values()])).tolist()
    texts = dict(zip(distinct, token_texts(model, distinct), strict=True))
    rows = []
    for top, likely, (own, theirs), share in zip(ids, probabilities, standings, parts.layers, strict=True):
        said = {
            name: [Said(texts[id], id, p) for id, p in zip(top[name].tolist(), likely[name].tolist(), strict=True)]
            for name in ("r", "y", "o")
        }
        attention, ffn = share.attention.sum(0).tolist(), (share.cells + share.value_bias).sum(0).tolist()
        columns = zip(said["r"], said["y"], said["o"], own, theirs, attention, ffn, strict=True)
        rows.append(tuple(Tile(r, y, o, case_of(r.id, y.id, o.id), *rest) for r, y, o, *rest in columns))
    return Grid(tokens, tuple(rows))


def standing(log_prob: Tensor, rank: Int[Tensor, " n"]) -> list[Standing]:
    return [Standing(p, place) for p, place in zip(log_prob.exp().tolist(), rank.tolist(), strict=True)]
