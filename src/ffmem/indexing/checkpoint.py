"""What workers leave behind after every shard, so that a run that is stopped anywhere goes on from there.

A worker keeps one state: the triggers and counts of all shards that it has read, and which shards those are. What depends
on the order of shards (sums of floats) or belongs to one shard alone (its sentences) is kept a shard. A shard counts once
a state covers it, and all states together make the index, in any order. Every file carries a hash of all that is in it, or
another file does, and is compared with it before it is used: a damaged one costs what it held, not the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.corpus.shards import Progress, Shard, Span
from ffmem.corpus.tokens import Encoder, Sentences
from ffmem.errors import RunError
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.sealed import SealError, load_sealed, read_facts, save_sealed
from ffmem.indexing.tables import SENTENCE_SCHEMA, each_once, sentence_batch, write_table
from ffmem.indexing.top import sentence_of
from ffmem.run.folder import WORK, RunFolder, file_hash

STATE, ENDING, SENTENCES = f"{WORK}/state-", ".safetensors", ".arrow"


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
    worker: str | None,
    covered: list[int],
    shard: Shard,
    snapshot: Snapshot,
    encoder: Encoder,
    counted: dict[str, int],
    origin: str,
) -> None:
    """Keep what is the shard's own, then the worker's state, which makes it count.

    Without a worker only the former is written: for a shard that some state covers, but whose own files were damaged.
    `origin` is the manifest's, so that no file of another run is ever taken for one of this.
    """
    numbers = snapshot.pointed_to(shard)
    sentences = shard.sentences.take(numbers - shard.first)
    if (sentences.ends < 0).any():
        sentences = Sentences.of(encoder.with_ends(list(sentences)))
    name = _shard(shard.number)
    with folder.writing(f"{name}{SENTENCES}") as path:
        write_table(path, SENTENCE_SCHEMA, [sentence_batch(numbers, sentences)])
        digest = file_hash(path)
    facts = {
        "origin": origin,
        "number": shard.number,
        "since": shard.since.as_dict(),
        "after": shard.after.as_dict(),
        "last": shard.last,
        "full": shard.full,
        "sentences": digest,
        **counted,
    }
    with folder.writing(f"{name}{ENDING}") as path:
        save_sealed(path, snapshot.sums, facts)
    if worker is not None:
        with folder.writing(_state(worker)) as path:
            save_sealed(path, snapshot.state, {"origin": origin, "covered": covered})


@dataclass(frozen=True)
class Kept:
    """A finished shard."""

    span: Span
    padded: int
    """Positions that were computed for it, padding and beginning-of-sentence tokens included."""
    read_again: int
    """Groups of batches and a layer that were read again, for want of room on a GPU."""
    sentences: str
    """The hash of the file that holds its sentences."""


def mend(folder: RunFolder, origin: str) -> list[str]:
    """Compare every file that stopped work has left with its hash, and delete what is damaged or another run's.

    What is lost that way is read again: a shard for its own files, the shards that it covers for a state. Returns the names
    of the files that are gone. What cannot be looked at now (a network or a disk that fails) is an error, and stays.
    """
    damaged: list[str] = []
    numbers: set[int] = set()
    for state in _states(folder):  # one after the other: each is as large as what a worker holds
        covers = _state_covers(folder, state, origin)
        if covers is None or numbers & covers:
            damaged.append(state)
        else:
            numbers |= covers
    there = set(folder.parts(WORK))
    with ThreadPoolExecutor() as pool:
        whole = pool.map(lambda number: _is_whole(folder, there, number, origin), sorted(numbers))
        for number, one in zip(sorted(numbers), whole, strict=True):
            # Both go, or what is made again might be taken for the half of it that was left.
            damaged += [] if one else [name for name in _own_files(number) if name in there]
    folder.remove(*damaged)
    return damaged


def _state_covers(folder: RunFolder, state: str, origin: str) -> set[int] | None:
    """The shards that a state covers; None where it is damaged or another run's."""
    with suppress(SealError, KeyError, TypeError, ValueError), folder.reading(state) as path:
        _, facts = load_sealed(path)
        if facts["origin"] == origin:
            return {int(number) for number in facts["covered"]}
    return None


def _is_whole(folder: RunFolder, there: set[str], number: int, origin: str) -> bool:
    """Whether a shard's own files are all there, as they were written, and of this shard and this run."""
    sentences, sums = _own_files(number)
    if not {sentences, sums} <= there:
        return False
    with suppress(SealError, KeyError, TypeError, ValueError), folder.reading(sums) as path:
        _, facts = load_sealed(path)
        if (facts["origin"], facts["number"]) == (origin, number):
            with folder.reading(sentences) as other:
                return bool(file_hash(other) == facts["sentences"])
    return False


