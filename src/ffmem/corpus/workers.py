"""Processes that share work on text: ordered results, a bounded queue, and no second run of the caller's script."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import get_all_start_methods, get_context, parent_process, resource_tracker
from typing import Any, TypeVar

from ffmem.errors import CorpusError

Item = TypeVar("Item")
Common = TypeVar("Common")
Result = TypeVar("Result")

FEW = 16
"""Items up to which starting processes takes longer than the work."""
METHOD = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
"""Not forks of this process: one that has touched a GPU or started threads may hang. Where there is a server that has
imported what they need, they are forks of that, since many imports at once take long."""
PRELOAD = ["ffmem.corpus.plan", "tokenizers"]
"""Modules that most work needs."""
AHEAD = 3
"""Items that wait for each worker."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_ready() -> None:
    """Start the server, where processes are forks of one: it imports what they need while other things are done."""
    if METHOD == "forkserver":
        from multiprocessing.forkserver import ensure_running

        get_context(METHOD).set_forkserver_preload(PRELOAD)
        with hidden_main():
            ensure_running()


def shared(
    work: Callable[[Common, Item], Result],
    common: Common,
    items: Iterable[Item],
    *,
    workers: int,
    pool: ProcessPoolExecutor | None = None,
) -> Iterator[Result]:
    """`work(common, item)` for every item, in order, by several processes. `common` is sent to each of them once.

    `work` is a function of a module. Few items, or one worker, are done here, unless there is a pool (`forked`) for it.

    >>> list(shared(str.join, "-", [["a", "b"], ["c"]], workers=2))
    ['a-b', 'c']
    """
    if workers < 2:
        yield from (work(common, item) for item in items)
        return
    failed: list[Exception] = []
    rest = _readable(items, failed)
    if pool is not None:
        yield from _by_processes(pool, rest, workers)
    elif len(first := list(islice(rest, FEW))) < FEW:
        yield from (work(common, item) for item in first)
    else:
        get_ready()
        pool = ProcessPoolExecutor(workers, get_context(METHOD), _begin, (work, pickle.dumps(common)))
        yield from _by_processes(pool, chain(first, rest), workers)
    if failed:
        raise failed[0]


def forked(work: Callable[[Common, Item], Result], common: Common, workers: int) -> ProcessPoolExecutor:
    """Processes for `shared` that are forks of this one, and so have what it has; all of them begin now.

    Only for a process that has neither threads nor a GPU.
    """
    pool = ProcessPoolExecutor(workers, get_context("fork"), _begin, (work, common))
    pool.submit(cores)  # whatever it is, it starts them all
    return pool


def _readable(items: Iterable[Item], failed: list[Exception]) -> Iterator[Item]:
    """The items up to an error, which is raised once what was read before it is done."""
    try:
        yield from items
    except Exception as error:
        failed.append(error)


def _by_processes(pool: ProcessPoolExecutor, items: Iterable[Item], workers: int) -> Iterator[Any]:
    waiting: deque[Future[Any]] = deque()
    try:
        for item in items:
            with hidden_main():
                waiting.append(pool.submit(_do, item))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise ended() from error
    finally:
        pool.shutdown(cancel_futures=True)


def ended() -> CorpusError:
    return CorpusError("a process that reads the text was ended from outside, perhaps for want of memory")


_task: list[Any] = []
"""In a worker: what it does, and what it does it with."""


def _begin(work: Callable[[Any, Any], Any], common: Any) -> None:
    """`common` may be packed: it was, once, to be sent to each of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core for each worker is enough
    _task[:] = [work, pickle.loads(common) if isinstance(common, bytes) else common]


def _end_with_parent() -> None:
    """A parent that was killed has told nobody to end."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(item: Any) -> Any:
    work, common = _task
    return work(common, item)


_starting = threading.Lock()


@contextmanager
def hidden_main() -> Iterator[None]:
    """Start processes in here: they do not run the caller's script again, and Ctrl-C is not for them.

    A spawned process would run it, unless that looks like an interactive session. Workers need nothing of it, and a script
    without a main guard must not break. A process inherits which signals are blocked.
    """
    with _starting, _no_interrupts():
        yield from _hidden()


@contextmanager
def _no_interrupts() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # With the first process another one starts, which keeps track of what they share; that lets signals in again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hidden() -> Iterator[None]:
    main = sys.modules["__main__"]
    hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if getattr(main, name, None) is not None}
    for name in hidden:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(main, name, value)
