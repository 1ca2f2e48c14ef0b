"""Files of text, line by line: packed or not, with bounded memory, and watched while they are read."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import stat
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ffmem.corpus.record import MAX_RECORD, listed, text_of, too_large
from ffmem.corpus.wikitext import is_heading, is_title
from ffmem.errors import CorpusError
from ffmem.text import visible

PACKED = (".gz", ".xz", ".zst")
POCKET = {"pocket": (True, True), "pocket:9/10": (True, False), "pocket:1/10": (False, True)}
"""The names of the text that comes with ffmem, a pocket encyclopedia of 559 articles: all of them, all but every tenth,
and every tenth. True is for what is read: of the nine, of the tenth."""
SPECIAL = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
"""What is no file and might never end, or give its text once only."""


@dataclass
class TextFile:
    """Plain or WikiText: a line is a record; blank lines and, unless wanted, headings are dropped and counted."""

    path: Path
    handle: BinaryIO | None = field(default=None, repr=False)
    headings: bool = False
    title: str | None = None
    """What it is called where that is not its path."""
    max_record: int = MAX_RECORD
    """Bytes of a line, at most."""
    articles: int = 0
    """Titles of articles, in WikiText's layout, up to the line that was read last."""

    @property
    def name(self) -> str:
        return self.title or str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}  # another process opens the file itself

    def size(self) -> int | None:
        return self.path.stat().st_size

    def fraction(self) -> float | None:
        if self.handle is None or self.handle.closed:
            return 0.0 if self.handle is None else 1.0
        size = os.fstat(self.handle.fileno()).st_size
        return min(1.0, self.handle.tell() / size) if size else 0.0

    def lines(self) -> Generator[tuple[int, str], None, None]:
        """Numbered lines (from 1) as text, or an error that names the line."""
        number, where = 0, visible(str(self.path))
        self.handle = None
        try:
            with unchanged(self.path) as handle, _unpacked(handle, self.path.suffix.lower()) as stream:
                self.handle = handle
                # Two more bytes are read, for the end of a line.
                for number, raw in enumerate(iter(partial(stream.readline, self.max_record + 2), b""), 1):
                    if len(raw) > self.max_record and len(raw.removesuffix(b"\n").removesuffix(b"\r")) > self.max_record:
                        raise too_large(f"{where}:{number}", f"a longer line, which begins {_shown(raw)}", self.max_record)
                    if b"\0" in raw:
                        raise CorpusError(f"{where}:{number}: expected text, found a binary file (a NUL byte)")
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{where}:{number}: expected UTF-8, found byte 0x{error.object[error.start]:02x} at byte "
                f"{error.start + 1} of the line; convert the file first (iconv -t utf-8)"
            ) from error
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            kind = self.path.suffix.lower()
            if kind in PACKED and self.handle is not None:
                raise CorpusError(f"{where}: damaged or not a {kind} file, after line {number}: {error}") from error
            raise CorpusError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        self.articles = 0
        for _, line in self.lines():
            self.articles += is_title(line)
            if not line or line.isspace():
                skipped["blank lines"] += 1
            elif not self.headings and is_heading(line):
                skipped["headings"] += 1
            else:
                yield line


@dataclass
class Pocket(TextFile):
    """The text that comes with ffmem, or a part of its articles."""

    path: Path = field(default_factory=lambda: Path(__file__).with_name("pocket.txt"))
    title: str = "pocket"

    def lines(self) -> Generator[tuple[int, str], None, None]:
        article = 0
        for number, line in super().lines():
            article += is_heading(line)
            if POCKET[self.title][article % 10 == 0]:
                yield number, line


@dataclass
class JsonLines(TextFile):
    """A JSON object a line, with the text under one name."""

    column: str = "text"

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        lines, where = self.lines(), visible(str(self.path))
        for number, line in lines:
            if not line.strip():
                skipped["blank lines"] += 1
                continue
            try:
                texts = list(self._texts(line, f"{where}:{number}", skipped))
            except CorpusError as error:
                lines.throw(error)  # in there it is known whether the file is being written
            yield from texts

    def _texts(self, line: str, where: str, skipped: Counter[str]) -> Iterator[str]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}: expected a JSON object, found {line[:40]!r} ({error})") from error
        if not isinstance(record, dict) or self.column not in record:
            found = listed(record) if isinstance(record, dict) else type(record).__name__
            raise CorpusError(f"{where}: expected a field {self.column!r}, found {found or 'none'}; name it with --column")
        return text_of(record[self.column], where, skipped, self.max_record)


@contextmanager
def unchanged(path: Path) -> Iterator[BinaryIO]:
    """A file opened to be read, and an error if it was written to, replaced or removed by the end.

    Whoever stops reading before the end is told nothing.
    """
    if found := special(path):
        raise CorpusError(found)
    with path.open("rb") as handle:
        before = _version(os.fstat(handle.fileno()))
        try:
            yield handle
        except Exception as error:
            if _now(path) != before:  # that is what is wrong with it
                raise _rewritten(path) from error
            raise
        if _now(path) != before:
            raise _rewritten(path)


def special(path: Path) -> str:
    """What is wrong with a path that names something other than a file, in words; empty for a file or nothing."""
    mode = path.stat().st_mode
    for is_one, name in SPECIAL.items():
        if is_one(mode):
            return (
                f"{visible(str(path))} is {name}: a corpus is read more than once, so write the text to a file first "
                f"(for instance: cat {visible(str(path))} > corpus.txt)"
            )
    return ""


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_size, found.st_mtime_ns, found.st_ino


def _now(path: Path) -> tuple[int, int, int] | None:
    try:
        return _version(path.stat())
    except OSError:
        return None


def _rewritten(path: Path) -> CorpusError:
    return CorpusError(
        f"{visible(str(path))}: expected a file that stays as it is, but while it was read it was written to, replaced or "
        "removed: let that end, or read a copy"
    )


def _shown(raw: bytes) -> str:
    """The beginning of a line that is too long."""
    return repr(raw[:40].decode("utf-8", "replace"))


def _unpacked(handle: BinaryIO, suffix: str) -> Any:
    """The decompressed stream of a file, by its ending."""
    if suffix == ".gz":
        return gzip.open(handle)
    if suffix == ".xz":
        return lzma.open(handle)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(handle), 1 << 18)
    return handle


class _ZstdReader(io.RawIOBase):
    """Arrow's zstd stream as a raw file, so that lines can be read from it."""

    def __init__(self, handle: BinaryIO) -> None:
        self.stream = pa.CompressedInputStream(pa.PythonFile(handle, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
