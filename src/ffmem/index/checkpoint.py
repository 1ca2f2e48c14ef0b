"""What a pass leaves behind after every shard, so that a killed run goes on where it stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import safetensors
import safetensors.torch
from jaxtyping import Int

from ffmem.corpus.plan import Progress, Shard
from ffmem.corpus.tokens import Encoder
from ffmem.index.collect import LayerCollector
from ffmem.index.folder import WORK, RunFolder
from ffmem.index.tables import SENTENCE_SCHEMA, referenced_sentences, sentence_batch, write_table
from ffmem.words import RunError

STATE = f"{WORK}/state.safetensors"


@dataclass(frozen=True)
class Done:
    """The shards that are finished."""

    shards: int
    progress: Progress
    padded: int
    """Positions processed so far, padding and beginning-of-sentence tokens included."""
    last: bool


NOTHING = Done(0, Progress(), 0, last=False)


def save(folder: RunFolder, collectors: dict[int, LayerCollector], shard: Shard, encoder: Encoder, done: Done) -> None:
    """Keep the sentences of this shard that triggers point to, then the state; the state's name makes it count."""
    folder.work.mkdir(exist_ok=True)
    numbers = referenced_sentences(collectors.values())
    here = numbers[(numbers >= shard.first) & (numbers < shard.first + len(shard.sentences))]
    sentences = encoder.with_ends([shard.sentences[number - shard.first] for number in here.tolist()])
    with folder.writing(_sentences_file(shard.number)) as path:
        write_table(path, SENTENCE_SCHEMA, [sentence_batch(here.tolist(), sentences)])
    tensors = {name: tensor for collector in collectors.values() for name, tensor in collector.state().items()}
    facts = {"shards": done.shards, "progress": done.progress.as_dict(), "padded": done.padded, "last": done.last}
    with folder.writing(STATE) as path:
        safetensors.torch.save_file(tensors, path, {"done": json.dumps(facts)})


def worth_keeping(folder: RunFolder) -> bool:
    """Whether a run has anything to lose: it is complete, or a shard of it is."""
    manifest = folder.manifest()
    return manifest is not None and (manifest["state"] == "complete" or (folder / STATE).exists())


def load(folder: RunFolder, collectors: dict[int, LayerCollector]) -> Done:
    """Fill the collectors with the last state; nothing where there is none."""
    path = folder / STATE
    if not path.exists():
        return NOTHING
    try:
        with safetensors.safe_open(path, "pt") as file:
            facts = json.loads(file.metadata()["done"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        for collector in collectors.values():
            collector.load(tensors)
        progress = Progress(**facts["progress"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"{path}: damaged, the run cannot be continued; start over with --overwrite") from error
    return Done(facts["shards"], progress, facts["padded"], facts["last"])


def kept_sentences(folder: RunFolder, shards: int, numbers: Int[np.ndarray, " n"]) -> Iterator[pa.RecordBatch]:
    """The sentences with these numbers, shard by shard; all of them, or an error."""
    found = 0
    for shard in range(shards):
        path: Path = folder / _sentences_file(shard)
        try:
            with pa.memory_map(str(path)) as source:
                table = pa.ipc.open_file(source).read_all()
                wanted = np.isin(table.column("sentence").to_numpy(), numbers, assume_unique=True)
                found += int(wanted.sum())
                yield from table.filter(pa.array(wanted)).combine_chunks().to_batches()
        except (OSError, pa.ArrowException) as error:
            raise RunError(f"{path}: missing or damaged, the run cannot be finished; start over with --overwrite") from error

    if found != len(numbers):
        raise RunError(f"{folder.work}: {len(numbers) - found:,} sentences are missing; start over with --overwrite")


def clear(folder: RunFolder) -> None:
    shutil.rmtree(folder.work, ignore_errors=True)


def _sentences_file(shard: int) -> str:
    return f"{WORK}/sentences-{shard:06d}.arrow"
