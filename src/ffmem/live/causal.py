"""The causal check of a cell: the tokens that its value promises, and what is lost of them when the cell is switched off."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from ffmem.cells import Cell
from ffmem.corpus.batches import padded, plan_batches
from ffmem.corpus.tokens import Encoder
from ffmem.errors import CorpusError, FfmemError, RunError
from ffmem.experiments.examples import corpus_like
from ffmem.experiments.resampling import interval
from ffmem.live.blocks import WIDTH, Block, Column, Table, Text, text_lines
from ffmem.live.edits import Edit, Operation, parse_cells, resolve
from ffmem.live.intervene import applying
from ffmem.live.matched import Gathered, Prefix, forward_tokens, gather
from ffmem.live.scope import Scope
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import log_probs_at
from ffmem.progress import reporting
from ffmem.run.model import model_of
from ffmem.run.reader import Index, open_index
from ffmem.run.results import Result
from ffmem.text import shown_token, visible

MEANS = 1000
"""The number of resamples that the interval of a mean is from."""
DRAWN_AT_A_TIME = 1 << 20
"""The number of random numbers of the resamples that are held at a time."""
SCORES = 1 << 23
"""The number of log-probabilities that are held at a time: 32 MB in float32."""


def causal(
    run: str | Path | Index,
    cells: Any,
    *,
    eval: Any,
    model: MemoryModel | Any = None,
    prefixes: int = 200,
    tokens: int = 5,
    quantile: float = 0.999,
    seed: int = 0,
    quiet: bool = False,
    **load: Any,
) -> Result:
    """Switch cells off where they fire in a held-out text, and where they do not: what becomes of what they promise?

    `cells` is a name, a comma list, a file `@cells.txt` or an iterable. A cell fires on a prefix if its coefficient there
    is above its `quantile` in the run's statistics, and above 0. Each of up to `prefixes` such prefixes, drawn at random,
    is matched with one on which it does not fire, of the same last token and the nearest length; where there is none,
    of any last token (counted). The cell is set to 0 at all positions of the prefix.

    A row a cell and group (`fires`, `matched`): the change of the log-probability of the value's top `tokens` together
    (the logarithm of their summed probability), and of the token that really follows, as means with 95% intervals.
    """
    for name, number, least in (("prefixes", prefixes, 1), ("tokens", tokens, 1), ("seed", seed, 0)):
        if number < least:
            raise FfmemError(f"expected {name} of at least {least}, found {number}")
    if not 0 <= quantile <= 1:
        raise FfmemError(f"expected a quantile from 0 to 1, found {quantile}")
    index = run if isinstance(run, Index) else open_index(run)
    thresholds = {cell: _threshold(index, cell, quantile) for cell in parse_cells(cells)}
    loaded = model_of(index, model, **load)
    index = Index(index.folder, index.manifest, loaded)
    encoder = Encoder(loaded.tokenizer, loaded.context - int(index.manifest.settings.bos))
    corpus = corpus_like(index, encoder, eval)
    assert corpus is not None, "an eval text is always there"
    bos = loaded.bos if index.manifest.settings.bos else None
    found = gather(loaded, corpus, thresholds, bos=bos, limit=prefixes, seed=seed, quiet=quiet)
    origin = ", ".join(source.name for source in corpus.sources)
    if not any(one.above for one in found):
        most = ", ".join(f"{one.cell} {one.threshold:.3g}" for one in found[:3]) + (", …" if len(found) > 3 else "")
        raise CorpusError(
            f"expected prefixes above the cells' {quantile:.1%} quantile ({most}), found none in {origin}: use more text"
        )
    rows: list[dict[str, Any]] = []
    with reporting("switching cells off", quiet=quiet) as reporter:
        for done, one in enumerate(found):
            reporter.update(done / len(found), str(one.cell))
            rows += _rows(loaded, index, one, bos, tokens, np.random.default_rng([seed, 4, one.cell.layer, one.cell.index]))
    settings = {
        "eval": origin,
        "prefixes": prefixes,
        "tokens": tokens,
        "quantile": quantile,
        "edit": "=0 at all positions of the prefix, the beginning-of-sentence token's too",
        "bos": bos is not None,
        "interval": f"95%, bootstrap of the mean over prefixes, {MEANS:,} resamples",
        "dtype": loaded.dtype_name,
        "device": loaded.device.type,
    }
    facts = {"cells": {str(one.cell): _facts(one) for one in found}, "notes": _notes(index, found, prefixes, quantile)}
    return Result("causal", seed, settings, rows, facts).saved(index)


@dataclass(frozen=True)
class Effects:
    """The effect on each prefix of switching a cell off, in log-probabilities."""

    promised: Float[np.ndarray, " n"]
    """The log-probability of the value's top tokens together, before the cell is switched off."""
    promise: Float[np.ndarray, " n"]
    """The change of that log-probability."""
    next: Float[np.ndarray, " n"]
    """The change of the true next token's log-probability; NaN at a sentence's end."""


