"""What every cell's value says: its most promoted and most suppressed tokens, streamed over all cells of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.corpus.ahead import ahead
from ffmem.index.folder import VALUES, VALUES_ANEW, values_of
from ffmem.index.manifest import ValueFacts
from ffmem.index.origin import check_same_model
from ffmem.index.reader import Index, open_index
from ffmem.index.tables import write_table
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.progress import reporting
from ffmem.words import FfmemError, RunError

CHUNK, GPU_CHUNK = 1024, 1 << 15
"""Cells projected between two reports, on a CPU and on a GPU."""
VALUE_SCHEMA = pa.schema(
    [
        ("promoted", pa.list_(pa.int32())),
        ("promoted_log_prob", pa.list_(pa.float32())),
        ("promoted_z", pa.list_(pa.float32())),
        ("suppressed", pa.list_(pa.int32())),
        ("suppressed_log_prob", pa.list_(pa.float32())),
        ("suppressed_z", pa.list_(pa.float32())),
        ("norm", pa.float32()),
    ]
)


def values(
    run: str | Path | Index,
    model: MemoryModel | Any = None,
    *,
    top: int = 50,
    norm: bool = False,
    quiet: bool = False,
    **load: Any,
) -> Index:
    """Add every cell's value projection to a run: `top` tokens promoted and suppressed, and the largest probability.

    The value goes to the vocabulary bare; `norm=True` sends it through the final norm first. Without `model` the
    run's own is loaded; any other is refused. Values that the run has are replaced once the new ones are there.
    """
    if top < 1:
        raise FfmemError(f"expected top of at least 1, found {top}")
    index = run if isinstance(run, Index) else open_index(run)
    loaded = model_of(index, model, **load)
    with index.folder.locked(quiet=quiet), reporting("projecting values", quiet=quiet) as reporter:
        manifest = index.folder.complete()
        if manifest.identity != index.manifest.identity:
            raise RunError(f"{index.path}: made anew since it was opened; give the same command again")
        before = values_of(manifest)
        now = VALUES_ANEW if before == VALUES else VALUES
        with index.folder.writing(now) as path:
            write_table(path, VALUE_SCHEMA, _batches(index, loaded, top, norm, reporter))
        files = {name: facts for name, facts in manifest.files.items() if name != before} | index.folder.described(now)
        facts = ValueFacts(top, norm, loaded.dtype_name)
        index.folder.write_manifest(replace(manifest, values=facts, files=files))
        if before:  # until here, a run that is stopped still has its earlier values
            index.folder.remove(before)
    return open_index(index.path, model=loaded)


def model_of(index: Index, model: MemoryModel | Any = None, **load: Any) -> MemoryModel:
    """The model of a run: the one given, the one it was opened with or the manifest's; any other is refused.

    Every way from a run to a model goes through here. The check costs a hash of the weights for a model in memory, which
    its owner may have changed, and no more than one for all calls together where ffmem loaded it.
    """
    facts = index.manifest.model
    model = index.model if model is None else model
    if model is None and facts.in_memory:
        raise RunError(f"{index.path} was made with a {facts.architecture} in memory: give that model (--model)")
    if model is None:
        model = facts.name
    if isinstance(model, str) and model == facts.name:
        load = {"revision": facts.revision} | load
    loaded = load_model(model, **load)
    check_same_model(index.path, index.manifest, loaded)
    return loaded


def project(model: MemoryModel, vectors: Float[Tensor, "n d"], *, k: int, norm: bool = False) -> pa.RecordBatch:
    """The rows of the value table for these vectors."""
    found = model.vocabulary.extremes(vectors, k, norm=norm)
    promoted = [found.promoted.int(), found.promoted_log_prob, found.promoted_z]
    lists = [*promoted, found.suppressed.int(), found.suppressed_log_prob, found.suppressed_z]
    *columns, lengths = _to_host([*lists, torch.linalg.vector_norm(vectors.detach().float(), dim=1)])
    arrays = [*map(_lists, columns), pa.array(lengths, pa.float32())]
    return pa.RecordBatch.from_arrays(arrays, schema=VALUE_SCHEMA)


def _batches(index: Index, model: MemoryModel, top: int, norm: bool, reporter: Any) -> Iterator[pa.RecordBatch]:
    gpu = model.device.type == "cuda"
    parts = ((layer, part) for layer in index.layers for part in model.values(layer).split(CHUNK))
    made = ((layer, project(model, part, k=top, norm=norm)) for layer, part in (together(parts) if gpu else parts))
    done = 0
    # A GPU need not wait for a disk: the next part is made while this one is written.
    for layer, batch in ahead(lambda _: made, 1) if gpu else made:
        yield batch
        done += len(batch)
        reporter.update(done / len(index), f"layer {layer}, {done:,} of {len(index):,} cells")


def together(parts: Iterable[tuple[int, Tensor]], rows: int = GPU_CHUNK) -> Iterator[tuple[int, Tensor]]:
    """Small parts as large ones of these many rows, with the last one's layer: a GPU is waited for once for each."""
    held: list[Tensor] = []
    layer = 0
    for layer, part in parts:
        held.append(part.detach().to(held[0].device) if held else part.detach())
        if sum(map(len, held)) >= rows:
            yield layer, torch.cat(held)
            held = []
    if held:
        yield layer, torch.cat(held)


def _to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Tensors of one device as arrays, waited for once."""
    if not tensors[0].is_cuda:
        return [tensor.numpy() for tensor in tensors]
    arrays = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for array, tensor in zip(arrays, tensors, strict=True):
        array.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [array.numpy() for array in arrays]


def _lists(rows: np.ndarray) -> pa.Array:
    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(rows.reshape(-1)))
