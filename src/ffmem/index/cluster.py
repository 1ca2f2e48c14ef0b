"""Workers on a Ray cluster."""

from __future__ import annotations

from typing import Any

from ffmem.index.crew import Lost
from ffmem.words import FfmemError


def connect(address: str | None) -> Any:
    """Ray, connected to the cluster at this address, or to one that is started on this machine."""
    try:
        import ray
    except ImportError as error:
        raise FfmemError("the engine ray needs the ray package: pip install 'ffmem[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise FfmemError(
                f"no Ray cluster at {address}: start one with `ray start --head`, or leave out --address"
            ) from error
    return ray


def places(ray: Any, device: str) -> int:
    """How many workers the cluster has room for: one a GPU, or one a machine where there are none."""
    if device != "cpu" and (gpus := int(ray.cluster_resources().get("GPU", 0))):
        return gpus
    return max(1, sum(bool(node["Alive"]) for node in ray.nodes()))


class RayLane:
    """A worker as an actor, on whatever machine has room for it."""

    def __init__(self, ray: Any, model: str, load: dict[str, Any], threads: int) -> None:
        gpus = 1 if load.get("device", "auto") != "cpu" and ray.cluster_resources().get("GPU", 0) else 0
        actor = ray.remote(_Actor).options(num_cpus=1, num_gpus=gpus, max_concurrency=2, max_restarts=0)
        self.ray = ray
        self.actor = actor.remote(model, load, threads)
        self.pending: Any = None
        self.asked: Any = None
        self.tokens = 0

    def call(self, method: str, *arguments: Any) -> None:
        self.tokens = 0
        self.pending = getattr(self.actor, method).remote(*arguments)

    def answer(self) -> tuple[Any] | None:
        if self.pending is None or not self.ray.wait([self.pending], timeout=0)[0]:
            return None
        found, self.pending = self._get(self.pending), None
        return (found,)

    def read_so_far(self) -> int:
        """What the actor said last; it is asked again once it has answered."""
        if self.asked is None:
            self.asked = self.actor.read_so_far.remote()
        elif self.ray.wait([self.asked], timeout=0)[0]:
            try:
                self.tokens = self._get(self.asked)
            except Lost:
                return self.tokens  # `answer` says so too
            self.asked = None
        return self.tokens

    def _get(self, reference: Any) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, FfmemError):
                raise error.cause from None
            raise RuntimeError(f"in a worker: {error}") from None
        except (errors.RayActorError, errors.ObjectLostError, errors.OwnerDiedError, errors.WorkerCrashedError) as error:
            raise Lost(f"({str(error).splitlines()[0]})") from error

    def close(self) -> None:
        self.ray.kill(self.actor)


class _Actor:
    """A `Service` that a Ray actor offers; a second thread tells how far it has come."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.service: Any = None
        self.tokens = 0

    def _do(self, method: str, *arguments: Any) -> Any:
        from ffmem.index.worker import Service

        if self.service is None:
            self.service = Service(*self.arguments)
            self.service.told = self._told
        self.tokens = 0
        return getattr(self.service, method)(*arguments)

    def _told(self, tokens: int) -> None:
        self.tokens = tokens

    def subject(self) -> Any:
        return self._do("subject")

    def begin(self, *arguments: Any) -> Any:
        return self._do("begin", *arguments)

    def read(self, shard: Any) -> Any:
        return self._do("read", shard)

    def keep(self) -> Any:
        return self._do("keep")

    def read_so_far(self) -> int:
        return self.tokens
