"""A record: one text of a corpus, and how large it may be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from ffmem.errors import CorpusError
from ffmem.text import beginning, quoted, shown_size, visible

MAX_RECORD = 10_000_000
"""Bytes of a record, by default: longer than any book, and short enough to be held many times."""
SMALLEST, LARGEST = 100, 10**12
"""Bytes that a limit on records may be."""
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SURROGATE = re.compile("[\ud800-\udfff]")


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


def too_large(where: str, what: str, limit: int) -> CorpusError:
    """An error for a record that is larger than one may be; `what` was found there."""
    return CorpusError(
        f"{where}: expected a record of at most {shown_size(limit)}, found {what}: cut it into shorter ones, or allow it "
        "with a larger --max-record"
    )


def listed(names: Iterable[object]) -> str:
    """Names of fields or columns in an error: on one line, and no more than a line holds."""
    return beginning(", ".join(visible(beginning(str(name), 60)) for name, _ in zip(names, range(50), strict=False)), 300)


def text_of(value: object, where: str, skipped: Counter[str], limit: int) -> Iterator[str]:
    """A record's text; a missing or blank one is counted and gives none."""
    if value is None:
        skipped["empty records"] += 1
    elif not isinstance(value, str):
        raise CorpusError(f"{where}: expected text, found {type(value).__name__}")
    elif (size := _bytes(value, limit)) > limit:
        raise too_large(where, shown_size(size), limit)
    elif not value.strip():
        skipped["empty records"] += 1
    elif not value.isascii() and _SURROGATE.search(value):
        raise CorpusError(f"{where}: expected text, found half of a surrogate pair (it has no UTF-8)")
    else:
        yield value


def _bytes(text: str, limit: int) -> int:
    """Bytes of a text in UTF-8; no more than a bound on them where that is within the limit."""
    most = len(text) if text.isascii() else 4 * len(text)
    return most if most <= limit or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
