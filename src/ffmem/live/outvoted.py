"""Outvoted memories: active cells that promise the true next token, in layers whose sum says something else."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ffmem.live.contributions import CellContribution, Flow, contributions
from ffmem.model.memories import MemoryModel
from ffmem.model.vocabulary import Vocabulary

PROBES = 256
"""The number of tokens that a promised one has to beat before a value is projected onto the whole vocabulary."""
SLACK = 0.02
"""The relative difference of scores that is left to the full projection."""


@dataclass(frozen=True)
class Votes:
    """The cells of one layer, at one position, for and against the true next token; contributions are to that token."""

    layer: int
    promised: list[CellContribution]
    suppressed: list[CellContribution]


@torch.inference_mode()
def outvoted(
    model: MemoryModel,
    flows: list[Flow],
    truth: Int[Tensor, " n"],
    y_top: Int[Tensor, "n layer"],
    *,
    cells: int,
    of: str,
) -> dict[int, list[Votes]]:
    """For each position, every layer whose y (`y_top`) does not put the true token first though an active cell's value does.

    A truth of -1 is not known. Of the cells that promise and those that suppress, the first `cells` are given.
    """
    promising: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for layer, flow in enumerate(flows, 1):
        rows = ((truth >= 0) & (y_top[:, layer - 1] != truth)).nonzero()[:, 0]
        for row, cell in _promising(model, layer, flow, rows, truth[rows]):
            promising[row][layer].append(cell)
    if not promising:
        return {}
    rows = torch.tensor(sorted(promising))
    parts = contributions(model, [flow.at(rows) for flow in flows], truth[rows], of=of)
    found: dict[int, list[Votes]] = {}
    for at, row in enumerate(rows.tolist()):
        found[row] = []
        for layer, indices in sorted(promising[row].items()):
            promised = parts.of_cells(layer, at, torch.tensor(indices))
            promised.sort(key=lambda one: (-one.total, one.cell))
            found[row].append(Votes(layer, promised[:cells], parts.largest(layer, at, cells, sign=-1)))
    return found


def _promising(
    model: MemoryModel, layer: int, flow: Flow, rows: Int[Tensor, " rows"], truth: Int[Tensor, " rows"]
) -> list[tuple[int, int]]:
    """The position and the cell of every active cell whose value, with the sign of the coefficient, puts the position's
    token first."""
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
    """Whether a value may put a token first: no probe in the same softmax scores higher. False is always right."""
    first, *others = vocabulary.readouts(torch.arange(min(PROBES, vocabulary.size)))
    # A word of a tail has less than its band's score, so it is no measure for others.
    whole = torch.stack([(other.vectors == 0).all(1) for other in others]).all(0) if others else slice(None)
    probes, wanted = first.vectors[whole].to(values.device), vocabulary.readouts(truth)[0]
    own = values.float() @ wanted.vectors.to(values.device).T + wanted.bias.to(values.device)
    best = (values.float() @ probes.T + first.bias[whole].to(values.device)).amax(1, keepdim=True)
    return own >= best - SLACK * (best.abs() + own.abs())
