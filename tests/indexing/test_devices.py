"""Each worker of a machine has a device, or several GPUs over which its model is spread and beside which it sees none."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ffmem import build_index
from ffmem.errors import FfmemError
from ffmem.indexing.actor import Actor
from ffmem.indexing.devices import SEEN, crowded, share_out
from tests.indexing.reference import SETTINGS, content

SPREAD = {"device_map": "auto"}


@pytest.fixture
def gpus(monkeypatch):
    """Make a machine of one with so many GPUs."""
    monkeypatch.delenv(SEEN, raising=False)
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def seen(found):
    return [one.environment.get(SEEN) for one in found]


@pytest.mark.parametrize(
    ("count", "load", "workers", "expected"),
    [
        (4, {}, 2, ["cuda:0", "cuda:1"]),
        (4, {"device": "cuda"}, 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (4, {"device": "cpu"}, 2, ["cpu", "cpu"]),
        (4, {"device": "cuda:3"}, 2, ["cuda:3", "cuda:3"]),
        (0, {}, 2, ["cpu", "cpu"]),
        (0, SPREAD, 2, ["cpu", "cpu"]),
    ],
)
def test_workers_have_a_gpu_each_where_there_are_some(gpus, count, load, workers, expected):
    gpus(count)
    found = share_out(load, workers, None)
    assert [one.load["device"] for one in found] == expected
    assert all(one.load["device_map"] is None for one in found)
    assert seen(found) == [None] * workers


@pytest.mark.parametrize(
    ("count", "workers", "expected"),
    [(8, 4, ["0,1", "2,3", "4,5", "6,7"]), (8, 3, ["0,1", "2,3,4", "5,6,7"]), (2, 2, ["0", "1"])],
)
def test_with_a_device_map_they_share_the_gpus(gpus, count, workers, expected):
    gpus(count)
    found = share_out(SPREAD, workers, None)
    assert seen(found) == expected
    assert all(one.load == {"device": "auto", "device_map": "auto"} for one in found)


@pytest.mark.parametrize(
    ("device_map", "devices"), [(None, None), ("auto", None), (None, "cpu,cpu"), (None, "cuda:0+cuda:1,cuda:2+cuda:3")]
)
def test_every_worker_is_told_whose_code_to_trust(gpus, device_map, devices):
    gpus(4)
    found = share_out({"device_map": device_map, "trust_remote_code": True}, 2, devices)
    assert all(one.load["trust_remote_code"] is True for one in found)


def test_gpus_may_be_named(gpus, monkeypatch):
    gpus(4)
    found = share_out({"dtype": "bf16"}, None, "cuda:0 + cuda:2, cuda:3")
    assert seen(found) == ["0,2", None]
    assert found[0].load == {"dtype": "bf16", "device": "auto", "device_map": "auto"}
    assert found[1].load == {"dtype": "bf16", "device": "cuda:3", "device_map": None}
    assert [one.load["device_map"] for one in share_out({"device_map": "balanced"}, 1, "cuda:0+cuda:1")] == ["balanced"]
    # They are counted among those that this process may see.
    monkeypatch.setenv(SEEN, "4,5, GPU-1f,7")
    assert seen(share_out({}, 2, "cuda:0+cuda:2,cuda:1+cuda:3")) == ["4,GPU-1f", "5,7"]


@pytest.mark.parametrize(
    ("count", "workers", "devices", "message"),
    [
        (2, 2, "cuda:0", "a device for each of 2 workers, found 1: cuda:0"),
        (2, 3, None, "at most 2 workers for 2 GPUs, found 3: to share a GPU"),
        (2, None, "cuda:1+cuda:2", "different GPUs of the 2 of this machine, such as .*, found cuda:1\\+cuda:2"),
        (2, None, "cuda:1+cuda:1", "different GPUs"),
        (2, None, "cuda:0+cpu", "different GPUs"),
        (2, None, "cuda:0+", "different GPUs"),
    ],
)
def test_places_that_cannot_be_are_refused(gpus, count, workers, devices, message):
    gpus(count)
    with pytest.raises(FfmemError, match=message):
        share_out({}, workers, devices)


@pytest.mark.slow
def test_workers_with_more_threads_than_there_are_cores_are_told_of(monkeypatch, gpt2_folder, long_text, tmp_path, capfd):
    monkeypatch.setattr("ffmem.indexing.devices.cores", lambda: 4)
    two = share_out({"device": "cpu"}, 2, None)
    assert crowded(two, 2) == crowded(two[:1], 8) == crowded(share_out({}, 4, "cuda:0,cuda:0,cuda:0,cuda:0"), 8) == ""
    assert crowded(two, 3).startswith("2 workers of 3 threads share 4 cores, ")
    assert crowded(two, 3).endswith("OMP_NUM_THREADS=2 set")
    assert crowded(share_out({"device": "cpu"}, 9, None), 1).endswith("give no more than --workers 4")
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=None, shutdown=lambda: None))
    try:
        for quiet in (True, False):
            with pytest.raises(FfmemError, match="Ray could not be started"):  # it is told before that
                build_index(gpt2_folder, long_text, out=tmp_path / "run", workers=2, device="cpu", quiet=quiet)
            assert ("2 workers of 3 threads share 4 cores" in capfd.readouterr().err) == (not quiet)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "mps"])
def test_a_device_and_a_map_are_not_both_wanted(gpus, device):
    gpus(2)
    with pytest.raises(FfmemError, match=f"spreads a model over all GPUs, found device '{device}' too"):
        share_out(SPREAD | {"device": device}, 2, None)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="Linux only")
@pytest.mark.slow
def test_workers_that_spread_a_model_see_their_own_gpus_only_and_make_the_bytes_of_one(
    gpus, gpt2_folder, long_text, tmp_path, monkeypatch
):
    """What they see is checked; that there is nothing to be seen, on a machine without GPUs, puts the model on its CPU."""
    pytest.importorskip("ray")
    monkeypatch.setattr("ffmem.indexing.workers.Actor", Watched)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("SEEN_BY_WORKERS", str(tmp_path))
    build_index(gpt2_folder, long_text, out=tmp_path / "one", device="cpu", **SETTINGS)
    gpus(4)
    build_index(gpt2_folder, long_text, out=tmp_path / "two", workers=2, device_map="auto", **SETTINGS)
    assert sorted(path.read_text() for path in tmp_path.glob("seen-*")) == ["0,1", "2,3"]
    if not torch.cuda.is_available():
        assert content(tmp_path / "two") == content(tmp_path / "one")


class Watched(Actor):
    """A worker that notes which GPUs it sees when it loads its model."""

    def model_info(self):
        Path(os.environ["SEEN_BY_WORKERS"], f"seen-{self.name}").write_text(os.environ[SEEN])
        return super().model_info()
