"""The fixed plan of a corpus: shards of consecutive sentences, and length-sorted batches inside each."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Int

from ffmem.corpus.sentences import Segmenter, Unit
from ffmem.corpus.sources import Source
from ffmem.corpus.tokens import Encoder, Sentence, cut_records, prefix_keys
from ffmem.corpus.workers import shared
from ffmem.words import CorpusError

PADDING = 0.05
"""The largest share of a batch that may be padding."""
CHUNK = 1 << 16
"""Characters that are segmented and tokenized together."""


@dataclass(frozen=True)
class Progress:
    """How far a corpus has been read, always between two records. A chain of hashes stands for all text so far."""

    records: int = 0
    sentences: int = 0
    tokens: int = 0
    cut: int = 0
    without_tokens: int = 0
    digest: str = ""
    skipped: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Batch:
    """Rows of about equal length, padded on the right."""

    ids: Int[np.ndarray, "batch columns"]
    """Token ids, the beginning-of-sentence token first where there is one."""
    lengths: Int[np.ndarray, " batch"]
    """Tokens of each row, the beginning-of-sentence token not counted."""
    sentences: Int[np.ndarray, " batch"]
    """The number of each row's sentence in the corpus."""
    keys: Int[np.ndarray, "batch pos 2"]
    """A hash of every prefix; column j belongs to the prefix of j+1 tokens."""
    start: int
    """The column of the first token: 1 behind a beginning-of-sentence token, else 0."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Shard:
    """Consecutive sentences of the corpus: the unit of work that is redone or kept as a whole."""

    number: int
    first: int
    sentences: list[Sentence]
    after: Progress
    """The corpus behind this shard."""
    fraction: float | None
    """The share of the corpus read by then, where it is known."""
    last: bool

    @property
    def tokens(self) -> int:
        return sum(len(sentence.ids) for sentence in self.sentences)

    def batches(self, batch_tokens: int, bos: int | None) -> Iterator[Batch]:
        """The shard's sentences sorted by length and cut into batches of at most `batch_tokens`, padding included.

        The longest come first: a long sentence has more prefixes to offer a cell, so thresholds rise early and what
        follows rarely passes them.
        """
        lengths = np.array([len(sentence.ids) for sentence in self.sentences], np.int64)
        start = 0 if bos is None else 1
        for rows in reversed(plan_batches(lengths + start, batch_tokens)):
            ids = padded([self.sentences[sentence].ids for sentence in rows], bos)
            yield Batch(ids, lengths[rows], rows + self.first, prefix_keys(ids[:, start:]), start)


def padded(sequences: Sequence[Int[np.ndarray, " _"]], bos: int | None) -> Int[np.ndarray, "batch columns"]:
    """Sequences as rows, padded on the right, behind the beginning-of-sentence token where there is one.

    >>> padded([np.array([5, 6]), np.array([7])], 0).tolist()
    [[0, 5, 6], [0, 7, 0]]
    """
    start = 0 if bos is None else 1
    ids = np.full((len(sequences), start + max(map(len, sequences))), bos or 0, np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[start : start + len(sequence)] = sequence
    return ids


def plan_batches(lengths: Int[np.ndarray, " n"], batch_tokens: int) -> list[Int[np.ndarray, " rows"]]:
    """Groups of sentence indices, shortest first: each at most `batch_tokens` wide × high, at most 5% of it padding.

    >>> [rows.tolist() for rows in plan_batches(np.array([3, 40, 41, 3]), 100)]
    [[0, 3], [1, 2]]
    """
    order = np.argsort(lengths, kind="stable")
    sizes = lengths[order].tolist()
    groups, begin, filled = [], 0, 0
    for at, size in enumerate(sizes):
        area = (at - begin + 1) * size
        if at > begin and (area > batch_tokens or area - filled - size > PADDING * area):
            groups.append(order[begin:at])
            begin, filled = at, 0
        filled += size
    if len(order):
        groups.append(order[begin:])
    return groups


@dataclass
class Corpus:
    """A corpus and how it is cut: everything that the plan of shards depends on."""

    sources: list[Source]
    encoder: Encoder
    unit: Unit
    language: str
    shard_tokens: int
    limit_tokens: int | None = None
    workers: int = 1
    """Processes that segment and tokenize; the plan is the same for any number."""

    def shards(
        self, since: Progress | None = None, number: int = 0, stopped: threading.Event | None = None
    ) -> Iterator[Shard]:
        """The shards behind `since`, in order. What was read before is read again, hashed and compared, not tokenized."""
        since = progress = since or Progress()
        skipped: Counter[str] = Counter()
        sentences: list[Sentence] = []
        for pieces, mark in self._tokenized(self._records(since, skipped, stopped)):
            kept = self._within_limit(pieces, progress.tokens)
            taken = [sentence for group in kept for sentence in group]
            sentences.extend(taken)
            windows = self.unit.kind == "window"
            progress = Progress(
                records=mark.number,
                sentences=progress.sentences + len(taken),
                tokens=progress.tokens + sum(len(sentence.ids) for sentence in taken),
                cut=progress.cut + (0 if windows else sum(len(group) > 1 for group in kept)),
                without_tokens=progress.without_tokens + sum(not group for group in kept),
                digest=mark.digest.hex(),
                skipped=mark.skipped,
            )
            if len(taken) < sum(map(len, pieces)):
                break
            if progress.tokens - since.tokens >= self.shard_tokens:
                yield Shard(number, since.sentences, sentences, progress, mark.fraction, last=False)
                number, since, sentences = number + 1, progress, []
        else:
            progress = replace(progress, skipped=dict(sorted(skipped.items())))
        yield Shard(number, since.sentences, sentences, progress, 1.0, last=True)

    def shards_ahead(self, since: Progress | None = None, number: int = 0) -> Iterator[Shard]:
        """The same shards, read, segmented and tokenized by a background thread that keeps up to two shards ahead."""
        ready: queue.Queue[Shard | BaseException | None] = queue.Queue(maxsize=1)
        stopped = threading.Event()

        def put(item: Shard | BaseException | None) -> bool:
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def read() -> None:
            try:
                for shard in self.shards(since, number, stopped):
                    if not put(shard):
                        return
                put(None)
            except BaseException as error:  # handed to the reader, who raises it
                put(error)

        thread = threading.Thread(target=read, name="ffmem-corpus", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            thread.join()

    def _records(
        self, since: Progress, skipped: Counter[str], stopped: threading.Event | None = None
    ) -> Iterator[tuple[str, _Mark]]:
        """Records behind `since`; those before it are compared by their hash. Ends early once `stopped`."""
        digest, number = b"", 0
        for at, source in enumerate(self.sources):
            for text in source.records(skipped):
                if stopped is not None and stopped.is_set():
                    return
                number += 1
                digest = hashlib.sha256(digest + text.encode("utf-8", "surrogatepass")).digest()
                if number == since.records and digest.hex() != since.digest:
                    raise _changed(since)
                if number > since.records:
                    yield text, _Mark(number, digest, dict(sorted(skipped.items())), self._fraction(at))
        if number < since.records:
            raise _changed(since)

    def digest(self, records: int | None = None) -> str:
        """The hash of the corpus's text, or of its first records, read without segmenting or tokenizing it."""
        digest = b""
        for _, mark in islice(self._records(Progress(), Counter()), records):
            digest = mark.digest
        return digest.hex()

    def _fraction(self, at: int) -> float | None:
        """The share of the sources read, inside source `at`: by bytes where all have a size."""
        if len(self.sources) == 1:
            return self.sources[0].fraction()
        sizes = [source.size() for source in self.sources]
        if None in sizes:
            return None
        weights = [size or 0 for size in sizes]
        return (sum(weights[:at]) + (self.sources[at].fraction() or 0.0) * weights[at]) / max(1, sum(weights))

    def _tokenized(self, records: Iterator[tuple[str, _Mark]]) -> Iterator[tuple[list[list[Sentence]], _Mark]]:
        """Every record as its units' sentences; many records are tokenized in one call, and calls are shared out."""
        marks: deque[list[_Mark]] = deque()

        def chunks() -> Iterator[list[str]]:
            waiting: list[tuple[str, _Mark]] = []
            characters = 0
            for text, mark in records:
                waiting.append((text, mark))
                characters += len(text)
                if characters >= CHUNK:
                    marks.append([mark for _, mark in waiting])
                    yield [text for text, _ in waiting]
                    waiting, characters = [], 0
            marks.append([mark for _, mark in waiting])
            yield [text for text, _ in waiting]

        common = (Segmenter(self.unit, self.language), self.encoder)
        for cut in shared(cut_records, common, chunks(), workers=self.workers):
            yield from zip(cut.records(), marks.popleft(), strict=True)

    def _within_limit(self, pieces: list[list[Sentence]], tokens: int) -> list[list[Sentence]]:
        """The sentences before the one that would exceed the limit on tokens."""
        if self.limit_tokens is None:
            return pieces
        kept: list[list[Sentence]] = []
        for group in pieces:
            room: list[Sentence] = []
            for sentence in group:
                tokens += len(sentence.ids)
                if tokens > self.limit_tokens:
                    return [*kept, room] if room else kept
                room.append(sentence)
            kept.append(room)
        return kept


@dataclass(frozen=True)
class _Mark:
    """The corpus behind one record."""

    number: int
    digest: bytes
    skipped: dict[str, int]
    fraction: float | None


def _changed(since: Progress) -> CorpusError:
    return CorpusError(
        f"the corpus has changed since the run began (within its first {since.records:,} records): "
        "restore it, or start over with --overwrite"
    )
