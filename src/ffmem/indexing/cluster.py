"""Workers on a Ray cluster.

A worker's process imports this module when it is placed, so nothing heavy is imported here.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ffmem.errors import FfmemError, RunError

if TYPE_CHECKING:
    from ffmem.run.manifest import Manifest

REACH = 10.0
"""Seconds for a cluster's head to take up a connection; Ray itself would try for many minutes."""
PATIENCE = 60.0
"""Seconds without any worker, after which a cluster is taken to have no room."""
SETTLING = 2.0
"""Seconds until a lost worker has surely stopped writing: it looks for its node every second, and ends without it."""
GRACE = 1.0
"""Seconds that a worker has to delete what it has fetched, before it is ended."""
ASKING = 0.2
"""Seconds between two questions to a worker how far it has come."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # What becomes of workers is told in ffmem's words; Ray would print it to standard output.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "^(A worker died or was killed|.* worker.s. were killed due to|The node with node id)",
}
SHARED = ("ffmem", "numpy", "pyarrow", "sentencex", "tokenizers", "transformers")
"""Packages that cut the text here and read it there, so that their versions must agree."""


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster at this address (or RAY_ADDRESS), or to one that lives on this machine as long as this.

    Where the caller is connected already, that cluster is used, and stays connected.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise FfmemError("the engine ray needs the ray package: pip install 'ffmem[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        try:
            _reach(address)
            with warnings.catch_warnings(action="ignore"):
                ray.init(address, log_to_driver=False, logging_level="ERROR", **own)
        except Exception as error:
            raise FfmemError(_unreachable(address, error)) from error
        if main and callable(before):  # Ray has taken it over, and would end the process with nothing cleaned up
            signal.signal(signal.SIGTERM, before)
        yield ray
    finally:
        ray.shutdown()
        if main and before is not None:
            signal.signal(signal.SIGTERM, before)


def _reach(address: str) -> None:
    """An address with a port must answer, and in the protocol that Ray has."""
    found = re.fullmatch(r"(?:ray://)?(\[?([^/\[\]]+?)\]?:(\d+))", address)
    if found is None:
        return
    socket.create_connection((found[2], int(found[3])), REACH).close()
    if os.environ.get("RAY_USE_TLS", "0") == "0":
        import grpc

        with grpc.insecure_channel(found[1]) as channel:
            try:
                grpc.channel_ready_future(channel).result(REACH)
            except grpc.FutureTimeoutError:
                raise ConnectionError("what answers there is not Ray") from None


def _unreachable(address: str, error: Exception) -> str:
    why = " ".join(str(error).split())
    if address == "local":
        return f"Ray could not be started on this machine: {why}"
    if isinstance(error, ImportError):
        return f"{address} needs a part of Ray that is not installed ({why}): pip install 'ffmem[ray]'"
    if not isinstance(error, OSError):
        return f"cannot use the Ray cluster at {address}: {why}"
    return (
        f"no Ray cluster can be reached at {address} ({why}): start one with `ray start --head`, or leave out --address; if "
        "it asks for a token, set RAY_AUTH_MODE=token"
    )


class Cluster:
    """The machines of a Ray cluster, as far as workers need them."""

    def __init__(self, ray: Any, device: str, workers: int | None = None, *, spread: bool = False) -> None:
        if device.startswith("cuda:"):
            raise FfmemError(
                f"expected --device auto, cuda or cpu with --engine ray, found {device}: Ray gives out the GPUs"
            )
        self.ray = ray
        self.needs = {"CPU": 1}
        if device != "cpu" and (device == "cuda" or self._count("GPU")):
            self.needs["GPU"] = self._share(workers) if spread else 1
        self.worked = time.monotonic()
        """When a worker was last known to live."""

    def _nodes(self) -> list[dict[str, float]]:
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _count(self, what: str) -> int:
        return sum(int(node.get(what, 0)) for node in self._nodes())

    def _share(self, workers: int | None) -> int:
        """GPUs of one machine over which a worker spreads its model: as many as there are for so many workers, or else all
        that the machine with the fewest has."""
        gpus = [found for node in self._nodes() if (found := int(node.get("GPU", 0)))] or [1]
        shares = range(max(gpus), 1, -1) if workers else [min(gpus)]
        return next((share for share in shares if sum(found // share for found in gpus) >= (workers or 1)), 1)

    def places(self) -> int:
        """How many workers there is room for: one a GPU or a share of them, or one a machine where there are none."""
        if "GPU" in self.needs:
            return max(1, sum(int(node.get("GPU", 0)) // self.needs["GPU"] for node in self._nodes()))
        return max(1, sum(node.get("CPU", 0) >= 1 for node in self._nodes()))

    def hire(self, model: str, load: dict[str, Any], threads: int) -> RayLane:
        return RayLane(self, model, load, threads)

    def wait_for_room(self) -> None:
        """For a worker that is not placed: others may have all the room, but if there are none, this ends."""
        if time.monotonic() - self.worked < PATIENCE:
            return
        free = self.ray.available_resources()
        asked = " and ".join(f"{count} {what}" for what, count in self.needs.items())
        there = ", ".join(f"{self._count(what)} {what} ({int(free.get(what, 0))} free)" for what in self.needs)
        raise FfmemError(
            f"the Ray cluster has had no room for a worker for {PATIENCE:.0f} s: each needs {asked}, and on "
            f"{len(self._nodes())} nodes there are {there}; add nodes or wait for them, then give the same command again"
        )


class RayLane:
    """A worker as an actor, on whatever machine has room for it, now or later.

    A shard goes through Ray's object store, which lets go of it once it is read.
    """

    def __init__(self, cluster: Cluster, *arguments: Any) -> None:
        self.cluster, self.ray = cluster, cluster.ray
        needs = {f"num_{what.lower()}s": count for what, count in cluster.needs.items()}
        # Two calls at a time: one that works, and one that tells how far it has come.
        options = {"max_concurrency": 2, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self.actor = self.ray.remote(_Actor).options(**options, **needs).remote(*arguments)
        self.host, self.pid = "", 0
        """Where it is; empty until it is placed."""
        self.lost, self.settled = "", 0.0
        """Why it is gone, and when that is certain."""
        self.tokens = 0
        self.pending: Any = None
        self.greeting = self.actor.greet.remote()
        self.asked: Any = None
        self.asked_at = 0.0

    def call(self, method: str, *arguments: Any) -> None:
        self.tokens, self.asked = 0, None
        self.pending = self.actor.do.remote(method, *arguments)

    def answer(self) -> tuple[Any] | None:
        answer = None
        if not self.lost:
            answer = self._heard(self.pending) if self._placed() else None
        elif time.monotonic() >= self.settled:
            from ffmem.indexing.lane import Lost

            raise Lost(self.lost)
        if answer is not None:
            self.pending = None
        return answer

    def _placed(self) -> bool:
        if self.host:
            self.cluster.worked = time.monotonic()
        elif (greeting := self._heard(self.greeting)) is not None:
            (self.host, self.pid, versions), self.greeting = greeting[0], None
            for name, there in versions.items():
                if (here := _version(name)) != there:
                    raise FfmemError(
                        f"{self.host} has {name} {there}, this machine {here}: install the same versions on every node"
                    )
        elif not self.lost:
            self.cluster.wait_for_room()
        return bool(self.host)

    def read_so_far(self) -> int:
        """What the worker said last; it is asked again once it has answered."""
        if self.asked is not None:
            if (heard := self._heard(self.asked)) is not None:
                self.tokens, self.asked = heard[0], None
        elif not self.lost and time.monotonic() - self.asked_at >= ASKING:
            self.asked, self.asked_at = self.actor.read_so_far.remote(), time.monotonic()
        return self.tokens

    def _heard(self, reference: Any) -> tuple[Any] | None:
        """What a call has come to; None where it goes on, or its worker is lost, which `answer` tells when it is certain."""
        if reference is None or self.lost or not self.ray.wait([reference], timeout=0)[0]:
            return None
        errors = self.ray.exceptions
        try:
            return (self.ray.get(reference),)
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, FfmemError):
                raise type(cause)(f"{cause}{self._there()}") from None
            print(error, file=sys.stderr)
            raise RuntimeError(f"in a worker{self._there()}: {type(cause).__name__}: {cause}") from None
        except errors.RayError as error:
            if missing := re.search("No module named '(ffmem[^']*)'", str(error)):
                raise FfmemError(
                    f"a node of the Ray cluster has no {missing[1]}: install ffmem {_version('ffmem')} on every node"
                ) from None
            self.lost, self.settled = self._end(error), time.monotonic() + SETTLING
            self.close()  # it may live, out of reach: Ray ends it
            return None

    def _there(self) -> str:
        return f" (on {self.host})" if self.host not in ("", platform.node()) else ""

    def _end(self, error: Exception) -> str:
        found = re.search(r"^The actor .*? because (.*?)\.? *($|[.] )", str(error), re.MULTILINE)
        why = found[1] if found else str(error).strip().split("\n")[0]
        return f"on {self.host}, process {self.pid} ({why})" if self.host else f"({why})"

    def close(self) -> None:
        with suppress(Exception):  # a cluster that is gone has no workers left
            if self.host and not self.lost:
                self.ray.wait([self.actor.forget.remote()], timeout=GRACE)
            self.ray.kill(self.actor)


class _Actor:
    """A `Service` that a Ray actor offers. Ray calls from any of its threads; the work is done by one."""

    def __init__(self, *arguments: Any) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.arguments = arguments
        self.thread = ThreadPoolExecutor(1, "ffmem-worker")
        self.service: Any = None
        self.tokens = 0

    def greet(self) -> tuple[str, int, dict[str, str]]:
        return platform.node(), os.getpid(), {name: _version(name) for name in SHARED}

    def read_so_far(self) -> int:
        return self.tokens

    def forget(self) -> None:
        from ffmem.run.store import forget

        forget()

    def do(self, method: str, *arguments: Any) -> Any:
        return self.thread.submit(self._do, method, *arguments).result()

    def _do(self, method: str, *arguments: Any) -> Any:
        from ffmem.indexing.worker import Service

        if self.service is None:
            self.service = Service(*self.arguments)
            self.service.told = self._told
        if method == "begin":
            _check_same_place(*arguments)
        try:
            return getattr(self.service, method)(*arguments)
        finally:
            self.tokens = 0

    def _told(self, tokens: int) -> None:
        self.tokens = tokens


def _check_same_place(run: str, manifest: Manifest, *_: Any) -> None:
    """A path may mean another folder on another machine."""
    from ffmem.run.folder import RunFolder

    found = RunFolder(run).manifest()
    if found is None or found.settings != manifest.settings:
        raise RunError(
            f"{platform.node()} does not see the run at {run}: give a folder that every node reaches under this path, "
            "or a URL such as s3://bucket/run"
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
