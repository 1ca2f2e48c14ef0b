"""A record, one text of a corpus: how large it may be, and rows of a table or a list as records."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ffmem.errors import CorpusError
from ffmem.text import beginning, quoted, shown_size, visible

MAX_RECORD = 10_000_000
"""The most bytes that a record may have by default: longer than any book, and short enough to be held many times."""
SMALLEST, LARGEST = 100, 10**12
"""The smallest and the largest limit, in bytes, that can be set on the size of a record."""
CHUNK = 1 << 17
"""The number of bytes or characters of text that are read, segmented and tokenized together."""
CHUNK_ROWS = 1 << 12
"""The most rows that a chunk has, however short they are."""
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SURROGATE = re.compile("[\ud800-\udfff]")

Stretch = tuple[int, int | None, int | None]
"""The beginning and the end of a stretch of a source, in the source's own unit, and its bytes of text (None if unknown)."""
Record = tuple[int, str | None]
"""The position of a record in its source, in the source's own unit, and its text; None in place of a text says that an
article begins there."""


@dataclass(frozen=True)
class Rows:
    """A chunk of consecutive rows: texts, and among them counts of what a source has left out by itself."""

    where: str
    """The name of a row in an error, with `{}` where its number goes."""
    first: int
    """The number of the first row."""
    values: list[Any]
    max_record: int
    share: float | None
    """The share of the stretch of the source that has been read once these rows are, None where it is not known."""
    before: int = 0
    """The number that is added to a row's number to make its position."""

    def records(self, skipped: Counter[str]) -> Iterator[Record]:
        """The rows that have a text; those without are counted in `skipped`."""
        for number, value in enumerate(self.values, self.first):
            if isinstance(value, Counter):
                skipped.update(value)
                continue
            try:
                text = text_of(value, skipped, self.max_record)
            except CorpusError as error:
                raise CorpusError(f"{self.where.format(number)}: {error}") from error
            if text is not None:
                yield self.before + number, text


def in_chunks(values: Iterable[Any], where: str, first: int, max_record: int, total: int | None = None) -> Iterator[Rows]:
    """Rows as chunks of about `CHUNK` characters; `total` is their number, where it is known."""
    waiting: list[Any] = []
    characters, done = 0, 0
    for value in values:
        waiting.append(value)
        characters += len(value) if isinstance(value, str) else 1
        if characters >= CHUNK or len(waiting) == CHUNK_ROWS:
            done += len(waiting)
            yield Rows(where, first + done - len(waiting), waiting, max_record, done / total if total else None)
            waiting, characters = [], 0
    if waiting:
        yield Rows(where, first + done, waiting, max_record, 1.0)


def field_of(row: dict[str, Any], column: str, where: str) -> Any:
    """The value of a row's column; a row that has no such column is an error at `where`."""
    if column not in row:
        raise CorpusError(f"{where}: expected a column {column!r}, found {listed(row)}; name it with --column")
    return row[column]


def parse_size(size: str | int) -> int:
    """A size in bytes: a number, or a number with kB, MB, GB, KiB, MiB or GiB.

    >>> parse_size("16MB"), parse_size("1.5 KiB"), parse_size(2000)
    (16000000, 1536, 2000)
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(size).strip(), re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or not SMALLEST <= (found := int(float(match[1]) * unit)) <= LARGEST:
        ends = " to ".join(map(shown_size, (SMALLEST, LARGEST)))
        raise CorpusError(f"expected max-record from {ends}, such as 16MB, found {quoted(str(size))}")
    return found


def too_large(what: str, limit: int) -> CorpusError:
    """An error for a record that is larger than one may be; `what` says, in words, what was found."""
    return CorpusError(
        f"expected a record of at most {shown_size(limit)}, found {what}: cut it into shorter ones, or allow it "
        "with a larger --max-record"
    )


def listed(names: Iterable[object]) -> str:
    """Names of fields or columns in an error: on one line, and no more than a line holds."""
    return beginning(", ".join(visible(beginning(str(name), 60)) for name, _ in zip(names, range(50), strict=False)), 300)


def text_of(value: object, skipped: Counter[str], limit: int) -> str | None:
    """A record's text; a missing or blank one is counted and gives None."""
    if value is None:
        skipped["empty records"] += 1
        return None
    if not isinstance(value, str):
        raise CorpusError(f"expected text, found {type(value).__name__}")
    if (size := _bytes(value, limit)) > limit:
        raise too_large(shown_size(size), limit)
    if not value.strip():
        skipped["empty records"] += 1
        return None
    if not value.isascii() and _SURROGATE.search(value):
        raise CorpusError("expected text, found half of a surrogate pair (it has no UTF-8)")
    return value


def _bytes(text: str, limit: int) -> int:
    """The number of bytes of a text in UTF-8; a quick upper bound where that is within the limit already."""
    most = len(text) if text.isascii() else 4 * len(text)
    return most if most <= limit or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
