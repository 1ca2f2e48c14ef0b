"""What a large run takes, before there is a machine for it: time, memory, disk and network, from measured rates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch

from ffmem.errors import FfmemError
from ffmem.indexing.estimate import Estimate, estimate, state_bytes
from ffmem.indexing.provenance import GPU_SHARE, LAYER_BYTES
from ffmem.indexing.rates import HostRate, Rate, measured_rates, nearest
from ffmem.indexing.request import SHARD_TOKENS, auto_batch_tokens
from ffmem.model.shape import Shape, shape_of
from ffmem.run.histogram import BINS

GPU_MEMORY = 141
"""Gigabytes of an H200."""
USABLE = 0.95
"""Share of a GPU's memory that tensors can have: the rest is the driver's and the allocator's."""
LENGTH = 24
"""Tokens a sentence: pocket has 20, WikiText 27."""
PADDING = 0.02
"""Share of a batch."""
BANDWIDTH = 1e9
"""Bytes a second that one process writes to or reads from the place where the run is kept."""
TEXT_BYTES = 13.6
"""Bytes a token, ids and text, that are sent to a worker."""
SHARE = 0.02
"""Of a shard's time that its checkpoint may take."""
ROUNDS = 4
"""Shards that each worker should have at least: the last ones leave some of them idle."""
WIDE, NARROW = {True: 4, False: 3}, 8
"""Tensors as wide as a layer's cells, by whether it is gated, and as wide as the stream, that a forward holds at once."""
FUSED = 256
"""The largest t that the kernels are for."""
SPILLED = 2 * 36 << 16
"""Bytes that they keep, a layer and sign, for hits that find no waiting place."""


@dataclass(frozen=True)
class Time:
    """Seconds, and what they come from."""

    tokens_a_second: float
    """Of one worker."""
    workers: int
    reading: float
    finishing: float
    """Merging what workers found and writing the run."""
    shard: float
    """Of one shard, for one worker."""
    checkpoint_share: float
    """Of that, what writing the state would take if nothing else went on meanwhile."""
    text_cores: float
    """Processor cores that keep all workers in text."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one copy of the model at work."""

    weights: int
    state: int
    """Triggers, waiting places and statistics of all cells."""
    activations: int
    """Of a batch."""
    batch_tokens: int
    gpus: int
    """GPUs that all this takes."""
    host: int
    """Of the worker's machine: the state that is being written and the next."""

    @property
    def whole(self) -> int:
        """On all GPUs of a copy, through each of which a batch goes."""
        return self.weights + self.state + self.gpus * self.activations


@dataclass(frozen=True)
class Network:
    """Bytes between driver, workers and the place where the run is kept, in all."""

    text: int
    """From the driver to the workers."""
    checkpoint: int
    """One state."""
    written: int
    """By all workers: a state after every shard, and what belongs to the shard."""
    merged: int
    """Read by the driver at the end."""


