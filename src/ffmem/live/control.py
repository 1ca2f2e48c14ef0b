"""Controls: random cells of the same layers on which the same edit is about as large, to compare its effect with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.cells import Cell
from ffmem.live.edits import Edit, Operation
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index

NEAREST = 10
"""The least number of cells of the nearest size that a control is drawn from; twice the number of controls if more."""


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
) -> tuple[float, list[tuple[list[Edit], float]]]:
    """The size of the edits themselves, and up to `count` controls: the same edits on other cells, with their size.

    The size is |Δm|·‖v‖, how far an edit moves what a cell adds to the stream: a mean over its cells and over the edited
    columns that reach the prediction, which is that of column `last`: up to that one, and in the last layer no other. For
    every edited cell another one of its layer is drawn from those nearest in size if the same is done to them; so for `*2`
    and `=0` they are as large in |m|·‖v‖. Coefficients are those of the model without edits. Fewer controls are found where
    a layer has too few other cells.
    """
    operations: dict[Cell, tuple[Operation, ...]] = {}
    for edit in edits:
        for cell in edit.cells:
            operations[cell] = (*operations.get(cell, ()), edit.operation)
    sizes = _sizes(model, operations, ids, columns, last, run)
    own = float(np.mean([sizes[cell][cell.index] for cell in operations]))
    near = max(NEAREST, 2 * count)
    chance = np.random.default_rng([seed, 2])
    free = {cell.layer: np.ones(model.cells[cell.layer - 1], bool) for cell in operations}
    for cell in operations:
        free[cell.layer][cell.index] = False
    drawn: dict[Cell, list[int]] = {cell: [] for cell in operations}
    found: list[tuple[list[Edit], float]] = []
    while len(found) < count:
        left = {layer: cells.copy() for layer, cells in free.items()}
        chosen: dict[Cell, Cell] = {}
        for cell in operations:
            able = left[cell.layer].copy()
            able[drawn[cell]] = False
            order = np.argsort(np.abs(sizes[cell] - sizes[cell][cell.index]), kind="stable")
            pool = order[able[order]][:near]
            if not len(pool):
                return own, found
            index = int(chance.choice(pool))
            drawn[cell].append(index)
            left[cell.layer][index] = False
            chosen[cell] = Cell(cell.layer, index)
        others = [Edit(tuple(chosen[cell] for cell in edit.cells), edit.operation) for edit in edits]
        found.append((others, float(np.mean([sizes[cell][other.index] for cell, other in chosen.items()]))))
    return own, found


def _sizes(
    model: MemoryModel,
    operations: dict[Cell, tuple[Operation, ...]],
    ids: Int[Tensor, "1 pos"],
    columns: Sequence[int],
    last: int,
    run: Index | None,
) -> dict[Cell, Float[np.ndarray, " cells"]]:
    """For every edited cell, the |Δm|·‖v‖ of all cells of its layer if its operations were made on them."""
    read: dict[int, Tensor] = {}

    def visit(layer: int, m: Tensor) -> None:
        reaching = columns if layer < model.layers else [column for column in columns if column == last]
        read[layer] = m[0, list(reaching)].float()

    with model.reading(visit, {cell.layer for cell in operations}) as forward:
        forward(ids)
    # Cells of a layer that get the same operations share their sizes.
    kinds: dict[tuple[int, tuple[Operation, ...]], Float[np.ndarray, " cells"]] = {}
    for cell, made in operations.items():
        if (cell.layer, made) in kinds:
            continue
        m = new = read[cell.layer]
        every = [Cell(cell.layer, index) for index in range(m.shape[-1])]
        for operation in made:
            new = operation.of(new, torch.tensor(operation.amounts(every, run), device=m.device))
        lengths = torch.linalg.vector_norm(model.values(cell.layer).float(), dim=1).to(m.device)
        kinds[cell.layer, made] = ((new - m).abs().sum(0) / max(1, len(m)) * lengths).double().cpu().numpy()
    return {cell: kinds[cell.layer, made] for cell, made in operations.items()}
