"""Shards: consecutive sentences of a part, the unit of work that a run redoes or keeps as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int

from ffmem.corpus.batches import Batch, document_keys, plan_batches, prefix_keys
from ffmem.corpus.chunks import TokenizedChunk
from ffmem.corpus.digest import joined
from ffmem.corpus.parts import SENTENCE_BITS, Part
from ffmem.corpus.tokens import Sentences
from ffmem.errors import CorpusError

FIRST = 1 << 20
"""The number of tokens of a run's first shard, if `shard_tokens` is no fewer; each shard is twice as large as the one before
until it has its size, so that work on large shards begins as soon as some text is ready."""
POSITION_BITS = 44
"""The shift in a document's number, which is its source's number << POSITION_BITS, plus its position in the source."""


@dataclass(frozen=True)
class Progress:
    """Counts of what was read of a part up to a point between two records. Those of consecutive stretches add up."""

    records: int = 0
    sentences: int = 0
    tokens: int = 0
    cut: int = 0
    """The number of units that were longer than the model's context."""
    without_tokens: int = 0
    """The number of units that have no token."""
    digest: str = ""
    """A hash of the texts of all records."""
    skipped: dict[str, int] = field(default_factory=dict)
    """How often a record was left out, by reason."""

    def as_dict(self) -> dict[str, Any]:
        """The counts as a dict that JSON can hold."""
        return asdict(self)

    def __add__(self, other: Progress) -> Progress:
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        digest = joined(self.digest, other.digest, other.records)
        return Progress(**counts, digest=digest, skipped=_sum(self.skipped, other.skipped))


_COUNTS = ("records", "sentences", "tokens", "cut", "without_tokens")


@dataclass(frozen=True)
class Span:
    """The beginning and the end of a finished shard in its part."""

    since: Progress
    after: Progress
    last: bool
    full: bool = False
    """Whether the limit on tokens was reached in the shard, so that no text behind it is read."""


