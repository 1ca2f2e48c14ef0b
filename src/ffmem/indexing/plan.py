"""A plan of a large run before there is a machine for it: time, memory and disk, from a few measured rates (rates.json)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.resources import files
from math import ceil, inf, log
from pathlib import Path
from typing import Any

from ffmem.errors import FfmemError
from ffmem.indexing.estimate import estimate, state_bytes
from ffmem.model.shape import shape_of
from ffmem.text import shown_size


@dataclass(frozen=True)
class Plan:
    """The time, memory and disk that reading so many tokens with a model takes, and the assumptions that they rest on."""

    model: str
    cells: int
    tokens: int
    gpus: int
    workers: int
    gpus_a_worker: int
    tokens_a_second: float
    """The number of tokens that one worker reads in a second."""
    reading_seconds: float
    finishing_seconds: float
    """Seconds to merge what the workers found and to write the tables of the run."""
    text_cores: int
    """The number of processor cores that segment and tokenize as fast as all workers together read."""
    weights_bytes: int
    gpu_bytes: int
    """Bytes on the GPUs of one worker together: weights, triggers and statistics of all cells, and a batch."""
    host_bytes: int
    """Bytes of memory of a worker's machine: the state that is being written, and the next."""
    run_bytes: int
    work_bytes: int
    """Bytes of disk that are needed beside the run while it is built."""
    assumptions: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The plan's fields as a dict for JSON."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """The plan as rows for people: a name, and its amount in words."""
        return [
            ("model", f"{self.model}: {shown_size(self.weights_bytes)} of weights, {self.cells:,} cells"),
            ("tokens", f"{self.tokens:,}"),
            ("workers", f"{self.workers} on {_gpus(self.gpus)}, {float(f'{self.tokens_a_second:.2g}'):,.0f} tokens/s each"),
            ("time to read", _duration(self.reading_seconds)),
            ("time to finish", _duration(self.finishing_seconds)),
            ("cores for the text", f"{self.text_cores:,}"),
            ("GPU memory", f"{shown_size(self.gpu_bytes)} a worker: {_gpus(self.gpus_a_worker)}"),
            ("host memory", f"{shown_size(self.host_bytes)} a worker"),
            ("disk, the run", f"at most {shown_size(self.run_bytes)}"),
            ("disk, while it is built", f"{shown_size(self.work_bytes)} more"),
        ]

    def __str__(self) -> str:
        lines = [f"{name:<23}  {text}" for name, text in self.rows()]
        return "\n".join([*lines, "", "Assumed:", *(f"- {text}" for text in self.assumptions)])


