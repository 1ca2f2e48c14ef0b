"""Workers on a Ray cluster make the bytes of one process, whatever happens to them, their nodes or the driver."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer
from types import SimpleNamespace

import pytest
import torch

from ffmem import build_index
from ffmem.cli.app import main
from ffmem.errors import CorpusError, FfmemError, ModelError, RunError
from ffmem.indexing import cluster as room
from ffmem.indexing import workers as workers_module
from ffmem.run import lock
from ffmem.run.folder import RunFolder
from tests.indexing.parts import InParts
from tests.indexing.reference import SETTINGS, content
from tests.shelf import BUCKET, s3_store
from tests.tiny import some_text

for name, value in room.QUIET.items():
    os.environ.setdefault(name, value)  # Ray reads them when it is imported
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

pytestmark = pytest.mark.slow
CPU = {"device": "cpu"}
COMMAND = [sys.executable, "-c", "import sys, torch; torch.set_num_threads(1); from ffmem.cli.app import main; main()"]
OPTIONS = ["--shard-tokens", "500", "--batch-tokens", "256", "--top", "5", "--device", "cpu", "-q"]
"""The settings of all runs here, as they are typed."""
DEADLINE = 300
"""Seconds after which a test that waits for something is wrong."""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Shards enough that all workers are in the midst of one when something happens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(some_text(600, seed=9), "utf-8")
    return path


@pytest.fixture(scope="module")
def alone(gpt2_folder, text, tmp_path_factory):
    """What one process makes of the corpus in parts."""
    run = tmp_path_factory.mktemp("alone") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ffmem.indexing.build.Corpus", InParts)
        build_index(gpt2_folder, text, out=run, **SETTINGS, **CPU)
    return content(run)


@pytest.fixture(autouse=True)
def in_parts(monkeypatch):
    """Every corpus comes in parts; may be called again with more of `InParts`."""

    def have(**more):
        monkeypatch.setattr("ffmem.indexing.build.Corpus", partial(InParts, **more))

    have()
    return have


@pytest.fixture(scope="module")
def store():
    """An S3 store that the cluster's nodes know of, since it is there before them."""
    with s3_store():
        yield f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def rays():
    """A folder for what Ray keeps on a machine, so that a cluster of the developer's, or of other tests, is left alone."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: there are sockets in it
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(store, rays):
    """Two nodes on this machine, with room for a worker each; this process is connected to neither. What one of them says
    of two GPUs concerns those only who do not ask for the CPU."""
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.ERROR)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        made.add_node(num_cpus=1, num_gpus=2)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def indexing(gpt2_folder, text, cluster):
    """The run that all tests make."""

    def index(run, *, model=gpt2_folder, **settings):
        return build_index(model, text, out=run, address=cluster.address, **SETTINGS, **CPU, **settings)

    return index


@pytest.fixture
def meanwhile(in_parts, tmp_path):
    """Have something done while two workers are in the midst of a part; it is told their processes, which go on after it."""
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "hold").touch()
    in_parts(gate=str(gate))

    def processes():
        return [int(path.name) for path in gate.iterdir() if path.name != "hold"]

    def have(do):
        def wait():
            try:
                wait_until(lambda: len(processes()) == 2)
                do(processes())
            finally:
                (gate / "hold").unlink()

        threading.Thread(target=wait, daemon=True).start()

    return have


def logged(run, event):
    lines = [json.loads(line) for line in RunFolder(run).read_bytes("log.jsonl").splitlines()]
    return [line for line in lines if line["event"] == event]


def wait_until(true):
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_workers_on_two_nodes_make_the_bytes_of_one(indexing, alone, tmp_path, meanwhile, capfd, monkeypatch):
    """A third finds no room, which holds up nobody."""
    monkeypatch.setattr(workers_module, "NO_ROOM", 15.0)
    monkeypatch.chdir(tmp_path)  # a relative path means the same to workers, wherever they run
    processes = []
    meanwhile(processes.extend)
    index = indexing("run", workers=3)
    assert index.model is None
    assert content(tmp_path / "run") == alone
    assert len(set(processes) - {os.getpid()}) == 2
    assert not ray.is_initialized()
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_is_killed_is_replaced_and_loses_nothing(indexing, alone, tmp_path, meanwhile, capfd):
    run = tmp_path / "run"
    meanwhile(lambda processes: os.kill(processes[0], signal.SIGKILL))
    indexing(run)
    assert content(run) == alone
    (lost,) = logged(run, "lost")
    assert re.search(r"^worker \d on .*, process \d+, ended while it read part \d ", lost["what"])
    assert capfd.readouterr() == ("", "")


def test_a_node_that_is_gone_takes_its_worker_with_it_and_nothing_else(cluster, indexing, alone, tmp_path, meanwhile):
    """Its replacement finds no room until the other worker has nothing left to do."""
    run = tmp_path / "run"
    (node,) = cluster.worker_nodes

    def remove(processes):
        cluster.remove_node(node, allow_graceful=False)
        wait_until(lambda: not all(Path(f"/proc/{process}").exists() for process in processes))

    meanwhile(remove)
    try:
        indexing(run)
    finally:
        cluster.add_node(num_cpus=1, num_gpus=2)
    assert content(run) == alone
    assert logged(run, "lost")


def test_a_part_that_ends_every_worker_ends_the_run(indexing, tmp_path, in_parts, monkeypatch):
    monkeypatch.setattr(workers_module, "RESTARTS", 1)
    in_parts(leader=os.getpid())
    with pytest.raises(FfmemError, match=r"part \d has cost a worker 2 times \(the last: worker \d .*\): finished"):
        indexing(tmp_path / "run")


@pytest.mark.parametrize("first", ["several", "one"])
def test_a_run_is_finished_by_another_number_of_workers(first, gpt2_folder, text, indexing, alone, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def stop(_):
        if len(list(run.glob("work/shard-*.arrow"))) >= 2 and list(run.glob("work/state-*")):
            raise KeyboardInterrupt

    local = partial(build_index, gpt2_folder, text, **SETTINGS, **CPU)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "check_writer", stop)
        with pytest.raises(KeyboardInterrupt):
            (indexing if first == "several" else lambda run: local(out=run))(run)
    assert logged(run, "finished") == []
    if first == "several":
        local(out=run)
    else:
        indexing(run)
    assert content(run) == alone
    assert logged(run, "continued")[0]["shards"] >= 1


def test_a_limit_on_tokens_falls_where_it_falls_in_one_process(gpt2_folder, text, indexing, tmp_path):
    indexing(tmp_path / "several", limit_tokens=3000)
    build_index(gpt2_folder, text, out=tmp_path / "one", limit_tokens=3000, **SETTINGS, **CPU)
    assert content(tmp_path / "several") == content(tmp_path / "one")


def test_a_driver_that_is_killed_is_continued_from_the_shards_that_are_kept(
    cluster, gpt2_folder, text, tmp_path, monkeypatch
):
    monkeypatch.undo()  # as it is typed
    run = tmp_path / "run"
    typed = [*COMMAND, "index", str(gpt2_folder), str(text), "-o", str(run), *OPTIONS]
    driver = subprocess.Popen([*typed, "--address", cluster.address])
    try:
        wait_until(lambda: driver.poll() is not None or len(list(run.glob("work/shard-*.arrow"))) >= 3)
    finally:
        driver.kill()
        driver.wait()
    assert logged(run, "finished") == []
    time.sleep(2)  # its workers end with it
    build_index(gpt2_folder, text, out=run, **SETTINGS, **CPU)
    build_index(gpt2_folder, text, out=tmp_path / "alone", **SETTINGS, **CPU)
    assert content(run) == content(tmp_path / "alone")
    (continued,) = logged(run, "continued")
    assert continued["shards"] >= 1


def test_a_cluster_that_the_caller_is_connected_to_is_used_and_stays_connected(cluster, gpt2_folder, text, alone, tmp_path):
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        build_index(gpt2_folder, text, out=tmp_path / "run", workers=2, **SETTINGS, **CPU)
        assert content(tmp_path / "run") == alone
        assert ray.is_initialized()
    finally:
        ray.shutdown()


def test_workers_keep_a_run_in_an_object_store(indexing, store, alone):
    run = f"{store}/runs/ray"
    indexing(run)
    folder = RunFolder(run)
    names = set(folder.names("")) - {"log.jsonl"}
    assert {Path(name): folder.read_bytes(name) for name in names} == alone


def test_workers_of_a_writer_that_was_taken_for_dead_keep_nothing_more(indexing, store, meanwhile, monkeypatch):
    """The one who took over would find their states in place of its own."""
    monkeypatch.setattr(lock, "RENEWED_EVERY", 60.0)  # so that no sign of life comes after that
    run = f"{store}/runs/taken"
    store = RunFolder(run).store
    meanwhile(lambda _: store.put(lock.WRITER, json.dumps({"host": "far", "process": 7, "id": "other"}).encode()))
    with pytest.raises(RunError, match="process 7 on far writes this run now, so this process has ended"):
        indexing(run)
    assert RunFolder(run).names("work") == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_a_cluster_of_its_own_ends_with_the_run_when_it_is_interrupted(
    gpt2_folder, text, rays, tmp_path, number, code, monkeypatch
):
    """As the command line starts it, where no address is given."""
    monkeypatch.undo()
    run = tmp_path / "run"
    where = os.environ | {"TOLD_BY": str(tmp_path), "RAY_TMPDIR": rays}  # all processes that it starts have this too
    typed = [*COMMAND, "index", str(gpt2_folder), str(text), "-o", str(run), *OPTIONS, "--workers", "2"]
    driver = subprocess.Popen(typed, env=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        wait_until(lambda: driver.poll() is not None or list(run.glob("work/state-*")))
        if number == signal.SIGINT:
            os.killpg(driver.pid, number)  # as a terminal does
        else:
            driver.send_signal(number)  # as a scheduler may
        out, err = driver.communicate(timeout=DEADLINE)
    finally:
        driver.kill()
    assert (driver.returncode, out) == (code, "")
    assert re.fullmatch(f"ffmem: stopped; all finished shards are kept in {run}. Give the same .* to continue.\n", err)
    wait_until(lambda: not started_with(f"TOLD_BY={tmp_path}"))
    build_index(gpt2_folder, text, out=run, **SETTINGS, **CPU)
    build_index(gpt2_folder, text, out=tmp_path / "alone", **SETTINGS, **CPU)
    assert content(run) == content(tmp_path / "alone")


def started_with(variable):
    """The processes of this machine that have this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [path.parent.name] if variable.encode() in path.read_bytes().split(b"\0") else []
    return found