@dataclass(frozen=True)
class Shard:
    """Consecutive sentences of a part: the unit of work that is redone or kept as a whole."""

    part: int
    number: int
    """The shard's number in its part, from 0."""
    since: Progress
    """The progress of the part before this shard."""
    sentences: Sentences
    documents: Int[np.ndarray, " sentences"]
    """The number of each sentence's document, which depends on neither parts nor shards."""
    after: Progress
    """The progress of the part behind this shard."""
    fraction: float | None
    """The share of the whole corpus up to the shard's end; None where sizes are not known."""
    last: bool
    """Whether no other shard of the part follows."""
    full: bool = False
    """Whether the limit on tokens was reached in the shard, so that no text behind it is read."""
    _planned: dict[tuple[int, int], list[Int[np.ndarray, " rows"]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def first(self) -> int:
        """The number of the shard's first sentence: the part's number << SENTENCE_BITS, plus the sentences before it."""
        return (self.part << SENTENCE_BITS) | self.since.sentences

    @property
    def tokens(self) -> int:
        """The number of tokens of the shard's sentences."""
        return len(self.sentences.ids)

    @property
    def span(self) -> Span:
        """The beginning and the end of the shard in its part."""
        return Span(self.since, self.after, self.last, self.full)

    def batches(self, batch_tokens: int, bos: int | None, *, by_document: bool = False) -> Iterator[Batch]:
        """The shard's sentences sorted by length and cut into batches of at most `batch_tokens`, padding included.

        Their keys are of prefixes, or `by_document` of documents. The longest come first: a long sentence has more prefixes
        to offer a cell, so thresholds rise early and what follows rarely passes them.
        """
        start = 0 if bos is None else 1
        for rows in reversed(self.planned(batch_tokens, start)):
            ids = self.sentences.padded(rows, bos)
            lengths = self.sentences.lengths[rows].astype(np.int64)
            width = ids.shape[1] - start
            keys = document_keys(self.documents[rows], width) if by_document else prefix_keys(ids[:, start:])
            yield Batch(ids, lengths, rows + self.first, keys, start)

    def planned(self, batch_tokens: int, start: int) -> list[Int[np.ndarray, " rows"]]:
        """The rows of each batch, shortest first, for rows that have `start` columns before their tokens; planned once."""
        if (batch_tokens, start) not in self._planned:
            lengths = self.sentences.lengths.astype(np.int64)
            self._planned[batch_tokens, start] = plan_batches(lengths + start, batch_tokens)
        return self._planned[batch_tokens, start]


@dataclass(frozen=True)
class RangeChunk:
    """A tokenized chunk of a part, with the number of the part's range that it is from."""

    range: int
    """The number of the range in the part, from 0."""
    chunk: TokenizedChunk


def assemble(
    part: Part,
    chunks: Iterable[RangeChunk],
    done: Mapping[int, Span],
    *,
    shard_tokens: int,
    room: int | None = None,
    count_cut: bool = True,
) -> Iterator[Shard]:
    """The shards of a part that are not `done`, from its chunks in order.

    A shard ends with the record that fills it. The part has at most `room` tokens, its finished shards included: whole
    sentences, up to the first that exceeds it.
    """
    last_done = next((number for number, span in done.items() if span.last), None)
    number, since = behind(done, 0, Progress())
    progress = since
    before = Progress()  # what was read and left out before the chunk
    pieces: list[tuple[Sentences, Int[np.ndarray, " _"]]] = []
    nth, article = 0, part.article
    fraction: float | None = None

    def shard(*, last: bool, full: bool = False) -> Shard:
        documents = np.concatenate([np.zeros(0, np.int64), *(documents for _, documents in pieces)])
        sentences = Sentences.join([sentences for sentences, _ in pieces])
        return Shard(part.number, number, since, sentences, documents, progress, fraction, last, full)

    for placed in chunks:
        chunk, records = placed.chunk, placed.chunk.records
        if placed.range != nth:  # an article ends with its file
            nth, article = placed.range, None
        positions = records.positions
        if article is not None:
            positions = np.append(np.full(records.untitled, article), positions[records.untitled :])
        article = article if records.article is None else records.article
        documents = (part.ranges[nth].source << POSITION_BITS) + positions if part.ranges else positions
        fraction = part.share_read(nth, records.share)
        at = 0
        while at < len(chunk) and (last_done is None or number < last_done):
            size = min(shard_tokens, FIRST << min(part.number + number, 60))
            read = int(chunk.token_stops[at - 1]) if at else 0
            full = since.tokens + size - progress.tokens + read
            end = min(len(chunk), int(np.searchsorted(chunk.token_stops, full)) + 1)
            last, stop = _within(chunk, at, end, None if room is None else room - progress.tokens)
            is_full = stop < chunk.sentence_stops[end - 1]
            begin = int(chunk.sentence_stops[at - 1]) if at else 0
            taken = chunk.sentences.between(begin, stop)
            ends = np.minimum(chunk.sentence_stops[at:last], stop)
            pieces.append((taken, np.repeat(documents[at:last], np.diff(ends, prepend=begin))))
            units = chunk.units_between(at, last, stop if is_full else None)
            read_here = int(records.numbers[last - 1]) + 1
            progress = replace(
                before + Progress(read_here, digest=records.digests[last - 1], skipped=records.skipped[last - 1]),
                sentences=progress.sentences + len(taken),
                tokens=progress.tokens + len(taken.ids),
                cut=progress.cut + (int((units > 1).sum()) if count_cut else 0),
                without_tokens=progress.without_tokens + int((units == 0).sum()),
            )
            if progress.sentences >= 1 << SENTENCE_BITS:
                raise CorpusError(
                    f"expected fewer than {1 << SENTENCE_BITS:,} sentences in part {part.number} of the corpus, found more: "
                    "make parts smaller with a smaller --shard-tokens"
                )
            if is_full:
                fraction = 1.0
                yield shard(last=True, full=True)
                return
            if progress.tokens - since.tokens >= size:
                yield shard(last=False)
                number, since = behind(done, number + 1, progress)
                progress, pieces = since, []
            at = end
        before += Progress(records=records.count, digest=records.digest, skipped=records.skipped_in_all)
    if last_done is None:
        progress = replace(progress, skipped=before.skipped)
        fraction = part.share[1] if part.share else None
        yield shard(last=True)


def _within(chunk: TokenizedChunk, at: int, end: int, room: int | None) -> tuple[int, int]:
    """The first record and the first sentence of a chunk not taken, if its records from `at` to `end` have `room` tokens."""
    stop = int(chunk.sentence_stops[end - 1])
    begin = int(chunk.sentence_stops[at - 1]) if at else 0
    if room is not None:
        read = int(chunk.sentences.stops[begin - 1]) if begin else 0
        limit = max(begin, int(np.searchsorted(chunk.sentences.stops, room + read, side="right")))
        if limit < stop:
            unit = int(np.searchsorted(chunk.unit_stops, limit, side="right"))
            return int(np.searchsorted(chunk.record_stops, unit, side="right")) + 1, limit
    return end, stop


def behind(done: Mapping[int, Span], number: int, progress: Progress) -> tuple[int, Progress]:
    """The number of the first shard from `number` on that is not done, and the progress of the part before it."""
    while number in done:
        if done[number].since.records != progress.records:
            raise changed(done[number].since)
        progress = done[number].after
        number += 1
    return number, progress


def changed(since: Progress) -> CorpusError:
    """An error that says that the text is not what it was when finished shards were read."""
    return CorpusError(
        f"the corpus has changed since the run began (within the first {since.records:,} records of a part): "
        "restore it, or start over with --overwrite"
    )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in sorted({*one, *other})}
