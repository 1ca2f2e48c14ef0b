"""Outvoted memories: active cells that promise the true next token, in layers whose sum says something else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ffmem.live.capture import Flow
from ffmem.live.contributions import contributions
from ffmem.model.memories import MemoryModel
from ffmem.model.vocabulary import Vocabulary

PROBES = 256
"""Tokens that a promised one has to beat before a value is projected onto the whole vocabulary."""
SLACK = 0.02
"""Relative difference of scores that is left to the full projection."""


@dataclass(frozen=True)
class Vote:
    """A cell and its parts of the true token's scores."""

    cell: int
    coefficient: float
    parts: tuple[float, ...]


@dataclass(frozen=True)
class Votes:
    """The cells of one layer, at one position, for and against the true next token."""

    layer: int
    row: int
    promised: tuple[Vote, ...]
    suppressed: tuple[Vote, ...]


@torch.inference_mode()
def outvoted(
    model: MemoryModel,
    flows: list[Flow],
    truth: Int[Tensor, " n"],
    said: Int[Tensor, "layer n"],
    *,
    cells: int,
    of: str,
) -> list[Votes]:
    """Every layer and position in which the layer's y (`said`) does not put the true token first and some cell does.

    A truth of -1 is not known. The cells that promise and those that suppress are the first `cells` by contribution.
    """
    chosen: dict[int, list[tuple[int, int]]] = {}
    for layer, flow in enumerate(flows, 1):
        rows = ((truth >= 0) & (said[layer - 1] != truth)).nonzero()[:, 0]
        found = _promising(model, layer, flow, rows, truth[rows])
        if found:
            chosen[layer] = found
    if not chosen:
        return []
    rows = torch.tensor(sorted({row for pairs in chosen.values() for row, _ in pairs}))
    place = {row: at for at, row in enumerate(rows.tolist())}
    votes: list[Votes] = []

    def visit(layer: int, parts: Float[Tensor, "k n cells"]) -> None:
        for row in sorted({row for row, _ in chosen.get(layer, [])}):
            own, m = parts[:, place[row]], flows[layer - 1].m[row]
            total = own.sum(0)
            promised = sorted((cell for at, cell in chosen[layer] if at == row), key=lambda cell: -float(total[cell]))
            lowest = total.topk(min(cells, len(total)), largest=False).indices.tolist()
            sides = (promised[:cells], [cell for cell in lowest if total[cell] < 0])
            for_it, against = (
                tuple(Vote(cell, float(m[cell]), tuple(own[:, cell].tolist())) for cell in side) for side in sides
            )
            votes.append(Votes(layer, row, for_it, against))

    contributions(model, [flow.at(rows.to(flow.m.device)) for flow in flows], truth[rows], cells=1, of=of, visit=visit)
    return sorted(votes, key=lambda one: (one.row, one.layer))


def _promising(
    model: MemoryModel, layer: int, flow: Flow, rows: Int[Tensor, " rows"], truth: Int[Tensor, " rows"]
) -> list[tuple[int, int]]:
    """(position, cell) of active cells whose value, with the sign of the coefficient, puts the position's token first."""
    m = flow.m[rows.to(flow.m.device)]
    active = (m != 0).any(0).nonzero()[:, 0]
    values = model.values(layer)[active]
    found: list[tuple[int, int]] = []
    for sign in (1, -1):
        likely = _likely(model.vocabulary, sign * values, truth) & (sign * m[:, active] > 0).T
        some = likely.any(1).nonzero()[:, 0]
        if len(some):
            top = model.vocabulary.best(sign * values[some])[1].to(likely.device)
            pairs = (likely[some] & (top[:, None] == truth.to(top.device))).nonzero().tolist()
            found += [(int(rows[at]), int(active[some[cell]])) for cell, at in pairs]
    return found


def _likely(vocabulary: Vocabulary, values: Float[Tensor, "cells d"], truth: Int[Tensor, " n"]) -> Bool[Tensor, "cells n"]:
    """Whether a value may put a token first: none of some tokens in the same softmax scores higher. Never a false no."""
    first, *others = vocabulary.readouts(torch.arange(min(PROBES, vocabulary.size)))
    # A word of a tail has less than its band's score, so it is no measure for others.
    whole = torch.stack([(other.vectors == 0).all(1) for other in others]).all(0) if others else slice(None)
    probes, wanted = first.vectors[whole].to(values.device), vocabulary.readouts(truth)[0]
    own = values.float() @ wanted.vectors.to(values.device).T + wanted.bias.to(values.device)
    best = (values.float() @ probes.T + first.bias[whole].to(values.device)).amax(1, keepdim=True)
    return own >= best - SLACK * (best.abs() + own.abs())
