"""The tables of a run: what all workers have found, merged, as rows.

States are merged in any order, float sums and sentences in the order of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.corpus.parts import SENTENCE_BITS
from ffmem.indexing.checkpoint import (
    SENTENCE_SCHEMA,
    Kept,
    ShardId,
    State,
    coverage,
    damaged_file,
    each_once,
    load,
    own_files,
)
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.layer_statistics import LayerStatistics
from ffmem.indexing.sealed import SealError, load_sealed
from ffmem.indexing.top import POSITION_BITS, TopTriggers, position_of, sentence_of
from ffmem.run.folder import WORK, RunFolder, file_hash

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
TOKEN_SCHEMA = pa.schema([("text", pa.string())])


def merged(
    folder: RunFolder, make: Callable[[], dict[int, LayerCollector]], shards: Iterable[ShardId], own: State | None = None
) -> dict[int, LayerCollector]:
    """All workers' findings in one set of collectors, which `make` makes; sums are added in the order of shards.

    `own` is the state of a worker of this process, which goes for the one that it may have written before.
    """
    whole: dict[int, LayerCollector] | None = None
    for worker in sorted({*coverage(folder), *([own.worker] if own else [])}):
        part = make()
        if own and worker == own.worker:
            for collector in part.values():
                collector.load(own.tensors)
        else:
            load(folder, worker, part)
        if whole is None:
            whole = part
        else:
            with ThreadPoolExecutor() as pool:  # layers have nothing to do with one another
                list(pool.map(LayerCollector.merge, whole.values(), part.values()))
    whole = make() if whole is None else whole
    for shard in sorted(shards):
        name = own_files(shard)[1]
        try:
            with folder.reading(name) as path:
                sums, _ = load_sealed(path)
                for collector in whole.values():
                    collector.add_sums({name: sums[name] for name in collector.sums()})
        except (SealError, OSError, KeyError, ValueError) as error:
            raise damaged_file(folder, name, error) from error
    return whole


def shifts(shards: Mapping[ShardId, Kept]) -> Int[Tensor, " parts"]:
    """For each part, the number to add to its sentences' ids so that sentences are numbered from 0 through all parts."""
    sentences: dict[int, int] = {}
    for (part, _), one in sorted(shards.items()):
        sentences[part] = one.span.after.sentences
    found = torch.zeros(max(sentences, default=0) + 1, dtype=torch.int64)
    before = 0
    for part, count in sorted(sentences.items()):
        found[part] = before - (part << SENTENCE_BITS)
        before += count
    return found


def renumber(collectors: Iterable[LayerCollector], shift: Int[Tensor, " parts"]) -> None:
    """Make triggers point to sentences by the number that these have in the corpus."""
    for collector in collectors:
        for top in collector.top.values():
            used = top.coefficient > 0
            place = top.place[used]
            top.place[used] = place + (shift[sentence_of(place) >> SENTENCE_BITS] << POSITION_BITS)


def kept_sentences(
    folder: RunFolder, shards: Mapping[ShardId, Kept], shift: Int[Tensor, " parts"], numbers: Int[np.ndarray, " n"]
) -> Iterator[pa.RecordBatch]:
    """The sentences that have these numbers in the corpus, shard by shard; all of them, or an error."""
    found = 0
    for shard, one in sorted(shards.items()):
        name = own_files(shard)[0]
        try:
            with folder.reading(name) as path:
                if file_hash(path) != one.sentences:
                    raise SealError("its hash differs")
                with pa.memory_map(str(path)) as source:
                    table = pa.ipc.open_file(source).read_all()
                    here = table.column("sentence").to_numpy() + int(shift[shard[0]])
                    wanted = np.append(numbers, -1)[np.searchsorted(numbers, here)] == here  # both are sorted
                    found += int(wanted.sum())
                    numbered = table.set_column(0, SENTENCE_SCHEMA.field(0), pa.array(here))
                    yield from numbered.filter(pa.array(wanted)).combine_chunks().to_batches()
        except (SealError, OSError, pa.ArrowException) as error:
            raise damaged_file(folder, name, error) from error
    if found != len(numbers):
        raise damaged_file(folder, WORK, f"{len(numbers) - found:,} sentences are missing")


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
