"""A process that reads, cuts and tokenizes a corpus, so that whoever computes with its text is not held up by that.

A thread would do the same work, but threads of Python take turns, and a GPU waits for the one that launches its kernels.
Shards come in memory that both processes map: nothing is copied where they arrive.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from contextlib import suppress
from functools import cache
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from ffmem.corpus.tokens import cut_records
from ffmem.corpus.workers import METHOD, ended, forked, get_ready, hidden_main
from ffmem.errors import FfmemError

if TYPE_CHECKING:
    from ffmem.corpus.plan import Shard

AHEAD = 2
"""Shards that are ready, or being made, before they are asked for."""
ALIGNED = 64
"""Bytes that arrays begin at a multiple of."""


@cache
def can_feed() -> bool:
    """Whether there is memory here that a process can hand to another, and a process without threads to fork."""
    if METHOD != "forkserver" or not hasattr(os, "memfd_create"):
        return False
    try:
        os.close(os.memfd_create("ffmem"))
    except OSError:
        return False
    return True


class Feeder:
    """The shards that `feed(corpus, stopped)` gives, made by a process of their own, which begins at once.

    `packed` is the pickled pair of them.
    """

    def __init__(self, packed: bytes) -> None:
        get_ready()
        context: Any = get_context(METHOD)
        self.pipe, theirs = context.Pipe()
        # The server may be older than what the environment says now.
        self.process = context.Process(target=_serve, args=(theirs, dict(os.environ), packed), name="ffmem-feeder")
        with hidden_main():
            self.process.start()
        theirs.close()
        # A process that is not told to end would be waited for at exit.
        self._hang_up = Finalize(self, self.pipe.close, exitpriority=1)
        self._closed = False
        for _ in range(AHEAD):
            self._ask()

    def __iter__(self) -> Feeder:
        return self

    def __next__(self) -> Shard:
        if self._closed:
            raise StopIteration
        try:
            item = _taken(self.pipe)
        except (EOFError, OSError) as error:
            self.close()
            raise ended() from error
        if isinstance(item, Exception):
            self.close()
            raise item
        self._ask()
        return item

    def _ask(self) -> None:
        with suppress(OSError):  # what became of it is told by what comes next
            self.pipe.send(None)

    def close(self) -> None:
        """End the process; its readers end with it."""
        self._closed = True
        self._hang_up()
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, environment: dict[str, str], packed: bytes) -> None:
    """Make and send a shard for every word from the other side, then the end; end too when the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    os.environ.update(environment)
    wanted, stopped = threading.Semaphore(0), threading.Event()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                pipe.recv()
                wanted.release()
        stopped.set()
        wanted.release()

    with suppress(OSError):
        try:
            corpus, feed = pickle.loads(packed)
            os.register_at_fork(after_in_child=pipe.close)  # or the other side would not see that this one is gone
            # Forks of this process, which have the tokenizer at once: it has no threads yet.
            corpus.pool = forked(cut_records, corpus.tools, corpus.readers)
            threading.Thread(target=listen, daemon=True).start()
            shards = iter(feed(corpus, stopped))
            while wanted.acquire() and not stopped.is_set():
                _give(pipe, next(shards, StopIteration()))
        except FfmemError as error:
            _give(pipe, error)
        except Exception as error:
            traceback.print_exc()
            _give(pipe, RuntimeError(f"in the process that reads the text: {type(error).__name__}: {error}"))


def _give(pipe: Connection, item: Any) -> None:
    """Send something whose arrays are large."""
    from multiprocessing.reduction import send_handle

    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(item, protocol=5, buffer_callback=arrays.append)
    sizes = [array.raw().nbytes for array in arrays]
    if not sizes:
        pipe.send((head, sizes))
        return
    memory = os.memfd_create("ffmem-shard")
    try:
        at = 0
        for array, size in zip(arrays, sizes, strict=True):
            part = array.raw()
            written = 0
            while written < size:
                written += os.pwrite(memory, part[written:], at + written)
            at = _behind(at, size)
        os.ftruncate(memory, max(1, at))
        pipe.send((head, sizes))
        send_handle(pipe, memory, None)
    finally:
        os.close(memory)


def _taken(pipe: Connection) -> Any:
    """What was sent."""
    from multiprocessing.reduction import recv_handle

    head, sizes = pipe.recv()
    if not sizes:
        return pickle.loads(head)
    handle = recv_handle(pipe)
    try:
        memory = memoryview(mmap(handle, 0))
    finally:
        os.close(handle)
    arrays, at = [], 0
    for size in sizes:
        arrays.append(memory[at : at + size])
        at = _behind(at, size)
    return pickle.loads(head, buffers=arrays)


def _behind(at: int, size: int) -> int:
    """Where the next array begins."""
    return -(-(at + size) // ALIGNED) * ALIGNED
