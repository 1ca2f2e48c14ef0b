"""Checkpoints: the files that workers leave after every shard, so that a run that is stopped anywhere goes on from there.

A worker keeps one state: the triggers and counts of all shards that it has read, and which shards those are. What depends
on the order of shards (sums of floats) or belongs to one shard alone (its sentences) is kept for each shard. A shard counts
once a state covers it, and all states together make the index, in any order. Every file carries a hash of all that is in it,
or another file does, and is compared with it before it is used: a damaged one costs what it held, not the run.

Until the run is finished, a sentence's id holds its part above and its number within the part below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from ffmem.indexing.top import sentence_of
from ffmem.run.folder import WORK, RunFolder, file_hash, write_table

STATE, ENDING, SENTENCES = f"{WORK}/state-", ".safetensors", ".arrow"
SENTENCE_SCHEMA = pa.schema(
    [
        ("sentence", pa.int64()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("ends", pa.list_(pa.int32())),
    ]
)
ShardId = tuple[int, int]
"""A shard by two numbers, from 0: that of its part, and its own in the part."""


class Snapshot:
    """A worker's findings, copied when it has read a shard, so that it may go on while they are written.

    The copies are made into the same memory every time, which a GPU can write to directly.
    """

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def take(self, collectors: Iterable[LayerCollector]) -> None:
        """Copy what the collectors hold now; returns once the copies are there."""
        devices = set()
        for collector in collectors:
            for name, tensor in collector.state().items():
                if name not in self.state:
                    self.state[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self.state[name].copy_(tensor, non_blocking=True)
                devices.add(tensor.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def pointed_to(self, shard: Shard) -> Int[np.ndarray, " n"]:
        """The ids of the sentences of a shard that triggers point to, in order."""
        parts = [np.zeros(0, np.int64)]
        for name, place in self.state.items():
            if name.endswith(".place"):
                sentence = sentence_of(place).numpy()  # an unused slot's is behind all sentences
                parts.append(sentence[(sentence >= shard.first) & (sentence < shard.first + len(shard.sentences))])
        return each_once(np.concatenate(parts))


@dataclass(frozen=True)
class Finished:
    """A shard that was read, and what of the findings belongs to it alone."""

    shard: Shard
    sums: dict[str, Tensor]
    """The shard's sums of floats, on the host."""
    counted: dict[str, int]
    """The number of positions computed for the shard (`padded`), and of groups of batches read again (`read_again`)."""


@dataclass(frozen=True)
class State:
    """All that a worker holds once it has read its last shard: its name, the shards covered, and its tensors on the host."""

    worker: str
    covered: list[ShardId]
    tensors: dict[str, Tensor]


def save(
    folder: RunFolder,
    worker: str | None,
    covered: list[ShardId],
    finished: list[Finished],
    snapshot: Snapshot,
    encoder: Encoder,
    provenance: str,
) -> None:
    """Keep what is each finished shard's own, then the worker's state, which makes them count.

    Without a worker only the former is written: the state is written by nobody, or another one covers the shards already.
    `provenance` is the manifest's, so that no file of another run is ever taken for one of this.
    """
    for one in finished:
        _save_own(folder, one, snapshot, encoder, provenance)
    if worker is not None:
        with folder.writing(_state(worker)) as path:
            save_sealed(path, snapshot.state, {"provenance": provenance, "covered": covered})


def _save_own(folder: RunFolder, finished: Finished, snapshot: Snapshot, encoder: Encoder, provenance: str) -> None:
    """Write what belongs to a shard alone: the sentences that triggers point to, and its sums."""
    shard = finished.shard
    numbers = snapshot.pointed_to(shard)
    sentences = shard.sentences.take(numbers - shard.first)
    if (sentences.ends < 0).any():
        sentences = Sentences.of(encoder.with_ends(list(sentences)))
    shard_id = (shard.part, shard.number)
    arrow, sums = own_files(shard_id)
    with folder.writing(arrow) as path:
        write_table(path, SENTENCE_SCHEMA, [sentence_batch(numbers, sentences)])
        digest = file_hash(path)
    facts = {
        "provenance": provenance,
        "shard": shard_id,
        "since": shard.since.as_dict(),
        "after": shard.after.as_dict(),
        "last": shard.last,
        "full": shard.full,
        "sentences": digest,
        **finished.counted,
    }
    with folder.writing(sums) as path:
        save_sealed(path, finished.sums, facts)


@dataclass(frozen=True)
class Kept:
    """A finished shard as its own files describe it."""

    span: Span
    padded: int
    """The number of positions computed for the shard, padding and beginning-of-sentence tokens included."""
    read_again: int
    """The number of groups of batches, counted once a layer, that were read again because a GPU had no room for a hit."""
    sentences: str
    """The SHA-256 of the file that holds the shard's sentences."""

    @property
    def tokens(self) -> int:
        """The number of tokens of the shard."""
        return self.span.after.tokens - self.span.since.tokens


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


