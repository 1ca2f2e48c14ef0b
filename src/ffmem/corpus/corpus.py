"""A corpus: sources of text, how they are cut into parts and shards, and the reading of these."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
from jaxtyping import Int

from ffmem.corpus.ahead import ahead
from ffmem.corpus.chunks import Records, TokenizedChunk, look_at, tokenize
from ffmem.corpus.parts import Part, cut_parts, with_articles
from ffmem.corpus.readers import CAN_FORK, FEW, Readers
from ffmem.corpus.sample import Sample
from ffmem.corpus.sentences import Segmenter, Unit
from ffmem.corpus.shards import Progress, RangeChunk, Shard, Span, assemble, changed
from ffmem.corpus.sources import Chunk, Source, can_be_read_again, chunks_of
from ffmem.corpus.tokens import Encoder
from ffmem.corpus.wikitext import shows_marks
from ffmem.errors import CorpusError

PART_SHARDS = 2
"""About how many shards a part has."""
BYTES_A_TOKEN = 4
"""About how many bytes of text a token has."""


@dataclass
class Corpus:
    """A corpus and how it is cut: everything that parts and shards depend on.

    Reading costs nothing beside the text: `shards` does it in this thread, `stream` in another one, and with several
    `workers` processes segment and tokenize, with the same result.
    """

    sources: list[Source]
    encoder: Encoder
    unit: Unit
    language: str
    shard_tokens: int
    limit_tokens: int | None = None
    sample: Sample | None = None
    """The sample of records that is read, None for all; sampled records are numbered among themselves."""
    plain: bool = False
    """Whether WikiText's marks are turned back to plain text; hashes are of the text as it was before."""
    workers: int = 1
    """The number of processes that segment and tokenize."""
    by_document: bool = False
    """Whether sentences need their document's number, so that parts must know which article is open where they begin."""
    part_shards: int = PART_SHARDS
    _readers: Readers | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def tools(self) -> tuple[Segmenter, Encoder]:
        """The segmenter and the encoder, which together make sentences of records."""
        return Segmenter(self.unit, self.language, plain=self.plain), self.encoder

    def parts(self) -> list[Part]:
        """The parts of the corpus, found from sizes alone; the same as long as sources and settings are."""
        parts = cut_parts(self.sources, self.part_shards * self.shard_tokens * BYTES_A_TOKEN)
        return with_articles(parts, self.sources) if self.by_document else parts

    def shards(
        self,
        part: Part,
        done: Mapping[int, Span] | None = None,
        *,
        room: int | None = None,
        stopped: threading.Event | None = None,
    ) -> Iterator[Shard]:
        """The shards of a part that are not done, in order; reading ends early once `stopped`.

        The text of those that are done is read again, hashed and compared before any other is tokenized. The part may have
        at most `room` tokens, those of finished shards included.
        """
        yield from self._shards([part], {part.number: done or {}}, room, stopped or threading.Event())

    def stream(
        self,
        parts: Iterable[Part] | None = None,
        done: Mapping[int, Mapping[int, Span]] | None = None,
        planned: tuple[int, int] | None = None,
        room: int | None = None,
    ) -> Generator[Shard, None, None]:
        """The shards of several parts, by default all, read a little ahead, without a gap between parts, with their batches
        planned for what `Shard.planned` takes.

        `parts` may be an iterator; a thread asks it for a part before the shards of those before are read, so it must not
        wait for these. `done` are finished shards by part and number. All these parts together have at most `room` tokens,
        `limit_tokens` by default.
        """
        limit = self.limit_tokens if room is None else room

        def make(stopped: threading.Event) -> Iterator[Shard]:
            for shard in self._shards(self.parts() if parts is None else parts, done or {}, limit, stopped):
                if planned:
                    shard.planned(*planned)
                yield shard

        return ahead(make, 1, name="ffmem-corpus")

    def _shards(
        self,
        parts: Iterable[Part],
        done: Mapping[int, Mapping[int, Span]],
        room: int | None,
        stopped: threading.Event,
    ) -> Iterator[Shard]:
        for part, chunks in groupby(self._tokenized(parts, done, stopped), key=lambda found: found[0]):
            finished = done.get(part.number, {})
            tokens = sum(span.after.tokens - span.since.tokens for span in finished.values())
            placed = (chunk for _, chunk in chunks if chunk is not None)
            count_cut = self.unit.kind != "window"
            is_full = any(span.full for span in finished.values())
            for shard in assemble(part, placed, finished, shard_tokens=self.shard_tokens, room=room, count_cut=count_cut):
                if stopped.is_set():
                    return
                tokens += shard.tokens
                is_full = is_full or shard.full
                yield shard
            if is_full:
                return
            room = None if room is None else room - tokens

    def _tokenized(
        self, parts: Iterable[Part], done: Mapping[int, Mapping[int, Span]], stopped: threading.Event
    ) -> Iterator[tuple[Part, RangeChunk | None]]:
        """The chunks of parts in order, and None at the end of each part; processes go on from part to part."""
        waiting: deque[tuple[Part, int | None]] = deque()

        def chunks() -> Iterator[Chunk | Records]:
            for part in parts:
                finished = done.get(part.number, {})
                if len(finished) <= max(finished, default=-1) and all(map(can_be_read_again, self.sources)):
                    self.check(part, finished)
                for nth, chunk in self._left(part, finished, stopped):
                    waiting.append((part, nth))
                    yield chunk
                waiting.append((part, None))

        def ended() -> Iterator[tuple[Part, RangeChunk | None]]:
            while waiting and waiting[0][1] is None:
                yield waiting.popleft()[0], None

        for chunk in self._mapped(chunks()):
            yield from ended()
            part, nth = waiting.popleft()
            assert nth is not None
            yield part, RangeChunk(nth, chunk)
        yield from ended()

    def _mapped(self, chunks: Iterator[Chunk | Records]) -> Iterator[TokenizedChunk]:
        """Tokenize chunks, in order: in other processes if there are `workers` and more than a few chunks, else here."""
        work = partial(tokenize, self.tools)
        if self.workers < 2 or not self.is_portable:
            yield from map(work, chunks)
            return
        if self._readers is None or self._readers.is_closed:
            first = list(islice(chunks, FEW))
            if len(first) < FEW:
                yield from map(work, first)
                return
            self._readers = Readers(tokenize, self.tools, self.workers)
            chunks = chain(first, chunks)
        yield from self._readers.map(chunks)

    @property
    def is_portable(self) -> bool:
        """Whether segmenter and encoder can be sent to other processes: nothing in them is a class of the caller's
        script."""
        here = [*self.sources] + ([self.encoder.tokenizer] if self.encoder.engine is None else [])
        return CAN_FORK and not any(type(one).__module__ == "__main__" for one in here)

    def _left(
        self, part: Part, done: Mapping[int, Span], stopped: threading.Event | None = None
    ) -> Iterator[tuple[int, Chunk | Records]]:
        """The chunks of a part that are not read yet, each with the number of the part's range that it is from."""
        if self.sample is None and not done:
            for nth, chunk in self._chunks(part, stopped):
                yield nth, chunk
            return
        spans = list(done.values())
        first = 0
        for nth, records in self._compared(part, done, stopped):
            numbers = records.numbers + first
            is_left = np.ones(len(numbers), bool)
            for span in spans:
                is_left &= (numbers < span.since.records) | (numbers >= span.after.records)
            first += records.count
            yield nth, records.only(is_left)

    def _chunks(self, part: Part, stopped: threading.Event | None = None) -> Iterator[tuple[int, Chunk]]:
        for nth, here in enumerate(part.ranges):
            for chunk in chunks_of(self.sources[here.source], here.begin, here.end):
                if stopped is not None and stopped.is_set():
                    return
                yield nth, chunk

    def _records(self, part: Part, stopped: threading.Event | None = None) -> Iterator[tuple[int, Records]]:
        """The records of a part that are read (all, or those of the sample), looked at in this process."""
        if self.sample is None:
            for nth, chunk in self._chunks(part, stopped):
                yield nth, look_at(chunk, plain=self.plain)
            return
        wanted = self._sampled(part)
        first = 0
        for nth, chunk in self._chunks(part, stopped):
            begin = int(np.searchsorted(wanted, first))
            records = look_at(chunk, plain=self.plain, sample=wanted[begin:] - first)
            first += records.found
            yield nth, records
        if first != self.sample.records[part.number] and not (stopped is not None and stopped.is_set()):
            raise self._recounted(part, first)

    def _sampled(self, part: Part) -> Int[np.ndarray, " n"]:
        assert self.sample is not None
        if part.number >= len(self.sample.records):
            raise self._recounted(part, None)
        return self.sample.of_part(part.number)

    def _recounted(self, part: Part, found: int | None) -> CorpusError:
        assert self.sample is not None
        before = self.sample.records[part.number] if found is not None else 0
        now = "some" if found is None else f"{found:,}"
        return CorpusError(
            f"part {part.number} of the corpus had {before:,} records when a sample was drawn, now it has {now}: restore "
            "it, or start over with --overwrite"
        )

    def _compared(
        self, part: Part, done: Mapping[int, Span], stopped: threading.Event | None = None
    ) -> Iterator[tuple[int, Records]]:
        """The records of a part; where finished shards end, their text must be what it was."""
        spans = sorted(done.values(), key=lambda span: span.after.records)
        ended = next((span for span in spans if span.last and not span.full and not span.after.records), None)
        spans = [span for span in spans if span.after.records]
        read = Progress()
        for nth, records in self._records(part, stopped):
            while spans and (at := spans[0].after.records - read.records) <= records.count:
                span = spans.pop(0)
                if (read + Progress(at, digest=records.digests[at - 1])).digest != span.after.digest:
                    raise changed(span.after)
                ended = span if span.last and not span.full else None
            read += Progress(records.count, digest=records.digest)
            if ended and read.records > ended.after.records:
                raise changed(ended.after)  # there is more of it now
            yield nth, records
        if spans and not (stopped is not None and stopped.is_set()):
            raise changed(spans[0].after)

    def check(self, part: Part, done: Mapping[int, Span]) -> None:
        """Compare the text of a part's finished shards with their hashes; a change is an error."""
        last = max((span.after.records for span in done.values()), default=0)
        goes_on = any(span.last and not span.full for span in done.values())
        read = 0
        for _, records in self._compared(part, done):
            read += records.count
            if read >= last and not goes_on:
                return

    def digest(self, records: int | None = None) -> str:
        """The hash of the corpus's text, or of its first records; it depends on neither parts nor settings."""
        read = Progress()
        for part in self.parts():
            for _, found in self._records(part):
                if records is not None and read.records + found.count >= records:
                    left = records - read.records
                    return (read + Progress(left, digest=found.digests[left - 1])).digest if left else read.digest
                read += Progress(found.count, digest=found.digest)
        return read.digest

    def count(self, report: Callable[[float | None, str], None]) -> list[int]:
        """The number of records of each part, read without segmenting them; `report` gets the share read and a note."""
        if not all(map(can_be_read_again, self.sources)):
            raise CorpusError("a sample is drawn from a text that can be read twice: give a file or a list, not an iterator")
        counts: list[int] = []
        for part in self.parts():
            counts.append(0)
            for nth, chunk in self._chunks(part):
                counts[-1] += look_at(chunk, plain=False).found
                report(part.share_read(nth, chunk.share), f"{sum(counts):,} records")
        return counts

    def shows_marks(self) -> bool:
        """Whether the corpus begins with text that has WikiText's marks; False for one that can be read only once."""
        if not all(map(can_be_read_again, self.sources)):
            return False
        records = (found for part in self.parts() for _, found in self._records(part))
        return shows_marks(text for found in records for text in found.texts)

    def close(self) -> None:
        """End the processes that read, if there are any; the corpus can be read again."""
        if self._readers is not None:
            self._readers.close()
            self._readers = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_readers": None}
