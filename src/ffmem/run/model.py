"""The model of a run: whether a model is the one that a run was made with, and the rows of the value table that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.errors import RunError
from ffmem.model.identity import tokenizer_hash
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.run.manifest import Manifest
from ffmem.run.reader import Index

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


def check_same_model(run: Any, manifest: Manifest, model: MemoryModel) -> None:
    """An error that names both where a model is not the one a run was made with."""
    check_same(run, manifest, model.name, model.fingerprint(), tokenizer_hash(model.tokenizer))


def check_same(run: Any, manifest: Manifest, name: str, model: str, tokenizer: str) -> None:
    """An error where a model or a tokenizer, given by its hash, is not the one that a run was made with."""
    for what, before, now in (
        ("model", manifest.model.hash, model),
        ("tokenizer", manifest.tokenizer.hash, tokenizer),
    ):
        if before != now:
            raise RunError(
                f"{run} was made with {what} {manifest.model.name} ({before[:12]}), but {name} has "
                f"{now[:12]}: give the {what} it was made with, or build another run"
            )


def project(model: MemoryModel, vectors: Float[Tensor, "n d"], *, k: int, norm: bool = False) -> pa.RecordBatch:
    """The rows of the value table for these vectors."""
    found = model.vocabulary.extremes(vectors, k, norm=norm)
    promoted = [found.promoted.int(), found.promoted_log_prob, found.promoted_z]
    lists = [*promoted, found.suppressed.int(), found.suppressed_log_prob, found.suppressed_z]
    *columns, lengths = _to_host([*lists, torch.linalg.vector_norm(vectors.detach().float(), dim=1)])
    arrays = [*map(_lists, columns), pa.array(lengths, pa.float32())]
    return pa.RecordBatch.from_arrays(arrays, schema=VALUE_SCHEMA)


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
