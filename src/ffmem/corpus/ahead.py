"""Work done ahead by a background thread, so that whoever needs its results does not wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def ahead(
    make: Callable[[threading.Event], Iterable[Item]], count: int, *, name: str = "ffmem-ahead"
) -> Generator[Item, None, None]:
    """The items that `make` gives, up to `count` of them ready before they are asked for.

    An error in the thread is raised here. `make` gets an event that is set when nobody wants any more.

    >>> list(ahead(lambda stopped: range(3), 2))
    [0, 1, 2]
    """
    ready: queue.Queue[Item | BaseException | None] = queue.Queue(maxsize=max(1, count))
    stopped = threading.Event()

    def put(item: Item | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in make(stopped):
                if not put(item):
                    return
            put(None)
        except BaseException as error:  # handed over, and raised there
            put(error)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stopped.set()
        thread.join()
