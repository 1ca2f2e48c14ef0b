"""Where text comes from: files, Hugging Face datasets, iterables. One record after another, never all at once."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.words import CorpusError

PACKED = (".gz", ".xz", ".zst")
LINES_OF_JSON = (".jsonl", ".ndjson")
POCKET = {"pocket": (True, True), "pocket:9/10": (True, False), "pocket:1/10": (False, True)}
"""The names of the text that comes with ffmem, a pocket encyclopedia of 559 articles: all of them, all but every tenth,
and every tenth. True is for what is read: of the nine, of the tenth."""


@runtime_checkable
class Source(Protocol):
    """Something that gives records of text."""

    @property
    def name(self) -> str: ...

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        """The texts in order; what is left out on purpose is counted in `skipped`."""
        ...

    def fraction(self) -> float | None:
        """How much of the source has been read, where that is known."""
        ...

    def size(self) -> int | None:
        """Its size in bytes on disk, where it has one."""
        ...


@dataclass
class TextFile:
    """Plain or WikiText: a line is a record; blank lines and, unless wanted, headings are dropped and counted."""

    path: Path
    handle: BinaryIO | None = field(default=None, repr=False)
    headings: bool = False
    title: str | None = None
    """What it is called where that is not its path."""

    @property
    def name(self) -> str:
        return self.title or str(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"handle": None}  # another process opens the file itself

    def size(self) -> int | None:
        return self.path.stat().st_size

    def fraction(self) -> float | None:
        size = self.size()
        if self.handle is None or not size:
            return 0.0
        return 1.0 if self.handle.closed else min(1.0, self.handle.tell() / size)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Numbered lines (from 1) as text, or an error that names the line."""
        number = 0
        try:
            with self.path.open("rb") as handle, _unpacked(handle, self.path.suffix.lower()) as stream:
                self.handle = handle
                for number, raw in enumerate(stream, 1):
                    if b"\0" in raw:
                        raise CorpusError(f"{self.path}:{number}: expected text, found a binary file (a NUL byte)")
                    yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{self.path}:{number}: expected UTF-8, found byte 0x{error.object[error.start]:02x} at byte "
                f"{error.start + 1} of the line; convert the file first (iconv -t utf-8)"
            ) from error
        except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
            kind = self.path.suffix.lower()
            if kind in PACKED and self.handle is not None:
                raise CorpusError(f"{self.path}: damaged or not a {kind} file, after line {number}: {error}") from error
            raise CorpusError(f"{self.path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        for _, line in self.lines():
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

    def lines(self) -> Iterator[tuple[int, str]]:
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
        for number, line in self.lines():
            if not line.strip():
                skipped["blank lines"] += 1
                continue
            where = f"{self.path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CorpusError(f"{where}: expected a JSON object, found {line[:40]!r} ({error})") from error
            if not isinstance(record, dict) or self.column not in record:
                found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise CorpusError(
                    f"{where}: expected a field {self.column!r}, found {found or 'none'}; name it with --column"
                )
            yield from _text(record[self.column], where, skipped)


@dataclass
class ParquetFile:
    """A Parquet table with a column of text."""

    path: Path
    column: str = "text"
    groups: int = 1
    group: int = 0

    @property
    def name(self) -> str:
        return str(self.path)

    def size(self) -> int | None:
        return self.path.stat().st_size

    def fraction(self) -> float | None:
        return self.group / self.groups

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        row = 0
        try:
            with pq.ParquetFile(self.path) as table:
                if self.column not in table.schema_arrow.names:
                    raise CorpusError(
                        f"{self.path}: expected a column {self.column!r}, found {', '.join(table.schema_arrow.names)}; "
                        "name it with --column"
                    )
                self.groups = max(1, table.num_row_groups)
                for self.group in range(table.num_row_groups):
                    for batch in table.iter_batches(1024, row_groups=[self.group], columns=[self.column]):
                        for value in batch.column(0).to_pylist():
                            row += 1
                            yield from _text(value, f"{self.path}: row {row}", skipped)
                self.group = self.groups
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{self.path}: expected UTF-8, found other bytes in the 1,024 rows behind row {row}"
            ) from error
        except (pa.ArrowException, OSError) as error:
            raise CorpusError(f"{self.path}: expected a Parquet file: {str(error).splitlines()[0]}") from error