def test_an_error_in_a_worker_is_told_as_it_is_with_its_machine(indexing, tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module.platform, "node", lambda: "another")
    with pytest.raises(ModelError, match=r"^[^\n]*nothing at [^\n]*nowhere[^\n]* \(on [^\n]+\)$"):
        indexing(tmp_path / "run", model=str(tmp_path / "nowhere"), workers=1)
    assert not ray.is_initialized()


def test_an_error_of_ours_in_a_worker_is_no_loss(indexing, tmp_path, capfd):
    with pytest.raises(RuntimeError, match=r"^in a worker: TypeError: .*colour"):
        indexing(tmp_path / "run", colour="red", workers=1)
    assert "in model_info" in capfd.readouterr().err  # where it happened


def test_a_run_that_workers_do_not_see_is_refused(indexing):
    with pytest.raises(RunError, match=r"does not see the run at memory://here/run: give a folder that every node reaches"):
        indexing("memory://here/run", workers=1)


def test_a_text_that_workers_do_not_see_is_refused(indexing, tmp_path, in_parts):
    in_parts(elsewhere=os.getpid())
    with pytest.raises(CorpusError, match=r"does not see the same text as the machine that leads: every machine needs"):
        indexing(tmp_path / "run", workers=1)


def test_a_worker_unlike_the_first_is_refused(indexing, tmp_path, monkeypatch):
    def abacus(*arguments):
        from ffmem.indexing.provenance import new_manifest

        manifest = new_manifest(*arguments)
        return replace(manifest, environment=manifest.environment | {"device_name": "abacus"})

    monkeypatch.setattr("ffmem.indexing.build.new_manifest", abacus)
    with pytest.raises(FfmemError, match=r"worker \d is not like .* in place of abacus"):
        indexing(tmp_path / "run")


