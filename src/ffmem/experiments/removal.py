"""Which token of a trigger a key looks for: its coefficient once the first, the last or a random token is gone (Fig 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.corpus.plan import plan_batches
from ffmem.index.origin import BATCH_TOKENS
from ffmem.index.reader import Index
from ffmem.index.values import model_of
from ffmem.model.memories import MemoryModel
from ffmem.progress import reporting
from ffmem.results import Result
from ffmem.words import Cell, FfmemError, ModelError

KINDS = ("first", "last", "random")
RESAMPLES = 1000
DRAWN_AT_A_TIME = 1 << 20
"""Random numbers of the bootstrap held at a time."""


def removal(
    model: MemoryModel | Any,
    index: Index,
    *,
    cells: int = 100,
    triggers: int = 50,
    seed: int = 0,
    quiet: bool = False,
) -> Result:
    """The relative change (m' - m)/m of a cell's coefficient when one token of its trigger is removed.

    `cells` random cells a layer, of those with a positive trigger, and up to `triggers` of their best; a row a layer and
    kind of removal (first, last, random). The beginning-of-sentence token stays; `random` may hit the ends.
    """
    for name, count in (("cells", cells), ("triggers", triggers)):
        if count < 1:
            raise FfmemError(f"expected {name} of at least 1, found {count}")
    loaded = model_of(index, model)
    rows, every = [], []
    with reporting("removing tokens", quiet=quiet) as reporter:
        for done, layer in enumerate(index.layers):
            reporter.update(done / len(index.layers), f"layer {layer}")
            chance = np.random.default_rng([seed, layer])
            drawn = draw_triggers(index, layer, cells=cells, triggers=triggers, chance=chance)
            found = remove_tokens(loaded, index, drawn, chance=chance)
            every.append(found)
            for kind in KINDS:
                changes = found.changes(kind)
                low, high = bootstrap(changes, chance)
                mean, median = (float(of(changes)) if len(changes) else float("nan") for of in (np.mean, np.median))
                row = {"layer": layer, "kind": kind, "mean": mean, "low": low, "high": high, "median": median}
                rows.append(row | {"n": len(changes)})
    settings = {
        "cells": cells,
        "triggers": triggers,
        "sign": "+",
        "bos": bool(index.manifest["settings"]["bos"]),
        "interval": f"95%, bootstrap of the mean over a layer's triggers, pooled over its cells, {RESAMPLES:,} resamples",
        "dtype": loaded.dtype_name,
        "device": loaded.device.type,
    }
    return Result("removal", seed, settings, rows, _facts(loaded, every, cells, triggers)).saved(index)


@dataclass(frozen=True)
class Drawn:
    """Triggers of random cells of a layer: an entry a trigger."""

    layer: int
    cells: int
    """Cells drawn."""
    cell: Int[np.ndarray, " n"]
    stored: Float[np.ndarray, " n"]
    """The coefficient that the index holds."""
    position: Int[np.ndarray, " n"]
    row: Int[np.ndarray, " n"]
    """Of the sentence in the run's table."""


@dataclass(frozen=True)
class Removed:
    """What the removal of a token did to each trigger of at least two tokens."""

    drawn: Drawn
    kept: Int[np.ndarray, " kept"]
    """Which of the drawn triggers these are."""
    at: Int[np.ndarray, " kept"]
    """The random token's place, from 0."""
    m: Float[np.ndarray, " kept"]
    """The coefficient of the whole prefix, computed again."""
    without: dict[str, Float[np.ndarray, " kept"]]
    """The coefficient at the new last position, by kind."""
    sequences: int
    """Different sequences that were run."""

    @property
    def usable(self) -> np.ndarray:
        """Triggers whose coefficient is still above 0: one stored as 1e-9 may round to 0 in another batch."""
        return self.m > 0

    def changes(self, kind: str) -> Float[np.ndarray, " usable"]:
        """(m' - m)/m of every usable trigger."""
        return (self.without[kind] - self.m)[self.usable] / self.m[self.usable]

    @property
    def differences(self) -> Float[np.ndarray, " kept"]:
        """How far each coefficient is from the stored one, relative to it."""
        stored = self.drawn.stored[self.kept]
        return np.abs(self.m - stored) / stored


def draw_triggers(index: Index, layer: int, *, cells: int, triggers: int, chance: np.random.Generator) -> Drawn:
    """The best positive triggers of random cells, each cell with a trigger having the same chance."""
    first = index[Cell(layer, 0)].row
    table = index.table("cells").slice(first, index.manifest["model"]["cells"][layer - 1])
    begins, counts = (table.column(name).to_numpy().astype(np.int64) for name in ("first_trigger", "positive_triggers"))
    chosen = np.sort(chance.permutation(np.flatnonzero(counts))[:cells])
    taken = np.minimum(counts[chosen], triggers)
    # A cell's triggers lie together, positive ones first, by rank.
    rank = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    begin = int(begins[0])
    own = index.table("triggers").slice(begin, int(begins[-1] + counts[-1]) - begin)  # a take over all layers is slow
    found = own.take(pa.array(np.repeat(begins[chosen] - begin, taken) + rank))
    coefficient, position, row = (found.column(name).to_numpy() for name in ("coefficient", "position", "row"))
    return Drawn(
        layer=layer,
        cells=len(chosen),
        cell=np.repeat(chosen, taken),
        stored=coefficient.astype(np.float64),
        position=position.astype(np.int64),
        row=row.astype(np.int64),
    )


def remove_tokens(model: MemoryModel, index: Index, drawn: Drawn, *, chance: np.random.Generator) -> Removed:
    """Run every prefix and what is left of it, equal sequences once, and read the drawn cells' coefficients."""
    kept = np.flatnonzero(drawn.position > 1)
    lengths = drawn.position[kept]
    at = chance.integers(0, lengths)
    sentences = index.sentences(drawn.row[kept].tolist())
    numbers: dict[bytes, int] = {}

    def number(ids: np.ndarray) -> int:
        return numbers.setdefault(ids.tobytes(), len(numbers))

    sequence = np.zeros((4, len(kept)), np.int64)
    for column, (row, length, random) in enumerate(zip(drawn.row[kept].tolist(), lengths, at, strict=True)):
        ids = np.array(sentences[row]["tokens"][:length], np.int64)
        whole = number(ids)
        # A causal model's run of the prefix holds its own run without the last token.
        left = whole if random == length - 1 else number(np.delete(ids, random))
        sequence[:, column] = whole, number(ids[1:]), whole, left
    position = np.stack([lengths, *[lengths - 1] * len(KINDS)])
    m, *without = read_coefficients(
        model,
        drawn.layer,
        [np.frombuffer(ids, np.int64) for ids in numbers],
        sequence=sequence.ravel(),
        position=position.ravel(),
        cell=np.tile(drawn.cell[kept], len(sequence)),
        bos=model.bos if index.manifest["settings"]["bos"] else None,
    ).reshape(sequence.shape)
    return Removed(drawn, kept, at, m, dict(zip(KINDS, without, strict=True)), len(numbers))


def read_coefficients(
    model: MemoryModel,
    layer: int,
    sequences: list[np.ndarray],
    *,
    sequence: Int[np.ndarray, " n"],
    position: Int[np.ndarray, " n"],
    cell: Int[np.ndarray, " n"],
    bos: int | None,
) -> Float[np.ndarray, " n"]:
    """One layer's coefficient of `cell` behind the first `position` tokens of a sequence, for many at once."""
    start = 0 if bos is None else 1
    lengths = np.array([len(ids) for ids in sequences], np.int64)
    found = np.full(len(sequence), np.nan)
    order = np.argsort(sequence, kind="stable")
    begins = np.searchsorted(sequence[order], np.arange(len(sequences) + 1))
    wanted: tuple[np.ndarray, np.ndarray, np.ndarray] = (order, order, order)

    def visit(_: int, m: Tensor) -> None:
        which, row, column = wanted
        places = (torch.from_numpy(part).to(m.device) for part in (row, column, cell[which]))
        found[which] = m[tuple(places)].double().cpu().numpy()

    with model.reading(visit, [layer]) as forward:
        for rows in plan_batches(lengths + start, BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"])):
            ids = np.full((len(rows), start + int(lengths[rows].max())), bos or 0, np.int64)
            for row, number in enumerate(rows.tolist()):
                ids[row, start : start + lengths[number]] = sequences[number]
            reads = [order[begins[number] : begins[number + 1]] for number in rows.tolist()]
            which = np.concatenate(reads)
            row_of = np.repeat(np.arange(len(rows)), [len(part) for part in reads])
            wanted = (which, row_of, position[which] - 1 + start)
            forward(torch.from_numpy(ids))
    if not np.isfinite(found).all():
        raise ModelError(
            f"layer {layer} gives coefficients that are not finite in {model.dtype_name}: try --dtype float32 or bfloat16"
        )
    return found


def bootstrap(values: Float[np.ndarray, " n"], chance: np.random.Generator) -> tuple[float, float]:
    """The 95% interval of the mean: 2.5th and 97.5th percentile of the means of resamples; NaN of nothing.

    >>> bootstrap(np.full(5, -0.5), np.random.default_rng(0))
    (-0.5, -0.5)
    """
    if not len(values):
        return float("nan"), float("nan")
    step = max(1, DRAWN_AT_A_TIME // len(values))
    means = [
        values[chance.integers(0, len(values), (min(step, RESAMPLES - begin), len(values)))].mean(1)
        for begin in range(0, RESAMPLES, step)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)


def _facts(model: MemoryModel, every: list[Removed], cells: int, triggers: int) -> dict[str, Any]:
    """What was left out and why, and whether this model gives the coefficients that the index holds."""
    differences = np.concatenate([found.differences for found in every])
    names = [str(Cell(found.drawn.layer, int(cell))) for found in every for cell in found.drawn.cell[found.kept]]
    per_cell = [np.unique(found.drawn.cell, return_counts=True)[1] for found in every]
    worst = int(differences.argmax()) if len(differences) else None
    return {
        "cells": sum(found.drawn.cells for found in every),
        "layers_with_fewer_cells": {str(f.drawn.layer): f.drawn.cells for f in every if f.drawn.cells < cells},
        "cells_with_fewer_triggers": int(sum((counts < triggers).sum() for counts in per_cell)),
        "triggers_drawn": sum(len(found.drawn.cell) for found in every),
        "one_token_prefixes": sum(len(found.drawn.cell) - len(found.kept) for found in every),
        "not_above_zero_again": sum(int((~found.usable).sum()) for found in every),
        "triggers_used": sum(int(found.usable.sum()) for found in every),
        "random_hit_first": sum(int((found.at == 0).sum()) for found in every),
        "random_hit_last": sum(int((found.at == found.drawn.position[found.kept] - 1).sum()) for found in every),
        "sequences_run": sum(found.sequences for found in every),
        "largest_difference_from_index": float(differences[worst]) if worst is not None else float("nan"),
        "largest_difference_at": names[worst] if worst is not None else None,
        "median_difference_from_index": float(np.median(differences)) if worst is not None else float("nan"),
        "coefficients_may_be_negative": model.family.gated,
        "negative_triggers_used": 0,
    }
