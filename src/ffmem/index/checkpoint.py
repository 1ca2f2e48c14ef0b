"""What workers leave behind after every shard, so that a run that is stopped anywhere goes on from there.

A worker keeps one state: the triggers and counts of all shards that it has read, and which shards those are. What depends
on the order of shards (sums of floats) or belongs to one shard alone (its sentences) is kept a shard. A shard counts once
a state covers it, and all states together make the index, in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors
import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.corpus.plan import Progress, Shard, Span
from ffmem.corpus.tokens import Encoder, Sentences
from ffmem.index.collect import LayerCollector
from ffmem.index.folder import WORK, RunFolder
from ffmem.index.tables import SENTENCE_SCHEMA, each_once, sentence_batch, write_table, write_tensors
from ffmem.index.top import sentence_of
from ffmem.words import RunError

STATE, ENDING = f"{WORK}/state-", ".safetensors"


class Snapshot:
    """A worker's findings, copied when it had read a shard: it may go on while they are written.

    The copies are made into the same memory every time, which a GPU can write to directly.
    """

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        """Of this shard alone."""

    def take(self, collectors: Iterable[LayerCollector]) -> None:
        devices = set()
        for collector in collectors:
            for copies, found in ((self.state, collector.state()), (self.sums, collector.sums())):
                for name, tensor in found.items():
                    if name not in copies:
                        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                    copies[name].copy_(tensor, non_blocking=True)
                    devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def pointed_to(self, shard: Shard) -> Int[np.ndarray, " n"]:
        """The sentences of a shard that triggers point to, by their number."""
        parts = [np.zeros(0, np.int64)]
        for name, place in self.state.items():
            if name.endswith(".place"):
                sentence = sentence_of(place).numpy()  # an unused slot's is behind all sentences
                parts.append(sentence[(sentence >= shard.first) & (sentence < shard.after.sentences)])
        return each_once(np.concatenate(parts))


def save(
    folder: RunFolder,
    worker: str,
    covered: list[int],
    shard: Shard,
    snapshot: Snapshot,
    encoder: Encoder,
    counted: dict[str, int],
) -> None:
    """Keep what is the shard's own, then the worker's state, which makes it count."""
    numbers = snapshot.pointed_to(shard)
    sentences = shard.sentences.take(numbers - shard.first)
    if (sentences.ends < 0).any():
        sentences = Sentences.of(encoder.with_ends(list(sentences)))
    with folder.writing(f"{_shard(shard.number)}.arrow") as path:
        write_table(path, SENTENCE_SCHEMA, [sentence_batch(numbers, sentences)])
    facts = {
        "since": shard.since.as_dict(),
        "after": shard.after.as_dict(),
        "last": shard.last,
        **counted,
    }
    with folder.writing(f"{_shard(shard.number)}.safetensors") as path:
        write_tensors(path, snapshot.sums, {"shard": json.dumps(facts)})
    with folder.writing(_state(worker)) as path:
        write_tensors(path, snapshot.state, {"covered": json.dumps(covered)})


@dataclass(frozen=True)
class Kept:
    """A finished shard."""

    span: Span
    padded: int
    """Positions that were computed for it, padding and beginning-of-sentence tokens included."""
    read_again: int
    """Groups of batches and a layer that were read again, for want of room on a GPU."""


def kept(folder: RunFolder) -> dict[int, Kept]:
    """The finished shards, by their numbers."""
    found: dict[int, Kept] = {}
    for state in _states(folder):
        for number in _metadata(folder, state, "covered"):
            if number in found:
                raise _damaged(folder, state, f"shard {number} is in two states")
            facts = _metadata(folder, f"{_shard(number)}.safetensors", "shard")
            span = Span(Progress(**facts["since"]), Progress(**facts["after"]), facts["last"])
            found[number] = Kept(span, facts["padded"], facts["read_again"])
    return dict(sorted(found.items()))


def covered(folder: RunFolder, worker: str) -> list[int]:
    """The shards that a worker has kept."""
    name = _state(worker)
    return list(_metadata(folder, name, "covered")) if folder.exists(name) else []


def begun(folder: RunFolder) -> bool:
    """Whether there is anything to lose."""
    return bool(_states(folder))


def workers(folder: RunFolder) -> list[str]:
    """Those who have left a state."""
    return [state.removeprefix(STATE).removesuffix(ENDING) for state in _states(folder)]


def load(folder: RunFolder, worker: str, collectors: Mapping[int, LayerCollector]) -> list[int]:
    """Fill the collectors with a worker's state; the shards that it covers, none where there is none."""
    name = _state(worker)
    if not folder.exists(name):
        return []
    try:
        with folder.reading(name) as path, safetensors.safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        for collector in collectors.values():
            collector.load(tensors)
    except (safetensors.SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise _damaged(folder, name, error) from error
    return covered(folder, worker)


def merged(folder: RunFolder, make: Any, shards: Iterable[int]) -> dict[int, LayerCollector]:
    """All workers' findings in one set of collectors, which `make` makes; sums are added in the order of shards."""
    whole: dict[int, LayerCollector] | None = None
    for worker in workers(folder):
        part = make()
        load(folder, worker, part)
        if whole is None:
            whole = part
        else:
            for layer, collector in whole.items():
                collector.merge(part[layer])
    whole = make() if whole is None else whole
    for collector in whole.values():
        collector.clear_sums()
    for number in sorted(shards):
        name = f"{_shard(number)}.safetensors"
        try:
            with folder.reading(name) as path, safetensors.safe_open(path, "pt") as file:
                for collector in whole.values():
                    collector.add_sums({key: file.get_tensor(key) for key in collector.sums()})
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise _damaged(folder, name, error) from error
    return whole


def kept_sentences(folder: RunFolder, shards: Iterable[int], numbers: Int[np.ndarray, " n"]) -> Iterator[pa.RecordBatch]:
    """The sentences with these numbers, shard by shard; all of them, or an error."""
    found = 0
    for shard in sorted(shards):
        name = f"{_shard(shard)}.arrow"
        try:
            with folder.reading(name) as path, pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
                here = table.column("sentence").to_numpy()
                wanted = np.append(numbers, -1)[np.searchsorted(numbers, here)] == here  # both are sorted
                found += int(wanted.sum())
                yield from table.filter(pa.array(wanted)).combine_chunks().to_batches()
        except (OSError, pa.ArrowException) as error:
            raise _damaged(folder, name, error) from error
    if found != len(numbers):
        raise _damaged(folder, WORK, f"{len(numbers) - found:,} sentences are missing")


def _state(worker: str) -> str:
    return f"{STATE}{worker}{ENDING}"


def _shard(number: int) -> str:
    return f"{WORK}/shard-{number:06d}"


def _states(folder: RunFolder) -> list[str]:
    return [name for name in folder.parts(WORK) if name.startswith(STATE)]


def _metadata(folder: RunFolder, name: str, key: str) -> Any:
    try:
        with folder.reading(name) as path, safetensors.safe_open(path, "pt") as file:
            return json.loads(file.metadata()[key])
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, name, error) from error


def _damaged(folder: RunFolder, name: str, why: object) -> RunError:
    return RunError(
        f"{folder.place(name)}: missing or damaged ({why}), the run cannot be continued; start over with --overwrite"
    )
