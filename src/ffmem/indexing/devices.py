"""The devices of workers on this machine: one each, or several GPUs over which a worker's model is spread."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ffmem.corpus.readers import cores
from ffmem.errors import FfmemError
from ffmem.model.loading import check_device_map

SEEN = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Devices:
    """The devices of one worker, as the arguments and the environment that its process begins with."""

    load: dict[str, Any]
    """The keywords with which the worker loads its model."""
    environment: dict[str, str]
    """Environment variables that the worker's process has besides those of its parent."""


def share_out(load: dict[str, Any], workers: int | None, devices: str | None) -> list[Devices]:
    """The devices of each of so many workers, or of a worker for each of these devices: "cuda:0,cuda:1",
    "cuda:0+cuda:1,cuda:2+cuda:3".

    `load` is how the model is loaded; with a device map the GPUs are shared out.
    """
    named = [device.strip() for device in devices.split(",")] if devices else _shared_out(load, workers or 1)
    if workers not in (None, len(named)):
        raise FfmemError(f"expected a device for each of {workers} workers, found {len(named)}: {devices}")
    return [_devices(load, device) for device in named]


def crowded(found: list[Devices], threads: int) -> str:
    """Advice where workers on the CPU have more threads than there are cores; empty where they have not."""
    workers = sum(one.load["device"] == "cpu" for one in found)
    if workers < 2 or workers * threads <= cores():
        return ""
    share = cores() // workers
    advice = f"start over with OMP_NUM_THREADS={share} set" if share else f"give no more than --workers {cores()}"
    return f"{workers} workers of {threads} threads share {cores()} cores, which slows them down: {advice}"


def _shared_out(load: dict[str, Any], workers: int) -> list[str]:
    """A device, or GPUs joined by `+`, for each worker: GPUs where there are some, unless the CPU is asked for."""
    device, gpus = load.get("device", "auto"), torch.cuda.device_count()
    check_device_map(device, load.get("device_map"))
    if device not in ("auto", "cuda"):
        return [device] * workers
    if not gpus:
        return ["cpu" if device == "auto" else device] * workers
    if workers > gpus:
        raise FfmemError(
            f"expected at most {gpus} workers for {gpus} GPUs, found {workers}: to share a GPU, name it twice "
            "(--devices cuda:0,cuda:0)"
        )
    if not load.get("device_map"):
        return [f"cuda:{number}" for number in range(workers)]
    bounds = [number * gpus // workers for number in range(workers + 1)]
    return ["+".join(f"cuda:{gpu}" for gpu in range(*pair)) for pair in pairwise(bounds)]


def _devices(load: dict[str, Any], device: str) -> Devices:
    """The devices of a worker by their text; a process that spreads its model over some GPUs sees no others."""
    devices = [one.strip() for one in device.split("+")]
    if len(devices) == 1 and (not load.get("device_map") or devices == ["cpu"]):
        return Devices(load | {"device": device, "device_map": None}, {})
    gpus = [int(found[1]) for one in devices if (found := re.fullmatch(r"cuda:(\d+)", one))]
    count = torch.cuda.device_count()
    if len(gpus) < len(devices) or max(gpus) >= count or len(set(gpus)) < len(gpus):
        raise FfmemError(f"expected different GPUs of the {count} of this machine, such as cuda:0+cuda:1, found {device}")
    seen = os.environ.get(SEEN)
    names = seen.split(",") if seen else [str(gpu) for gpu in range(count)]
    spread = {"device": "auto", "device_map": load.get("device_map") or "auto"}
    return Devices(load | spread, {SEEN: ",".join(names[gpu].strip() for gpu in gpus)})