def test_a_node_with_other_versions_is_refused(indexing, tmp_path, monkeypatch):
    monkeypatch.setattr(workers_module, "version", lambda name: "0.0")
    with pytest.raises(FfmemError, match=r" has ffmem .*, this machine 0\.0: install the same versions on every node$"):
        indexing(tmp_path / "run")


def test_a_node_without_ffmem_is_told(cluster, indexing, tmp_path):
    hidden = tmp_path / "site" / "ffmem"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'ffmem'\")")
    node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(hidden.parent)})
    try:
        with pytest.raises(FfmemError, match=r"^a node of the Ray cluster has no ffmem: install ffmem \S+ on every node$"):
            indexing(tmp_path / "run", workers=3)
    finally:
        cluster.remove_node(node)


def test_a_cluster_without_room_is_told(cluster, indexing, tmp_path, monkeypatch):
    class Other:
        def greet(self):
            pass

    monkeypatch.setattr(workers_module, "NO_ROOM", 0.3)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        others = [ray.remote(num_cpus=1)(Other).remote() for _ in range(2)]
        ray.get([other.greet.remote() for other in others])
        with pytest.raises(
            FfmemError,
            match=r"no room for a worker for 0 s: each needs 1 CPU, and on 2 nodes there are 2 CPU \(0 free\); add nodes",
        ):
            indexing(tmp_path / "run")
    finally:
        ray.shutdown()


