"""Sealed tensors: safetensors files that carry the hash of all that is in them, compared before any of it is used."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

LARGEST_HEADER = 100_000_000
"""The most bytes that the format lets a header have."""


class SealError(ValueError):
    """An error that says, in words, why a file is not as it was written."""


def save_sealed(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors (on a CPU, contiguous) and facts, which are JSON, and the hash of both."""
    text = json.dumps(facts, sort_keys=True)
    digest = _digest(tensors, text)
    with as_os_errors():
        safetensors.torch.save_file(dict(tensors), path, {"facts": text, "sha256": digest})


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn an error of safetensors in writing into an OSError, as any other writer would raise."""
    try:
        yield
    except safetensors.SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from error


def load_sealed(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a file; a `SealError` where they are not those that were written."""
    with _damage_as_error():
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        digest = _digest(tensors, metadata["facts"])
        if digest != metadata["sha256"]:
            raise SealError("its hash differs")
        return tensors, json.loads(metadata["facts"])


def read_facts(first_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """The facts of a sealed file alone, not compared with anything; only the file's header is read.

    `first_bytes` gives as many bytes of the file as it is asked for.
    """
    with _damage_as_error():
        size = min(int.from_bytes(first_bytes(8), "little"), LARGEST_HEADER)
        header = json.loads(first_bytes(8 + size)[8:])
        return json.loads(header["__metadata__"]["facts"])


@contextmanager
def _damage_as_error() -> Iterator[None]:
    try:
        yield
    except SealError:
        raise
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise SealError((str(error).strip() or type(error).__name__).splitlines()[0]) from error


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    total = hashlib.sha256(facts.encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            total.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
