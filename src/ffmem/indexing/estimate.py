"""Estimates, shown before a run starts, of the tokens it will read and of the disk it will take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.files import TextFile
from ffmem.corpus.sources import Texts
from ffmem.indexing.layer_statistics import cell_bytes, installed_statistics
from ffmem.indexing.statistics import BUILT_IN, Statistic

SAMPLE = 100
"""The number of records of a source that are tokenized to estimate its tokens."""
OFTEN = 64
"""The number of records between two looks at how much of a file has been read."""
AHEAD = 1 << 20
"""The number of bytes of a file whose characters are counted to estimate its tokens."""


@dataclass(frozen=True)
class Estimate:
    """An estimate of a run: cells, tokens (None where the size of the corpus is unknown) and at most so many bytes of disk.

    `work_bytes` are needed beside the run while it is built.
    """

    cells: int
    tokens: int | None
    run_bytes: int
    work_bytes: int


def estimate_tokens(corpus: Corpus) -> int | None:
    """About how many tokens the corpus has; None where its length is unknown.

    The beginning of the first file of each kind tells how many tokens a byte of such files has.
    """
    known = [source for source in corpus.sources if isinstance(source, TextFile)]
    lists = [source for source in corpus.sources if isinstance(source, Texts) and isinstance(source.texts, list)]
    if len(known) + len(lists) < len(corpus.sources):
        return None
    total = 0.0
    rates: dict[str, float] = {}
    for source in known:
        kind, size = Path(source.name).suffix, source.size() or 0
        if not rates.get(kind):
            tokens, share = _begin(corpus, source)
            rates[kind] = tokens / max(1e-9, share * (size or 1))
        total += rates[kind] * size
    for texts in lists:
        tokens, share = _begin(corpus, texts)
        total += tokens / max(share, 1e-9)
    if corpus.sample is not None:
        total *= min(1.0, corpus.sample.size / max(1, corpus.sample.total))
    limit = corpus.limit_tokens
    return round(total) if limit is None else min(limit, round(total))


def _begin(corpus: Corpus, source: TextFile | Texts) -> tuple[float, float]:
    """About how many tokens the beginning of a source has, and which share of the source that beginning is.

    Tokens a character come from the first records; characters are counted further, since a packed file is read in
    large pieces and its share read is known only roughly near the start.
    """
    segmenter, encoder = corpus.tools
    records = source.records(Counter())
    first = list(islice(records, SAMPLE))
    units = [unit for record in first for unit in segmenter.split(record)]
    tokens = sum(len(sentence.ids) for pieces in encoder.encode(units) for sentence in pieces) if units else 0
    size = source.size() or 0
    sampled = characters = sum(map(len, first))
    for number, record in enumerate(records):
        characters += len(record)
        if size and number % OFTEN:
            continue
        share = source.fraction() or 0.0
        if share * size >= AHEAD or (not size and share):
            return tokens * characters / sampled, share
    return tokens * characters / max(1, sampled), 1.0


def state_bytes(t: int, signs: int, stats: bool) -> int:
    """The bytes that a worker's state takes for one cell: 28 a trigger, and the state of its statistics with `stats`."""
    return 28 * t * signs + cell_bytes(_statistics(stats))[0]


def _statistics(stats: bool) -> list[type[Statistic]]:
    """The statistics that a run gathers if it begins now."""
    return [*BUILT_IN.values(), *installed_statistics().values()] if stats else []


def estimate(
    tokens: int | None,
    *,
    cells: int,
    t: int,
    signs: int,
    stats: bool,
    vocabulary: int = 0,
    workers: int = 1,
    shards: int = 1,
) -> Estimate:
    """The disk that a run takes, at most, in bytes.

    A trigger takes 20 bytes, the statistics of a cell 1,400, a sentence 300 (there are at most as many as triggers), a token
    of the vocabulary 16.

    While it is built it also has a state for each worker, and for each shard its sums and the sentences that it referred to.
    """
    triggers = cells * t * signs
    known = tokens // 20 if tokens is not None else None
    sentences, then = (most if known is None else min(most, known) for most in (triggers, triggers * shards))
    columns = 20 + sum(kind.row_bytes for kind in _statistics(stats))
    run = 20 * triggers + columns * cells + 300 * sentences + 16 * vocabulary
    work = workers * cells * state_bytes(t, signs, stats) + cell_bytes(_statistics(stats))[1] * cells * shards + 300 * then
    return Estimate(cells, tokens, run, work)
