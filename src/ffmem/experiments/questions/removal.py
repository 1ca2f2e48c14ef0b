"""The experiment: which token of a trigger does a key look for? Its coefficient once the first, the last or a random
token is gone (Fig 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from ffmem.cells import Cell
from ffmem.corpus.batches import padded, plan_batches
from ffmem.errors import ModelError
from ffmem.experiments.experiment import Experiment, Figure
from ffmem.experiments.numbers import share
from ffmem.experiments.panels import COLOURS, HERE, PAPER, RANDOM, Axis, Panel, curve_of, paper_curve
from ffmem.experiments.paper import the_paper
from ffmem.experiments.readings import Row, ends, falls, in_most_layers, trend
from ffmem.experiments.resampling import RESAMPLES, as_draws, draw_counts, interval, resampling_settings, shares
from ffmem.experiments.rules import Claim, Reading, Rule
from ffmem.progress import Reporter, reporting
from ffmem.run.reader import Index
from ffmem.run.results import Result, check_request

if TYPE_CHECKING:
    from torch import Tensor

    from ffmem.model.memories import MemoryModel

CELLS = 100
"""The number of cells a layer, as many as in the paper."""
KINDS = ("first", "last", "random")


def removal(
    model: MemoryModel | Any,
    index: Index,
    *,
    cells: int = CELLS,
    triggers: int = 50,
    seed: int = 0,
    quiet: bool = False,
) -> Result:
    """The relative change (m' - m)/m of a cell's coefficient when one token of its trigger is removed.

    `cells` random cells a layer, of those with a positive trigger, and up to `triggers` of their best; a row a layer and
    kind of removal (first, last, random). The beginning-of-sentence token stays; `random` may hit the ends: every token of
    a prefix has the same chance, but two prefixes of one sentence often lose the same token (see `remove_tokens`).
    """
    from ffmem.run.model import model_of

    check_request(seed=seed, cells=cells, triggers=triggers)
    loaded = model_of(index, model)
    chances = {layer: np.random.default_rng([seed, layer]) for layer in index.layers}
    drawn = [draw_triggers(index, layer, cells=cells, triggers=triggers, chance=chances[layer]) for layer in index.layers]
    with reporting("removing tokens", quiet=quiet) as reporter:
        every, sequences = remove_tokens(loaded, index, drawn, seed=seed, reporter=reporter)
    rows, drawn_rows = [], []
    for found in every:
        layer = found.drawn.layer
        counts = draw_counts(found.drawn.cells, [seed, layer])
        for kind in KINDS:
            changes, again = found.changes(kind), found.drawn_again(kind, counts)
            low, high = interval(again["mean"]) or (float("nan"), float("nan"))
            mean, median = (float(of(changes)) if len(changes) else float("nan") for of in (np.mean, np.median))
            row = {"layer": layer, "kind": kind, "mean": mean, "low": low, "high": high, "median": median}
            rows.append(row | {"n": len(changes), "cells": found.usable_cells})
            drawn_rows.append({"layer": layer, "kind": kind} | again)
    settings = {
        "cells": cells,
        "triggers": triggers,
        "sign": "+",
        "bos": bool(index.manifest.settings.bos),
        "random": "the token of the prefix that comes first in a random order of its sentence's tokens",
        "interval": f"95% of the mean over a layer's triggers: {RESAMPLES:,} draws of its cells, each with its triggers",
        "dtype": loaded.dtype_name,
        "device": loaded.device.type,
        **resampling_settings("cells within layers"),
    }
    facts = _facts(loaded, every, cells, triggers, sequences)
    return Result("removal", seed, settings, rows, facts, as_draws(drawn_rows, {})).saved(index)


@dataclass(frozen=True)
class Drawn:
    """Triggers of random cells of a layer, one an entry."""

    layer: int
    cells: int
    """The number of cells that were drawn."""
    cell: Int[np.ndarray, " n"]
    stored: Float[np.ndarray, " n"]
    """The coefficient that the index holds."""
    position: Int[np.ndarray, " n"]
    row: Int[np.ndarray, " n"]
    """The row of the trigger's sentence in the run's table of sentences."""


@dataclass(frozen=True)
class Removed:
    """The coefficients of each trigger of at least two tokens before and after the removal of a token."""

    drawn: Drawn
    kept: Int[np.ndarray, " kept"]
    """The indices of these triggers among the drawn ones."""
    at: Int[np.ndarray, " kept"]
    """The random token's index in the prefix, from 0."""
    m: Float[np.ndarray, " kept"]
    """The coefficient of the whole prefix, computed again."""
    without: dict[str, Float[np.ndarray, " kept"]]
    """The coefficient at the new last position, by kind."""

    @property
    def usable(self) -> np.ndarray:
        """True for triggers whose coefficient is still above 0: one stored as 1e-9 may round to 0 in another batch."""
        return self.m > 0

    def changes(self, kind: str) -> Float[np.ndarray, " usable"]:
        """The relative change (m' - m)/m of every usable trigger, by kind of removal."""
        return (self.without[kind] - self.m)[self.usable] / self.m[self.usable]

    @property
    def usable_cells(self) -> int:
        """The number of cells that have a usable trigger."""
        return len(np.unique(self.drawn.cell[self.kept][self.usable]))

    def drawn_again(self, kind: str, counts: Float[np.ndarray, "draws cells"]) -> dict[str, np.ndarray]:
        """The mean change over the usable triggers of each draw of cells, and their number: a cell's stay together."""
        of = np.unique(self.drawn.cell, return_inverse=True)[1][self.kept][self.usable]
        sums = np.bincount(of, weights=self.changes(kind), minlength=self.drawn.cells)
        triggers = np.bincount(of, minlength=self.drawn.cells)
        return {"mean": shares(counts, sums, triggers), "n": np.rint(counts @ triggers).astype(np.int64)}

    @property
    def differences(self) -> Float[np.ndarray, " kept"]:
        """The distance of each coefficient from the stored one, relative to it."""
        stored = self.drawn.stored[self.kept]
        return np.abs(self.m - stored) / stored


def draw_triggers(index: Index, layer: int, *, cells: int, triggers: int, chance: np.random.Generator) -> Drawn:
    """The best positive triggers of random cells, each cell with a trigger having the same chance."""
    first = index[Cell(layer, 0)].row
    table = index.table("cells").slice(first, index.manifest.model.cells[layer - 1])
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


def remove_tokens(
    model: MemoryModel, index: Index, drawn: list[Drawn], *, seed: int, reporter: Reporter | None = None
) -> tuple[list[Removed], int]:
    """Run the triggers' sentences and what is left of them, and read the drawn cells; also how many sequences were run.

    A causal model's run of a sentence holds those of all its prefixes, and of a prefix without its last token; a run
    without the first token serves all prefixes alike. So that few runs serve the random removals too, each sentence
    has one random order of its tokens, and a prefix loses the one that comes first in it: any with the same chance, and
    mostly the same for a sentence's prefixes.
    """
    kept = [np.flatnonzero(one.position > 1) for one in drawn]
    row, length, cell = (
        np.concatenate([getattr(one, name)[which] for one, which in zip(drawn, kept, strict=True)])
        for name in ("row", "position", "cell")
    )
    layer = np.repeat([one.layer for one in drawn], [len(which) for which in kept])
    sentences = index.sentences(row.tolist())
    runs: dict[bytes, int] = {}  # different sequences, numbered

    def number(ids: Int[np.ndarray, " pos"]) -> int:
        return runs.setdefault(ids.tobytes(), len(runs))

    sequence, at = np.zeros((4, len(row)), np.int64), np.zeros(len(row), np.int64)
    by_row = np.argsort(row, kind="stable")
    for own in np.split(by_row, np.flatnonzero(np.diff(row[by_row])) + 1) if len(row) else []:
        found = sentences[int(row[own[0]])]
        ids = np.array(found["tokens"][: int(length[own].max())], np.int64)
        order = np.random.default_rng([seed, found["sentence"]]).random(len(ids))
        whole, first = number(ids), number(ids[1:])
        # At each token, which one so far comes first in the order.
        at[own] = np.maximum.accumulate(np.where(order == np.minimum.accumulate(order), np.arange(len(ids)), 0))[
            length[own] - 1
        ]
        for lost in np.unique(at[own]).tolist():
            those = own[at[own] == lost]
            inside = those[length[those] > lost + 1]
            left = first if lost == 0 else whole
            if len(inside) and lost:
                left = number(np.delete(ids[: int(length[inside].max())], lost))
            sequence[3, inside] = left
            sequence[3, those[length[those] == lost + 1]] = whole
        sequence[:3, own] = np.array([whole, first, whole])[:, None]
    sequences = [np.frombuffer(ids, np.int64) for ids in runs]
    m, *without = read_coefficients(
        model,
        sequences,
        sequence=sequence.ravel(),
        position=np.stack([length, *[length - 1] * len(KINDS)]).ravel(),
        layer=np.tile(layer, len(sequence)),
        cell=np.tile(cell, len(sequence)),
        bos=model.bos if index.manifest.settings.bos else None,
        reporter=reporter,
    ).reshape(sequence.shape)
    ends = np.cumsum([len(which) for which in kept])[:-1]
    parts = zip(*(np.split(array, ends) for array in (at, m, *without)), strict=True)
    every = [
        Removed(one, which, lost, own, dict(zip(KINDS, others, strict=True)))
        for one, which, (lost, own, *others) in zip(drawn, kept, parts, strict=True)
    ]
    return every, len(sequences)


def read_coefficients(
    model: MemoryModel,
    sequences: list[np.ndarray],
    *,
    sequence: Int[np.ndarray, " n"],
    position: Int[np.ndarray, " n"],
    layer: Int[np.ndarray, " n"],
    cell: Int[np.ndarray, " n"],
    bos: int | None,
    reporter: Reporter | None = None,
) -> Float[np.ndarray, " n"]:
    """The coefficient of a layer's cell behind the first `position` tokens of a sequence, for many at once."""
    import torch

    from ffmem.experiments.observe import BATCH_TOKENS

    start = 0 if bos is None else 1
    lengths = np.array([len(ids) for ids in sequences], np.int64)
    found = np.full(len(sequence), np.nan)
    order = np.argsort(sequence, kind="stable")
    begins = np.searchsorted(sequence[order], np.arange(len(sequences) + 1))
    wanted: tuple[np.ndarray, np.ndarray, np.ndarray] = (order, order, order)

    def visit(number: int, m: Tensor) -> None:
        which, row, column = (part[layer[wanted[0]] == number] for part in wanted)
        indices = (torch.from_numpy(part).to(m.device) for part in (row, column, cell[which]))
        found[which] = m[tuple(indices)].double().cpu().numpy()

    batches = plan_batches(lengths + start, BATCH_TOKENS.get(model.device.type, BATCH_TOKENS["cpu"]))
    for done, rows in enumerate(batches, 1):
        reads = [order[begins[number] : begins[number + 1]] for number in rows.tolist()]
        which = np.concatenate(reads)
        row_of = np.repeat(np.arange(len(rows)), [len(part) for part in reads])
        wanted = (which, row_of, position[which] - 1 + start)
        with model.reading(visit, np.unique(layer[which]).tolist()) as forward:
            forward(torch.from_numpy(padded([sequences[number] for number in rows], bos)))
        if reporter:
            reporter.update(done / len(batches), f"{done:,} of {len(batches):,} batches")
    if len(nonfinite := np.flatnonzero(~np.isfinite(found))):
        raise ModelError(
            f"layer {layer[nonfinite].min()} gives coefficients that are not finite in {model.dtype_name}: "
            "try --dtype float32 or bfloat16"
        )
    return found


def _facts(model: MemoryModel, every: list[Removed], cells: int, triggers: int, sequences: int) -> dict[str, Any]:
    """Facts on what was left out and why, and on whether this model gives the coefficients that the index holds."""
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
        "sequences_run": sequences,
        "largest_difference_from_index": float(differences[worst]) if worst is not None else float("nan"),
        "largest_difference_at": names[worst] if worst is not None else None,
        "median_difference_from_index": float(np.median(differences)) if worst is not None else float("nan"),
        "coefficients_may_be_negative": model.family.gated,
        "negative_triggers_used": 0,
    }


