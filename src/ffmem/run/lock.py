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

from ffmem.atomic import FolderLock
from ffmem.errors import RunError
from ffmem.progress import Reporter, reporting
from ffmem.run.store import LocalStore, ObjectStore

WRITER = "writer.json"
"""The file that says who writes a run in an object store."""
RENEWED_EVERY = 5.0
"""The number of seconds between two renewals of a writer's file."""
POLLED_EVERY = 0.1
"""The number of seconds between two looks at the lock of a folder."""
GONE_AFTER = 30.0
"""The number of seconds without a renewal after which a writer is taken to be gone."""
CLOCK = getattr(time, "CLOCK_BOOTTIME", None)


@contextmanager
def only_writer(store: LocalStore | ObjectStore, *, wait: float = 0.0, quiet: bool = False) -> Iterator[WriterFile | None]:
    """Be the only writer of a run while the block runs; in an object store this gives the file that says so.

    A folder that is not there is made, and its lock ends with the process, however that ends. Where another process writes,
    its end is awaited for `wait` seconds, and then that is an error.
    """
    file = WriterFile(store) if isinstance(store, ObjectStore) else None
    lock = FolderLock(_made(store.path)) if isinstance(store, LocalStore) else None
    began = time.monotonic()
    with reporting("waiting", quiet=quiet) as reporter:
        while (file.take(reporter) if file else lock and lock.take()) is False:
            if (waited := time.monotonic() - began) >= wait:
                other = file.other if file else ""
                raise RunError(
                    f"{store.path}: another process is writing this run{other}; wait for it or choose another folder"
                )
            reporter.update(None, f"another process is writing {store.path}")
            time.sleep(min(RENEWED_EVERY if file else POLLED_EVERY, wait - waited))
    try:
        yield file
    finally:
        for held in (file, lock):
            if held:
                held.release()


def _made(folder: Path) -> Path:
    """A folder that is there now and may be written to; an error where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise RunError(f"expected a folder for the run, found a file at {folder}") from error
    except OSError as error:
        raise RunError(f"{folder}: cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"{folder}: cannot be written: choose another folder, or change what is allowed there")
    return folder


class WriterFile:
    """A file that says who writes, made only where there is none, and renewed as long as its process lives.

    No clocks of machines are compared: whoever finds one watches whether it changes. One that stays as it is was left
    behind by a process that is gone, and is taken over. A writer looks at it before it puts a file, so that one which was
    out of reach for so long finds out then; so does every worker of its.
    """

    def __init__(self, store: ObjectStore, id: str | None = None) -> None:
        self.store = store
        self.id = id or uuid.uuid4().hex
        """The writer's id, the same for all who write in one name: the process that leads, one that takes the name, and
        the workers."""
        self.renewals = 0
        self.confirmed = _now()
        """The time, on this process's clock, at which the file was last seen to be this writer's."""
        self._ended = threading.Event()
        self._renewer = threading.Thread(target=self._renew, name="ffmem-writer", daemon=True)

    def take(self, reporter: Reporter) -> bool:
        """Become the writer; False where another one lives."""
        found = self._read()
        if found is not None:
            now = self._watched(found, reporter)
            if now not in (found, None):  # its writer lives
                return False
            if now is not None:
                self.store.remove(WRITER)
        # What is there may be this writer's own: a store may lose the answer to a first try, and have it made again.
        if not self.store.create(WRITER, self._content()) and not self._is_own(self._read()):
            return False
        if found is not None:
            # Another one that waited as well may have removed this file for the one that was left behind.
            time.sleep(RENEWED_EVERY / 5)
            if not self._is_own(self._read()):
                return False
        self.confirmed = _now()
        self._renewer.start()
        return True

    @property
    def other(self) -> str:
        """The process that writes instead, in words."""
        return f" ({_who(self._read())})"

    def check(self) -> None:
        """An error where another process has taken over; the store is asked only if nothing was confirmed for long."""
        if _now() - self.confirmed > GONE_AFTER:
            self.confirm()

    def confirm(self) -> None:
        """An error where the file is not this writer's, or cannot be read."""
        if not self._is_own(found := self._read()):
            self.confirmed = -math.inf  # so that `check` tells it too, when the renewer has found it out
            who = f"{_who(found)} writes this run now" if found is not None else f"{WRITER} is gone"
            raise RunError(f"{self.store.path}: {who}, so this process has ended; give the same command again to continue")
        self.confirmed = _now()

    def release(self) -> None:
        """Delete the file, if it is still this writer's."""
        self._ended.set()
        if self._renewer.is_alive():
            self._renewer.join(RENEWED_EVERY)
        with suppress(RunError):  # what cannot be reached now is taken over later
            if not self._renewer.is_alive() and self._is_own(self._read()):
                self.store.remove(WRITER)

    def _watched(self, found: dict[str, Any], reporter: Reporter) -> dict[str, Any] | None:
        """The file's content once it has changed, or unchanged after a while; None where it was deleted."""
        began = time.monotonic()
        now: dict[str, Any] | None = found
        while now == found and (waited := time.monotonic() - began) < GONE_AFTER:
            reporter.update(waited / GONE_AFTER, f"{_who(found)} was writing this run: looking whether it lives")
            time.sleep(RENEWED_EVERY / 5)
            now = self._read()
        return now

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_EVERY):
            with suppress(RunError):  # raised by `check`, or when a file is put; a network that fails now may work next time
                self.confirm()
                self.renewals += 1
                self.store.put(WRITER, self._content())

    def _content(self) -> bytes:
        content = {"host": platform.node(), "process": os.getpid(), "id": self.id, "renewals": self.renewals}
        return json.dumps(content).encode()

    def _read(self) -> dict[str, Any] | None:
        """The file's content as a dict, empty where it is damaged; None where there is no file."""
        try:
            found = json.loads(self.store.read_bytes(WRITER))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _is_own(self, found: dict[str, Any] | None) -> bool:
        return found is not None and found.get("id") == self.id


def _who(found: dict[str, Any] | None) -> str:
    """The process that a writer's file names, in words."""
    known = found and {"process", "host"} <= found.keys()
    return f"process {found['process']} on {found['host']}" if found and known else "another one"


def _now() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where there is one."""
    return time.monotonic() if CLOCK is None else time.clock_gettime(CLOCK)
