"""Hand a run's tables to other tools: JSON lines, CSV or Parquet, streamed."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.atomic import atomic_file, sweep
from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.run.folder import folder_of, refuse_part
from ffmem.run.reader import CellView, Index, open_index
from ffmem.run.store import is_url, store_at

FORMATS = ("jsonl", "csv", "parquet")
Row = dict[str, Any]
ROW_GROUP = 8192
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""The characters with which a text begins that a spreadsheet would compute instead of showing it."""
CELLS = 256
"""The number of cells whose triggers are read together."""
TRIGGER_ROWS = pa.schema(
    [
        ("cell", pa.string()),
        ("layer", pa.int16()),
        ("index", pa.int32()),
        ("sign", pa.string()),
        ("rank", pa.int16()),
        ("coefficient", pa.float32()),
        ("sentence", pa.int64()),
        ("position", pa.int32()),
        ("prefix", pa.string()),
        ("next", pa.string()),
    ]
)


def trigger_rows(index: Index) -> Iterator[Row]:
    """One row for each trigger, by cell, positive before negative, by rank."""
    for layer in index.layers:
        count = index.manifest.model.cells[layer - 1]
        for first in range(0, count, CELLS):
            for trigger in index.triggers(index[Cell(layer, first)], min(CELLS, count - first)):
                yield trigger.as_dict()


def cell_rows(index: Index) -> Iterator[Row]:
    """One row for each cell: how many triggers it has, its statistics, and the tokens that its value promotes."""
    for view in index:
        yield cell_row(view)


def cell_row(view: CellView) -> Row:
    """A cell as the row that `ffmem export cells` writes."""
    row: Row = {"cell": view.name, "layer": view.cell.layer, "index": view.cell.index}
    row["triggers"] = view.facts["positive_triggers"]
    row["negative_triggers"] = view.facts["negative_triggers"]
    if view.index.manifest.settings.has_stats:
        row |= view.stats.as_dict()
    if view.index.has_values:
        best = view.value.top(1)[0]
        row |= {"value_top": best.token, "value_top_z": best.z, "value_max_probability": best.probability}
        row["value_norm"] = view.value.norm
    return row


def sentence_rows(index: Index) -> Iterator[Row]:
    """One row for each sentence that some trigger points to."""
    for batch in index.table("sentences").to_batches():
        for row in batch.to_pylist():
            yield {"sentence": row["sentence"], "text": row["text"], "tokens": row["tokens"]}


TABLES: dict[str, Callable[[Index], Iterator[Row]]] = {
    "triggers": trigger_rows,
    "cells": cell_rows,
    "sentences": sentence_rows,
}


def export(
    run: str | Path | Index, table: str, *, format: str = "jsonl", out: str | Path | None = None, raw: bool = False
) -> None:
    """Write `triggers`, `cells` or `sentences` as jsonl, csv or parquet, to a file (or URL) or to standard output.

    In a csv, text that a spreadsheet would take for a formula has an apostrophe before it, unless it is to be `raw`.
    """
    if table not in TABLES:
        raise FfmemError(f"expected {', '.join(TABLES)}, found {table!r}")
    if format not in FORMATS:
        raise FfmemError(f"expected format {', '.join(FORMATS)}, found {format!r}")
    if format == "parquet" and out is None:
        raise FfmemError("parquet is binary: give a file with -o")
    index = run if isinstance(run, Index) else open_index(run)
    rows = TABLES[table](index)
    with _output(out) as handle:
        if format == "parquet":
            _write_parquet(handle, rows, TRIGGER_ROWS if table == "triggers" else None)
        elif format == "csv":
            _write_csv(handle, rows, TRIGGER_ROWS.names if table == "triggers" else None, raw=raw)
        else:
            for row in rows:
                handle.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


@contextmanager
def _output(out: str | Path | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears only when it is whole."""
    if out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    refuse_part(out)
    if is_url(out):
        folder, name = folder_of(out)
        with folder.writing(name) as path, path.open("wb") as handle:
            yield handle
        return
    target = Path(store_at(out).path)
    sweep(target.parent)
    with atomic_file(target) as path, path.open("wb") as handle:
        yield handle


def _write_csv(handle: IO[bytes], rows: Iterable[Row], names: list[str] | None, *, raw: bool) -> None:
    text = io.TextIOWrapper(handle, "utf-8", newline="", write_through=True)
    writer: csv.DictWriter[str] | None = None
    if names is not None:
        writer = csv.DictWriter(text, names)
        writer.writeheader()
    for row in rows:
        if writer is None:
            writer = csv.DictWriter(text, list(row))
            writer.writeheader()
        writer.writerow({name: _csv_cell(name, value, raw=raw) for name, value in row.items()})
    text.detach()


def _csv_cell(name: str, value: Any, *, raw: bool) -> Any:
    """A value as a spreadsheet should show it.

    >>> _csv_cell("next", "=1+2", raw=False), _csv_cell("next", "=1+2", raw=True), _csv_cell("sign", "-", raw=False)
    ("'=1+2", '=1+2', '-')
    """
    if isinstance(value, list):
        return json.dumps(value)
    formula = isinstance(value, str) and value.startswith(FORMULA) and name != "sign"  # whose + and - are not from a text
    return f"'{value}" if formula and not raw else value


def _write_parquet(handle: IO[bytes], rows: Iterable[Row], schema: pa.Schema | None) -> None:
    writer = pq.ParquetWriter(handle, schema) if schema is not None else None
    for group in _grouped(rows):
        batch = pa.RecordBatch.from_pylist(group, schema=schema)
        if writer is None:
            schema = batch.schema
            writer = pq.ParquetWriter(handle, schema)
        writer.write_batch(batch)
    if writer is not None:
        writer.close()


def _grouped(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        group.append(row)
        if len(group) == ROW_GROUP:
            yield group
            group = []
    if group:
        yield group
