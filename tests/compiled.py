"""Compiles every kernel for an H200, which needs none: what they take of a processor goes to standard output, as JSON.

    python -m tests.compiled

The functions that launch kernels are called as they are, with numbers on a CPU; where one would be launched it is compiled.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ffmem.corpus.batches import Batch, prefix_keys
from ffmem.indexing import gpu
from ffmem.indexing.coefficients import DeviceBatch
from ffmem.indexing.layer_statistics import LayerStatistics
from ffmem.indexing.statistics import BUILT_IN
from ffmem.model.activation import Activation

HOPPER = GPUTarget("cuda", 90, 32)
CPU = torch.device("cpu")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CELLS, ROWS, COLUMNS, T = 3072, 8, 32, 50


class NoDriver:
    """Stands for a GPU's driver as far as compiling asks for one."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def taken(cubin: bytes) -> dict[str, int]:
    """Registers a thread, and bytes of its own memory for what finds no register."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", told))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


def compile_launched() -> Collection[dict[str, Any]]:
    """From now on a launch only compiles; what that has made is added to the answer."""
    compiled: dict[str, dict[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in compiled:
            compiled[kernel.hash] = {
                "kernel": self.fn.__name__,
                "constants": {name: value for name, value in options.items() if name.isupper()},
                "threads": 32 * kernel.metadata.num_warps,
                "shared": kernel.metadata.shared,
                **taken(kernel.asm["cubin"]),
            }
        return kernel

    driver.set_active(NoDriver())
    JITFunction.run = compile_only
    return compiled.values()


def launch_filter(dtype: torch.dtype, *, negative: bool, statistics: bool, activation: torch.nn.Module | None) -> None:
    x = torch.zeros(ROWS, COLUMNS, CELLS, dtype=dtype).as_subclass(OnGpu)
    made = activation and Activation.of(activation, torch.zeros(1, dtype=dtype))
    assert (made is None) == (activation is None)
    ids, lengths = np.zeros((ROWS, COLUMNS), np.int64), np.full(ROWS, COLUMNS - 1)
    batch = DeviceBatch(Batch(ids, lengths, np.arange(ROWS), prefix_keys(ids[:, 1:]), 1), CPU)
    tops = [gpu.GpuTopTriggers(CELLS, T, "text", CPU) for _ in range(1 + negative)]
    for busy in (0, gpu.BUSY):  # many sentences a program, and one
        gpu.BUSY = busy
        gpu.sift(
            torch.empty_like(x),
            range(ROWS),
            batch,
            tops=tops,
            counts=LayerStatistics(BUILT_IN, CELLS, CPU).in_kernel if statistics else {},
            nonfinite=torch.zeros(1, dtype=torch.int32),
            activation=made,
            x=x if made else None,
        )
    for top in tops:
        top.merge_pending()


def main() -> None:
    compiled = compile_launched()
    half, single = torch.bfloat16, torch.float32
    launch_filter(half, negative=False, statistics=False, activation=None)
    launch_filter(half, negative=True, statistics=True, activation=None)
    launch_filter(half, negative=False, statistics=True, activation=torch.nn.ReLU())
    launch_filter(half, negative=False, statistics=True, activation=torch.nn.SiLU())
    launch_filter(torch.float16, negative=True, statistics=True, activation=None)
    launch_filter(single, negative=True, statistics=True, activation=None)
    launch_filter(single, negative=False, statistics=False, activation=torch.nn.ReLU())
    print(json.dumps(list(compiled)))


if __name__ == "__main__":
    main()
