"""Every kernel compiles for an H200 and fits on it, which Triton's interpreter would not tell."""

import json
import os
import subprocess
import sys

import pytest

KernelInterface = pytest.importorskip("triton.runtime.jit").KernelInterface
if sys.platform != "linux":  # whose Triton has NVIDIA's assembler with it
    pytest.skip("Triton compiles for NVIDIA's GPUs on Linux", allow_module_level=True)

REGISTERS, SHARED = 1 << 16, 227 << 10
"""What one processor of an H200 has: registers, and bytes of memory that its threads share."""
SPILL = 16
"""How many bytes a thread may keep in memory because no register is left, outside of loops."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What every kernel takes of a processor, found in another process, because this one may have Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.compiled"], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_compiles(compiled):
    from ffmem.indexing import gpu_kernels

    launched = {
        name for name, made in vars(gpu_kernels).items() if isinstance(made, KernelInterface) and not name.startswith("_")
    }
    assert launched >= {"sift", "merge"}
    assert {one["kernel"] for one in compiled} == launched


def test_every_kernel_fits_and_keeps_its_numbers_in_registers(compiled):
    for one in compiled:
        assert one["registers"] * one["threads"] <= REGISTERS, one
        assert one["shared"] <= SHARED, one
        assert one["stack"] <= SPILL, one


def test_the_hot_kernels_spill_nothing_and_share_a_processor(compiled):
    reads = [one for one in compiled if one["kernel"] == "sift" and one["constants"]["PACKED"]]
    assert {one["constants"]["ACTIVATION"] for one in reads} == {"", "relu", "table"}
    assert not any(one["stack"] for one in reads)
    assert all(one["registers"] * one["threads"] * 12 <= REGISTERS for one in reads)  # enough to wait for memory together
