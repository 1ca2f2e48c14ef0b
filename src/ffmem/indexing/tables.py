"""The tables of a finished run: their columns, and how they are made from what the collectors hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int

from ffmem.corpus.tokens import Sentences
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.layer_statistics import LayerStatistics
from ffmem.indexing.top import TopTriggers, position_of, sentence_of

TRIGGER_SCHEMA = pa.schema(
    [
        ("coefficient", pa.float32()),
        ("sentence", pa.int64()),
        ("position", pa.int32()),
        ("row", pa.int32()),  # of the sentence in sentences.arrow
    ]
)
CELL_SCHEMA = pa.schema(
    [
        ("layer", pa.int16()),
        ("index", pa.int32()),
        ("first_trigger", pa.int64()),
        ("positive_triggers", pa.int16()),
        ("negative_triggers", pa.int16()),
    ]
)
SENTENCE_SCHEMA = pa.schema(
    [
        ("sentence", pa.int64()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("ends", pa.list_(pa.int32())),
    ]
)
TOKEN_SCHEMA = pa.schema([("text", pa.string())])


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write an uncompressed Arrow file, so that a reader can map it and touch only what it needs."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def sentence_batch(numbers: Int[np.ndarray, " n"], sentences: Sentences) -> pa.RecordBatch:
    """Some sentences, which have these numbers, as rows of the table of sentences."""
    offsets = pa.array(np.append(0, sentences.stops).astype(np.int32))
    columns = [
        pa.array(numbers, pa.int64()),
        sentences.texts.cast(pa.string()),
        pa.ListArray.from_arrays(offsets, pa.array(sentences.ids, pa.int32())),
        pa.ListArray.from_arrays(offsets, pa.array(sentences.ends, pa.int32())),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SENTENCE_SCHEMA)


def token_batch(texts: list[str]) -> pa.RecordBatch:
    """The table of tokens: the text of each id."""
    return pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], schema=TOKEN_SCHEMA)


def referenced_sentences(collectors: Iterable[LayerCollector]) -> Int[np.ndarray, " n"]:
    """The numbers of all sentences that some trigger points to, in order."""
    parts = [np.zeros(0, np.int64)]
    for collector in collectors:
        for top in collector.top.values():
            parts.append(sentence_of(top.place[top.coefficient > 0]).cpu().numpy())
    return each_once(np.concatenate(parts))


def each_once(numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " k"]:
    """The different ones among some numbers, in order. A sort is several times as fast as numpy.unique.

    >>> each_once(np.array([7, 3, 7])).tolist()
    [3, 7]
    """
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def trigger_batches(collectors: Iterable[LayerCollector], numbers: Int[np.ndarray, " n"]) -> Iterator[pa.RecordBatch]:
    """The table of triggers, ordered by layer, cell, sign (positive first) and rank; a batch holds one layer.

    `numbers` are those of the sentences in the table of sentences, in order.
    """
    for collector in collectors:
        yield _trigger_batch(list(collector.top.values()), numbers)


def _trigger_batch(tops: list[TopTriggers], numbers: Int[np.ndarray, " n"]) -> pa.RecordBatch:
    # cells x signs x t, flattened in that order
    coefficient = np.stack([top.coefficient.cpu().numpy() for top in tops], axis=1)
    coefficient[:, 1:] *= -1
    place = np.stack([top.place.cpu().numpy() for top in tops], axis=1)
    used = coefficient != 0
    places = torch.from_numpy(place[used])
    sentence, position = sentence_of(places).numpy(), position_of(places).numpy()
    columns = [
        pa.array(coefficient[used], pa.float32()),
        pa.array(sentence, pa.int64()),
        pa.array(position.astype(np.int32), pa.int32()),
        pa.array(np.searchsorted(numbers, sentence).astype(np.int32), pa.int32()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TRIGGER_SCHEMA)


def cell_batches(collectors: Iterable[LayerCollector]) -> Iterator[pa.RecordBatch]:
    """Every cell with the row of its first trigger, how many it has and, where they were gathered, its statistics.

    A batch holds one layer.
    """
    first = 0
    for collector in collectors:
        counts = {sign: (top.coefficient > 0).sum(1).cpu().numpy() for sign, top in collector.top.items()}
        positive = counts["+"]
        negative = counts.get("-", np.zeros_like(positive))
        begins = first + np.cumsum(positive + negative) - (positive + negative)
        first += int((positive + negative).sum())
        columns = [
            pa.array(np.full(len(positive), collector.layer), pa.int16()),
            pa.array(np.arange(len(positive)), pa.int32()),
            pa.array(begins, pa.int64()),
            pa.array(positive.astype(np.int16), pa.int16()),
            pa.array(negative.astype(np.int16), pa.int16()),
            *(collector.statistics.columns() if collector.statistics else ()),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=cell_schema(collector.statistics))


def cell_schema(statistics: LayerStatistics | None) -> pa.Schema:
    """The columns of the table of cells: those that every run has, and those of the statistics that were gathered."""
    return pa.schema([*CELL_SCHEMA, *(statistics.schema if statistics else ())])
