"""Records of text as units: sentences, lines or windows of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import sentencex

from ffmem.corpus.wikitext import ELLIPSIS, plain
from ffmem.errors import CorpusError
from ffmem.text import quoted

_DECIMAL_POINT = re.compile(r"@\.@")
_WIDE_SPACE = re.compile(r"[^\S \t]")


@dataclass(frozen=True)
class Unit:
    """The kind of text that counts as one sentence: `sentence`, `line`, or `window:N`, every N tokens of a record.

    >>> Unit.parse("window:256")
    Unit(kind='window', tokens=256)
    """

    kind: str
    tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> Unit:
        """Read `sentence`, `line` or `window:N`; an error for anything else."""
        if text in ("sentence", "line"):
            return cls(text)
        if match := re.fullmatch(r"window:([1-9][0-9]{0,17})", text):
            return cls("window", int(match[1]))
        raise CorpusError(f"expected unit sentence, line or window:N, found {quoted(text)}")

    def __str__(self) -> str:
        return f"window:{self.tokens}" if self.tokens else self.kind


class Segmenter:
    """Splits a record into its units' texts. Paragraphs (lines) are never joined."""

    def __init__(self, unit: Unit, language: str = "en", *, plain: bool = False) -> None:
        self.unit = unit
        self.language = language
        self.plain = plain
        """Whether WikiText's marks are turned back to plain text before a record is cut."""

    def split(self, record: str) -> Iterator[str]:
        """The units of a record: its sentences, its lines, or the record whole where windows are cut from tokens."""
        record = plain(record) if self.plain else record
        if self.unit.kind == "window":
            yield record.strip()
            return
        for line in record.splitlines():
            line = line.strip()
            if line and self.unit.kind == "line":
                yield line
            elif line:
                yield from self._sentences(line)

    def _sentences(self, line: str) -> Iterator[str]:
        """The sentences of a paragraph, as slices of it.

        The segmenter reads a copy of equal length: it must not end a sentence inside WikiText's decimal point
        ("2 @.@ 5"), nor behind what stands for an unknown word, and wide spaces (no-break, thin) make it fail.
        """
        shadow = _WIDE_SPACE.sub(" ", _DECIMAL_POINT.sub("@,@", line))
        shadow = shadow.replace(ELLIPSIS, "_") if self.plain else shadow
        start = 0
        for sentence in sentencex.segment(self.language, shadow):
            end = start + len(sentence)
            if text := line[start:end].strip():
                yield text
            start = end
        if rest := line[start:].strip():
            yield rest
