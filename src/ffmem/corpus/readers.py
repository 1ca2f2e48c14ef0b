"""Processes that share work on text: results in order, a bounded queue, no second run of the caller's script.

The first of them is a fresh Python, never a fork of this process, which may have touched a GPU or started threads. It
imports what is needed and unpacks the tokenizer, once, and the others are forks of it, made before it has a thread. Each is
one end of a pipe, and ends when the other end is closed, however this process ends.
"""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import chain, islice
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

from ffmem.errors import CorpusError, FfmemError

Item = TypeVar("Item")
Common = TypeVar("Common")
Result = TypeVar("Result")

FEW = 8
"""The number of items up to which starting processes takes longer than the work."""
AHEAD = 3
"""The number of items that are sent to each process before their results are asked for."""
CAN_FORK = hasattr(os, "fork") and bool(sys.executable)
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ffmem.corpus.readers import serve; serve(sys.argv[2:])"
)
_ready: list[_Processes] = []
"""Processes that `getting_ready` has started before they are needed."""


def cores() -> int:
    """The number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Processes:
    """The processes and the pipes to them. The first imports what is needed; the others begin with the work."""

    def __init__(self, count: int) -> None:
        pairs = [Pipe() for _ in range(count)]
        self.pipes: list[Connection[Any, Any]] = [mine for mine, _ in pairs]
        numbers = [theirs.fileno() for _, theirs in pairs]
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            pass_fds=numbers,
            process_group=0,  # Ctrl-C is for this process, which ends them
        )
        for _, theirs in pairs:
            theirs.close()
        self.pid = process.pid
        self.end = weakref.finalize(self, _end, process, self.pipes)


def _end(process: subprocess.Popen[bytes], pipes: list[Connection[Any, Any]]) -> None:
    for pipe in pipes:
        pipe.close()
    with suppress(ProcessLookupError):  # where SIGCHLD is ignored, the system forgets those that are gone
        os.killpg(process.pid, signal.SIGKILL)  # it has not been waited for, so its number is its own
    process.wait()


@contextmanager
def getting_ready(count: int) -> Iterator[None]:
    """Processes that the first `Readers` of as many in the block find ready, having imported what they need; they are ended
    with the block if nobody has taken them."""
    if not CAN_FORK or count < 2:
        yield
        return
    started = _Processes(count)
    _ready.append(started)
    try:
        yield
    finally:
        if started in _ready:
            _ready.remove(started)
            started.end()


class Readers:
    """Processes that compute `work(common, item)`; `work` is a function of a module, and `common` is sent once."""

    def __init__(self, work: Callable[[Common, Item], Result], common: Common, count: int) -> None:
        packed = pickle.dumps((work, common))
        ready = [one for one in _ready if len(one.pipes) == count]
        if ready:
            _ready.remove(ready[0])
        self.processes = ready[0] if ready else _Processes(count)
        try:
            self.processes.pipes[0].send((dict(os.environ), packed))
        except OSError as error:
            raise _ended() from error

    def map(self, items: Iterable[Any]) -> Iterator[Any]:
        """The results of the items, in their order. An error of the items comes behind the results before it.

        Who stops before the end, or meets an error, ends the processes.
        """
        failed: list[Exception] = []
        waiting: deque[Connection[Any, Any]] = deque()
        pipes = self.processes.pipes
        try:
            for number, item in enumerate(_readable(items, failed)):
                if len(waiting) >= AHEAD * len(pipes):
                    yield self._answer(waiting.popleft())
                self._send(pipes[number % len(pipes)], item)
                waiting.append(pipes[number % len(pipes)])
            while waiting:
                yield self._answer(waiting.popleft())
        except BaseException:
            self.close()
            raise
        if failed:
            raise failed[0]

    def _send(self, pipe: Connection[Any, Any], item: Any) -> None:
        packed = pickle.dumps(item)
        try:
            pipe.send_bytes(packed)
        except OSError as error:
            raise _ended() from error

    def _answer(self, pipe: Connection[Any, Any]) -> Any:
        try:
            answer = pipe.recv()
        except (EOFError, OSError) as error:
            raise _ended() from error
        if isinstance(answer, _Failure):
            raise answer.error
        return answer

    @property
    def is_closed(self) -> bool:
        """Whether the processes have been ended, so that nothing more can be computed."""
        return not self.processes.end.alive

    def close(self) -> None:
        """End the processes, whatever they do."""
        self.processes.end()


def shared(
    work: Callable[[Common, Item], Result], common: Common, items: Iterable[Item], *, workers: int
) -> Iterator[Result]:
    """`work(common, item)` for every item, in order, by several processes; few items, or one worker, are done here.

    >>> list(shared(str.join, "-", [["a", "b"], ["c"]], workers=2))
    ['a-b', 'c']
    """
    if workers < 2 or not CAN_FORK:
        yield from (work(common, item) for item in items)
        return
    failed: list[Exception] = []
    rest = _readable(items, failed)
    if len(first := list(islice(rest, FEW))) < FEW:
        yield from (work(common, item) for item in first)
    else:
        readers = Readers(work, common, workers)
        try:
            yield from readers.map(chain(first, rest))
        finally:
            readers.close()
    if failed:
        raise failed[0]


def _readable(items: Iterable[Item], failed: list[Exception]) -> Iterator[Item]:
    """The items up to an error, which is raised once what was read before it is done."""
    try:
        yield from items
    except Exception as error:
        failed.append(error)


def _ended() -> CorpusError:
    return CorpusError("a process that reads the text was ended from outside, perhaps for want of memory")


class _Failure:
    """An error in the work, as it is sent."""

    def __init__(self, error: Exception) -> None:
        if not isinstance(error, FfmemError):
            error.add_note("in a process that reads the text:\n" + "".join(traceback.format_exception(error)))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an error of the caller's may hold anything
            error = RuntimeError(f"in a process that reads the text: {type(error).__name__}: {error}")
        self.error = error


def serve(numbers: list[str]) -> None:
    """The life of the processes: to import, to wait for the work, to become as many as there are pipes, and to do it."""
    for name in ("tokenizers", "ffmem.corpus.chunks"):
        import_module(name)  # what most work needs
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    pipes: list[Connection[Any, Any]] = [Connection(int(number)) for number in numbers]
    try:
        environment, packed = pipes[0].recv()
    except (EOFError, OSError):
        return
    os.environ.update(environment)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core for each process is enough
    try:
        work, common = pickle.loads(packed)
    except Exception as error:
        failure = _Failure(error)
        work, common = _raise, failure.error
    own = next((pipe for pipe in pipes[1:] if os.fork() == 0), pipes[0])
    for pipe in pipes:
        if pipe is not own:
            pipe.close()  # or the other side would not see that its process is gone
    _serve(own, work, common)


def _raise(error: Exception, _: Any) -> None:
    raise error


def _serve(pipe: Connection[Any, Any], work: Callable[[Any, Any], Any], common: Any) -> None:
    items: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                items.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the other side is gone, and nobody wants what is being done

    # Without it both sides might wait to send, and none would receive.
    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            answer = work(common, pickle.loads(items.get()))
        except Exception as error:
            answer = _Failure(error)
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)