@torch.inference_mode()
def effects(model: MemoryModel, cell: Cell, prefixes: list[Prefix], promised: list[int], bos: int | None) -> Effects:
    """Run every prefix with and without the cell; `promised` are the value's top tokens."""
    lengths = np.array([len(prefix.ids) + (bos is not None) for prefix in prefixes], np.int64)
    off = resolve(model, [Edit((cell,), Operation("=", 0.0))])
    before, after = np.full((2, len(prefixes), 2), np.nan)
    step = max(1, SCORES // model.vocabulary.size)
    for batch in plan_batches(lengths, forward_tokens(model)):
        for rows in np.split(batch, range(step, len(batch), step)):
            some = [prefixes[row] for row in rows.tolist()]
            ids = torch.from_numpy(padded([prefix.ids for prefix in some], bos))
            at = torch.from_numpy(lengths[rows] - 1)
            before[rows] = _log_probs(model, ids, at, some, promised)
            with applying(model, off, Scope.parse("all")):
                after[rows] = _log_probs(model, ids, at, some, promised)
    change = after - before
    return Effects(before[:, 0], change[:, 0], change[:, 1])


def _log_probs(
    model: MemoryModel, ids: torch.Tensor, at: torch.Tensor, prefixes: list[Prefix], promised: list[int]
) -> Float[np.ndarray, "n 2"]:
    """The log-probability of the promised tokens together, and of the true next token."""
    scores = log_probs_at(model, ids, at).double()
    together = scores[:, promised].logsumexp(1)
    own = [float("nan") if one.next is None else float(scores[row, one.next]) for row, one in enumerate(prefixes)]
    return np.stack([together.cpu().numpy(), np.array(own)], 1)


def _rows(
    model: MemoryModel, index: Index, found: Gathered, bos: int | None, tokens: int, chance: np.random.Generator
) -> list[dict[str, Any]]:
    """The rows of the result for one cell: none where it never fires."""
    promised = index[found.cell].value.top(min(tokens, model.vocabulary.size))
    matched = [pair.matched for pair in found.pairs if pair.matched is not None]
    rows = []
    for group, prefixes in (("fires", [pair.fires for pair in found.pairs]), ("matched", matched)):
        if not prefixes:
            continue
        effect = effects(model, found.cell, prefixes, [one.id for one in promised], bos)
        follows = effect.next[~np.isnan(effect.next)]
        promise_low, promise_high = bootstrap(effect.promise, chance)
        next_low, next_high = bootstrap(follows, chance)
        rows.append(
            {
                "cell": str(found.cell),
                "layer": found.cell.layer,
                "index": found.cell.index,
                "group": group,
                "promise": [one.token for one in promised],
                "promise_ids": [one.id for one in promised],
                "value_probability": sum(one.probability for one in promised),
                "n": len(prefixes),
                "coefficient": float(np.mean([prefix.coefficient for prefix in prefixes])),
                "length": float(np.mean([len(prefix.ids) for prefix in prefixes])),
                "promise_probability": float(np.exp(effect.promised).mean()),
                "promise_change": float(effect.promise.mean()),
                "promise_low": promise_low,
                "promise_high": promise_high,
                "n_next": len(follows),
                "next_change": float(follows.mean()) if len(follows) else float("nan"),
                "next_low": next_low,
                "next_high": next_high,
            }
        )
    return rows


def _threshold(index: Index, cell: Cell, quantile: float) -> float:
    """The coefficient above which a cell fires."""
    found = index[cell].stats.quantile(quantile)
    if np.isnan(found):
        raise RunError(f"{index.path} has no quantiles of {cell}: no token of it was measured")
    return max(found, 0.0)


def _facts(found: Gathered) -> dict[str, Any]:
    matched = [pair for pair in found.pairs if pair.matched is not None]
    return {
        "threshold": found.threshold,
        "prefixes_above": found.above,
        "repeated_prefixes": found.repeated,
        "prefixes_used": len(found.pairs),
        "matched_same_token": sum(pair.same_token for pair in matched),
        "matched_any_token": sum(not pair.same_token for pair in matched),
        "unmatched": len(found.pairs) - len(matched),
    }


def _notes(index: Index, found: list[Gathered], asked: int, quantile: float) -> list[str]:
    """Notes on cells with too few prefixes or matches, and on quantiles of few tokens."""
    notes = []
    for one in found:
        used, others = len(one.pairs), sum(not pair.same_token for pair in one.pairs if pair.matched is not None)
        if not used:
            notes.append(f"{one.cell}: no prefix above {one.threshold:.3g}")
        elif used < asked:
            notes.append(f"{one.cell}: {used} prefixes above {one.threshold:.3g}, {asked} asked")
        if others:
            notes.append(f"{one.cell}: {others} of {used} prefixes matched by length alone")
        if unmatched := sum(pair.matched is None for pair in one.pairs):
            notes.append(f"{one.cell}: {unmatched} of {used} prefixes without a match")
    measured = index.counts.measured_tokens
    if measured * (1 - quantile) < 1:
        notes.append(f"the run measured {measured:,} tokens: the {quantile:.1%} quantile is about the largest of them")
    return notes


def causal_lines(result: Result, width: int = WIDTH) -> list[str]:
    """A causal check for people, at most `width` characters a line."""
    blocks: list[Block] = [
        Text([f"switched off on prefixes of {visible(result.settings['eval'])}; Δ log p with 95% intervals"])
    ]
    numbers = [Column(name, width, right=True, gap=0) for name, width in (("n", 5), ("m", 9), ("p(promise)", 12))]
    columns = [Column("", 9, gap=4), *numbers, Column("Δ promise", 25, gap=3), Column("Δ next token")]
    for cell, rows in groupby(result.rows, lambda row: row["cell"]):
        every = list(rows)
        promise = " ".join(shown_token(token) for token in every[0]["promise"])
        blocks.append(Table(columns, list(map(_table_row, every)), f"{cell}  promises {promise}"))
    if notes := result.facts["notes"]:
        blocks.append(Text([f"note: {note}" for note in notes]))
    return text_lines(blocks, width)


def _table_row(row: dict[str, Any]) -> list[str]:
    """A row of the result as a row of the table that people see."""
    numbers = [str(row["n"]), f"{row['coefficient']:.3g}", f"{row['promise_probability']:.2g}"]
    return [row["group"], *numbers, _interval(row, "promise"), _interval(row, "next")]


def _interval(row: dict[str, Any], name: str) -> str:
    mean, low, high = (row[f"{name}_{part}"] for part in ("change", "low", "high"))
    if mean is None or np.isnan(mean):
        return "-"
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def bootstrap(values: Float[np.ndarray, " n"], chance: np.random.Generator) -> tuple[float, float]:
    """The 95% interval of the mean of independent values: from the means of resamples; NaN of nothing.

    >>> bootstrap(np.full(5, -0.5), np.random.default_rng(0))
    (-0.5, -0.5)
    """
    if not len(values):
        return float("nan"), float("nan")
    step = max(1, DRAWN_AT_A_TIME // len(values))
    means = [
        values[chance.integers(0, len(values), (min(step, MEANS - begin), len(values)))].mean(1)
        for begin in range(0, MEANS, step)
    ]
    return interval(np.concatenate(means)) or (float("nan"), float("nan"))