def kept(folder: RunFolder) -> dict[int, Kept]:
    """The finished shards, by their numbers: those that a state covers and whose own files are there."""
    found: dict[int, Kept] = {}
    there = set(folder.parts(WORK))
    for state in _states(folder):
        for number in _covered(folder, state):
            if number in found:
                raise _damaged(folder, state, f"shard {number} is in two states")
            if there.issuperset(_own_files(number)):
                facts = _facts(folder, _own_files(number)[1])
                span = Span(Progress(**facts["since"]), Progress(**facts["after"]), facts["last"], facts["full"])
                found[number] = Kept(span, facts["padded"], facts["read_again"], facts["sentences"])
    return dict(sorted(found.items()))


def covered(folder: RunFolder, worker: str) -> list[int]:
    """The shards that a worker's state covers; none where it has left no state."""
    return _covered(folder, _state(worker))


def have_files(folder: RunFolder, shards: Iterable[int]) -> set[int]:
    """Those of some shards whose own files are there."""
    there = set(folder.parts(WORK))
    return {number for number in shards if there.issuperset(_own_files(number))}


def damaged_shards(folder: RunFolder) -> set[int]:
    """The shards that some state covers, but whose own files are not there: only these are to be made again."""
    numbers = {number for state in _states(folder) for number in _covered(folder, state)}
    return numbers - have_files(folder, numbers)


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
        with folder.reading(name) as path:
            tensors, facts = load_sealed(path)
            for collector in collectors.values():
                collector.load(tensors)
    except (SealError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise _damaged(folder, name, error) from error
    return list(facts["covered"])


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
    for number in sorted(shards):
        name = f"{_shard(number)}{ENDING}"
        try:
            with folder.reading(name) as path:
                sums, _ = load_sealed(path)
                for collector in whole.values():
                    collector.add_sums({key: sums[key] for key in collector.sums()})
        except (SealError, OSError, KeyError, ValueError) as error:
            raise _damaged(folder, name, error) from error
    return whole


def kept_sentences(
    folder: RunFolder, shards: Mapping[int, Kept], numbers: Int[np.ndarray, " n"]
) -> Iterator[pa.RecordBatch]:
    """The sentences with these numbers, shard by shard; all of them, or an error."""
    found = 0
    for shard, one in sorted(shards.items()):
        name = f"{_shard(shard)}{SENTENCES}"
        try:
            with folder.reading(name) as path:
                if file_hash(path) != one.sentences:
                    raise SealError("its hash differs")
                with pa.memory_map(str(path)) as source:
                    table = pa.ipc.open_file(source).read_all()
                    here = table.column("sentence").to_numpy()
                    wanted = np.append(numbers, -1)[np.searchsorted(numbers, here)] == here  # both are sorted
                    found += int(wanted.sum())
                    yield from table.filter(pa.array(wanted)).combine_chunks().to_batches()
        except (SealError, OSError, pa.ArrowException) as error:
            raise _damaged(folder, name, error) from error
    if found != len(numbers):
        raise _damaged(folder, WORK, f"{len(numbers) - found:,} sentences are missing")


def _state(worker: str) -> str:
    return f"{STATE}{worker}{ENDING}"


def _shard(number: int) -> str:
    return f"{WORK}/shard-{number:06d}"


def _states(folder: RunFolder) -> list[str]:
    return [name for name in folder.parts(WORK) if name.startswith(STATE)]


def _covered(folder: RunFolder, state: str) -> list[int]:
    """The shards that a state covers; none where there is no such state."""
    return [int(number) for number in _facts(folder, state)["covered"]] if folder.exists(state) else []


def _own_files(number: int) -> tuple[str, str]:
    """The names of the files that hold a shard's sentences, and its sums."""
    return f"{_shard(number)}{SENTENCES}", f"{_shard(number)}{ENDING}"


def _facts(folder: RunFolder, name: str) -> dict[str, Any]:
    """What a sealed file tells of itself, without its tensors, which are compared when they are used."""
    try:
        return read_facts(partial(folder.read_bytes, name))
    except SealError as error:
        raise _damaged(folder, name, error) from error


def _damaged(folder: RunFolder, name: str, why: object) -> RunError:
    return RunError(
        f"{folder.location(name)}: missing or damaged ({why}); give the same command again: what it held is read again"
    )