def panels(result: Result, axis: Axis, control: Result | None) -> list[Panel]:
    """The panels of Fig 3: three curves and the paper's three; random weights have their own panel, on the same scale."""
    curves, random = [], []
    for kind in ("last", "random", "first"):
        name = f"{kind} token"
        rows = partial(_of_kind, kind=kind)
        curves.append(curve_of(result, axis, "mean", name, rows=rows))
        curves.append(paper_curve(the_paper().removal[kind], axis, f"{name}, paper", COLOURS[name]))
        random.append(curve_of(control, axis, "mean", name, rows=rows))
    if control is None:
        return [Panel("", "change of the coefficient", curves, axis)]
    heights = [end for curve in (*curves, *random) for point in curve.points for end in (point.value, point.low, point.high)]
    known = [height for height in heights if height is not None]
    limits = {"domain": [min(0, *known), max(0, *known)], "nice": True}
    return [
        Panel(title, "change of the coefficient", drawn, axis, limits=limits)
        for title, drawn in ((f"{HERE} and {PAPER}", curves), (RANDOM, random))
    ]


def _of_kind(sample: Result, *, kind: str) -> Sequence[Mapping[str, Any]]:
    return [row for row in sample.rows if row["kind"] == kind]


def claims() -> list[Claim]:
    """The paper's claims on Fig 3."""
    paper = the_paper().removal
    changes = ", ".join(f"{kind} {share(median(paper[kind]))}" for kind in ("last", "random", "first"))
    return [
        Claim(
            "last-token", "Fig 3",
            "Removing the last token changes the coefficient most.",
            f"in every layer; median change: {changes}",
            "mean(last) below mean(first) and mean(random) in at least 80% of layers",
            last_token_most,
        ),
        Claim(
            "last-token-depth", "Fig 3",
            "The last token matters less in upper layers.",
            ends([abs(change) for change in paper["last"]]), falls("|mean(last)|", -0.5),
            trend("mean", below=-0.5, size=True, kind="last"),
        ),
    ]  # fmt: skip