def plan(
    model: str | Path,
    *,
    tokens: int | float,
    gpus: int = 1,
    top: int = 50,
    stats: bool = True,
    gpu_memory: int | float = 141,
) -> Plan:
    """The time, memory and disk of an index of a model over so many tokens on so many GPUs of `gpu_memory` gigabytes.

    `model` is one of `ffmem.model.shape.SHAPES`, or what `load_model` takes by name: only its config is read.

    >>> found = plan("llama3-70b", tokens=1e9, gpus=8)
    >>> found.workers, found.gpus_a_worker, found.cells
    (4, 2, 2293760)
    """
    for name, value, least in (("tokens", tokens, 1), ("gpus", gpus, 1), ("top", top, 1), ("gpu-memory", gpu_memory, 1)):
        if not least <= value < inf:
            raise FfmemError(f"expected {name} of at least {least}, found {value:g}")
    tokens, shape = int(tokens), shape_of(model)
    measured = json.loads((files("ffmem.indexing") / "rates.json").read_text("utf-8"))
    memory, text, host = measured["memory"], measured["text"], measured["host"]
    gpu = nearest(measured["gpus"], shape.d)
    signs, cells = 2 if shape.gated else 1, sum(shape.cells)

    weights = 2 * shape.parameters
    state = cells * (memory["bytes_a_trigger"] * top * signs + memory["bytes_a_cell_of_statistics"] * stats)
    batch = min(memory["batch_bytes"], round(memory["batch_share"] * gpu_memory * 1e9))
    each = ceil((weights + state) / (memory["usable_share"] * gpu_memory * 1e9 - batch))
    whole = weights + state + each * batch
    if each > gpus:
        raise FfmemError(
            f"{shape.name} takes {shown_size(whole)}, which is {each} GPUs of {gpu_memory:g} GB, found {gpus}: "
            "plan with more --gpus or a larger --gpu-memory"
        )
    workers = gpus // each

    ratio = gpu["ratio_with_statistics" if stats else "ratio_with_index"]
    flops = shape.flops(text["tokens_a_sentence"]) * (1 + 1 / text["tokens_a_sentence"]) / (1 - text["padding"])
    speed = gpu["tflops"] * 1e12 / flops / ratio
    shards = ceil(tokens / text["tokens_a_shard"])
    disk = estimate(tokens, cells=cells, t=top, signs=signs, stats=stats, workers=workers, shards=max(workers, shards))
    merging = (workers + 1) * cells * top * signs / host["merged_triggers_a_second"]
    alone = "every worker has a GPU of its own and is as fast as one alone"
    spread = (
        f"one GPU does not hold a copy: `--workers {workers} --device-map auto` shares {_gpus(gpus)} out, {each} or more a "
        "copy, whose layers run one after another, so that it has the speed of one"
    )
    return Plan(
        model=shape.name,
        cells=cells,
        tokens=tokens,
        gpus=gpus,
        workers=workers,
        gpus_a_worker=each,
        tokens_a_second=speed,
        reading_seconds=tokens / speed / workers,
        finishing_seconds=(disk.work_bytes + disk.run_bytes) / host["bytes_a_second"] + merging,
        text_cores=ceil(workers * speed / host["text_tokens_a_second"]),
        weights_bytes=weights,
        gpu_bytes=whole,
        host_bytes=2 * cells * state_bytes(top, signs, stats),
        run_bytes=disk.run_bytes,
        work_bytes=disk.work_bytes,
        assumptions=[
            f"speed: {gpu['tflops']:.0f} TFLOP/s of the bare trunk, × {ratio:g} the time with the index, measured at the "
            f"nearest width, {gpu['d']} ({gpu['machine']}, {gpu['date']}); no logits are made",
            spread if each > 1 else alone,
            f"sentences of {text['tokens_a_sentence']} tokens and one more each for its beginning, {text['padding']:.0%} of "
            f"a batch padding; shards of {text['tokens_a_shard']:,} tokens",
            f"weights in bfloat16; {memory['usable_share']:.0%} of {gpu_memory:g} GB a GPU can be had",
            f"a core reads {host['text_tokens_a_second']:,} tokens/s of text and merges or writes "
            f"{host['merged_triggers_a_second']:,} triggers/s (measured on {host['machine']}, {host['date']}); files are "
            f"written and read at {host['bytes_a_second'] / 1e9:g} GB/s",
            "disk: every cell has all its triggers, each in a sentence of its own; loading the model is not counted",
        ],
    )


def nearest(rates: dict[str, dict[str, Any]], d: int) -> dict[str, Any]:
    """The rate of the nearest width. A narrower model than any is slower in proportion, a wider one is not faster."""
    found = min(rates.values(), key=lambda rate: abs(log(rate["d"] / d)))
    return found | {"tflops": found["tflops"] * min(1.0, d / min(rate["d"] for rate in rates.values()))}


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _duration(seconds: int | float) -> str:
    """A number of seconds as a duration for people.

    >>> _duration(100_000), _duration(5_000), _duration(300), _duration(2)
    ('28 hours', '83 minutes', '5 minutes', '2 seconds')
    """
    for unit, scale in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.2g} {unit}"
    return f"{seconds:.2g} seconds"
