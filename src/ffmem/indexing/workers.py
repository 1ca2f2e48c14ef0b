"""Several workers as actors of Ray, which schedules them, starts lost ones again and repeats what they were doing."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ffmem.errors import CorpusError, FfmemError
from ffmem.indexing.actor import TICK, Actor, Job, version
from ffmem.indexing.cluster import Capacity
from ffmem.indexing.devices import Devices
from ffmem.indexing.provenance import ModelInfo

RESTARTS = 3
"""The number of times that Ray starts a worker again; one lost once more ends the run, or leaves its work to others."""
NO_ROOM = 60.0
"""The number of seconds without a sign of life from any worker, after which a cluster is taken to be full."""
GRACE = 1.0
"""The number of seconds that a worker has to delete what it has fetched, before it is ended."""


@dataclass(eq=False)
class _Member:
    """One worker, as the process that leads the run sees it."""

    name: str
    actor: Any
    host: str = ""
    """The machine that the worker is on; empty until Ray has started it."""
    pid: int = 0
    is_ready: bool = False
    """Whether the worker has loaded its model."""
    task: tuple[Any, ...] | None = None
    """The arguments of the call that the worker is working on; None where it is free."""
    tokens: int = 0
    """The number of tokens that the worker has read of the part that it is reading."""

    def __str__(self) -> str:
        where = f" on {self.host}, process {self.pid}," if self.host else ""
        return f"worker {self.name}{where}"


class Workers:
    """All workers of a run, seen from the process that leads them."""

    def __init__(self, ray: Any, model: str, devices: list[Devices], capacity: Capacity, threads: int) -> None:
        self.ray, self.capacity = ray, capacity
        self.lost: list[str] = []
        """For each worker that was lost, a line on what it was doing and why it ended."""
        self._last_answer = time.monotonic()
        self._waiting: dict[Any, tuple[_Member, str]] = {}
        """Calls that are not answered yet: of whom, and which."""
        needs = {f"num_{what.lower()}s": count for what, count in capacity.needs.items()}
        # Two calls at a time: one that works, and one that tells how far it has come.
        options = {"max_concurrency": 2, "max_restarts": RESTARTS, "max_task_retries": -1, "scheduling_strategy": "SPREAD"}
        made = ray.remote(Actor).options(**options, **needs)
        sharing = -(-len(devices) // max(1, len(capacity.nodes())))
        self.members = [
            _Member(str(number), made.remote(str(number), model, one.load, one.environment, threads, sharing))
            for number, one in enumerate(devices)
        ]
        self.size = len(devices)
        for member in self.members:
            self._call(member, "greet")
            self._call(member, "model_info")

    @property
    def working(self) -> int:
        """The number of workers that have loaded the model."""
        return sum(member.is_ready for member in self.members)

    @property
    def tokens(self) -> int:
        """The number of tokens read so far of the parts that are being read."""
        return sum(member.tokens for member in self.members)

    def model_info(self) -> ModelInfo:
        """The model's facts from the first worker that has loaded it; waits for that."""
        while True:
            if (answer := self._answer()) and answer[1] == "model_info":
                return answer[2]

    def send(self, job: Job) -> Any:
        """Put a job where every worker can fetch it, once a machine."""
        try:
            return self.ray.put(job)
        except (TypeError, ValueError, AttributeError) as error:
            raise CorpusError(f"the corpus cannot be sent to workers ({error}): give files, or take one worker") from error

    def each(self, method: str, job: Any, tasks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any] | None]:
        """Have every task done by whichever worker is free; yields tasks with their answers as they come, and None often.

        When no task is left for it, a free worker of `read` is ended, so that one that was lost may find room in its place.
        """
        left, more = iter(tasks), True
        while True:
            for member in [member for member in self.members if member.is_ready and member.task is None]:
                member.task = next(left, None) if more else None
                if member.task is not None:
                    self._call(member, method, [job], *member.task)
                    continue
                more = False
                if method == "read":
                    self._end(member)
            if not more and not any(member.task for member in self.members):
                return
            task = None
            if (answer := self._answer()) and answer[1] == method:
                member = answer[0]
                task, member.task, member.tokens = member.task, None, 0
            yield (task, answer[2]) if answer and task else None

    def _call(self, member: _Member, method: str, *arguments: Any, **options: Any) -> None:
        self._waiting[getattr(member.actor, method).options(**options).remote(*arguments)] = member, method

    def _answer(self) -> tuple[_Member, str, Any] | None:
        """The next answer of a worker; None where there is none within a while."""
        ready, _ = self.ray.wait(list(self._waiting), timeout=TICK)
        if not ready:
            if time.monotonic() - self._last_answer >= NO_ROOM:
                raise self._no_room()
            return None
        member, method = self._waiting.pop(ready[0])
        errors = self.ray.exceptions
        try:
            answer = self.ray.get(ready[0])
        except errors.RayTaskError as error:
            cause = error.cause
            there = f" (on {member.host})" if member.host not in ("", platform.node()) else ""
            if isinstance(cause, FfmemError):
                raise type(cause)(f"{cause}{there}") from None
            print(error, file=sys.stderr)
            raise RuntimeError(f"in a worker{there}: {type(cause).__name__}: {cause}") from None
        except errors.RayError as error:
            if missing := re.search("No module named '(ffmem[^']*)'", str(error)):
                raise FfmemError(
                    f"a node of the Ray cluster has no {missing[1]}: install ffmem {version('ffmem')} on every node"
                ) from None
            self._was_lost(member, method, error)
            return None
        self._last_answer = time.monotonic()
        if method == "greet":
            member.host, member.pid, versions = answer
            _check_versions(member.host, versions)
            self._call(member, "progress", max_task_retries=0)  # so that it tells of a loss at once
        elif method == "progress":
            member.tokens = answer if member.task else 0
            self._call(member, "progress", max_task_retries=0)
        elif method == "model_info":
            member.is_ready = True
        return member, method, answer

    def _was_lost(self, member: _Member, method: str, error: Exception) -> None:
        """Note that a worker was lost: for now, if a `progress` call failed, since Ray starts it again; else for good."""
        if member not in self.members:
            return
        if method == "progress":
            doing = f"it read part {member.task[0].number}" if member.task else "it waited"
            self.lost.append(f"{member} ended while {doing} ({_reason(error)})")
            member.host, member.tokens = "", 0
            self._call(member, "greet")
            return
        self.members.remove(member)
        last = self.lost[-1] if self.lost else _reason(error)
        if member.task:
            raise FfmemError(
                f"part {member.task[0].number} has cost a worker {RESTARTS + 1} times (the last: {last}): finished shards "
                "are kept; look for want of memory, then give the same command again"
            ) from None
        if not self.members:
            raise FfmemError(f"no worker lives long enough to take up the run; the last: {last}") from None

    def _no_room(self) -> FfmemError:
        free, capacity = self.ray.available_resources(), self.capacity
        asked = " and ".join(f"{count} {what}" for what, count in capacity.needs.items())
        there = ", ".join(f"{capacity.count(what)} {what} ({int(free.get(what, 0))} free)" for what in capacity.needs)
        return FfmemError(
            f"the Ray cluster has had no room for a worker for {NO_ROOM:.0f} s: each needs {asked}, and on "
            f"{len(capacity.nodes())} nodes there are {there}; add nodes or wait for them, then give the same command again"
        )

    def _end(self, member: _Member) -> None:
        """End a worker for good."""
        self.members.remove(member)
        self._waiting = {call: what for call, what in self._waiting.items() if what[0] is not member}
        with suppress(Exception):  # a cluster that is gone has no workers left
            if member.host:
                self.ray.wait([member.actor.forget.remote()], timeout=GRACE)
            self.ray.kill(member.actor)

    def close(self) -> None:
        """End all workers, at the same time."""
        if self.members:
            with ThreadPoolExecutor(len(self.members)) as pool:
                list(pool.map(self._end, list(self.members)))


def _check_versions(host: str, versions: dict[str, str]) -> None:
    for name, there in versions.items():
        if (here := version(name)) != there:
            raise FfmemError(f"{host} has {name} {there}, this machine {here}: install the same versions on every node")


def _reason(error: Exception) -> str:
    """The reason why an actor is gone, in Ray's words."""
    found = re.search(r"^The actor .*? because (.*?)\.? *($|[.] )", str(error), re.MULTILINE)
    return found[1] if found else str(error).strip().split("\n")[0]
