"""Workers on a Ray cluster make the bytes of one on this machine, whatever happens to them, their nodes or the driver."""

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
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer
from types import SimpleNamespace

import pytest

from ffmem import build_index
from ffmem.cli.app import main
from ffmem.errors import FfmemError, ModelError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing import cluster as room
from ffmem.indexing.crew import Crew
from ffmem.indexing.lane import Lost
from ffmem.run.folder import RunFolder
from tests.indexing.reference import SETTINGS, content
from tests.shelf import BUCKET, s3_store
from tests.tiny import some_text

for name, value in room.QUIET.items():
    os.environ.setdefault(name, value)  # Ray reads them when it is imported
ray = pytest.importorskip("ray")
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
    run = tmp_path_factory.mktemp("alone") / "run"
    build_index(gpt2_folder, text, out=run, **SETTINGS, **CPU)
    return content(run)


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
        return build_index(model, text, out=run, engine="ray", address=cluster.address, **SETTINGS, **CPU, **settings)

    return index


@pytest.fixture
def hired(monkeypatch):
    """Every lane that is opened, in order; workers are asked often how far they have come."""
    lanes = []

    class Watched(room.RayLane):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.called = ""
            lanes.append(self)

        def call(self, method, *arguments):
            super().call(method, *arguments)
            self.called = method

    monkeypatch.setattr(room, "RayLane", Watched)
    monkeypatch.setattr(room, "ASKING", 0.0)
    return lanes


@pytest.fixture
def meanwhile(hired, monkeypatch):
    """Have something done, by another thread, while two workers are in the midst of a shard. They begin together, and get no
    other shard before it is done."""
    doing = threading.Event()

    def answer(self, real=room.RayLane.answer):
        if self.called == "begin" and any(lane.called == "subject" for lane in hired[:2]):
            return None
        return None if self.called == "read" and doing.is_set() else real(self)

    def have(do):
        def wait():
            wait_until(lambda: len(hired) == 2 and all(lane.tokens for lane in hired))
            doing.set()
            try:
                do()
            finally:
                doing.clear()

        threading.Thread(target=wait, daemon=True).start()

    monkeypatch.setattr(room.RayLane, "answer", answer)
    return have


def logged(run, event):
    lines = [json.loads(line) for line in RunFolder(run).read_bytes("log.jsonl").splitlines()]
    return [line for line in lines if line["event"] == event]


def test_workers_on_two_nodes_make_the_bytes_of_one(indexing, alone, tmp_path, hired, capfd, monkeypatch):
    """A third finds no room, which holds up nobody."""
    monkeypatch.setattr(room, "PATIENCE", 15.0)
    monkeypatch.chdir(tmp_path)  # a relative path means the same to workers, wherever they run
    index = indexing("run", workers=3)
    assert index.model is None
    assert content(tmp_path / "run") == alone
    assert len(hired) == 3
    assert len({lane.pid for lane in hired} - {0, os.getpid()}) == 2
    assert not ray.is_initialized()
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_is_killed_is_replaced_and_loses_nothing(indexing, alone, tmp_path, hired, meanwhile, capfd):
    run = tmp_path / "run"
    meanwhile(lambda: os.kill(hired[0].pid, signal.SIGKILL))
    indexing(run)
    assert content(run) == alone
    (lost,) = logged(run, "lost")
    assert re.search(
        r"^worker 0 ended on .*, process \d+ \(its worker process has died\) while it read a shard", lost["what"]
    )
    assert len(hired) == 3
    assert capfd.readouterr() == ("", "")


def test_a_node_that_is_gone_takes_its_worker_with_it_and_nothing_else(cluster, indexing, alone, tmp_path, hired, meanwhile):
    """Its replacement finds no room and waits; the other worker does the rest."""
    run = tmp_path / "run"
    (node,) = cluster.worker_nodes

    def remove():
        cluster.remove_node(node, allow_graceful=False)
        wait_until(
            lambda: not all(Path(f"/proc/{lane.pid}").exists() for lane in hired)
        )  # it looks for its node now and then

    meanwhile(remove)
    try:
        indexing(run)
    finally:
        cluster.add_node(num_cpus=1, num_gpus=2)
    assert content(run) == alone
    lost = logged(run, "lost")  # more than one where a replacement was sent to the node before its end was known
    assert lost
    assert len(hired) == 2 + len(lost)
    assert hired[-1].host == ""