def each_once(numbers: Int[np.ndarray, " n"]) -> Int[np.ndarray, " k"]:
    """The different ones among some numbers, in order. A sort is several times as fast as numpy.unique.

    >>> each_once(np.array([7, 3, 7])).tolist()
    [3, 7]
    """
    ordered = np.sort(numbers)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def mend(folder: RunFolder, provenance: str) -> list[str]:
    """Compare every file that stopped work has left with its hash, and delete what is damaged or another run's.

    What is lost that way is read again: a shard for its own files, the shards that it covers for a state. Returns the names
    of the files that are gone. What cannot be looked at now (a network or a disk that fails) is an error, and stays.
    """
    damaged: list[str] = []
    shards: set[ShardId] = set()
    for state in _states(folder):  # one after the other: each is as large as what a worker holds
        covers = _state_covers(folder, state, provenance)
        if covers is None or shards & covers:
            damaged.append(state)
        else:
            shards |= covers
    there = set(folder.parts(WORK))
    with ThreadPoolExecutor() as pool:
        whole = pool.map(lambda shard: _is_whole(folder, there, shard, provenance), sorted(shards))
        for shard, one in zip(sorted(shards), whole, strict=True):
            # Both go, or what is made again might be taken for the half of it that was left.
            damaged += [] if one else [name for name in own_files(shard) if name in there]
    folder.remove(*damaged)
    return damaged


def _state_covers(folder: RunFolder, state: str, provenance: str) -> set[ShardId] | None:
    """The shards that a state covers; None where it is damaged or another run's."""
    with suppress(SealError, KeyError, TypeError, ValueError), folder.reading(state) as path:
        _, facts = load_sealed(path)
        if facts["provenance"] == provenance:
            return _covered(facts)
    return None


def _is_whole(folder: RunFolder, there: set[str], shard: ShardId, provenance: str) -> bool:
    """Whether a shard's own files are all there, unchanged since they were written, and of this shard and this run."""
    sentences, sums = own_files(shard)
    if not {sentences, sums} <= there:
        return False
    with suppress(SealError, KeyError, TypeError, ValueError), folder.reading(sums) as path:
        _, facts = load_sealed(path)
        if (facts["provenance"], tuple(facts["shard"])) == (provenance, shard):
            with folder.reading(sentences) as other:
                return bool(file_hash(other) == facts["sentences"])
    return False


def coverage(folder: RunFolder) -> dict[str, set[ShardId]]:
    """The shards that each worker's state covers, by the worker's name; an error where two cover the same."""
    found: dict[str, set[ShardId]] = {}
    for state in _states(folder):
        shards = _covered(_facts(folder, state))
        if twice := shards.intersection(*[set().union(*found.values())]):
            raise damaged_file(folder, state, f"shard {min(twice)[1]} of part {min(twice)[0]} is in two states")
        found[state.removeprefix(STATE).removesuffix(ENDING)] = shards
    return found


def covered_by(folder: RunFolder, worker: str) -> set[ShardId]:
    """The shards that one worker's state covers, none where it has none. Others' states are not looked at: they may just be
    writing them anew."""
    name = _state(worker)
    return _covered(_facts(folder, name)) if folder.exists(name) else set()


def kept(folder: RunFolder, only: Iterable[ShardId] | None = None) -> dict[ShardId, Kept]:
    """The finished shards, in order: those that a state covers and whose own files are there; of `only` these, if given."""
    shards = set().union(*coverage(folder).values()) if only is None else set(only)
    there = set(folder.parts(WORK)) if shards else set()
    found = {}
    for shard in sorted(shards):
        if there.issuperset(own_files(shard)):
            facts = _facts(folder, own_files(shard)[1])
            span = Span(Progress(**facts["since"]), Progress(**facts["after"]), facts["last"], facts["full"])
            found[shard] = Kept(span, facts["padded"], facts["read_again"], facts["sentences"])
    return found


def begun(folder: RunFolder) -> bool:
    """Whether a run has any worker's state, so that deleting it would lose finished work."""
    return bool(_states(folder))


def load(folder: RunFolder, worker: str, collectors: Mapping[int, LayerCollector]) -> list[ShardId]:
    """Fill the collectors with a worker's state; gives the shards that it covers, none where there is no state."""
    name = _state(worker)
    if not folder.exists(name):
        return []
    try:
        with folder.reading(name) as path:
            tensors, facts = load_sealed(path)
            for collector in collectors.values():
                collector.load(tensors)
    except (SealError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise damaged_file(folder, name, error) from error
    return [(part, number) for part, number in facts["covered"]]


def _state(worker: str) -> str:
    return f"{STATE}{worker}{ENDING}"


def _states(folder: RunFolder) -> list[str]:
    return [name for name in folder.parts(WORK) if name.startswith(STATE)]


def _covered(facts: Mapping[str, Any]) -> set[ShardId]:
    """The shards that a state covers, from the facts in it."""
    return {(int(part), int(number)) for part, number in facts["covered"]}


def own_files(shard: ShardId) -> tuple[str, str]:
    """The names of the two files that hold a shard's sentences and its sums."""
    name = f"{WORK}/shard-{shard[0]:05d}-{shard[1]:06d}"
    return f"{name}{SENTENCES}", f"{name}{ENDING}"


def _facts(folder: RunFolder, name: str) -> dict[str, Any]:
    """The facts in a sealed file; its tensors are neither read nor compared with their hash."""
    try:
        return read_facts(partial(folder.read_bytes, name))
    except SealError as error:
        raise damaged_file(folder, name, error) from error


def damaged_file(folder: RunFolder, name: str, why: object) -> RunError:
    """The error for a file of unfinished work that is missing or damaged: the same command reads again what it held."""
    return RunError(
        f"{folder.location(name)}: missing or damaged ({why}); give the same command again: what it held is read again"
    )
