"""Several workers, whatever happens to them, make the same bytes as one."""

import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ffmem import build_index
from ffmem.errors import FfmemError, ModelError, RunError
from ffmem.indexing.crew import Crew, Member
from ffmem.indexing.lane import Lost, Nobody, ProcessLane
from tests.indexing.reference import SETTINGS, content

CPU = {"device": "cpu"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(gpt2_folder, long_text, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    build_index(gpt2_folder, long_text, out=run, **SETTINGS, **CPU)
    return content(run)


@pytest.fixture
def hired(monkeypatch):
    """Every lane that is opened, in order."""
    lanes = []

    class Watched(ProcessLane):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            lanes.append(self)

    monkeypatch.setattr("ffmem.indexing.build.ProcessLane", Watched)
    return lanes


def test_two_workers_make_the_bytes_of_one(gpt2_folder, long_text, alone, tmp_path):
    index = build_index(gpt2_folder, long_text, out=tmp_path / "run", workers=2, **SETTINGS, **CPU)
    assert index.model is None
    assert content(tmp_path / "run") == alone


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_workers_on_one_gpu_make_the_bytes_of_one(gpt2_folder, long_text, tmp_path):
    settings = SETTINGS | {"dtype": "bfloat16"}
    build_index(gpt2_folder, long_text, out=tmp_path / "one", device="cuda", **settings)
    build_index(gpt2_folder, long_text, out=tmp_path / "two", devices="cuda:0,cuda:0", **settings)
    assert content(tmp_path / "two") == content(tmp_path / "one")


def test_workers_that_are_killed_are_replaced_and_lose_nothing(gpt2_folder, long_text, alone, tmp_path, hired):
    run = tmp_path / "run"

    def kill_two():
        victims = 0
        while victims < 2:
            for lane in list(hired):
                if lane.tokens and lane.process.is_alive():
                    os.kill(lane.process.pid, signal.SIGKILL)
                    victims += 1
                    time.sleep(0.3)
                    break
            time.sleep(0.001)

    killer = threading.Thread(target=kill_two, daemon=True)
    killer.start()
    build_index(gpt2_folder, long_text, out=run, workers=2, **SETTINGS, **CPU)
    lost = sum('"lost"' in line for line in (run / "log.jsonl").read_text().splitlines())
    assert lost >= 1
    assert len(hired) == 2 + lost
    assert content(run) == alone


def test_a_run_begun_by_three_is_finished_by_one_and_the_other_way_round(
    gpt2_folder, long_text, alone, tmp_path, monkeypatch
):
    class Stopped(BaseException):
        pass

    def stop_after(count):
        kept = 0
        read = Crew.read

        def some(self, *arguments):
            nonlocal kept
            for standing in read(self, *arguments):
                yield standing
                kept += len(standing.kept)
                if kept >= count:
                    raise Stopped

        return some

    for first, then in ((3, 1), (1, 3), (3, 2)):
        run = tmp_path / f"{first}-{then}"
        with monkeypatch.context() as patch:
            patch.setattr(Crew, "read", stop_after(2))
            if first > 1:
                with pytest.raises(Stopped):
                    build_index(gpt2_folder, long_text, out=run, workers=first, **SETTINGS, **CPU)
            else:
                patch.setattr("ffmem.indexing.worker.checkpoint.save", _saving_twice())
                with pytest.raises(KeyboardInterrupt):
                    build_index(gpt2_folder, long_text, out=run, **SETTINGS, **CPU)
        assert list((run / "work").iterdir())
        build_index(gpt2_folder, long_text, out=run, workers=then, **SETTINGS, **CPU)
        assert content(run) == alone


@pytest.fixture
def stopped(gpt2_folder, long_text, tmp_path, monkeypatch):
    """A run with two finished shards, of which one's sentences are damaged."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("ffmem.indexing.worker.checkpoint.save", _saving_twice())
        with pytest.raises(KeyboardInterrupt):
            build_index(gpt2_folder, long_text, out=run, **SETTINGS, **CPU)
    path = run / "work" / "shard-000001.arrow"
    path.write_bytes(path.read_bytes()[:-3])
    return run


def test_a_damaged_shard_is_made_again_by_any_of_several_workers(gpt2_folder, long_text, alone, stopped):
    build_index(gpt2_folder, long_text, out=stopped, workers=2, **SETTINGS, **CPU)
    assert content(stopped) == alone


def test_a_worker_that_is_lost_when_it_has_made_a_damaged_shard_again_costs_nothing(
    gpt2_folder, long_text, alone, stopped, monkeypatch
):
    lost = []

    class Forgotten(ProcessLane):
        """Is gone before anybody hears that the damaged shard is written."""

        def answer(self):
            found = super().answer()
            if found and not lost and (stopped / "work" / "shard-000001.arrow").exists():
                lost.append(found)
                self.process.kill()
                raise Lost(self._end())
            return found

    monkeypatch.setattr("ffmem.indexing.build.ProcessLane", Forgotten)
    build_index(gpt2_folder, long_text, out=stopped, devices="cpu", **SETTINGS)
    assert lost
    assert content(stopped) == alone


def _saving_twice():
    from ffmem.indexing.checkpoint import save

    count = 0

    def some(*arguments):
        nonlocal count
        save(*arguments)
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    return some


def test_a_shard_that_ends_every_worker_ends_the_run(gpt2_folder, long_text, tmp_path, monkeypatch):
    class Deadly(ProcessLane):
        def call(self, method, *arguments):
            super().call(method, *arguments)
            if method == "read":
                os.kill(self.process.pid, signal.SIGKILL)

    monkeypatch.setattr("ffmem.indexing.build.ProcessLane", Deadly)
    with pytest.raises(FfmemError, match=r"shard \d+ has cost 3 workers .*signal 9"):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", workers=2, **SETTINGS, **CPU)


def test_an_error_in_a_worker_is_told_as_it_is(tmp_path, long_text):
    with pytest.raises(ModelError, match="nowhere"):
        build_index(str(tmp_path / "nowhere"), long_text, out=tmp_path / "run", workers=2, **SETTINGS, **CPU)


def test_a_worker_unlike_the_first_is_refused(gpt2_folder, long_text, tmp_path, monkeypatch):
    monkeypatch.setattr("ffmem.indexing.build.new_manifest", _abacus)
    with pytest.raises(FfmemError, match=r"worker \d is not like .* in place of abacus"):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", workers=2, **SETTINGS, **CPU)


def _abacus(*arguments):
    from ffmem.indexing.provenance import new_manifest

    manifest = new_manifest(*arguments)
    return replace(manifest, environment=manifest.environment | {"device_name": "abacus"})


def test_threads_are_set_to_what_a_run_began_with(gpt2_folder, long_text, alone, tmp_path, monkeypatch):
    monkeypatch.setattr("ffmem.indexing.worker.checkpoint.save", _saving_twice())
    with pytest.raises(KeyboardInterrupt):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", **SETTINGS, **CPU)
    monkeypatch.undo()
    monkeypatch.setattr("ffmem.indexing.build.torch.get_num_threads", lambda: 2)
    build_index(gpt2_folder, long_text, out=tmp_path / "run", workers=1, devices="cpu", **SETTINGS, **CPU)
    assert content(tmp_path / "run") == alone


def test_a_state_that_grew_meanwhile_is_not_read_twice(gpt2_folder, long_text, tmp_path, monkeypatch):
    monkeypatch.setattr("ffmem.indexing.worker.checkpoint.save", _saving_twice())
    with pytest.raises(KeyboardInterrupt):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", **SETTINGS, **CPU)
    monkeypatch.undo()
    from ffmem.indexing import checkpoint

    kept = checkpoint.kept
    monkeypatch.setattr(checkpoint, "kept", lambda folder: dict(list(kept(folder).items())[:1]))
    with pytest.raises(RunError, match=r"another process has written shard 1 meanwhile"):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", **SETTINGS, **CPU)


def test_a_disk_that_is_full_is_one_clear_line(gpt2_folder, long_text, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ffmem.indexing.checkpoint.write_table", full)
    with pytest.raises(
        RunError, match=r"work/shard-\d+\.arrow: cannot be written: No space left.* give the same command again"
    ):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", **SETTINGS, **CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "at least 1 worker"),
        ({"workers": 2, "devices": "cpu"}, "a device for each of 2 workers, found 1"),
        ({"device_map": "auto", "device": "cpu"}, "spreads a model over all GPUs, found device 'cpu' too"),
        ({"engine": "slurm"}, "expected engine local or ray"),
        ({"address": "auto"}, "an address is for --engine ray"),
        ({"engine": "ray", "devices": "cuda:0"}, "--devices is for workers on this machine"),
    ],
)
def test_settings_that_make_no_sense_are_refused(gpt2_folder, long_text, tmp_path, settings, message):
    with pytest.raises(FfmemError, match=message):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", **settings)


def test_a_model_in_memory_has_one_worker(gpt2, long_text, tmp_path):
    with pytest.raises(ModelError, match="give its name or its folder"):
        build_index(gpt2, long_text, out=tmp_path / "run", workers=2)
    assert not (tmp_path / "run").exists()


def test_what_a_worker_has_read_counts_until_it_is_kept_and_never_less():
    def shard(number, tokens):
        return SimpleNamespace(number=number, tokens=tokens)

    class Reading(Nobody):
        def read_so_far(self) -> int:
            return 5

    member = Member("0", Reading(), doing="keep")
    assert member.read_so_far() == 0
    member.doing = "read"
    member.unkept = {3: shard(3, 100), 4: shard(4, 70)}
    assert member.read_so_far() == 100 + 5  # the last one is being read
    member.doing = "keep"
    assert member.read_so_far() == 100 + 70
