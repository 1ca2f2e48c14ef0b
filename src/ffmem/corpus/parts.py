"""Parts of a corpus: contiguous stretches that depend on corpus and settings alone, so that each can be read by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ffmem.corpus.files import TextFile
from ffmem.corpus.sources import Source, stretches_of
from ffmem.errors import CorpusError

SENTENCE_BITS = 27
"""A sentence's number is its part's number << SENTENCE_BITS, plus its number in the part: so numbers are in the order of
the corpus, and no part waits for another."""
MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class Range:
    """A stretch of a source, in the source's own unit: bytes, rows, row groups, files."""

    source: int
    """The number of the source in the corpus, from 0."""
    begin: int
    end: int | None
    """The end of the stretch, in the source's unit; None where it goes to the source's end."""


@dataclass(frozen=True)
class Part:
    """Consecutive stretches of sources. Every record of the corpus is in exactly one part."""

    number: int
    ranges: tuple[Range, ...]
    share: tuple[float, float] | None
    """The share of the corpus before the part, and the share up to its end; None where sizes are not known."""
    article: int | None = None
    """The position, in the part's first source, of the article that is open where the part begins; None without one, or
    where nobody has looked."""

    def share_read(self, nth: int, share: float | None) -> float | None:
        """The share of the corpus that has been read, with this share of the part's range number `nth`."""
        if self.share is None or share is None:
            return None
        begin, end = self.share
        return begin + (nth + share) / max(1, len(self.ranges)) * (end - begin)


def cut_parts(sources: Sequence[Source], size: int) -> list[Part]:
    """The parts of about `size` bytes that sources are cut into; what has no known size is a part of its own.

    An empty corpus is one part, which is empty.
    """
    groups: list[list[Range]] = []
    sizes: list[int | None] = []
    for number, source in enumerate(sources):
        for begin, end, more in stretches_of(source, size):
            known = sizes[-1] if sizes else None
            if more is None or known is None or known + more > size:
                groups.append([Range(number, begin, end)])
                sizes.append(more)
                continue
            sizes[-1] = known + more
            before = groups[-1][-1]
            if (before.source, before.end) == (number, begin):
                groups[-1][-1] = Range(number, before.begin, end)
            else:
                groups[-1].append(Range(number, begin, end))
    if len(groups) > MAX_PARTS:
        raise CorpusError(
            f"expected at most {MAX_PARTS:,} parts of a corpus, found {len(groups):,} of about {size:,} bytes: "
            "make them larger with a larger --shard-tokens"
        )
    shares = list(_shares(sizes))
    return [Part(number, tuple(ranges), shares[number]) for number, ranges in enumerate(groups)] or [Part(0, (), (0.0, 1.0))]


def _shares(sizes: Sequence[int | None]) -> Iterator[tuple[float, float] | None]:
    known = [size for size in sizes if size is not None]
    total, before = max(1, sum(known)), 0
    for size in sizes:
        if len(sizes) == 1:
            yield 0.0, 1.0
        elif len(known) < len(sizes) or size is None:
            yield None
        else:
            yield before / total, (before + size) / total
            before += size


def with_articles(parts: Sequence[Part], sources: Sequence[Source]) -> list[Part]:
    """The same parts, each with the article of a WikiText file that is open where it begins."""
    found: list[Part] = []
    article: int | None = None
    before: Range | None = None
    for part in parts:
        for here in part.ranges:
            source = sources[here.source]
            if before is None or before.source != here.source:
                article = None
            elif isinstance(source, TextFile) and before.end is not None:
                last = source.last_title(before.begin, before.end)
                article = article if last is None else last
            if here is part.ranges[0]:
                part = replace(part, article=article)
            before = here
        found.append(part)
    return found