def test_an_address_where_something_else_answers_is_one_line(gpt2_folder, text_file, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(room, "REACH", 1.0)
    with TCPServer(("127.0.0.1", 0), BaseRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{other.server_address[1]}"
        with pytest.raises(SystemExit):
            main(["index", str(gpt2_folder), str(text_file), "-o", str(tmp_path / "run"), "--address", address, "-q"])
        other.shutdown()
    error = rf"ffmem: error: no Ray cluster can be reached at {address} \(what answers there is not Ray\): start one .*\n"
    assert re.fullmatch(error, capfd.readouterr().err)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster_is_one_line(gpt2_folder, text_file, tmp_path, address, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["index", str(gpt2_folder), str(text_file), "-o", str(tmp_path / "run"), "--address", address, "-q"])
    assert ended.value.code == 1
    assert re.fullmatch(rf"ffmem: error: no Ray cluster can be reached at {address} \(.*\n", capfd.readouterr().err)
    assert not ray.is_initialized()


def test_devices_are_given_out_by_ray(cluster, gpt2_folder, text, tmp_path):
    with pytest.raises(FfmemError, match="expected --device auto, cuda or cpu with --address, found cuda:1"):
        build_index(gpt2_folder, text, out=tmp_path / "run", address=cluster.address, device="cuda:1")


def test_with_a_device_map_a_worker_gets_several_gpus_of_one_node(cluster, gpt2_folder, text, alone, tmp_path, monkeypatch):
    """There are none in truth, so that the model is on the CPU after all."""
    needs = []
    made = workers_module.Workers.__init__

    def watched(self, ray, model, devices, capacity, threads):
        needs.append((capacity.needs, len(devices)))
        made(self, ray, model, devices, capacity, threads)

    monkeypatch.setattr(workers_module.Workers, "__init__", watched)
    build_index(gpt2_folder, text, out=tmp_path / "run", **SETTINGS, address=cluster.address, device_map="auto")
    assert needs == [({"CPU": 1, "GPU": 2}, 1)]
    if not torch.cuda.is_available():
        assert content(tmp_path / "run") == alone


@pytest.mark.parametrize(
    ("gpus", "workers", "share", "places"),
    [
        ([8, 8], None, 8, 2),
        ([8, 4, 0], None, 4, 3),
        ([8, 8], 4, 4, 4),
        ([8, 8], 3, 4, 4),
        ([8, 8], 2, 8, 2),
        ([8, 4], 3, 4, 3),
        ([1, 1], 2, 1, 2),
        ([2], 5, 1, 2),
        ([], None, 1, 1),
    ],
)
def test_gpus_of_a_cluster_are_shared_out_machine_by_machine(gpus, workers, share, places):
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0} | ({"GPU": float(count)} if count else {})} for count in gpus]
    made = room.Capacity(SimpleNamespace(nodes=lambda: nodes), "cuda", workers, spread=True)
    assert made.needs == {"CPU": 1, "GPU": share}
    assert made.workers() == places
