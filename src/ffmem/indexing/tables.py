"""The tables of a finished run: their columns, and how they are made from the state of a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.corpus.tokens import Sentences
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.statistics import Statistics
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
STATISTICS_SCHEMA = pa.schema(
    [
        ("active", pa.int64()),
        ("maximum", pa.float32()),
        ("minimum", pa.float32()),
        ("mean", pa.float64()),
        ("variance", pa.float64()),
        ("bins", pa.list_(pa.int16())),
        ("counts", pa.list_(pa.int32())),
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
    """An uncompressed Arrow file, so that a reader can map it and touch only what it needs."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def sentence_batch(numbers: Int[np.ndarray, " n"], sentences: Sentences) -> pa.RecordBatch:
    offsets = pa.array(np.append(0, sentences.stops).astype(np.int32))
    columns = [
        pa.array(numbers, pa.int64()),
        sentences.texts.cast(pa.string()),
        pa.ListArray.from_arrays(offsets, pa.array(sentences.ids, pa.int32())),
        pa.ListArray.from_arrays(offsets, pa.array(sentences.ends, pa.int32())),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SENTENCE_SCHEMA)


def token_batch(texts: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(texts, pa.string())], schema=TOKEN_SCHEMA)


def referenced_sentences(collectors: Iterable[LayerCollector]) -> Int[np.ndarray, " n"]:
    """The numbers of all sentences that some trigger points to, in order."""
    parts = [np.zeros(0, np.int64)]
    for collector in collectors:
        for top in collector.top.values():
            parts.append(sentence_of(top.place[top.coefficient > 0]).cpu().numpy())
    return each_once(np.concatenate(parts))


def each_once(numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " k"]:
    """The different ones among numbers, in order. A sort is several times as fast as what numpy.unique does.

    >>> each_once(np.array([7, 3, 7])).tolist()
    [3, 7]
    """
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def trigger_batches(collectors: Iterable[LayerCollector], numbers: Int[np.ndarray, " n"]) -> Iterator[pa.RecordBatch]:
    """Triggers ordered by layer, cell, sign (positive first) and rank: a batch a layer."""
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


def cell_batches(collectors: Iterable[LayerCollector], stats: bool) -> Iterator[pa.RecordBatch]:
    """Every cell with the place of its triggers and, where they were gathered, its statistics: a batch a layer."""
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
        ]
        if stats:
            assert collector.total is not None
            columns += _statistics_columns(collector.total)
        yield pa.RecordBatch.from_arrays(columns, schema=cell_schema(stats))


def cell_schema(stats: bool) -> pa.Schema:
    return pa.schema([*CELL_SCHEMA, *STATISTICS_SCHEMA]) if stats else CELL_SCHEMA


def _statistics_columns(total: Statistics) -> list[pa.Array]:
    measured = max(1, int(total.measured))
    mean = (total.sum / measured).cpu().numpy()
    variance = np.maximum((total.squares / measured).cpu().numpy() - mean**2, 0.0)
    cells, bins = (column.cpu().numpy() for column in total.histogram.nonzero(as_tuple=True))
    counts = _numpy(total.histogram)[cells, bins]
    offsets = np.searchsorted(cells, np.arange(len(mean) + 1)).astype(np.int32)
    return [
        pa.array(_numpy(total.active), pa.int64()),
        # Which of 0 and -0 is the larger depends on the order in which they come: one zero for all.
        pa.array(_numpy(total.maximum) + 0.0, pa.float32()),
        pa.array(_numpy(total.minimum) + 0.0, pa.float32()),
        pa.array(mean, pa.float64()),
        pa.array(variance, pa.float64()),
        pa.ListArray.from_arrays(offsets, pa.array(bins.astype(np.int16), pa.int16())),
        pa.ListArray.from_arrays(offsets, pa.array(counts, pa.int32())),
    ]


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