def test_a_driver_that_is_killed_is_continued_from_the_shards_that_are_kept(
    cluster, gpt2_folder, text, indexing, alone, tmp_path
):
    run = tmp_path / "run"
    typed = [*COMMAND, "index", str(gpt2_folder), str(text), "-o", str(run), *OPTIONS, "--engine", "ray"]
    driver = subprocess.Popen([*typed, "--address", cluster.address])
    try:
        # A worker whose second shard is begun has kept its first one; the other may be slow to start.
        wait_until(lambda: driver.poll() is not None or len(list(run.glob("work/shard-*.arrow"))) >= 3)
    finally:
        driver.kill()
        driver.wait()
    assert logged(run, "finished") == []
    time.sleep(room.SETTLING)  # its workers end with it
    shutil.copytree(run, tmp_path / "local")
    indexing(run)
    assert content(run) == alone
    (continued,) = logged(run, "continued")
    assert continued["shards"] >= 1
    build_index(gpt2_folder, text, out=tmp_path / "local", **SETTINGS, **CPU)
    assert content(tmp_path / "local") == alone


def test_a_run_begun_here_is_finished_on_a_cluster_that_the_caller_is_connected_to(
    cluster, gpt2_folder, text, indexing, alone, tmp_path, monkeypatch
):
    def stop(*arguments, save=checkpoint.save):
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            build_index(gpt2_folder, text, out=tmp_path / "run", **SETTINGS, **CPU)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        indexing(tmp_path / "run")
        assert content(tmp_path / "run") == alone
        assert logged(tmp_path / "run", "continued")[0]["shards"] == 1
        assert ray.is_initialized()  # as before
    finally:
        ray.shutdown()


def test_workers_keep_a_run_in_an_object_store(indexing, store, alone, hired):
    run = f"{store}/runs/ray"
    indexing(run)
    folder = RunFolder(run)
    names = set(folder.names("")) - {"log.jsonl"}
    assert {Path(name): folder.read_bytes(name) for name in names} == alone
    assert len(hired) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_a_cluster_of_its_own_ends_with_the_run_when_it_is_interrupted(
    gpt2_folder, text, alone, rays, tmp_path, number, code
):
    """As the command line starts it, where no address is given."""
    run = tmp_path / "run"
    where = os.environ | {"TOLD_BY": str(tmp_path)}  # all processes that it starts have this too
    typed = [*COMMAND, "index", str(gpt2_folder), str(text), "-o", str(run), *OPTIONS, "--engine", "ray"]
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
    assert content(run) == alone