@dataclass(frozen=True)
class Plan:
    """What reading so many tokens with a model takes."""

    shape: Shape
    tokens: int
    gpus: int
    top: int
    stats: bool
    flops: float
    """A token."""
    rate: Rate
    time: Time
    memory: Memory
    disk: Estimate
    network: Network
    shard_tokens: int
    assumptions: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """The plan for people: what, and how much."""
        shape, time, memory, disk, network = self.shape, self.time, self.memory, self.disk, self.network
        parameters = (
            f"{shape.parameters / 1e9:.3g} billion" if shape.parameters >= 1e9 else f"{shape.parameters / 1e6:.3g} million"
        )
        return [
            ("model", f"{shape.name}: {parameters} parameters, {sum(shape.cells):,} cells in {shape.layers} layers"),
            ("tokens", f"{self.tokens:,}, {self.flops / 1e9:,.3g} GFLOPs each"),
            ("workers", f"{time.workers} on {_gpus(self.gpus)}, {_figures(time.tokens_a_second)} tokens/s each"),
            ("time to read", _duration(time.reading)),
            ("time to finish", _duration(time.finishing)),
            ("cores for the text", f"{max(1, ceil(time.text_cores)):,}"),
            ("GPU memory, weights", _size(memory.weights)),
            ("GPU memory, state", _size(memory.state)),
            ("GPU memory, a batch", f"{_size(memory.activations)} for {memory.batch_tokens:,} tokens"),
            ("GPU memory in all", f"{_size(memory.whole)} a worker: {_gpus(memory.gpus)}"),
            ("host memory", f"{_size(memory.host)} a worker, {_size(2 * network.checkpoint)} to finish"),
            ("disk, the run", f"at most {_size(disk.run_bytes)}"),
            ("disk, while it is built", f"{_size(disk.work_bytes)} more"),
            ("network, text", f"{_size(network.text)} to the workers"),
            ("network, checkpoints", f"{_size(network.written)}, {_size(network.checkpoint)} or more a shard"),
            ("network, to finish", _size(network.merged)),
            (
                "--shard-tokens",
                f"{self.shard_tokens:,}: {_duration(time.shard)}, a checkpoint is "
                + (f"{time.checkpoint_share:.1%} of it" if time.checkpoint_share < 1 else "longer than it"),
            ),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {text}" for name, text in rows]
        return "\n".join([*lines, "", "Assumed:", *(f"- {text}" for text in self.assumptions)])


def plan(
    model: str | Path,
    *,
    tokens: int | float,
    gpus: int = 1,
    top: int = 50,
    stats: bool = True,
    gpu_memory: int | float = GPU_MEMORY,
    length: int | float = LENGTH,
    padding: int | float = PADDING,
    rate: Rate | None = None,
    device: str = "cuda",
    dtype: str = "bfloat16",
) -> Plan:
    """What an index of a model over so many tokens takes on so many GPUs of `gpu_memory` gigabytes.

    `model` is one of `ffmem.model.shape.SHAPES`, or what `load_model` takes by name: only its config is read. `rate` is
    the packaged one whose width is nearest, if none is given; `length` is that of a sentence. `device="cpu"` plans for a
    machine without GPUs.

    >>> found = plan("llama3-70b", tokens=1e9, gpus=8)
    >>> found.memory.gpus, found.time.workers, found.network.checkpoint
    (2, 4, 12340428800)
    """
    for name, value, least in (("tokens", tokens, 1), ("gpus", gpus, 1), ("top", top, 1), ("gpu-memory", gpu_memory, 1)):
        if not least <= value < inf:
            raise FfmemError(f"expected {name} of at least {least}, found {value:g}")
    tokens, shape = int(tokens), shape_of(model)
    known, host = measured_rates()
    rate = rate or nearest(known, shape.d)
    signs, cells = 2 if shape.gated else 1, sum(shape.cells)
    memory = _memory(shape, top, signs, stats, gpu_memory, device, dtype)
    if memory.gpus > gpus:
        raise FfmemError(
            f"{shape.name} takes {_size(memory.whole)}, which is {memory.gpus} GPUs of {gpu_memory:g} GB, found {gpus}: "
            "plan with more --gpus or a larger --gpu-memory"
        )
    workers = gpus // memory.gpus
    flops = shape.flops(round(length)) * (1 + 1 / length) / (1 - padding)
    speed = rate.tflops * 1e12 / flops / (rate.ratio_with_statistics if stats else rate.ratio_with_index)
    checkpoint = cells * state_bytes(top, signs, stats)
    writing = checkpoint / BANDWIDTH
    cheap = max(SHARD_TOKENS[device], _rounded(speed * writing / SHARE))
    shard_tokens = min(cheap, _rounded(tokens / (ROUNDS * workers)))
    shards = ceil(tokens / shard_tokens)
    states = min(workers, shards)
    disk = estimate(tokens, cells=cells, t=top, signs=signs, stats=stats, workers=states, shards=shards)
    shard = min(shard_tokens, tokens) / speed
    # A state is written while the next shard is read, which waits for it only where writing takes longer.
    reading = tokens / speed * max(1.0, writing / shard) / states
    merging = (states + 1) * cells * top * signs / host.merged_triggers_a_second
    return Plan(
        shape=shape,
        tokens=tokens,
        gpus=gpus,
        top=top,
        stats=stats,
        flops=flops,
        rate=rate,
        time=Time(
            tokens_a_second=speed,
            workers=workers,
            reading=reading,
            finishing=(disk.work_bytes + disk.run_bytes) / BANDWIDTH + merging,
            shard=shard,
            checkpoint_share=writing / shard,
            text_cores=workers * speed / host.text_tokens_a_second,
        ),
        memory=memory,
        disk=disk,
        network=Network(
            text=round(TEXT_BYTES * tokens),
            checkpoint=checkpoint,
            written=disk.work_bytes + (shards - states) * checkpoint,
            merged=disk.work_bytes,
        ),
        shard_tokens=shard_tokens,
        assumptions=_assumptions(rate, host, memory, stats, gpus, workers, gpu_memory, length, padding, dtype),
    )


def held_bytes(t: int, signs: int, stats: bool, *, fused: bool) -> int:
    """Bytes a cell that a collector holds where it works: kernels keep waiting places behind a cell's triggers.

    A hit is a coefficient, a place and a key. Statistics are of all shards and of this one; of the last one, two sums.
    """
    places = max(128, 1 << (2 * t - 1).bit_length()) if fused else t
    return signs * (28 * places + 8 * fused) + (2 * (4 * BINS + 32) + 16) * stats


def _memory(shape: Shape, t: int, signs: int, stats: bool, gpu_memory: int | float, device: str, dtype: str) -> Memory:
    number, gpu = getattr(torch, dtype).itemsize, device == "cuda"
    fused = gpu and t <= FUSED
    layer = min(LAYER_BYTES, int(gpu_memory * 1e9 * GPU_SHARE)) if gpu else LAYER_BYTES
    batch = auto_batch_tokens(shape.cells, dtype, device, layer)
    weights = number * shape.parameters
    state = sum(shape.cells) * held_bytes(t, signs, stats, fused=fused) + fused * shape.layers * signs * SPILLED
    activations = number * batch * (WIDE[shape.gated] * max(shape.cells) + NARROW * shape.d)
    # A batch goes through all GPUs of a copy, so that each has room for one.
    room = max(1.0, USABLE * gpu_memory * 1e9 - activations)
    need = ceil((weights + state) / room) if gpu else 1
    host = 2 * sum(shape.cells) * state_bytes(t, signs, stats)
    return Memory(weights, state, activations, batch, need, host)


def _rounded(tokens: int | float) -> int:
    """Up to a multiple of 2^17."""
    return max(1, ceil(tokens / (1 << 17))) << 17


def _assumptions(
    rate: Rate,
    host: HostRate,
    memory: Memory,
    stats: bool,
    gpus: int,
    workers: int,
    gpu_memory: int | float,
    length: int | float,
    padding: int | float,
    dtype: str,
) -> list[str]:
    ratio = rate.ratio_with_statistics if stats else rate.ratio_with_index
    origin, core = ("measured" if one.measured else "NOT MEASURED YET, a stand-in" for one in (rate, host))
    alone = "every worker has a GPU of its own and is as fast as one alone"
    spread = (
        f"one GPU does not hold a copy: `--workers {workers} --device-map auto` shares {_gpus(gpus)} out, {memory.gpus} or "
        "more a copy, whose layers run one after another, so that it has the speed of one"
    )
    return [
        f"speed: {rate.tflops:.0f} TFLOP/s of the bare trunk, × {ratio:g} the time with the index, as for the nearest "
        f"width, {rate.d} ({rate.shape}; {origin}; {rate.machine}, {rate.date}); no logits are made",
        spread if memory.gpus > 1 else alone,
        f"sentences of {length:g} tokens and one more each for its beginning, {padding:.0%} of a batch padding",
        f"weights, coefficients and stream in {dtype}; {USABLE:.0%} of {gpu_memory:g} GB a GPU can be had; a forward holds "
        "a few tensors of a layer's width at once",
        f"a checkpoint is written at {BANDWIDTH / 1e9:g} GB/s by each worker while the next shard is read; `--shard-tokens` "
        f"is such that it would be {SHARE:.0%} of a shard's time or less, unless a worker had fewer than {ROUNDS} shards",
        f"text is {TEXT_BYTES} bytes a token with its ids and ends; a core reads {host.text_tokens_a_second:,.0f} tokens/s "
        f"of it and merges or writes {host.merged_triggers_a_second:,.0f} triggers/s ({core}; {host.machine}, {host.date})",
        "disk: every cell has all its triggers, each in a sentence of its own; loading the model is not counted",
    ]


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _figures(value: int | float) -> str:
    """Two significant figures: more would be a pretence.

    >>> _figures(2_834.2), _figures(1_234_567)
    ('2,800', '1,200,000')
    """
    return f"{float(f'{value:.2g}'):,.0f}"


def _size(size: int | float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def _duration(seconds: int | float) -> str:
    """A time for people.

    >>> _duration(100_000), _duration(5_000), _duration(300), _duration(2)
    ('28 hours', '83 minutes', '5 minutes', '2 seconds')
    """
    for unit, scale in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.2g} {unit}"
    return f"{seconds:.2g} seconds"
