"""The fixed plan of a corpus: shards of consecutive sentences, and length-sorted batches inside each."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Int

from ffmem.corpus.ahead import ahead
from ffmem.corpus.feeder import Feeder, can_feed
from ffmem.corpus.files import TextFile
from ffmem.corpus.sample import Sample
from ffmem.corpus.sentences import Segmenter, Unit
from ffmem.corpus.sources import Source, Texts
from ffmem.corpus.tokens import Cut, Encoder, Sentences, cut_records, document_keys, prefix_keys
from ffmem.corpus.wikitext import ELLIPSIS, UNKNOWN, shows_marks
from ffmem.corpus.workers import shared
from ffmem.errors import CorpusError

PADDING = 0.05
"""The largest share of a batch that may be padding."""
CHUNK = 1 << 17
"""Characters that are segmented and tokenized together."""
SMALL = 1 << 20
"""Bytes of text up to which starting processes takes longer than reading it."""
FIRST = 1 << 20
"""Tokens of the first shard, if it has no fewer; each is twice as large as the one before until it has its size. So work on
large shards begins as soon as some text is ready."""
SENTENCE_BITS = 27
"""Bits of a sentence's id that count the sentences of its part; those above are the part's number."""
OFTEN = 64
"""Records between two looks at how much of the corpus has been read."""


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

    def __add__(self, other: Progress) -> Progress:
        names = ("records", "sentences", "tokens", "cut", "without_tokens", "digest")
        both = sorted({*self.skipped, *other.skipped})
        skipped = {name: self.skipped.get(name, 0) + other.skipped.get(name, 0) for name in both}
        return Progress(**{name: getattr(self, name) + getattr(other, name) for name in names}, skipped=skipped)


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
    """A hash of every prefix, or of its document; column j belongs to the prefix of j+1 tokens."""
    start: int
    """The column of the first token: 1 behind a beginning-of-sentence token, else 0."""

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Shard:
    """Consecutive sentences of the corpus: the unit of work that is redone or kept as a whole."""

    number: int
    since: Progress
    """The corpus before this shard."""
    sentences: Sentences
    documents: Int[np.ndarray, " sentences"]
    """Of each sentence the document it is in, by the number of the document's first record in the whole corpus."""
    after: Progress
    """The corpus behind it."""
    fraction: float | None
    """The share of the corpus read by then, where it is known."""
    last: bool
    part: int = 0
    full: bool = False
    """Whether the limit on tokens was reached in it: no text behind it is read."""
    _planned: dict[tuple[int, int], list[Int[np.ndarray, " rows"]]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def first(self) -> int:
        """The number of its first sentence."""
        return (self.part << SENTENCE_BITS) | self.since.sentences

    @property
    def tokens(self) -> int:
        return len(self.sentences.ids)

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
        """The rows of each batch, shortest first; planned once."""
        if (batch_tokens, start) not in self._planned:
            lengths = self.sentences.lengths.astype(np.int64)
            self._planned[batch_tokens, start] = plan_batches(lengths + start, batch_tokens)
        return self._planned[batch_tokens, start]


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
    sizes = lengths[order]
    filled = np.cumsum(sizes)
    groups, begin = [], 0
    while begin < len(sizes):
        # No group is longer than this, since none of the others is shorter than the first.
        end = min(len(sizes), begin + batch_tokens // max(1, int(sizes[begin])) + 1)
        area = np.arange(1, end - begin + 1) * sizes[begin:end]
        padding = area - (filled[begin:end] - filled[begin] + sizes[begin])
        full = (area > batch_tokens) | (padding > PADDING * area)
        full[0] = False
        stop = begin + int(full.argmax()) if full.any() else end
        groups.append(order[begin:stop])
        begin = stop
    return groups


@dataclass(frozen=True)
class Span:
    """Where in the corpus a finished shard begins and ends."""

    since: Progress
    after: Progress
    last: bool
    full: bool = False


@dataclass
class Corpus:
    """A corpus and how it is cut: everything that the plan of shards depends on."""

    sources: list[Source]
    encoder: Encoder
    unit: Unit
    language: str
    shard_tokens: int
    limit_tokens: int | None = None
    sample: Sample | None = None
    """The records that are read, where not all are; they are numbered among themselves."""
    plain: bool = False
    """Whether WikiText's marks are turned back to plain text; hashes are of the text before."""
    workers: int = 1
    """Processes that segment and tokenize; the plan is the same for any number."""
    pool: ProcessPoolExecutor | None = field(default=None, repr=False)
    """Those that have been started already."""

    @property
    def readers(self) -> int:
        """As many as `workers`, if they can have the tokenizer."""
        return 1 if self.encoder.engine is None and _is_here_only(self.encoder.tokenizer) else self.workers

    @property
    def is_fed(self) -> bool:
        """Whether a process reads it: it can have the text, and there is enough of that for several readers."""
        if self.readers < 2 or not can_feed() or any(map(_is_here_only, self.sources)):
            return False
        sizes = [source.size() for source in self.sources]
        return None in sizes or sum(size or 0 for size in sizes) > SMALL

    @property
    def tools(self) -> tuple[Segmenter, Encoder]:
        """What `cut_records` needs."""
        return Segmenter(self.unit, self.language, plain=self.plain), self.encoder

    def shards(self, done: Mapping[int, Span] | None = None, stopped: threading.Event | None = None) -> Iterator[Shard]:
        """The shards that are not done yet, in order.

        The text of those that are done is read again, hashed and compared, not tokenized.
        """
        done = done or {}
        if len(done) <= max(done, default=-1) and all(map(_can_be_read_again, self.sources)):
            self._compare(done, stopped)
        skipped: Counter[str] = Counter()
        number, since = _behind(done, 0, Progress())
        progress = since
        parts: list[tuple[Sentences, Int[np.ndarray, " sentences"]]] = []
        for cut, marks in self._tokenized(self._records(done, skipped, stopped)):
            at = 0
            while at < len(marks):
                read = int(cut.token_stops[at - 1]) if at else 0
                size = min(self.shard_tokens, FIRST << min(number, 60))
                full = since.tokens + size - progress.tokens + read
                end = min(len(marks), int(np.searchsorted(cut.token_stops, full)) + 1)
                part, documents, progress, within = self._taken(cut, at, end, marks, progress)
                parts.append((part, documents))
                if not within:
                    yield Shard(number, since, *_joined(parts), progress, 1.0, last=True)
                    return
                if progress.tokens - since.tokens >= size:
                    yield Shard(number, since, *_joined(parts), progress, marks[end - 1].fraction, last=False)
                    number, since = _behind(done, number + 1, progress)
                    progress, parts = since, []
                at = end
        if not any(span.last for span in done.values()):
            progress = replace(progress, skipped=dict(sorted(skipped.items())))
            yield Shard(number, since, *_joined(parts), progress, 1.0, last=True)

    def _taken(
        self, cut: Cut, first: int, last: int, marks: list[_Mark], before: Progress
    ) -> tuple[Sentences, Int[np.ndarray, " sentences"], Progress, bool]:
        """The sentences of these records and their documents, the corpus behind them, and whether all are within the limit
        on tokens."""
        begin, end = int(cut.sentence_stops[first - 1]) if first else 0, int(cut.sentence_stops[last - 1])
        within = True
        if self.limit_tokens is not None:
            read = int(cut.sentences.stops[begin - 1]) if begin else 0
            room = self.limit_tokens - before.tokens + read
            stop = max(begin, int(np.searchsorted(cut.sentences.stops, room, side="right")))
            if stop < end:
                unit = int(np.searchsorted(cut.unit_stops, stop, side="right"))
                last = int(np.searchsorted(cut.record_stops, unit, side="right")) + 1
                end, within = stop, False
        taken = cut.sentences.between(begin, end)
        units = cut.units_of(first, last, end if not within else None)
        ends = np.minimum(cut.sentence_stops[first:last], end)
        documents = np.repeat([mark.document for mark in marks[first:last]], np.diff(ends, prepend=begin))
        mark = marks[last - 1]
        after = Progress(
            records=mark.number,
            sentences=before.sentences + len(taken),
            tokens=before.tokens + len(taken.ids),
            cut=before.cut + (0 if self.unit.kind == "window" else int((units > 1).sum())),
            without_tokens=before.without_tokens + int((units == 0).sum()),
            digest=mark.digest.hex(),
            skipped=mark.skipped,
        )
        return taken, documents, after, within

    def shards_ahead(
        self, done: Mapping[int, Span] | None = None, planned: tuple[int, int] | None = None
    ) -> Generator[Shard, None, None] | Feeder:
        """The same shards, read, segmented and tokenized up to two ahead, by a process or a thread. Batches are planned
        too, for what `Shard.planned` takes.
        """
        feed = Feed(dict(done or {}), planned)
        packed = _packed((self, feed)) if self.is_fed else None
        return Feeder(packed) if packed else ahead(lambda stopped: feed(self, stopped), 1, name="ffmem-corpus")

    def _records(
        self, done: Mapping[int, Span], skipped: Counter[str], stopped: threading.Event | None = None
    ) -> Iterator[tuple[str, _Mark]]:
        """The records of shards that are not done; the others are compared by their hash. Ends early once `stopped`."""
        spans = sorted(done.values(), key=lambda span: span.after.records)
        digest, read, number, document = b"", 0, 0, 0
        numbers = None if self.sample is None else self.sample.numbers
        seen: dict[str, int] = {}
        fraction: float | None = None
        ended: Span | None = None
        for at, source in enumerate(self.sources):
            article = 0
            for text in source.records(skipped):
                if stopped is not None and stopped.is_set():
                    return
                read += 1
                before, article = article, source.articles if isinstance(source, TextFile) else 0
                document = document if article and article == before else read
                if numbers is not None and (number == len(numbers) or read != numbers[number]):
                    skipped["records outside the sample"] += 1
                    continue
                number += 1
                if self.plain and (unknown := text.count(UNKNOWN)):
                    skipped[f"unknown words ({UNKNOWN}) replaced by {ELLIPSIS}"] += unknown
                digest = hashlib.sha256(digest + text.encode("utf-8", "surrogatepass")).digest()
                if skipped != seen:
                    seen = dict(sorted(skipped.items()))
                if (number - 1) % OFTEN == 0:
                    fraction = self._fraction(at)
                if ended:
                    raise _changed(ended.after)  # there is more of it now
                if not spans or number <= spans[0].since.records:
                    yield text, _Mark(number, document, digest, seen, fraction)
                elif number == spans[0].after.records:
                    span = spans.pop(0)
                    if digest.hex() != span.after.digest:
                        raise _changed(span.after)
                    if span.last and self.limit_tokens is not None:
                        return
                    ended = span if span.last else None
        if self.sample is not None and read != self.sample.records:
            raise CorpusError(
                f"the corpus had {self.sample.records:,} records when a sample was drawn, now it has {read:,}: restore it, "
                "or start over with --overwrite"
            )
        if spans and not (spans[0].last and number == spans[0].after.records):
            raise _changed(spans[0].after)

    def _compare(self, done: Mapping[int, Span], stopped: threading.Event | None) -> None:
        """Where shards are left between finished ones, all text up to the last of those must be as it was.

        Otherwise some of it would be read before the change is noticed.
        """
        digests = {span.after.records: span for span in done.values() if span.after.records}
        last = max(digests, default=0)
        number = 0
        for _, mark in islice(self._records({}, Counter(), stopped), last):
            number = mark.number
            if number in digests and mark.digest.hex() != digests[number].after.digest:
                raise _changed(digests[number].after)
        if number < last and not (stopped is not None and stopped.is_set()):
            raise _changed(digests[last].after)

    def digest(self, records: int | None = None) -> str:
        """The hash of the corpus's text, or of its first records, read without segmenting or tokenizing it."""
        digest = b""
        for _, mark in islice(self._records({}, Counter()), records):
            digest = mark.digest
        return digest.hex()

    def count(self, told: Callable[[float | None, str], None]) -> int:
        """The number of its records, read without segmenting or tokenizing them; `told` how far that is now and then."""
        if not all(map(_can_be_read_again, self.sources)):
            raise CorpusError("a sample is drawn from a text that can be read twice: give a file or a list, not an iterator")
        number = 0
        for at, source in enumerate(self.sources):
            for _ in source.records(Counter()):
                number += 1
                if number % OFTEN == 0:
                    told(self._fraction(at), f"{number:,} records")
        return number

    def shows_marks(self) -> bool:
        """Whether it begins with text that has WikiText's marks; one that can be read only once is not looked at."""
        if not all(map(_can_be_read_again, self.sources)):
            return False
        return shows_marks(text for text, _ in self._records({}, Counter()))

    def _fraction(self, at: int) -> float | None:
        """The share of the sources read, inside source `at`: by bytes where all have a size."""
        if len(self.sources) == 1:
            return self.sources[0].fraction()
        sizes = [source.size() for source in self.sources]
        if None in sizes:
            return None
        weights = [size or 0 for size in sizes]
        return (sum(weights[:at]) + (self.sources[at].fraction() or 0.0) * weights[at]) / max(1, sum(weights))

    def _tokenized(self, records: Iterator[tuple[str, _Mark]]) -> Iterator[tuple[Cut, list[_Mark]]]:
        """Records as sentences: many are tokenized in one call, and calls are shared out."""
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

        for cut in shared(cut_records, self.tools, chunks(), workers=self.readers, pool=self.pool):
            yield cut, marks.popleft()


@dataclass(frozen=True)
class Feed:
    """What is wanted of a corpus: shards that are not done, with their batches planned."""

    done: dict[int, Span]
    planned: tuple[int, int] | None

    def __call__(self, corpus: Corpus, stopped: threading.Event) -> Iterator[Shard]:
        for shard in corpus.shards(self.done, stopped):
            if self.planned:
                shard.planned(*self.planned)
            yield shard


def _joined(
    parts: list[tuple[Sentences, Int[np.ndarray, " _"]]],
) -> tuple[Sentences, Int[np.ndarray, " sentences"]]:
    """Parts of a shard, one behind the other."""
    documents = np.concatenate([np.zeros(0, np.int64), *(documents for _, documents in parts)])
    return Sentences.join([sentences for sentences, _ in parts]), documents


def _is_here_only(thing: object) -> bool:
    """Whether another process cannot have it: an iterable in memory, or of a class that the caller's script defines."""
    return isinstance(thing, Texts) or type(thing).__module__ == "__main__"


def _packed(things: object) -> bytes | None:
    """As another process can have them; None where it cannot."""
    try:
        return pickle.dumps(things)
    except Exception:  # a source of the caller's may hold anything
        return None


def _can_be_read_again(source: Source) -> bool:
    return not isinstance(source, Texts) or isinstance(source.texts, Sequence)


def _behind(done: Mapping[int, Span], number: int, progress: Progress) -> tuple[int, Progress]:
    """The first shard from `number` on that is not done, and the corpus before it."""
    while number in done:
        if done[number].since.records != progress.records:
            raise _changed(done[number].since)
        progress = done[number].after
        number += 1
    return number, progress


@dataclass(frozen=True)
class _Mark:
    """The corpus behind one record."""

    number: int
    document: int
    digest: bytes
    skipped: dict[str, int]
    fraction: float | None


def _changed(since: Progress) -> CorpusError:
    return CorpusError(
        f"the corpus has changed since the run began (within its first {since.records:,} records): "
        "restore it, or start over with --overwrite"
    )
