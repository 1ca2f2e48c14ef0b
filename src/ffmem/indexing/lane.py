"""The way to a worker: in a process of its own on this machine, or to nobody."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

from ffmem.errors import FfmemError
from ffmem.run.store import forget

GRACE = 1.0
"""Seconds that a worker has to end by itself."""


class Lost(Exception):
    """A worker is gone."""


@runtime_checkable
class Lane(Protocol):
    """The way to one worker: one call of its `Service` at a time, looked after without waiting."""

    def call(self, method: str, *arguments: Any) -> None: ...

    def answer(self) -> tuple[Any] | None:
        """The answer, once there is one; an error of the worker is raised, `Lost` where it is gone."""

    def read_so_far(self) -> int:
        """Tokens of the shard that it is reading."""

    def close(self) -> None: ...


class Nobody:
    """The lane to a place that is given up."""

    def call(self, method: str, *arguments: Any) -> None: ...

    def answer(self) -> None: ...

    def read_so_far(self) -> int:
        return 0

    def close(self) -> None: ...


class ProcessLane:
    """A worker in a process of its own on this machine, which sees this environment besides that of its parent."""

    def __init__(self, model: str, load: dict[str, Any], threads: int, environment: Mapping[str, str] | None = None) -> None:
        # A fresh process: a fork of one that has touched a GPU or started threads may hang.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, model, load, threads), daemon=True, name="ffmem-worker")
        with hidden_main(), _environment(environment or {}):
            self.process.start()
        theirs.close()
        self.tokens = 0

    def call(self, method: str, *arguments: Any) -> None:
        self.tokens = 0
        try:
            self.pipe.send((method, arguments))
        except OSError as error:
            raise Lost(self._end()) from error

    def answer(self) -> tuple[Any] | None:
        try:
            while self.pipe.poll():
                kind, what = self.pipe.recv()
                if kind == "tokens":
                    self.tokens = what
                elif kind == "error":
                    raise what
                else:
                    return (what,)
        except (EOFError, OSError) as error:
            raise Lost(self._end()) from error
        return None

    def read_so_far(self) -> int:
        return self.tokens

    def _end(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        return f"by signal {-code}" if code and code < 0 else f"with exit code {code}"

    def close(self) -> None:
        self.process.terminate()
        self.process.join(GRACE)
        self.process.kill()
        self.process.join()
        self.pipe.close()


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """What a process that is started meanwhile finds in its environment."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(pipe: Connection, model: str, load: dict[str, Any], threads: int) -> None:
    """A worker's life: load the model, then answer calls until the other side is gone."""
    from ffmem.indexing.worker import Service

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    signal.signal(signal.SIGTERM, _end)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    service: Service | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            method, arguments = pipe.recv()
            try:
                if service is None:
                    service = Service(model, load, threads)
                    service.told = partial(_tell, pipe)
                said: tuple[str, Any] = ("answer", getattr(service, method)(*arguments))
            except FfmemError as error:
                said = ("error", error)
            except Exception as error:
                traceback.print_exc()
                said = ("error", RuntimeError(f"in a worker: {type(error).__name__}: {error}"))
            pipe.send(said)


def _tell(pipe: Connection, tokens: int) -> None:
    try:
        pipe.send(("tokens", tokens))
    except OSError:  # nobody is there to whom this would matter
        raise SystemExit from None


def _end(*_: Any) -> None:
    """At once, in the midst of whatever it is, but leaving nothing behind."""
    forget()
    os._exit(128 + signal.SIGTERM)


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
