"""Matched prefixes: prefixes of a text on which a cell fires, and like ones on which it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ffmem.cells import Cell
from ffmem.corpus.batches import Batch
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.shards import Shard
from ffmem.model.memories import MemoryModel
from ffmem.progress import reporting

FORWARD_TOKENS = {"cpu": 2048, "cuda": 16384}
"""The number of tokens that a forward has, padding included, by kind of device."""


@dataclass(frozen=True)
class Prefix:
    """The first tokens of a sentence, and the token that really follows them (None at its end)."""

    ids: Int[np.ndarray, " pos"]
    next: int | None
    coefficient: float
    """The cell's coefficient at the last token."""


@dataclass(frozen=True)
class Pair:
    """A prefix that fires a cell, and one that does not, of the nearest length there was."""

    fires: Prefix
    matched: Prefix | None
    same_token: bool
    """Whether both prefixes end in the same token."""


@dataclass
class Gathered:
    """The prefixes of a text above a cell's threshold, a random sample of them, gathered a shard at a time."""

    cell: Cell
    threshold: float
    limit: int
    chance: np.random.Generator
    above: int = 0
    """The number of different prefixes that were above the threshold."""
    repeated: int = 0
    """The number of prefixes above the threshold that equal one read before."""
    _held: list[tuple[float, Pair]] = field(default_factory=list)
    _seen: set[int] = field(default_factory=set)

    @property
    def pairs(self) -> list[Pair]:
        """The prefixes of the sample, each with its match, in the order of the text."""
        return [pair for _, pair in self._held]

    def add(self, read: _Prefixes, coefficients: Float[np.ndarray, " n"]) -> None:
        """Add a shard. Prefixes with the smallest random numbers stay, so each has the same chance."""
        fires = coefficients > self.threshold
        found = [int(at) for at in np.flatnonzero(fires) if int(read.key[at]) not in self._seen]
        self.repeated += int(read.count[fires].sum()) - len(found)
        self.above += len(found)
        self._seen.update(read.key[found].tolist())
        numbers = self.chance.random(len(found))
        bound = self._held[-1][0] if len(self._held) == self.limit else np.inf
        order = [at for at in np.argsort(numbers, kind="stable").tolist() if numbers[at] < bound][: self.limit]
        used = fires.copy()
        for at in order:
            self._held.append((float(numbers[at]), self._pair(read, coefficients, found[at], used)))
        self._held = sorted(self._held, key=lambda one: one[0])[: self.limit]

    def _pair(self, read: _Prefixes, coefficients: np.ndarray, at: int, used: Bool[np.ndarray, " n"]) -> Pair:
        """A prefix with the nearest in length that is not `used`: with the same last token if there is any."""
        free = np.flatnonzero(~used)
        alike = free[read.token[free] == read.token[at]]
        same = len(alike) > 0
        pool = alike if same else free
        matched = None
        if len(pool):
            apart = np.abs(read.length[pool] - read.length[at])
            nearest = pool[apart == apart.min()]
            other = int(nearest[self.chance.integers(len(nearest))])
            used[other] = True
            matched = read.prefix(other, float(coefficients[other]))
        return Pair(read.prefix(at, float(coefficients[at])), matched, same)


@dataclass(frozen=True)
class _Prefixes:
    """All different prefixes of a shard, one an entry."""

    shard: Shard
    sentence: Int[np.ndarray, " n"]
    """The number of its sentence in the shard, from 0."""
    length: Int[np.ndarray, " n"]
    token: Int[np.ndarray, " n"]
    """The last token of each prefix."""
    key: Int[np.ndarray, " n"]
    """Half of the hash of each prefix."""
    count: Int[np.ndarray, " n"]
    """The number of times that each prefix was read in the shard."""

    def prefix(self, at: int, coefficient: float) -> Prefix:
        """The prefix of one entry, with its coefficient."""
        ids, length = self.shard.sentences[int(self.sentence[at])].ids, int(self.length[at])
        # A copy: a view would keep the whole shard.
        return Prefix(ids[:length].astype(np.int64), int(ids[length]) if length < len(ids) else None, coefficient)


def gather(
    model: MemoryModel,
    corpus: Corpus,
    thresholds: dict[Cell, float],
    *,
    bos: int | None,
    limit: int,
    seed: int,
    quiet: bool = False,
) -> list[Gathered]:
    """Read a text once, a shard in memory at a time, and keep up to `limit` pairs a cell.

    Equal prefixes count once. A match comes from the same shard as the prefix it is for, and is given once.
    """
    cells = list(thresholds)
    found = [
        Gathered(cell, thresholds[cell], limit, np.random.default_rng([seed, 3, cell.layer, cell.index])) for cell in cells
    ]
    tokens = 0
    with reporting("looking for prefixes", quiet=quiet) as reporter:
        for shard in corpus.stream():
            if not shard.sentences:
                continue
            prefixes, coefficients = _read(model, shard, cells, bos)
            for one, own in zip(found, coefficients, strict=True):
                one.add(prefixes, own)
            tokens += shard.tokens
            reporter.update(shard.fraction, f"{tokens:,} tokens read")
    return found


def _read(
    model: MemoryModel, shard: Shard, cells: Sequence[Cell], bos: int | None
) -> tuple[_Prefixes, list[Float[np.ndarray, " n"]]]:
    """The different prefixes of a shard, and behind each the coefficient of every cell."""
    parts: list[list[np.ndarray]] = []
    read: dict[Cell, list[np.ndarray]] = {cell: [] for cell in cells}
    real: Bool[np.ndarray, "batch pos"] = np.zeros((0, 0), bool)
    start = 0

    def visit(layer: int, m: Tensor) -> None:
        here = [cell for cell in cells if cell.layer == layer]
        picked = m[:, start:, torch.tensor([cell.index for cell in here], device=m.device)].float().cpu().numpy()
        for column, cell in enumerate(here):
            read[cell].append(picked[:, :, column][real])

    size = forward_tokens(model)
    with model.reading(visit, {cell.layer for cell in cells}) as forward:
        for batch in shard.batches(size, bos):
            start = batch.start
            real = np.arange(batch.keys.shape[1]) < batch.lengths[:, None]
            parts.append(_columns(batch, shard.first, real))
            forward(torch.from_numpy(batch.ids))
    sentence, length, token, key = (np.concatenate(column) for column in zip(*parts, strict=True))
    key, first, count = np.unique(key, return_index=True, return_counts=True)
    prefixes = _Prefixes(shard, sentence[first], length[first], token[first], key, count)
    return prefixes, [np.concatenate(read[cell])[first] for cell in cells]


def _columns(batch: Batch, first: int, real: Bool[np.ndarray, "batch pos"]) -> list[np.ndarray]:
    """The sentence, length, last token and key of every prefix in a batch."""
    lengths = np.broadcast_to(np.arange(1, real.shape[1] + 1), real.shape)
    sentences = np.broadcast_to((batch.sentences - first)[:, None], real.shape)
    return [sentences[real], lengths[real], batch.ids[:, batch.start :][real], batch.keys[:, :, 0][real]]


def forward_tokens(model: MemoryModel) -> int:
    """The number of tokens that a forward of a model has here, padding included."""
    return FORWARD_TOKENS.get(model.device.type, FORWARD_TOKENS["cpu"])
