"""The whole corpus as one part, until a corpus knows its own parts; then this module goes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from ffmem.corpus import plan
from ffmem.corpus.ahead import ahead
from ffmem.corpus.feeder import Feeder
from ffmem.corpus.plan import Span

SENTENCE_BITS = 27
"""Bits of a sentence's id that count the sentences of its part; those above are the part's number."""


@dataclass(frozen=True)
class Part:
    """A contiguous range of a corpus's records, which depends on the corpus and its settings alone."""

    number: int


@dataclass(frozen=True)
class Shard(plan.Shard):
    """A shard of a part. Its number, `since`, `after` and `last` count within the part."""

    part: int = field(default=0, kw_only=True)
    limited: bool = field(default=False, kw_only=True)
    """Whether the part was left here because the tokens that there was room for were read."""

    @property
    def first(self) -> int:
        return (self.part << SENTENCE_BITS) | self.since.sentences


def joined_digest(digests: Iterable[str]) -> str:
    """The hash of a corpus, from those of its parts in order; a part without records has none."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@dataclass
class Corpus(plan.Corpus):
    """A corpus in one part."""

    @property
    def can_be_sent(self) -> bool:
        """Whether other processes can read it too."""
        return all(map(plan._can_be_read_again, self.sources))

    def parts(self) -> list[Part]:
        return [Part(0)]

    def shards(  # type: ignore[override]
        self,
        part: Part,
        done: Mapping[int, Span] | None = None,
        *,
        room: int | None = None,
        stopped: threading.Event | None = None,
    ) -> Iterator[Shard]:
        yield from (_marked(shard, part, room) for shard in self._whole(room).shards(done, stopped))

    def shards_ahead(  # type: ignore[override]
        self, part: Part, done: Mapping[int, Span] | None, planned: tuple[int, int], room: int | None = None
    ) -> Generator[Shard, None, None]:
        feed = plan.Feed(dict(done or {}), planned)
        whole = self._whole(room)
        packed = plan._packed((whole, feed)) if whole.is_fed else None
        shards = Feeder(packed) if packed else ahead(lambda stopped: feed(whole, stopped), 1, name="ffmem-corpus")
        try:
            yield from (_marked(shard, part, room) for shard in shards)
        finally:
            shards.close()

    def digest(self, records: int | None = None) -> str:
        return joined_digest([super().digest(records)])

    def _whole(self, room: int | None) -> plan.Corpus:
        whole = plan.Corpus(**{one.name: getattr(self, one.name) for one in fields(self)})
        return replace(whole, limit_tokens=room)


def _marked(shard: plan.Shard, part: Part, room: int | None) -> Shard:
    """A shard of the whole as one of its part; one part need not know whether there is room for another."""
    held = {one.name: getattr(shard, one.name) for one in fields(shard)}
    return Shard(**held, part=part.number, limited=shard.last and room is not None)
