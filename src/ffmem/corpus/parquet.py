"""Parquet tables with a column of text, read in pieces whose size is known before they are unpacked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.corpus.files import unchanged
from ffmem.corpus.record import MAX_RECORD, listed, text_of, too_large
from ffmem.errors import CorpusError
from ffmem.text import beginning, shown_size, visible

ROWS = 64
"""Rows that are read together. A page, which can only be unpacked whole, may be as large as so many records may be."""
BUFFER = 1 << 20
"""Bytes that are read from the file at a time."""
DICTIONARY_PAGE = 2
TEXT = (pa.string(), pa.large_string(), pa.string_view(), pa.null())


@dataclass
class ParquetFile:
    """A Parquet table with a column of text."""

    path: Path
    column: str = "text"
    groups: int = 1
    group: int = 0
    max_record: int = MAX_RECORD
    """Bytes of a row's text, at most."""

    @property
    def name(self) -> str:
        return str(self.path)

    def size(self) -> int | None:
        return self.path.stat().st_size

    def fraction(self) -> float | None:
        return self.group / self.groups

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        where = visible(str(self.path))
        try:
            with unchanged(self.path) as handle, self._opened(where) as table:
                self.groups = max(1, table.num_row_groups)
                row = 0
                for self.group in range(table.num_row_groups):
                    self._check_pages(handle, table.metadata.row_group(self.group), row, where)
                    for batch in table.iter_batches(ROWS, row_groups=[self.group], columns=[self.column]):
                        for scalar in batch.column(0):
                            row += 1
                            here = f"{where}: row {row}"
                            yield from text_of(self._text(scalar, here), here, skipped, self.max_record)
                self.group = self.groups
        except (pa.ArrowException, OSError) as error:
            raise CorpusError(f"{where}: expected a Parquet file: {str(error).splitlines()[0]}") from error

    def _opened(self, where: str) -> pq.ParquetFile:
        with pq.ParquetFile(self.path) as table:
            self._check_column(table.schema_arrow, where)
            metadata = table.metadata
        # A word of a dictionary comes once then, however many rows of a batch have it.
        return pq.ParquetFile(self.path, metadata=metadata, read_dictionary=[self.column], buffer_size=BUFFER)

    def _check_column(self, schema: pa.Schema, where: str) -> None:
        if self.column not in schema.names:
            raise CorpusError(
                f"{where}: expected a column {self.column!r}, found {listed(schema.names)}; name it with --column"
            )
        kind = schema.field(self.column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in TEXT:
            raise CorpusError(f"{where}: expected text in the column {self.column!r}, found {beginning(str(kind), 60)}")

    def _check_pages(self, handle: BinaryIO, group: pq.RowGroupMetaData, row: int, where: str) -> None:
        """Whether all pages of the column in this group of rows, the first of which follows on `row`, can be held."""
        columns = (group.column(number) for number in range(group.num_columns))
        for chunk in (column for column in columns if column.path_in_schema == self.column):
            begin = min(offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset)
            for page in _pages(handle, begin, begin + chunk.total_compressed_size):
                last = min(row + page.rows, group.num_rows + row) if page.rows else row + group.num_rows
                if page.size > ROWS * self.max_record:
                    what = f"{shown_size(page.size)} that are packed together"
                    raise too_large(f"{where}: rows {row + 1} to {last}", what, self.max_record)
                row += page.rows

    def _text(self, scalar: pa.Scalar, where: str) -> str | None:
        """A row's text, once its size is known."""
        word = scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar
        if word is None or not word.is_valid:
            return None
        raw = word.as_buffer()
        if raw.size > self.max_record:
            raise too_large(where, shown_size(raw.size), self.max_record)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{where}: expected UTF-8, found byte 0x{raw[error.start]:02x} at byte {error.start + 1}"
            ) from error


@dataclass(frozen=True)
class _Page:
    """What the head of a page says."""

    size: int
    """Bytes once it is unpacked."""
    rows: int
    """None in a dictionary."""


def _pages(handle: BinaryIO, begin: int, end: int) -> Iterator[_Page]:
    """The heads of a column's pages in one group of rows, in order; none that cannot be read, which is for Arrow to tell."""
    handle.seek(begin)
    try:
        while handle.tell() < end:
            head = _struct(handle, 3)
            rows = 0 if head[1] == DICTIONARY_PAGE else (head.get(5) or head[8])[1]
            if min(head[2], head[3], rows) < 0:
                return
            yield _Page(head[2], rows)
            handle.seek(head[3], 1)
    except (EOFError, KeyError, TypeError, ValueError, OSError):
        return


def _struct(handle: BinaryIO, depth: int) -> dict[int, Any]:
    """The fields of a struct in Thrift's compact protocol by their numbers; strings are skipped."""
    fields: dict[int, Any] = {}
    number = 0
    while head := _byte(handle):
        number = number + (head >> 4) if head >> 4 else _integer(handle)
        kind = head & 15
        if kind in (1, 2):
            fields[number] = kind == 1
        elif kind in (4, 5, 6):
            fields[number] = _integer(handle)
        elif kind == 8:
            handle.seek(_varint(handle), 1)
        elif kind == 12 and depth:
            fields[number] = _struct(handle, depth - 1)
        else:
            raise ValueError(f"no field of a page's head is of kind {kind}")
    return fields


def _byte(handle: BinaryIO) -> int:
    found = handle.read(1)
    if not found:
        raise EOFError
    return found[0]


def _varint(handle: BinaryIO) -> int:
    value = shift = 0
    while (found := _byte(handle)) & 0x80 and shift < 64:
        value |= (found & 0x7F) << shift
        shift += 7
    return value | found << shift


def _integer(handle: BinaryIO) -> int:
    """A zigzag number."""
    found = _varint(handle)
    return (found >> 1) ^ -(found & 1)
