"""Settings of the whole process, kept right where several threads make them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_turn = threading.RLock()


@contextmanager
def alone(setting: AbstractContextManager[Any]) -> Iterator[None]:
    """With a setting that threads make differently: they take turns, and one that nests does not wait for itself."""
    with _turn, setting:
        yield


class Shared:
    """A setting that is the same for all who make it: the first thread makes it, the last puts back what was before.

    Each for itself would put back what it found, and the last to leave may have found the setting of another.
    """

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._changing = threading.RLock()
        self._made: AbstractContextManager[Any] | None = None
        self._users = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._changing:
            if self._made is None:
                made = self._setting()
                made.__enter__()
                self._made = made
            self._users += 1
        try:
            yield
        finally:
            with self._changing:
                self._users -= 1
                if not self._users:
                    made, self._made = self._made, None
                    made.__exit__(None, None, None)
