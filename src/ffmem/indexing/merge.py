"""The merge of all workers' findings: their states in any order, float sums and sentences in the order of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.corpus.parts import SENTENCE_BITS
from ffmem.indexing.checkpoint import Kept, ShardId, State, coverage, damaged_file, load, own_files
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.sealed import SealError, load_sealed
from ffmem.indexing.tables import SENTENCE_SCHEMA
from ffmem.indexing.top import POSITION_BITS, sentence_of
from ffmem.run.folder import WORK, RunFolder, file_hash


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
