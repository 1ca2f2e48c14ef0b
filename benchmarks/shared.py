"""What several benchmarks need: the bare forward, where results are kept, and what a run noted in its log."""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.corpus.readers import cores
from ffmem.indexing.collect import to_device
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"


def bare(model: MemoryModel, ids: Int[np.ndarray, "batch pos"] | Int[Tensor, "batch pos"]) -> None:
    """Read a batch through the last block as a pass attends: no hooks, no vocabulary projection."""
    fed = to_device(ids, model.device) if isinstance(ids, np.ndarray) else ids
    with torch.inference_mode(), model.attending(fed.shape[1]):
        model.model.base_model(input_ids=fed, use_cache=False)


def to_the_last_coefficients(model: MemoryModel, ids: Int[np.ndarray, "batch pos"]) -> None:
    """Read a batch through the trunk up to where a pass stops, with hooks that look at nothing."""
    with model.reading(lambda *_: None) as forward:
        forward(to_device(ids, model.device))


def processor() -> str:
    """The name of the CPU, where the system tells it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def measured_here(device: str = "cpu") -> dict[str, str]:
    """The machine and the date that every result is kept with."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else processor()
    machine = f"{name}, {cores()} cores, torch {torch.__version__}"
    return {"date": datetime.now(UTC).date().isoformat(), "machine": machine}


def add_result(out: Path | None, name: str, result: dict[str, Any]) -> None:
    """Print a result and, where a file is given, put it there under its name beside those that are there."""
    print(json.dumps({name: result}, indent=2, ensure_ascii=False), flush=True)
    if out:
        known = json.loads(out.read_text("utf-8")) if out.exists() else {}
        out.write_text(json.dumps(known | {name: result}, indent=2, ensure_ascii=False) + "\n", "utf-8")


def events(index: Index, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's log, in order: `finished` when all was read, `written` when the run was."""
    lines = (index.folder.path / "log.jsonl").read_text("utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]