def started_with(variable):
    """The processes of this machine that have this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [path.parent.name] if variable.encode() in path.read_bytes().split(b"\0") else []
    return found


def wait_until(true):
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_an_error_in_a_worker_is_told_as_it_is_with_its_machine(indexing, tmp_path, monkeypatch):
    monkeypatch.setattr(room.platform, "node", lambda: "another")
    with pytest.raises(ModelError, match=r"^[^\n]*nothing at [^\n]*nowhere[^\n]* \(on [^\n]+\)$"):
        indexing(tmp_path / "run", model=str(tmp_path / "nowhere"), workers=1)
    assert not ray.is_initialized()


def test_an_error_of_ours_in_a_worker_is_no_loss(indexing, tmp_path, capfd):
    with pytest.raises(RuntimeError, match=r"^in a worker: TypeError: .*colour"):
        indexing(tmp_path / "run", colour="red", workers=1)
    assert "in _do" in capfd.readouterr().err  # where it happened


def test_a_run_that_workers_do_not_see_is_refused(indexing):
    with pytest.raises(RunError, match=r"does not see the run at memory://here/run: give a folder that every node reaches"):
        indexing("memory://here/run", workers=1)


def test_a_node_with_other_versions_is_refused(indexing, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_version", lambda name: "0.0")
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

    monkeypatch.setattr(room, "PATIENCE", 0.3)
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
            main(
                [
                    "index",
                    str(gpt2_folder),
                    str(text_file),
                    "-o",
                    str(tmp_path / "run"),
                    "--engine",
                    "ray",
                    "--address",
                    address,
                    "-q",
                ]
            )
        other.shutdown()
    error = rf"ffmem: error: no Ray cluster can be reached at {address} \(what answers there is not Ray\): start one .*\n"
    assert re.fullmatch(error, capfd.readouterr().err)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_without_a_cluster_is_one_line(gpt2_folder, text_file, tmp_path, address, capfd):
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "index",
                str(gpt2_folder),
                str(text_file),
                "-o",
                str(tmp_path / "run"),
                "--engine",
                "ray",
                "--address",
                address,
                "-q",
            ]
        )
    assert ended.value.code == 1
    assert re.fullmatch(rf"ffmem: error: no Ray cluster can be reached at {address} \(.*\n", capfd.readouterr().err)
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cuda:1"}, "expected --device auto, cuda or cpu with --engine ray, found cuda:1"),
        ({"devices": "cpu,cpu"}, "--devices is for workers on this machine"),
    ],
)
def test_devices_are_given_out_by_ray(cluster, gpt2_folder, text, tmp_path, settings, message):
    with pytest.raises(FfmemError, match=message):
        build_index(gpt2_folder, text, out=tmp_path / "run", engine="ray", address=cluster.address, **settings)


def test_with_a_device_map_a_worker_gets_several_gpus_of_one_node(cluster, gpt2_folder, text, alone, tmp_path, hired):
    """There are none in truth, so that the model is on the CPU after all."""
    spread = {"engine": "ray", "address": cluster.address, "device_map": "auto"}
    build_index(gpt2_folder, text, out=tmp_path / "run", **SETTINGS, **spread)
    assert [lane.cluster.needs for lane in hired] == [{"CPU": 1, "GPU": 2}]
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
    made = room.Cluster(SimpleNamespace(nodes=lambda: nodes), "cuda", workers, spread=True)
    assert made.needs == {"CPU": 1, "GPU": share}
    assert made.places() == places


class Doomed:
    """A lane whose workers are lost as soon as they are called, but for those of place 0."""

    def __init__(self, number):
        self.number = number

    def call(self, method, *arguments):
        pass

    def answer(self):
        if self.number:
            raise Lost("by fate")
        return ([],)

    def read_so_far(self):
        return 0

    def close(self):
        pass


def test_a_place_whose_workers_never_begin_stays_empty():
    places = []
    crew = Crew(lambda number: (places.append(number), Doomed(number))[1], 2)
    for _ in range(5):
        assert crew._answer(crew.members[0]) == ([],)
        assert crew._answer(crew.members[1]) is None
    assert places == [0, 1, 1, 1]
    assert len(crew.lost) == 3
    with pytest.raises(
        FfmemError, match=r"^no worker lives long enough to take up the run; the last: worker 1 ended by fate"
    ):
        Crew(lambda number: Doomed(1 + number), 2).subject()


def test_shards_that_are_not_where_they_should_be_are_noticed(tmp_path):
    crew = Crew(Doomed, 2)
    crew._check_all_are_kept(set(), RunFolder(tmp_path))
    with pytest.raises(
        FfmemError, match=r"2 of 2 shards were read, but are not in .* \(such as 3\): .* the same command again$"
    ):
        crew._check_all_are_kept({4, 3}, RunFolder(tmp_path))


def test_without_ray_the_extra_is_named(gpt2_folder, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FfmemError, match=r"^the engine ray needs the ray package: pip install 'ffmem\[ray\]'$"):
        build_index(gpt2_folder, text_file, out=tmp_path / "run", engine="ray")
