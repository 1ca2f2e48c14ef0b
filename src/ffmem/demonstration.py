"""The demonstration: the bundled model reads the bundled text; its clearest memories, and the paper's questions to it."""

from __future__ import annotations

import sys
import tempfile
from math import log
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.text import shown_token, visible

if TYPE_CHECKING:
    from ffmem.run.reader import CellView, Index

MODEL = "wiki16"
CORPUS, HELD_OUT = "pocket:9/10", "pocket:1/10"
TOP = 20
EXAMPLES, CELLS = 100, 2
"""The number of prefixes to follow, and of cells a layer to remove tokens for: a taste of the paper's 4,000 and 100."""
CONTROL_EXAMPLES = 50
"""The number of prefixes that random weights are asked about: few, since the control has to be quick."""
SHOWN, A_LAYER = 6, 1
"""The most cells that are shown, in all and of one layer."""
LEAST = 5
"""The number of triggers with a next token that a cell must have to be shown."""
AGREEING = 0.3
"""The share of those triggers whose next token must be what the cell's value promotes most."""
WIDTH = 110
"""The width, in columns, of what is printed."""


def agreement(view: CellView) -> float:
    """The share of a cell's triggers whose next token is its value's top token; the paper's agreement, over all triggers."""
    promised = view.value.top(1)[0].token.strip()
    nexts = [trigger.next.strip() for trigger in view.triggers if trigger.next]
    return nexts.count(promised) / len(nexts) if nexts else 0.0


def worth_seeing(index: Index, count: int = SHOWN) -> list[CellView]:
    """The cells whose value best agrees with what follows their triggers, rare words first: each another word.

    The score is the agreement times the word's surprise, -log of its share among all tokens of the kept sentences. It needs
    the values in the run.
    """
    from ffmem.experiments.next_tokens import next_tokens, token_counts

    promoted = index.table("values").column("promoted")
    firsts = np.concatenate([chunk.values.to_numpy()[chunk.offsets.to_numpy()[:-1]] for chunk in promoted.chunks])
    counts = token_counts(index, len(index.table("tokens")))
    surprise = np.where(counts > 0, log(counts.sum()) - np.log(np.maximum(1, counts)), 0.0)
    scores = np.zeros(len(index))
    for layer in index.layers:
        first = index[Cell(layer, 0)].row
        tokens = next_tokens(index, layer)
        own = firsts[first : first + tokens.cells]
        agreeing = (tokens.ids == own[:, None]).sum(1) / np.maximum(1, tokens.with_next)
        good = (tokens.with_next >= LEAST) & (agreeing >= AGREEING)
        scores[first : first + tokens.cells] = agreeing * surprise[own] * good
    cells = list(zip(*(index.table("cells").column(name).to_pylist() for name in ("layer", "index")), strict=True))
    found: list[CellView] = []
    for row in np.argsort(-scores, kind="stable").tolist():
        layer, number = cells[row]
        others = [other for other in found if other.cell.layer == layer]
        if scores[row] > 0 and len(others) < A_LAYER and all(firsts[row] != firsts[other.row] for other in found):
            found.append(index[Cell(layer, number)])
        if len(found) == count:
            break
    return sorted(found, key=lambda view: view.cell)


def demo(out: str | Path | None = None, *, quiet: bool = False) -> Index:
    """Index, project the values, print the cells worth seeing, run the experiments, write the report. Returns the index."""
    from ffmem.experiments.run import run_experiments
    from ffmem.indexing.build import build_index
    from ffmem.indexing.values import values
    from ffmem.model.loading import load_model

    run = out if out is not None else Path(tempfile.mkdtemp(prefix="ffmem-demo-")) / "run"
    model = load_model(MODEL)
    index = build_index(model, CORPUS, out=run, top=TOP, quiet=quiet)
    if not index.has_values:
        index = values(index, model, top=10, quiet=quiet)
    cells = worth_seeing(index)
    _print_cells(index, cells)
    asked: dict[str, Any] = {"model": model, "eval": HELD_OUT, "cells": CELLS, "quiet": quiet}
    run_experiments(index, examples=EXAMPLES, **asked)
    run_experiments(index, control="random", examples=CONTROL_EXAMPLES, **asked)
    _print_claims(index)
    page = _page(index)
    if not quiet:
        _print_next(index, cells, page)
    return index


def _print_cells(index: Index, cells: list[CellView]) -> None:
    counts = index.counts
    print(
        f"{MODEL}, a language model of {counts.cells:,} memory cells, has read {counts.sentences:,} sentences of a "
        "pocket encyclopedia.\nThese are cells whose value promotes what really follows their triggers, one a layer:\n"
    )
    for view in cells:
        first = view.value.top(1)[0]
        print(f"{view.name}  promotes {shown_token(first.token)}  (agrees with {agreement(view):.0%} of its triggers)")
        for trigger in view.triggers[:4]:
            print(f"  {trigger.coefficient:6.2f}  {_end(visible(trigger.prefix))} ▸ {shown_token(trigger.next)}")
        print()


def _end(text: str, width: int = 90) -> str:
    """The last words of a text, as many as there is room for, since the end of a prefix is what fires a cell."""
    return text if len(text) <= width else "…" + text[-width:].partition(" ")[2]


def _print_claims(index: Index) -> None:
    """Print how many of the paper's claims hold, and how early the residual stream predicts the output."""
    from ffmem.reports.claims import judge_claims, summary
    from ffmem.reports.figures import all_results
    from ffmem.run.results import CONTROL

    results = all_results(index)
    claims = judge_claims(results, all_results(index, CONTROL))
    intro = f"The paper's experiments, on {EXAMPLES} prefixes of articles kept out of the index. {summary(claims)}"
    print(f"{fill(intro, WIDTH)}\nThe residual stream already predicts what the model will say, layer by layer:")
    for row in results["refinement"].rows:
        share = row["residual_matches_output"]
        print(f"  layer {row['layer']:2}  {'█' * round(40 * share)} {share:.0%}")
    print()


def _page(index: Index) -> Path | str | None:
    """The path or URL of the report written; None, after a line that says why, where packages that draw it are missing."""
    from ffmem.reports.page import report

    try:
        return report(index)
    except FfmemError as error:
        print(f"No report: {error}", file=sys.stderr)
        return None


def _print_next(index: Index, cells: list[CellView], page: Path | str | None) -> None:
    name = cells[0].name if cells else str(Cell(index.layers[-1], 0))
    steps = {
        f"ffmem show {index.path} {name}": "a cell in full; any other works too",
        f'ffmem trace {MODEL} "The capital of France is" --run {index.path}': "which cells make one prediction",
        f"ffmem experiments {index.path} --eval {HELD_OUT}": "the experiments with samples of the paper's size",
        "ffmem index MODEL TEXT -o RUN": "a model and a text of your own",
    }
    if page:
        print(f"The report, every figure beside the paper's: {page}", file=sys.stderr)
    print("Next:", file=sys.stderr)
    for command, what in steps.items():
        print(f"  {command}   # {what}", file=sys.stderr)