@dataclass
class Dataset:
    """A Hugging Face dataset, streamed: `Dataset("Salesforce/wikitext", config="wikitext-103-raw-v1", split="train")`."""

    id: str
    config: str | None = None
    split: str = "train"
    column: str = "text"

    @property
    def name(self) -> str:
        parts = [
            self.id,
            *([f"config={self.config}"] if self.config else []),
            f"split={self.split}",
            f"column={self.column}",
        ]
        return "hf:" + ",".join(parts)

    @classmethod
    def parse(cls, text: str, column: str = "text") -> Dataset:
        """Read `hf:ID[,config=C][,split=S][,column=NAME]`.

        >>> Dataset.parse("hf:Salesforce/wikitext,config=wikitext-2-raw-v1")
        Dataset(id='Salesforce/wikitext', config='wikitext-2-raw-v1', split='train', column='text')
        """
        name, *options = text.removeprefix("hf:").split(",")
        chosen = {"column": column}
        for option in options:
            key, equals, value = option.partition("=")
            if key not in ("config", "split", "column") or not equals:
                raise CorpusError(f"expected hf:ID,config=...,split=...,column=..., found {option!r} in {text!r}")
            chosen[key] = value
        return cls(name, **chosen)

    def size(self) -> int | None:
        return None

    def fraction(self) -> float | None:
        return None

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        try:
            import datasets
        except ImportError as error:
            raise CorpusError(f"{self.name} needs the datasets package: pip install 'ffmem[datasets]'") from error
        for number, row in enumerate(self._rows(datasets)):
            yield from _field(row, self.column, f"{self.name}: row {number}", skipped)

    def _rows(self, datasets: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from datasets.load_dataset(self.id, self.config, split=self.split, streaming=True)
        except Exception as error:  # the library raises many kinds, all of them about this name
            raise CorpusError(
                f"{self.name}: cannot be loaded: {(str(error).strip() or repr(error)).splitlines()[0]}"
            ) from error


@dataclass
class Texts:
    """A Python iterable of strings (or of mappings with a text column)."""

    texts: Iterable[Any]
    column: str = "text"
    name: str = "iterable"
    read: int = 0

    def size(self) -> int | None:
        return None

    def fraction(self) -> float | None:
        return self.read / max(1, len(self.texts)) if isinstance(self.texts, Sequence) else None

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        self.read = 0
        for number, value in enumerate(self.texts):
            self.read += 1
            where = f"item {number} of the corpus"
            if isinstance(value, dict):
                yield from _field(value, self.column, where, skipped)
            else:
                yield from _text(value, where, skipped)


def open_sources(corpus: object, *, column: str = "text", headings: bool = False) -> list[Source]:
    """The sources a user means: a path, a `hf:` name, a `Dataset`, a list of those, or an iterable of strings.

    A string alone is a path; strings in a list are texts, so a list of files is a list of `Path`s.
    """
    if isinstance(corpus, (str, Path, Source)):
        return [open_source(corpus, column=column, headings=headings)]
    if isinstance(corpus, (list, tuple)) and corpus and all(isinstance(part, (Path, Source)) for part in corpus):
        return [open_source(part, column=column, headings=headings) for part in corpus]
    if isinstance(corpus, (list, tuple)) and _are_files(corpus):
        raise CorpusError(f"strings in a list are texts, but {corpus[0]} is a file: give files as Path(...)")
    if isinstance(corpus, Iterable):
        return [Texts(corpus, column)]
    raise CorpusError(f"expected a path, a hf: name or an iterable of strings as the corpus, found {type(corpus).__name__}")


def _are_files(texts: Sequence[Any]) -> bool:
    """Whether strings look like names of files that exist, rather than texts."""
    short = 0 < len(texts) <= 100 and all(isinstance(text, str) and 0 < len(text) < 256 for text in texts)
    return short and all("\0" not in text and Path(text).is_file() for text in texts)


def open_source(spec: str | Path | Source, *, column: str = "text", headings: bool = False) -> Source:
    """One source, by the name or the ending of its file; `headings` keeps a text file's headings as records."""
    if not isinstance(spec, (str, Path)):
        return spec
    if isinstance(spec, str) and spec.startswith("hf:"):
        return Dataset.parse(spec, column)
    if isinstance(spec, str) and spec in POCKET:
        return Pocket(headings=headings, title=spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        raise CorpusError(f"{path} is a folder: give its files, for instance {path}/*.txt")
    if not path.is_file():
        raise CorpusError(f"{path}: no such file; the text that comes with ffmem is called pocket")
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    kind = suffixes[-1] if suffixes else ""
    if kind == ".parquet":
        return ParquetFile(path, column)
    if kind in LINES_OF_JSON:
        return JsonLines(path, column=column)
    if kind == ".json":
        raise CorpusError(f"{path}: expected text, .jsonl (an object a line) or .parquet, found .json")
    return TextFile(path, headings=headings)


def is_heading(line: str) -> bool:
    """Whether a line is a WikiText heading: as many lone equals signs behind a title as before it.

    >>> is_heading(" = = Early life = = "), is_heading("a = b"), is_heading("= = =")
    (True, False, False)
    """
    stripped = line.strip()
    if not (stripped.startswith("= ") and stripped.endswith(" =")):
        return False
    words = stripped.split()
    before = next((at for at, word in enumerate(words) if word != "="), len(words))
    behind = next((at for at, word in enumerate(reversed(words)) if word != "="), len(words))
    return before == behind < len(words)


def _unpacked(handle: BinaryIO, suffix: str) -> Any:
    """The decompressed stream of a file, by its ending."""
    if suffix == ".gz":
        return gzip.open(handle)
    if suffix == ".xz":
        return lzma.open(handle)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(handle), 1 << 18)
    return handle


_SURROGATE = re.compile("[\ud800-\udfff]")


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


def _field(row: dict[str, Any], column: str, where: str, skipped: Counter[str]) -> Iterator[str]:
    if column not in row:
        raise CorpusError(f"{where}: expected a column {column!r}, found {', '.join(row)}; name it with --column")
    return _text(row[column], where, skipped)


def _text(value: object, where: str, skipped: Counter[str]) -> Iterator[str]:
    """A record's text; missing or blank ones are counted."""
    if value is None:
        skipped["empty records"] += 1
    elif not isinstance(value, str):
        raise CorpusError(f"{where}: expected text, found {type(value).__name__}")
    elif not value.strip():
        skipped["empty records"] += 1
    elif not value.isascii() and _SURROGATE.search(value):
        raise CorpusError(f"{where}: expected text, found half of a surrogate pair (it has no UTF-8)")
    else:
        yield value
