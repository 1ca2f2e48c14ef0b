"""Files of text, line by line: packed or not, with bounded memory, and watched while they are read."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ffmem.corpus import record
from ffmem.corpus.record import MAX_RECORD, Record, Stretch, listed, text_of, too_large
from ffmem.corpus.wikitext import is_heading, is_title
from ffmem.errors import CorpusError
from ffmem.text import visible

PACKED = (".gz", ".xz", ".bz2", ".zst")
UNPACKED = 3
"""About how many bytes of text one byte of a packed file holds."""
POCKET = {"pocket": (True, True), "pocket:9/10": (True, False), "pocket:1/10": (False, True)}
"""The names of the text that comes with ffmem, a pocket encyclopedia of 559 articles: all of them, all but every tenth, and
every tenth. The pair says whether the nine of ten, and whether the tenth, are read."""
SPECIAL = {stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
"""The kinds of path that are no file, and might never end or give their text only once."""

Version = tuple[int, int, int]
"""Size, time of change and inode of a file: what tells whether it was written to or replaced."""


@dataclass
class TextFile:
    """Plain or WikiText: a line is a record; blank lines and, unless wanted, headings are dropped and counted.

    Its unit is the byte, of the unpacked text where it is packed: a line belongs to the stretch of bytes that it begins in.
    """

    path: Path
    headings: bool = False
    title: str | None = None
    """The source's name where that is not its path."""
    max_record: int = MAX_RECORD
    """The largest number of bytes that a line may have."""
    share: float = field(default=0.0, repr=False, compare=False)
    """The share of the file that `records` has read, from 0 to 1."""

    @property
    def name(self) -> str:
        """The name by which messages and the manifest call the source: its title, or else its path."""
        return self.title or str(self.path)

    @property
    def is_whole(self) -> bool:
        """Whether the file can only be read from its beginning, as packed ones can."""
        return self.path.suffix.lower() in PACKED

    def size(self) -> int:
        """The number of bytes of the file on disk."""
        return self.path.stat().st_size

    def fraction(self) -> float:
        """The share of the file that `records` has read, from 0 to 1."""
        return self.share

    def stretches(self, size: int) -> list[Stretch]:
        """The file as stretches of at most `size` bytes; a packed one is a single stretch."""
        try:
            end = self.size()
        except OSError as error:
            raise CorpusError(f"{visible(str(self.path))}: cannot be read: {error.strerror or error}") from error
        if self.is_whole:
            return [(0, None, UNPACKED * end)]
        return [(begin, min(end, begin + size), min(size, end - begin)) for begin in range(0, end, size)]

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        """The texts of the file in order; what is left out is counted in `skipped`."""
        self.share = 0.0
        for chunk in self.chunks():
            self.share = chunk.share
            yield from (text for _, text in chunk.records(skipped) if text is not None)
        self.share = 1.0

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[Lines]:
        """The lines that begin in a stretch of bytes, some at a time, not looked at yet."""
        kind, where, lines, size = self.path.suffix.lower(), visible(str(self.path)), 0, 0
        try:
            with unchanged(self.path) as handle, _unpacked(handle, kind) as stream:
                version = _version(os.fstat(handle.fileno()))
                size = version[0]
                stop = size if end is None and not self.is_whole else end
                if begin:  # what is left of the line before belongs to the stretch before
                    stream.seek(begin - 1)
                    while (rest := stream.readline(record.CHUNK)) and not rest.endswith(b"\n"):
                        pass
                at = stream.tell() if begin else 0
                while (stop is None or at < stop) and (data := self._read(stream, at, stop)):
                    share = handle.tell() / max(1, size) if stop is None else (at + len(data) - begin) / (stop - begin)
                    yield Lines(self, at, data, min(1.0, share), version)
                    at += len(data)
                    lines += data.count(b"\n")
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            if kind in PACKED and size:
                raise CorpusError(f"{where}: damaged or not a {kind} file, after line {lines}: {error}") from error
            raise CorpusError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error

    def _read(self, stream: Any, at: int, stop: int | None) -> bytes:
        """The lines of the file, some at a time and whole; of a line that is too long only so much as shows that it is."""
        data: bytes = stream.read(record.CHUNK if stop is None else min(record.CHUNK, stop - at))
        return data if data.endswith(b"\n") else data + stream.readline(self.max_record + 2)

    def parse(self, lines: Lines, skipped: Counter[str]) -> Iterator[Record]:
        """The records of a chunk of this file."""
        for at, line in lines.texts():
            if is_title(line):
                yield at, None
            if not line or line.isspace():
                skipped["blank lines"] += 1
            elif not self.headings and is_heading(line):
                skipped["headings"] += 1
            else:
                yield at, line

    def last_title(self, begin: int, end: int) -> int | None:
        """The position of the last title of an article among the lines that begin in this stretch, found from its end."""
        while begin < end:
            middle = max(begin, end - record.CHUNK)
            titles = [at for lines in self.chunks(middle, end) for at, line in lines.texts() if is_title(line)]
            if titles:
                return titles[-1]
            end = middle
        return None

    def line_number(self, at: int) -> int:
        """The number, from 1, of the line that begins at a byte; the file is read up to there."""
        number = 1
        with self.path.open("rb") as handle, _unpacked(handle, self.path.suffix.lower()) as stream:
            while at > 0 and (data := stream.read(min(at, 1 << 20))):
                number += data.count(b"\n")
                at -= len(data)
        return number


