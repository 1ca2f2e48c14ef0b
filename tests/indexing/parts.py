"""A corpus in as many parts as a test wants, whatever its own parts are, that can be held up while workers read it."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from ffmem.corpus import plan
from ffmem.corpus.ahead import ahead
from ffmem.corpus.corpus import Corpus, Part
from ffmem.corpus.shards import Shard, Span
from ffmem.corpus.sources import Texts

COUNT = 5
"""Parts of every corpus; some are empty where there are fewer records."""


@dataclass
class InParts(Corpus):
    """A corpus whose records are shared out evenly among `COUNT` parts."""

    gate: str = ""
    """A folder in which each process that reads a part leaves a file of its number, and waits while there is one `hold`."""
    leader: int = 0
    """The process that may read; any other is killed when it reads a part."""
    elsewhere: int = 0
    """The process that sees the whole text; any other sees it in one part."""

    def parts(self) -> list[Part]:
        return [Part(number) for number in range(COUNT if self.elsewhere in (0, os.getpid()) else 1)]

    def part(self, part: Part, room: int | None) -> plan.Corpus:
        records = [text for source in self.sources for text in source.records(Counter())]
        begin, end = list(pairwise(len(records) * number // COUNT for number in range(COUNT + 1)))[part.number]
        whole = plan.Corpus(**{one.name: getattr(self, one.name) for one in fields(plan.Corpus)})
        return replace(whole, sources=[Texts(records[begin:end])], limit_tokens=room)

    def shards(self, part: Part, done: Mapping[int, Span] | None = None, *, room=None, stopped=None) -> Iterator[Shard]:
        full = room is not None and sum(shard.tokens for shard in self.part(part, None).shards()) > room
        for shard in self.part(part, room).shards(done, stopped):
            yield replace(shard, part=part.number, full=full and shard.last)

    def stream(self, parts=None, done=None, planned=None, room=None):
        if self.leader not in (0, os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.gate:
            (Path(self.gate) / str(os.getpid())).touch()
            while (Path(self.gate) / "hold").exists():
                time.sleep(0.01)
        return ahead(lambda stopped: self.one_after_the_other(parts or self.parts(), done or {}, room, stopped), 1)

    def one_after_the_other(self, parts, done, room, stopped):
        for part in parts:
            full = any(span.full for span in done.get(part.number, {}).values())
            tokens = sum(span.after.tokens - span.since.tokens for span in done.get(part.number, {}).values())
            for shard in self.shards(part, done.get(part.number), room=room, stopped=stopped):
                tokens, full = tokens + shard.tokens, full or shard.full
                yield shard
            if full:
                return
            room = None if room is None else room - tokens

    def digest(self, records: int | None = None) -> str:
        digests, left = [], records
        for part in self.parts():
            mine = self.part(part, None)
            digests.append("" if left == 0 else plan.Corpus.digest(mine, left))
            left = None if left is None else max(0, left - len(mine.sources[0].texts))
        return "".join(digests)
