"""The whole corpus as one part, until a corpus knows its own parts; then this module goes, and those that only name it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

from ffmem.corpus import plan
from ffmem.corpus.ahead import ahead
from ffmem.corpus.feeder import Feeder
from ffmem.corpus.plan import Shard, Span


@dataclass(frozen=True)
class Part:
    """A contiguous range of a corpus's records, which depends on the corpus and its settings alone."""

    number: int


@dataclass
class Corpus(plan.Corpus):
    """A corpus in one part."""

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
        for shard in self._whole(room).shards(done, stopped):
            object.__setattr__(shard, "full", shard.last and room is not None)
            yield shard

    def stream(
        self,
        parts: Iterable[Part] | None = None,
        done: Mapping[int, Mapping[int, Span]] | None = None,
        planned: tuple[int, int] | None = None,
        room: int | None = None,
    ) -> Generator[Shard, None, None]:
        for part in self.parts() if parts is None else parts:
            feed = plan.Feed(dict((done or {}).get(part.number, {})), planned)
            whole = self._whole(self.limit_tokens if room is None else room)
            packed = plan._packed((whole, feed)) if whole.is_fed else None
            shards = Feeder(packed) if packed else ahead(partial(feed, whole), 1, name="ffmem-corpus")
            try:
                for shard in shards:
                    object.__setattr__(shard, "full", shard.last and whole.limit_tokens is not None)
                    yield shard
            finally:
                shards.close()

    def close(self) -> None:
        pass

    def _whole(self, room: int | None) -> plan.Corpus:
        whole = plan.Corpus(**{one.name: getattr(self, one.name) for one in fields(plan.Corpus)})
        return replace(whole, limit_tokens=room)
