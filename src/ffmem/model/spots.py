"""Spots: the tensors at named places of a block, recorded by hooks that are always taken off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ffmem.words import ModelError

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5}
"""Relative error that rounding may leave between two ways to compute the same tensor."""
HALF_TOLERANCE = 2e-2
"""The same in bfloat16 and float16."""


def module_at(root: nn.Module, path: str, what: str) -> nn.Module:
    """The submodule at a dotted path, or an error that names both."""
    try:
        found = root.get_submodule(path)
    except AttributeError as error:
        raise ModelError(f"expected {what} at {path!r} in {type(root).__name__}: {error}") from error
    return found


@contextmanager
def hooked(*installs: Callable[[], Any]) -> Iterator[None]:
    """Run with hooks installed; take every one of them off again, whatever happens."""
    handles: list[Any] = []
    try:
        for install in installs:
            handles.append(install())
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(value: object) -> Tensor | None:
    """The tensor that a module takes or returns: itself, or the first of a tuple."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (tuple, list)) and value:
        return first_tensor(value[0])
    return None


def spots_of(expression: str) -> list[tuple[str, str]]:
    """The spots of a sum, each as (module path, `in` or `out`).

    >>> spots_of("block.in + self_attn.out")
    [('block', 'in'), ('self_attn', 'out')]
    """
    pairs = []
    for part in expression.split("+"):
        path, _, side = part.strip().rpartition(".")
        assert side in ("in", "out"), f"a spot ends in .in or .out, found {part!r}"
        pairs.append((path, side))
    return pairs


def record_spot(block: nn.Module, path: str, side: str, keep: Callable[[Tensor], None]) -> Callable[[], Any]:
    """An install that hands a copy of the spot's tensor to `keep` (models may change it in place later)."""
    module = block if path == "block" else module_at(block, path, "a spot")

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = first_tensor(args)
        if tensor is None:
            tensor = first_tensor(kwargs.get("hidden_states"))
        if tensor is not None:
            keep(tensor.detach().clone())

    def leave(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            keep(tensor.detach().clone())

    if side == "in":
        return lambda: module.register_forward_pre_hook(enter, with_kwargs=True)
    return lambda: module.register_forward_hook(leave)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected, in float32, at the worst position.

    One vector with a huge norm, as many models have at their first token, must not hide the others.
    """
    found, expected = found.float(), expected.float()
    size = torch.linalg.vector_norm(expected, dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float((torch.linalg.vector_norm(found - expected, dim=-1) / size).max())
