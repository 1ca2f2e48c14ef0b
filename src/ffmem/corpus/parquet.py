"""Parquet tables with a column of text, read a few rows at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.corpus.files import unchanged
from ffmem.corpus.record import MAX_RECORD, Rows, Stretch, in_chunks, listed, too_large
from ffmem.errors import CorpusError
from ffmem.text import beginning, shown_size, visible

ROWS = 64
"""The number of rows that are unpacked together."""
GROUP_RECORDS = 256
"""The most that a group of rows may unpack to, as a multiple of the largest record allowed: a page, which can only be
unpacked whole, may be all of the group."""
BUFFER = 1 << 20
"""The number of bytes that are read from the file at a time."""
TEXT = (pa.string(), pa.large_string(), pa.string_view(), pa.null())


@dataclass
class ParquetFile:
    """A Parquet table with a column of text. Its unit is the row group."""

    path: Path
    column: str = "text"
    max_record: int = MAX_RECORD
    """The largest number of bytes that a row's text may have."""
    share: float = 0.0
    """The share of the table that `records` has read, from 0 to 1."""

    @property
    def name(self) -> str:
        """The name by which messages and the manifest call the source: its path."""
        return str(self.path)

    def size(self) -> int:
        """The number of bytes of the file on disk."""
        return self.path.stat().st_size

    def fraction(self) -> float:
        """The share of the table that `records` has read, from 0 to 1."""
        return self.share

    def stretches(self, size: int) -> list[Stretch]:
        """Every group of rows, with the bytes of text in it."""
        try:
            with pq.ParquetFile(self.path) as table:
                self._check_column(table.schema_arrow)
                found = table.metadata
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error
        return [(group, group + 1, _text_bytes(found, group, self.column)) for group in range(found.num_row_groups)]

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        """The texts of the table in order; what is left out is counted in `skipped`."""
        self.share = 0.0
        for rows in self.chunks():
            yield from (text for _, text in rows.records(skipped) if text is not None)
            self.share = rows.share or 0.0
        self.share = 1.0

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[Rows]:
        """The rows of these row groups, some at a time."""
        where = visible(str(self.path))
        try:
            with unchanged(self.path), self._opened() as table:
                groups = table.metadata.num_row_groups
                row = 1 + sum(table.metadata.row_group(group).num_rows for group in range(min(begin, groups)))
                stop = groups if end is None else end
                for group in range(begin, stop):
                    rows = table.metadata.row_group(group).num_rows
                    self._check_size(table.metadata, group, row)
                    for chunk in in_chunks(self._texts(table, group, row), f"{where}: row {{}}", row, self.max_record, rows):
                        yield replace(chunk, share=(group - begin + (chunk.share or 0.0)) / (stop - begin))
                    row += rows
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(error) from error

    def _texts(self, table: pq.ParquetFile, group: int, row: int) -> Iterator[str | None]:
        for batch in table.iter_batches(ROWS, row_groups=[group], columns=[self.column]):
            for number, scalar in enumerate(batch.column(0), row):
                yield self._text(scalar, number)
            row += len(batch)

    def _opened(self) -> pq.ParquetFile:
        with pq.ParquetFile(self.path) as table:
            self._check_column(table.schema_arrow)
            metadata = table.metadata
        # A word of a dictionary comes once then, however many rows of a batch have it.
        return pq.ParquetFile(self.path, metadata=metadata, read_dictionary=[self.column], buffer_size=BUFFER)

    def _check_column(self, schema: pa.Schema) -> None:
        where = visible(str(self.path))
        if self.column not in schema.names:
            raise CorpusError(
                f"{where}: expected a column {self.column!r}, found {listed(schema.names)}; name it with --column"
            )
        kind = schema.field(self.column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in TEXT:
            raise CorpusError(f"{where}: expected text in the column {self.column!r}, found {beginning(str(kind), 60)}")

    def _check_size(self, metadata: pq.FileMetaData, group: int, row: int) -> None:
        """Refuse a group of rows that may not be held, before it is unpacked: a small file may unpack to anything."""
        if (size := _text_bytes(metadata, group, self.column)) > GROUP_RECORDS * self.max_record:
            where = f"{visible(str(self.path))}: rows {row} to {row + metadata.row_group(group).num_rows - 1}"
            raise CorpusError(f"{where}: {too_large(f'{shown_size(size)} that are packed together', self.max_record)}")

    def _text(self, scalar: pa.Scalar, row: int) -> str | None:
        """A row's text, once its size is known."""
        word = scalar.value if isinstance(scalar, pa.DictionaryScalar) else scalar
        if word is None or not word.is_valid:
            return None
        raw, where = word.as_buffer(), f"{visible(str(self.path))}: row {row}"
        if raw.size > self.max_record:
            raise CorpusError(f"{where}: {too_large(shown_size(raw.size), self.max_record)}")
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            found = f"found byte 0x{raw[error.start]:02x} at byte {error.start + 1}"
            raise CorpusError(f"{where}: expected UTF-8, {found}") from error

    def _unreadable(self, error: Exception) -> CorpusError:
        return CorpusError(f"{visible(str(self.path))}: expected a Parquet file: {str(error).splitlines()[0]}")


def _text_bytes(metadata: pq.FileMetaData, group: int, column: str) -> int:
    """The bytes that a column takes in a group of rows once it is unpacked."""
    found = metadata.row_group(group)
    columns = (found.column(number) for number in range(found.num_columns))
    return sum(one.total_uncompressed_size for one in columns if one.path_in_schema == column)
