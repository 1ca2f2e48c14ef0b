"""Controls: random cells of the same layers on which the same edit is about as large, to compare its effect with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.cells import Cell
from ffmem.live.edits import Edit, Operation
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index

NEAREST = 10
"""Cells of the nearest size that a control is drawn from, at least; twice the number of controls if that is more."""


Own = dict[Cell, tuple[Operation, ...]]
"""What happens to each edited cell, in order."""
Sizes = dict[tuple[int, tuple[Operation, ...]], Float[np.ndarray, " cells"]]
"""By layer and operations, for every cell of the layer."""


@dataclass(frozen=True)
class Control:
    """The same edits on other cells."""

    edits: list[Edit]
    cells: list[Cell]
    size: float
    """|Δm|·‖v‖: how far the edit moves what a cell adds to the stream. A mean over its cells and over the edited tokens
    that reach the prediction: up to its own position, and in the last layer no other."""


@dataclass(frozen=True)
class Controls:
    """Controls, and the size that they were to have."""

    size: float
    found: list[Control]


def draw_controls(
    model: MemoryModel,
    edits: Sequence[Edit],
    ids: Int[Tensor, "1 pos"],
    columns: Sequence[int],
    last: int,
    *,
    count: int,
    seed: int = 0,
    run: Index | None = None,
) -> Controls:
    """Draw `count` controls: for every edited cell another one of its layer, from those nearest in |Δm|·‖v‖.

    Δm is what the cell's edits, made on the candidate, change of its coefficient in these columns; so for `*2` and `=0`
    candidates are as large in |m|·‖v‖. The prediction is that of column `last`. Coefficients are those of the model
    without edits. Fewer controls are found where a layer has too few other cells.
    """
    own: Own = {}
    for edit in edits:
        for cell in edit.cells:
            own[cell] = (*own.get(cell, ()), edit.operation)
    sizes = _sizes(model, own, ids, columns, last, run)
    near = max(NEAREST, 2 * count)
    chance = np.random.default_rng([seed, 2])
    free = {layer: np.ones(model.cells[layer - 1], bool) for layer in {cell.layer for cell in own}}
    for cell in own:
        free[cell.layer][cell.index] = False
    before: dict[Cell, list[int]] = {cell: [] for cell in own}
    found: list[Control] = []
    while len(found) < count:
        left = {layer: cells.copy() for layer, cells in free.items()}
        chosen: dict[Cell, Cell] = {}
        for cell in own:
            size = sizes[cell.layer, own[cell]]
            able = left[cell.layer].copy()
            able[before[cell]] = False
            order = np.argsort(np.abs(size - size[cell.index]), kind="stable")
            pool = order[able[order]][:near]
            if not len(pool):
                return Controls(_mean(sizes, own, {cell: cell for cell in own}), found)
            index = int(chance.choice(pool))
            before[cell].append(index)
            left[cell.layer][index] = False
            chosen[cell] = Cell(cell.layer, index)
        others = [Edit(tuple(chosen[cell] for cell in edit.cells), edit.operation) for edit in edits]
        found.append(Control(others, list(chosen.values()), _mean(sizes, own, chosen)))
    return Controls(_mean(sizes, own, {cell: cell for cell in own}), found)


def _mean(sizes: Sizes, own: Own, chosen: dict[Cell, Cell]) -> float:
    """The mean size over edited cells, each as the one chosen for it."""
    return float(np.mean([sizes[cell.layer, own[cell]][other.index] for cell, other in chosen.items()]))


def _sizes(
    model: MemoryModel, own: Own, ids: Int[Tensor, "1 pos"], columns: Sequence[int], last: int, run: Index | None
) -> Sizes:
    """|Δm|·‖v‖ of every cell of a layer, for every run of operations that an edited cell of it gets."""
    read: dict[int, Tensor] = {}

    def visit(layer: int, m: Tensor) -> None:
        reaching = columns if layer < model.layers else [column for column in columns if column == last]
        read[layer] = m[0, list(reaching)].float()

    with model.reading(visit, {cell.layer for cell in own}) as forward:
        forward(ids)
    sizes: Sizes = {}
    for cell, operations in own.items():
        if (cell.layer, operations) in sizes:
            continue
        m = new = read[cell.layer]
        every = [Cell(cell.layer, index) for index in range(m.shape[-1])]
        for operation in operations:
            new = operation.of(new, torch.tensor(operation.amounts(every, run), device=m.device))
        lengths = torch.linalg.vector_norm(model.values(cell.layer).float(), dim=1).to(m.device)
        sizes[cell.layer, operations] = ((new - m).abs().sum(0) / max(1, len(m)) * lengths).double().cpu().numpy()
    return sizes
