"""Settings of the whole process, such as a patched package, which several threads may make and undo at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from ffmem.errors import ModelError

_turn = threading.RLock()


@contextmanager
def alone(setting: AbstractContextManager[Any]) -> Iterator[None]:
    """Hold a setting of which each thread needs its own: threads take turns, and one thread may nest such settings."""
    with _turn, setting:
        yield


class Shared:
    """A setting that is the same for all threads: the first one to enter makes it, the last one to leave undoes it.

    If every thread undid its own, the last to leave might put back what another thread had set.
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


@Shared
@contextmanager
def parsed_once() -> Iterator[None]:
    """Inside, the gguf package parses a file once and makes its table of names once.

    transformers asks for both anew for the config, the tokenizer and the weights, and for the table at every module.
    """
    if missing := [name for name in ("gguf", "accelerate") if not find_spec(name)]:
        raise ModelError(f"a .gguf file needs the {missing[0]} package: pip install 'ffmem[gguf]'")
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """A reader that slices a plain array: it takes a fourth of a memmap's time, and a header is a million slices."""

        @property
        def data(self) -> Any:
            return self._bytes

        @data.setter
        def data(self, mapped: Any) -> None:
            self._bytes = np.asarray(mapped)

    before = {"GGUFReader": gguf.GGUFReader, "get_tensor_name_map": gguf.get_tensor_name_map}
    vars(gguf).update({"GGUFReader": cache(Reader), "get_tensor_name_map": cache(gguf.get_tensor_name_map)})
    try:
        yield
    finally:
        vars(gguf).update(before)