def last_token_most(result: Result) -> Reading:
    """A reading of Fig 3 that asks whether the fall is largest without the last token in most layers."""
    return in_most_layers(
        lambda row: row["last"] - min(row["first"], row["random"]),
        Rule(below=0),
        lambda row: ", ".join(f"{kind} {share(row[kind])}" for kind in ("last", "random", "first")),
        removals,
    )(result)


def removals(sample: Result) -> list[Row]:
    """The mean changes of every layer that has all three kinds of removal (Fig 3)."""
    layers: dict[int, Row] = {}
    for row in sample.rows:
        if row["mean"] is not None:
            layers.setdefault(row["layer"], {"layer": row["layer"]})[row["kind"]] = row["mean"]
    return [row for row in layers.values() if len(row) == 4]


EXPERIMENT = Experiment(
    name="removal",
    order=3,
    question="Which part of a prefix does a key look at? The first, the last or a random token of a trigger is removed and "
    "the coefficient read again.",
    columns={
        "layer": "from 1",
        "kind": "which token was removed: first, last or random",
        "mean": "mean relative change of the coefficient over the layer's triggers",
        "low, high": "its 95% interval, from draws of cells",
        "median": "median relative change",
        "n": "triggers",
        "cells": "cells of which some trigger counts",
    },
    run=removal,
    figures=[
        Figure(
            "fig3",
            "Fig 3",
            "Which token does a key look at?",
            "One token of each trigger was taken away and the coefficient read again: the further below zero a curve is, "
            "the more the key relied on that token. In the paper the last token matters most in every layer, and less so "
            "in upper layers, where keys look at the whole prefix rather than at how it ends.",
            "Relative change of coefficients without the first, the last or a random token, a point a layer, and the "
            "paper's.",
            panels,
        )
    ],
    claims=claims,
)
