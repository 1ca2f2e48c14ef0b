"""What every cell's value says: its most promoted and most suppressed tokens, streamed over all cells of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.index.folder import VALUES
from ffmem.index.origin import check_same_model
from ffmem.index.reader import Index, open_index
from ffmem.index.tables import write_table
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.progress import reporting
from ffmem.words import FfmemError, RunError

CHUNK = 1024
"""Cells projected between two reports."""
VALUE_SCHEMA = pa.schema(
    [
        ("promoted", pa.list_(pa.int32())),
        ("promoted_log_prob", pa.list_(pa.float32())),
        ("suppressed", pa.list_(pa.int32())),
        ("suppressed_log_prob", pa.list_(pa.float32())),
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
    run's own is loaded; any other is refused.
    """
    if top < 1:
        raise FfmemError(f"expected top of at least 1, found {top}")
    index = run if isinstance(run, Index) else open_index(run)
    loaded = model_of(index, model, **load)
    with index.folder.locked(), reporting("projecting values", quiet=quiet) as reporter:
        manifest = index.folder.complete()
        if manifest["files"].pop(VALUES, None):
            # Stopped between file and manifest, the run must not point to values that are not there.
            index.folder.write_manifest(manifest)
        with index.folder.writing(VALUES) as path:
            write_table(path, VALUE_SCHEMA, _batches(index, loaded, top, norm, reporter))
        manifest["values"] = {"top": top, "norm": norm, "dtype": loaded.dtype_name}
        manifest["files"] |= index.folder.described(VALUES)
        index.folder.write_manifest(manifest)
    return open_index(index.path, model=loaded)


def model_of(index: Index, model: MemoryModel | Any = None, **load: Any) -> MemoryModel:
    """The model of a run: the one given or the manifest's, its hash checked."""
    facts = index.manifest["model"]
    if model is None and index.model is not None:
        return index.model
    if model is None and facts["in_memory"]:
        raise RunError(f"{index.path} was made with a {facts['architecture']} in memory: give that model (--model)")
    if model is None:
        load = {"revision": facts["revision"]} | load
    loaded = load_model(facts["name"] if model is None else model, **load)
    check_same_model(index.path, index.manifest, loaded)
    return loaded


def project(model: MemoryModel, vectors: Float[Tensor, "n d"], *, k: int, norm: bool = False) -> pa.RecordBatch:
    """The rows of the value table for these vectors."""
    found = model.vocabulary.extremes(vectors, k, norm=norm)
    lists = [found.promoted, found.promoted_log_prob, found.suppressed, found.suppressed_log_prob]
    columns = [_lists(tensor, field.type) for tensor, field in zip(lists, VALUE_SCHEMA, strict=False)]
    lengths = torch.linalg.vector_norm(vectors.detach().float(), dim=1)
    return pa.RecordBatch.from_arrays([*columns, pa.array(lengths.cpu().numpy(), pa.float32())], schema=VALUE_SCHEMA)


def _batches(index: Index, model: MemoryModel, top: int, norm: bool, reporter: Any) -> Any:
    done = 0
    for layer in index.layers:
        for chunk in model.values(layer).split(CHUNK):
            yield project(model, chunk, k=top, norm=norm)
            done += len(chunk)
            reporter.update(done / len(index), f"layer {layer}, {done:,} of {len(index):,} cells")


def _lists(tensor: Tensor, kind: pa.DataType) -> pa.Array:
    rows, width = tensor.shape
    offsets = pa.array(range(0, rows * width + 1, width), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(tensor.flatten().cpu().numpy(), kind.value_type))
