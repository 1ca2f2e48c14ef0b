"""The one writer of a run: a lock on its folder, or in an object store a file that the writer renews."""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ffmem.errors import RunError
from ffmem.progress import reporting
from ffmem.run.store import ObjectStore

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

WRITER = "writer.json"
"""The file that says who writes a run in an object store."""
BEAT = 5.0
"""Seconds between two signs of life."""
PATIENCE = 30.0
"""Seconds without one, after which a writer is taken to be gone."""
CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


@contextmanager
def folder_lock(path: Path, *, wait: float = 0.0, quiet: bool = False) -> Iterator[None]:
    """The lock is on the folder itself, made if need be, and ends with the process, however that ends.

    Where another process has it, that is an error, after `wait` seconds.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunError(f"expected a folder for the run, found a file at {path}") from error
    except OSError as error:
        raise RunError(f"{path}: cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise RunError(f"{path}: cannot be written: choose another folder, or change what is allowed there")
    if fcntl is None:
        yield
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with reporting("waiting", quiet=quiet) as reporter:
            began = time.monotonic()
            while not _locked(handle):
                if (waited := time.monotonic() - began) >= wait:
                    raise RunError(f"{path}: another process is writing this run; wait for it or choose another folder")
                reporter.update(None, f"another process is writing {path}")
                time.sleep(min(0.1, wait - waited))
        yield
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    """Whether the lock is ours now; on a file system without locks it always is."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Claim:
    """A file that says who writes, made only where there is none, and renewed as long as its process lives.

    No clocks of machines are compared: whoever finds one watches whether it changes. One that stays as it is was left
    behind by a process that is gone, and is taken over. A writer looks at it before it puts a file, so that one which was
    out of reach for so long finds out then; so does every worker of its.
    """

    def __init__(self, store: ObjectStore, id: str | None = None) -> None:
        self.store = store
        self.id = id or uuid.uuid4().hex
        """The same for all who write in one name: whoever leads, who takes it, and the workers."""
        self.beats = 0
        self.heard = _now()
        """When the file was last seen to be this writer's."""
        self._ended = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="ffmem-writer", daemon=True)

    def take(self, *, quiet: bool = False) -> None:
        """Become the writer; an error where another one lives."""
        found = self._read()
        if found is not None and self._stays(found, quiet):
            self.store.remove(WRITER)
        # What is there may be this writer's own: a store may lose the answer to a first try, and have it made again.
        if not self.store.create(WRITER, self._told()) and not self._is_mine(other := self._read()):
            raise self._taken(other)
        if found is not None:
            # Another one that waited as well may have removed this file for the one that was left behind.
            time.sleep(BEAT / 5)
            if not self._is_mine(now := self._read()):
                raise self._taken(now)
        self.heard = _now()
        self._renewer.start()

    def check(self) -> None:
        """An error where another process has taken over; the store is asked only if nothing has been heard for long."""
        if _now() - self.heard > PATIENCE:
            self.confirm()

    def confirm(self) -> None:
        """An error where the file is not this writer's, or cannot be read."""
        if not self._is_mine(found := self._read()):
            self.heard = -math.inf  # for `check`, whoever has found it out
            who = f"{_who(found)} writes this run now" if found is not None else f"{WRITER} is gone"
            raise RunError(f"{self.store.path}: {who}, so this process has ended; give the same command again to continue")
        self.heard = _now()

    def release(self) -> None:
        self._ended.set()
        if self._renewer.is_alive():
            self._renewer.join(BEAT)
        with suppress(RunError):  # what cannot be reached now is taken over later
            if not self._renewer.is_alive() and self._is_mine(self._read()):
                self.store.remove(WRITER)

    def _stays(self, found: dict[str, Any], quiet: bool) -> bool:
        """Whether the file stays as it was found; False where it goes, an error where it changes."""
        began = time.monotonic()
        with reporting("waiting", quiet=quiet) as reporter:
            while (waited := time.monotonic() - began) < PATIENCE:
                reporter.update(waited / PATIENCE, f"{_who(found)} was writing this run: looking whether it lives")
                time.sleep(BEAT / 5)
                now = self._read()
                if now is None:
                    return False
                if now != found:
                    raise self._taken(now)
        return True

    def _renew(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                self.confirm()
            except RunError:  # told by `check`, or when a file is put; a network that fails now may work the next time
                continue
            self.beats += 1
            with suppress(RunError):
                self.store.put(WRITER, self._told())

    def _told(self) -> bytes:
        told = {"host": platform.node(), "process": os.getpid(), "id": self.id, "beats": self.beats}
        return json.dumps(told).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self.store.read_bytes(WRITER))
        except FileNotFoundError:
            return None
        except ValueError:
            found = None
        return found if isinstance(found, dict) else {}

    def _is_mine(self, found: dict[str, Any] | None) -> bool:
        return found is not None and found.get("id") == self.id

    def _taken(self, found: dict[str, Any] | None) -> RunError:
        return RunError(
            f"{self.store.path}: another process is writing this run ({_who(found)}); wait for it or choose another place"
        )


def _who(found: dict[str, Any] | None) -> str:
    return (
        f"process {found['process']} on {found['host']}" if found and {"process", "host"} <= found.keys() else "another one"
    )


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one."""
    return time.monotonic() if CLOCK is None else time.clock_gettime(CLOCK)
