"""Chunks of records on their way to sentences: looked at, segmented and tokenized, in whichever process does it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from ffmem.corpus.digest import shown, with_text
from ffmem.corpus.sentences import Segmenter
from ffmem.corpus.tokens import Encoder, Sentences
from ffmem.corpus.wikitext import ELLIPSIS, UNKNOWN

if TYPE_CHECKING:
    from ffmem.corpus.sources import Chunk

OUTSIDE = "records outside the sample"


@dataclass(frozen=True)
class Records:
    """The records of a chunk: those that are read, and among them those whose texts are still wanted."""

    texts: list[str]
    """The texts of the wanted records."""
    numbers: Int[np.ndarray, " records"]
    """The number of each wanted record among those that are read, from 0 in the chunk."""
    positions: Int[np.ndarray, " records"]
    """For each wanted record, a number that tells its document from others: the position of its article, or its own."""
    digests: list[str]
    """The hash of all texts that are read up to the end of each wanted record, from the chunk's beginning on."""
    skipped: list[dict[str, int]]
    """For each wanted record, counts of what was left out in the chunk before it, by reason."""
    count: int
    """The number of records that are read."""
    found: int
    """The number of records in the chunk; where a sample is read, more than `count`."""
    digest: str
    """The hash of all texts that are read."""
    skipped_in_all: dict[str, int]
    untitled: int
    """The number of wanted records before the chunk's first title, whose article began in an earlier chunk."""
    article: int | None
    """The position of the last title in the chunk; None where there is none."""
    share: float | None
    """The share of the stretch of the source that has been read once this chunk is."""

    def only(self, wanted: Bool[np.ndarray, " records"]) -> Records:
        """The same chunk, with the texts of these records only."""
        rows = np.flatnonzero(wanted).tolist()
        return replace(
            self,
            texts=[self.texts[row] for row in rows],
            numbers=self.numbers[wanted],
            positions=self.positions[wanted],
            digests=[self.digests[row] for row in rows],
            skipped=[self.skipped[row] for row in rows],
            untitled=int(wanted[: self.untitled].sum()),
        )


def look_at(chunk: Chunk, *, plain: bool, sample: Int[np.ndarray, " n"] | None = None) -> Records:
    """The records of a chunk, with all that is to be known of them but their sentences.

    With `plain`, unknown words of WikiText that will be replaced are counted. Of a `sample` only the records with these
    numbers, in order and from 0 in the chunk, are read.
    """
    skipped: Counter[str] = Counter()
    texts: list[str] = []
    positions: list[int] = []
    digests: list[str] = []
    before: list[dict[str, int]] = []
    untitled, article, found, digest = 0, None, 0, 0
    seen: dict[str, int] = {}
    for position, text in chunk.records(skipped):
        if text is None:
            article = position
            continue
        found += 1
        if sample is not None and (len(texts) == len(sample) or sample[len(texts)] != found - 1):
            skipped[OUTSIDE] += 1
            continue
        if plain and (unknown := text.count(UNKNOWN)):
            skipped[f"unknown words ({UNKNOWN}) replaced by {ELLIPSIS}"] += unknown
        if skipped != seen:
            seen = dict(skipped)
        digest = with_text(digest, text)
        untitled += article is None
        texts.append(text)
        positions.append(position if article is None else article)
        digests.append(shown(digest))
        before.append(seen)
    return Records(
        texts=texts,
        numbers=np.arange(len(texts)),
        positions=np.array(positions, np.int64),
        digests=digests,
        skipped=before,
        count=len(texts),
        found=found,
        digest=digests[-1] if digests else "",
        skipped_in_all=dict(skipped),
        untitled=untitled,
        article=article,
        share=chunk.share,
    )


@dataclass(frozen=True)
class TokenizedChunk:
    """A chunk of records as sentences."""

    records: Records
    """The records of the chunk; their texts are emptied, to be cheap to send."""
    sentences: Sentences
    units: Int[np.ndarray, " units"]
    """The number of sentences of each unit: none if it has no token, several if it was longer than the model's context."""
    units_of_records: Int[np.ndarray, " records"]
    """The number of units of each record."""

    def __len__(self) -> int:
        """The number of records in the chunk."""
        return len(self.units_of_records)

    @cached_property
    def unit_stops(self) -> Int[np.ndarray, " units"]:
        """The number of sentences up to the end of each unit."""
        return np.cumsum(self.units, dtype=np.int64)

    @cached_property
    def record_stops(self) -> Int[np.ndarray, " records"]:
        """The number of units up to the end of each record."""
        return np.cumsum(self.units_of_records, dtype=np.int64)

    @cached_property
    def sentence_stops(self) -> Int[np.ndarray, " records"]:
        """The number of sentences up to the end of each record."""
        return np.append(0, self.unit_stops)[self.record_stops]

    @cached_property
    def token_stops(self) -> Int[np.ndarray, " records"]:
        """The number of tokens up to the end of each record."""
        return np.append(0, self.sentences.stops)[self.sentence_stops]

    def units_between(self, first: int, last: int, end: int | None = None) -> Int[np.ndarray, " units"]:
        """The numbers of sentences of the units of records `first` to `last`, `last` excluded; if given, only before
        sentence `end`."""
        begin, stop = ((int(self.record_stops[record - 1]) if record else 0) for record in (first, last))
        units = self.units[begin:stop]
        if end is None:
            return units
        # The unit that holds sentence `end` counts for what is taken of it, if anything.
        whole = int(np.searchsorted(self.unit_stops, end, side="right"))
        rest = end - (int(self.unit_stops[whole - 1]) if whole else 0)
        return np.append(self.units[begin:whole], [rest] if rest else []).astype(np.int64)


def tokenize(tools: tuple[Segmenter, Encoder], chunk: Chunk | Records) -> TokenizedChunk:
    """Segment and tokenize a chunk in one call of the tokenizer; one that nobody has looked at yet is looked at first."""
    segmenter, encoder = tools
    records = chunk if isinstance(chunk, Records) else look_at(chunk, plain=segmenter.plain)
    texts = [list(segmenter.split(text)) for text in records.texts]
    groups = list(encoder.encode([text for units in texts for text in units]))
    return TokenizedChunk(
        replace(records, texts=[]),
        Sentences.of([sentence for group in groups for sentence in group]),
        units=np.array([len(group) for group in groups], np.int32),
        units_of_records=np.array([len(units) for units in texts], np.int32),
    )
