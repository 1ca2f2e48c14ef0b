"""A corpus in as many parts as a test wants, whatever its own parts are, that can be held up while workers read it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ffmem.corpus.ahead import ahead
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.parts import Part, cut_parts
from ffmem.corpus.sources import stretches_of

COUNT = 5
"""Parts of every corpus, or a few more or less, since each ends with a record."""


@dataclass
class InParts(Corpus):
    """A corpus that is shared out about evenly among `COUNT` parts."""

    gate: str = ""
    """A folder in which each process that reads a part leaves a file of its number, and waits while there is one `hold`."""
    leader: int = 0
    """The process that may read; any other is killed when it reads a part."""
    elsewhere: int = 0
    """The process that sees the whole text; any other sees it in one part."""

    def parts(self) -> list[Part]:
        whole = cut_parts(self.sources, 1 << 60)
        if self.elsewhere not in (0, os.getpid()):
            return whole
        size = sum(more or 0 for source in self.sources for _, _, more in stretches_of(source, 1 << 60))
        return cut_parts(self.sources, max(1, size // COUNT))

    def stream(self, parts=None, done=None, planned=None, room=None):
        if self.leader not in (0, os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)

        def held(stopped) -> Iterator:
            if self.gate:
                (Path(self.gate) / str(os.getpid())).touch()
                while (Path(self.gate) / "hold").exists() and not stopped.is_set():
                    time.sleep(0.01)
            shards = Corpus.stream(self, parts, done, planned, room)
            try:
                yield from shards
            finally:
                shards.close()

        return ahead(held, 1)
