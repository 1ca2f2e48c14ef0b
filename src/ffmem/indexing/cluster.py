"""A Ray cluster: how it is reached or started, what a worker needs of it, and how many workers it can hold."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ffmem.errors import FfmemError

REACH = 10.0
"""The number of seconds that a cluster's head has to answer; Ray itself would try for many minutes."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # What becomes of workers is reported in ffmem's words; Ray would print it to standard output.
    "RAY_DEDUP_LOGS_SKIP_REGEX": (
        "^(A worker died or was killed|.* worker.s. were killed due to|The node with node id|Task .* failed)"
    ),
}
"""Environment variables that keep Ray quiet, set where the user has not set them."""


def get_ray() -> Any:
    """The ray package, set to be quiet before it is imported; an error with what to install where it is missing."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise FfmemError("several workers need the ray package: pip install 'ffmem[ray]'") from error
    return ray


@contextmanager
def connected(address: str | None, workers: int) -> Iterator[Any]:
    """Ray, connected to the cluster at this address; without one, to a cluster with room for so many workers that lives on
    this machine as long as this. Where the caller is connected already, that cluster is used, and stays connected.
    """
    ray = get_ray()
    if ray.is_initialized():
        yield ray
        return
    own: dict[str, Any] = {} if address else {"include_dashboard": False, "num_cpus": workers, "num_gpus": 0}
    address = (os.environ.get("RAY_ADDRESS") or "auto") if address == "auto" else address or "local"
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
    """An error unless something answers at an address with a port, in the protocol that Ray has."""
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


class Capacity:
    """The resources that one worker needs of a Ray cluster, and the number of workers that the cluster can hold."""

    def __init__(self, ray: Any, device: str, workers: int | None = None, *, spread: bool = False) -> None:
        if device.startswith("cuda:"):
            raise FfmemError(f"expected --device auto, cuda or cpu with --address, found {device}: Ray gives out the GPUs")
        self.ray = ray
        self.needs = {"CPU": 1}
        if device != "cpu" and (device == "cuda" or self.count("GPU")):
            self.needs["GPU"] = self._share(workers) if spread else 1

    def nodes(self) -> list[dict[str, float]]:
        """The resources of each machine of the cluster that is alive, by their names in Ray."""
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def count(self, what: str) -> int:
        """The number of units of a resource (`CPU`, `GPU`) on all machines together."""
        return sum(int(node.get(what, 0)) for node in self.nodes())

    def _share(self, workers: int | None) -> int:
        """The number of GPUs of one machine over which a worker spreads its model: as many as there are for so many
        workers, or else all that the machine with the fewest has."""
        gpus = [found for node in self.nodes() if (found := int(node.get("GPU", 0)))] or [1]
        shares = range(max(gpus), 1, -1) if workers else [min(gpus)]
        return next((share for share in shares if sum(found // share for found in gpus) >= (workers or 1)), 1)

    def workers(self) -> int:
        """The number of workers that the cluster can hold: one a GPU or share of GPUs, or one a machine without GPUs."""
        if "GPU" in self.needs:
            return max(1, sum(int(node.get("GPU", 0)) // self.needs["GPU"] for node in self.nodes()))
        return max(1, sum(node.get("CPU", 0) >= 1 for node in self.nodes()))