@dataclass(frozen=True)
class Lines:
    """A chunk of consecutive lines of a text file, as bytes."""

    source: TextFile
    at: int
    """The byte of the file at which the chunk begins."""
    data: bytes
    share: float
    """The share of the stretch of the file that has been read once this chunk is."""
    version: Version
    """The file's version (size, time of change, inode) when it was opened."""

    def records(self, skipped: Counter[str]) -> Iterator[Record]:
        """The records of the chunk; what is left out is counted in `skipped`."""
        return self.source.parse(self, skipped)

    def texts(self) -> Iterator[tuple[int, str]]:
        """Every line with its position, without its end; an error names the line."""
        at, most = self.at, self.source.max_record
        lines = self.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for raw in lines:
            if len(raw) > most and len(raw.removesuffix(b"\r")) > most:
                shown = repr(raw[:40].decode("utf-8", "replace"))
                raise self.error(at, too_large(f"a longer line, which begins {shown}", most))
            if b"\0" in raw:
                raise self.error(at, "expected text, found a binary file (a NUL byte)")
            try:
                line = raw.decode("utf-8" if at else "utf-8-sig")
            except UnicodeDecodeError as error:
                found = f"found byte 0x{error.object[error.start]:02x} at byte {error.start + 1} of the line"
                raise self.error(at, f"expected UTF-8, {found}; convert the file first (iconv -t utf-8)") from error
            yield at, line.rstrip("\r\n")
            at += len(raw) + 1

    def error(self, at: int, what: object) -> CorpusError:
        """An error in the line that begins at a byte; if the file was written to meanwhile, the error says that instead."""
        path = self.source.path
        if _now(path) != self.version:
            return _rewritten(path)
        return CorpusError(f"{visible(str(path))}:{self.source.line_number(at)}: {what}")


@dataclass
class Pocket(TextFile):
    """The text that comes with ffmem, or a part of its articles."""

    path: Path = field(default_factory=lambda: Path(__file__).with_name("pocket.txt"))
    title: str = "pocket"

    @property
    def is_whole(self) -> bool:
        """Always true: the articles that are wanted are picked out while the whole text is read."""
        return True

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[Lines]:
        """All lines of the articles that are wanted."""
        article = 0
        wanted: list[str] = []
        for lines in super().chunks():
            for _, line in lines.texts():
                article += is_heading(line)
                if POCKET[self.title][article % 10 == 0]:
                    wanted.append(line)
        yield Lines(self, 0, "\n".join(wanted).encode(), 1.0, lines.version)


@dataclass
class JsonLines(TextFile):
    """A JSON object a line, with the text under one name."""

    column: str = "text"

    def parse(self, lines: Lines, skipped: Counter[str]) -> Iterator[Record]:
        """The records of a chunk of this file."""
        for at, line in lines.texts():
            if not line.strip():
                skipped["blank lines"] += 1
                continue
            try:
                text = self._text(line, skipped)
            except CorpusError as error:
                raise lines.error(at, error) from error
            if text is not None:
                yield at, text

    def last_title(self, begin: int, end: int) -> None:
        """None, since JSON lines have no articles: every record is a document."""

    def _text(self, line: str, skipped: Counter[str]) -> str | None:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"expected a JSON object, found {line[:40]!r} ({error})") from error
        if not isinstance(found, dict) or self.column not in found:
            names = listed(found) if isinstance(found, dict) else type(found).__name__
            raise CorpusError(f"expected a field {self.column!r}, found {names or 'none'}; name it with --column")
        return text_of(found[self.column], skipped, self.max_record)


@contextmanager
def unchanged(path: Path) -> Iterator[BinaryIO]:
    """A file opened to be read; an error if it was written to, replaced or removed by the end of the block.

    A caller that stops reading before the end gets no error.
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
    """The error message for a path to a pipe, a socket or a device; empty for a file and for nothing."""
    mode = path.stat().st_mode
    for is_one, name in SPECIAL.items():
        if is_one(mode):
            return (
                f"{visible(str(path))} is {name}: a corpus is read more than once, so write the text to a file first "
                f"(for instance: cat {visible(str(path))} > corpus.txt)"
            )
    return ""


def _version(found: os.stat_result) -> Version:
    return found.st_size, found.st_mtime_ns, found.st_ino


def _now(path: Path) -> Version | None:
    try:
        return _version(path.stat())
    except OSError:
        return None


def _rewritten(path: Path) -> CorpusError:
    return CorpusError(
        f"{visible(str(path))}: expected a file that stays as it is, but while it was read it was written to, replaced or "
        "removed: let that end, or read a copy"
    )


def _unpacked(handle: BinaryIO, suffix: str) -> Any:
    """The decompressed stream of a file, by its ending."""
    if suffix == ".gz":
        return gzip.open(handle)
    if suffix == ".xz":
        return lzma.open(handle)
    if suffix == ".bz2":
        return bz2.open(handle)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(handle), 1 << 18)
    return handle


class _ZstdReader(io.RawIOBase):
    """Arrow's zstd stream as a raw file, so that lines can be read from it."""

    def __init__(self, handle: BinaryIO) -> None:
        import pyarrow as pa

        self.stream = pa.CompressedInputStream(pa.PythonFile(handle, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
