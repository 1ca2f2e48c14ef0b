"""Read a GGUF file once for all that transformers asks of it: the config, the tokenizer's part and the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from ffmem.errors import ModelError
from ffmem.model.process import Shared


@Shared
@contextmanager
def parsed_once() -> Iterator[None]:
    """While a model is loaded, the gguf package's reader and its table of names are made once for a file.

    transformers calls both anew for the config, the tokenizer and the weights, and the table for every module.
    """
    if missing := [name for name in ("gguf", "accelerate") if not find_spec(name)]:
        raise ModelError(f"a .gguf file needs the {missing[0]} package: pip install 'ffmem[gguf]'")
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Slices of a plain array take a fourth of the time of a memmap's, and a header is a million of them."""

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
