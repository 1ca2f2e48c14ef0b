"""Several workers on one run: shards are handed out, a worker that dies is replaced and its shards are read again."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ffmem.corpus.shards import Shard
from ffmem.errors import FfmemError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing.lane import Lane, Lost, Nobody
from ffmem.indexing.provenance import Subject
from ffmem.run.folder import RunFolder
from ffmem.run.manifest import Manifest

PATIENCE = 0.02
"""Seconds between two looks at the workers."""
ATTEMPTS = 3
"""Workers that a shard may cost, or a place before one of them has taken up the run."""


@dataclass
class Member:
    """One place in the crew, whoever fills it."""

    name: str
    lane: Lane
    doing: str = "subject"
    """The call in flight; empty where there is none."""
    known: bool = False
    """Whether it has taken up the run."""
    unkept: dict[int, Shard] = field(default_factory=dict)
    """Shards that it was given and has not kept yet."""
    vain: int = 0
    """Workers in a row that were lost here before they had taken up the run."""

    def read_so_far(self) -> int:
        """Tokens that it has read and not kept yet."""
        tokens = [shard.tokens for shard in self.unkept.values()]
        if self.doing == "read":
            tokens[-1] = self.lane.read_so_far()
        return sum(tokens)


@dataclass(frozen=True)
class Standing:
    """How a run stands: what was kept since the last time, and what is being read."""

    kept: list[Shard]
    reading: int
    """Tokens that were read and are not kept yet."""
    working: int
    lost: int


class Crew:
    """Workers that `hire` starts, by the number of their place."""

    def __init__(self, hire: Callable[[int], Lane], size: int) -> None:
        self.hire = hire
        self.members = [self._member(number) for number in range(size)]
        self.damaged: set[int] = set()
        """Shards that are covered by what workers have left, but whose own files are to be made again."""
        self.lost: list[str] = []
        """What became of workers that are gone."""

    def _member(self, number: int) -> Member:
        member = Member(str(number), self.hire(number))
        self._call(member, "subject")
        return member

    def subject(self) -> Subject:
        """What the first worker that has loaded the model says of it."""
        while True:
            for member in self.members:
                if (answer := self._answer(member)) is not None:
                    subject: Subject = answer[0]
                    self._call(member, "subject")  # it is looked at once more when the run begins
                    return subject
            time.sleep(PATIENCE)

    def read(self, shards: Iterator[Shard], folder: RunFolder, manifest: Manifest) -> Generator[Standing, None, None]:
        """Have all shards read; yields how things stand, often. What a standing calls kept needs no second reading."""
        failures: Counter[int] = Counter()
        again: deque[Shard] = deque()
        given: set[int] = set()
        known = set(checkpoint.kept(folder))
        self.damaged = checkpoint.damaged_shards(folder)
        more = True
        while True:
            kept: list[Shard] = []
            for member in self.members:
                unkept = dict(member.unkept)
                if (answer := self._answer(member)) is not None:
                    if member.doing == "begin":
                        check_known(folder, answer[0], known)
                    kept += self._heard(member, answer[0], folder, manifest)
                elif unkept and not member.unkept:
                    # It is gone: what it had kept before is kept, the rest waits for another.
                    covered = set(checkpoint.covered(folder, member.name)) - self.damaged
                    covered |= checkpoint.have_files(folder, self.damaged)
                    kept += [shard for number, shard in unkept.items() if number in covered]
                    again += [shard for number, shard in unkept.items() if number not in covered]
                    self._give_up_after(failures, [number for number in unkept if number not in covered])
                if member.known and not member.doing:
                    shard = again.popleft() if again else next(shards, None) if more else None
                    more = more and (shard is not None or bool(again))
                    if shard is not None:
                        member.unkept[shard.number] = shard
                        given.add(shard.number)
                        self._call(member, "read", shard)
                    elif member.unkept:
                        self._call(member, "keep")
            known.update(shard.number for shard in kept)
            self.damaged -= known
            working = sum(member.known for member in self.members)
            reading = sum(member.read_so_far() for member in self.members)
            yield Standing(kept, reading, working, len(self.lost))
            if not more and not again and not any(member.unkept for member in self.members):
                self._check_all_are_kept(given, folder)
                return
            time.sleep(PATIENCE)

    def _check_all_are_kept(self, given: set[int], folder: RunFolder) -> None:
        """Workers may have written elsewhere, or have been overwritten by one that was thought to be gone."""
        if missing := sorted(given - checkpoint.kept(folder).keys()):
            raise FfmemError(
                f"{len(missing)} of {len(given)} shards were read, but are not in {folder.path} (such as {missing[0]}): "
                "see that it is one place for all workers, then give the same command again"
            )

    def _give_up_after(self, failures: Counter[int], numbers: list[int]) -> None:
        failures.update(numbers)
        for number in numbers:
            if failures[number] >= ATTEMPTS:
                raise FfmemError(
                    f"shard {number} has cost {ATTEMPTS} workers (the last: {self.lost[-1]}): finished shards are kept; "
                    "look for want of memory, then give the same command again"
                )

    def _heard(self, member: Member, answer: Any, folder: RunFolder, manifest: Manifest) -> list[Shard]:
        """Take an answer; the shards that are kept since the last."""
        done, member.doing = member.doing, ""
        if done == "subject":
            if difference := answer.differs(manifest):
                raise FfmemError(f"worker {member.name} is not like the one that the run began with: it has {difference}")
            place = folder.path.absolute() if isinstance(folder.path, Path) else folder.path
            self._call(member, "begin", str(place), manifest, member.name, folder.writer, self.damaged)
            return []
        member.known, member.vain = True, 0
        return [member.unkept.pop(number) for number in answer if number in member.unkept]

    def _call(self, member: Member, method: str, *arguments: Any) -> None:
        member.doing = method
        with suppress(Lost):  # `answer` says so too
            member.lane.call(method, *arguments)

    def _answer(self, member: Member) -> tuple[Any] | None:
        """A worker's answer; one that is gone is replaced by one that knows nothing yet."""
        try:
            return member.lane.answer()
        except Lost as error:
            shards = ", ".join(map(str, member.unkept)) or "none"
            self.lost.append(f"worker {member.name} ended {error} while it {_DOING[member.doing]}; unkept shards: {shards}")
            member.lane.close()
            vain = 0 if member.known else member.vain + 1
            if vain < ATTEMPTS:
                vars(member).update(vars(self._member(int(member.name))), vain=vain)
                return None
            # Another would fare no better: the place stays empty.
            vars(member).update(vars(Member(member.name, Nobody())), vain=vain)
            if all(other.vain >= ATTEMPTS for other in self.members):
                raise FfmemError(f"no worker lives long enough to take up the run; the last: {self.lost[-1]}") from error
            return None

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.members)) as pool:
            list(pool.map(lambda member: member.lane.close(), self.members))


def check_known(folder: RunFolder, covered: list[int], known: Container[int]) -> None:
    """A worker's state may have grown behind the back of whoever leads: its last one had not ended yet."""
    if more := [number for number in covered if number not in known]:
        raise RunError(
            f"{folder.path}: another process has written shard {more[0]} meanwhile; when it has ended, give the same "
            "command again"
        )


_DOING = {
    "subject": "loaded the model",
    "begin": "took up the run",
    "read": "read a shard",
    "keep": "kept its shards",
    "": "waited",
}
