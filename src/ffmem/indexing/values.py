"""The projection of every cell's value: its most promoted and most suppressed tokens, streamed over all cells of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from ffmem.corpus.ahead import ahead
from ffmem.errors import FfmemError, RunError
from ffmem.model.memories import MemoryModel
from ffmem.progress import reporting
from ffmem.run.folder import VALUES, VALUES_ANEW, values_of, write_table
from ffmem.run.manifest import ValueFacts
from ffmem.run.model import VALUE_SCHEMA, model_of, project
from ffmem.run.reader import Index, open_index

CHUNK, GPU_CHUNK = 1024, 1 << 15
"""The number of cells projected between two reports, on a CPU and on a GPU."""


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
    """Small parts joined into ones of these many rows, with the last one's layer: a GPU is waited for once for each."""
    held: list[Tensor] = []
    layer = 0
    for layer, part in parts:
        held.append(part.detach().to(held[0].device) if held else part.detach())
        if sum(map(len, held)) >= rows:
            yield layer, torch.cat(held)
            held = []
    if held:
        yield layer, torch.cat(held)
