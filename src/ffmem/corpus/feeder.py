"""A process that reads, cuts and tokenizes a corpus, so that whoever computes with its text is not held up by that.

A thread would do the same work, but threads of Python take turns, and a GPU waits for the one that launches its kernels.
Shards come in memory that both processes map: nothing is copied where they arrive.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from contextlib import suppress
from mmap import mmap
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from ffmem.corpus.workers import METHOD, ended, get_ready, hidden_main

if TYPE_CHECKING:
    from ffmem.corpus.plan import Corpus, Feed, Shard

AHEAD = 2
"""Shards that are ready, or being made, before they are asked for."""
ALIGNED = 64
"""Bytes that arrays begin at a multiple of."""
PATIENCE = 10.0
"""Seconds that the process has for ending by itself."""


def can_feed() -> bool:
    """Whether there is memory here that a process can hand to another, and a process without threads to fork."""
    return METHOD == "forkserver" and hasattr(os, "memfd_create")


class Feeder:
    """The shards that `feed(corpus, stopped)` gives, made by a process of their own, which begins at once."""

    def __init__(self, corpus: Corpus, feed: Feed) -> None:
        get_ready()
        context: Any = get_context(METHOD)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, pickle.dumps((corpus, feed))), name="ffmem-feeder")
        with hidden_main():
            self.process.start()
        theirs.close()
        # A process that is not told to end would be waited for at exit.
        self._hang_up = Finalize(self, self.pipe.close, exitpriority=1)
        for _ in range(AHEAD):
            self._ask()

    def __iter__(self) -> Feeder:
        return self

    def __next__(self) -> Shard:
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
        self._hang_up()
        self.process.join(PATIENCE)
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, packed: bytes) -> None:
    """Send a shard for every word from the other side, then the end; end too when the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
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
            # Readers are forks of this process, which have the tokenizer at once: up to the first shard it has no threads.
            corpus.forking = True
            os.register_at_fork(after_in_child=pipe.close)  # or the other side would not see that this one is gone
            shards = iter(feed(corpus, stopped))
            shard = next(shards, None)
            threading.Thread(target=listen, daemon=True).start()
            while shard is not None:
                wanted.acquire()
                if stopped.is_set():
                    return
                _give(pipe, shard)
                shard = next(shards, None)
            _give(pipe, StopIteration())
        except Exception as error:
            _give(pipe, error)


def _give(pipe: Connection, item: Any) -> None:
    """Send something whose arrays are large."""
    from multiprocessing.reduction import send_handle

    arrays: list[pickle.PickleBuffer] = []
    head = pickle.dumps(item, protocol=5, buffer_callback=arrays.append)
    sizes = [array.raw().nbytes for array in arrays]
    pipe.send((head, sizes))
    if not sizes:
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
