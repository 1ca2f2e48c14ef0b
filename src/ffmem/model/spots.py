"""Spots: the tensors at named places of a block, and hooks there, each its own thread's, always taken off again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ffmem.errors import ModelError

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


class _Mark(threading.local):
    """Something of its own for every thread; its number may be that of an earlier one."""

    def __init__(self) -> None:
        self.thread = object()


_mark = _Mark()
_changing = threading.RLock()
"""Held while hooks are hung up or taken off, by a thread that may be collecting another's at that moment."""


@dataclass(frozen=True, eq=False)
class Hook:
    """What is done when a module is called.

    `in`: `call(module, args, kwargs)` may give other arguments, as such a pair. `out`: `call(module, args, output)` may
    give another output. `instead`: `call(*args, **kwargs)` stands in for the module's forward.
    """

    module: nn.Module
    side: Literal["in", "out", "instead"]
    call: Callable[..., Any]

    def hung(self, acting: Callable[[], bool]) -> Any:
        """Hang it up, for calls at which `acting` is true; `remove` of what is returned takes it off."""
        if self.side == "instead":
            return _StandIn.put(self.module, _Guarded(self.call, acting))
        if self.side == "in":
            return self.module.register_forward_pre_hook(_Guarded(self.call, acting), with_kwargs=True)
        return self.module.register_forward_hook(_Guarded(self.call, acting))


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A hook that passes by calls that are none of its business.

    Torch looks up a module's hooks first and how to call each later: in between another thread may have hung it up or
    taken it off, so that it is called without keyword arguments, or when all is over.
    """

    call: Callable[..., Any]
    acting: Callable[[], bool]

    def __call__(self, *given: Any) -> Any:
        return self.call(*given) if self.acting() else None


class _StandIn:
    """A module's forward while there are others in its place: each acts in its own thread, the module's in all others."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = vars(module).get("forward")
        """One that was put on the module itself, as packages do that spread a model over devices."""
        self.others: tuple[_Guarded, ...] = ()

    @classmethod
    def put(cls, module: nn.Module, other: _Guarded) -> _Handle:
        stand_in = vars(module).get("forward")
        if not isinstance(stand_in, cls):
            stand_in = cls(module)
            module.forward = stand_in  # type: ignore[method-assign]
        stand_in.others = (*stand_in.others, other)
        return _Handle(stand_in, other)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for other in reversed(self.others):
            if other.acting():
                return other.call(*args, **kwargs)
        return (self.before or partial(type(self.module).forward, self.module))(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class _Handle:
    stand_in: _StandIn
    other: _Guarded

    def remove(self) -> None:
        stand_in, module = self.stand_in, self.stand_in.module
        stand_in.others = tuple(one for one in stand_in.others if one is not self.other)
        if stand_in.others or vars(module).get("forward") is not stand_in:
            return
        if stand_in.before is None:
            del module.forward
        else:
            module.forward = stand_in.before  # type: ignore[method-assign]


@contextmanager
def hooked(*hooks: Hook, acting: Callable[[], bool] | None = None) -> Iterator[None]:
    """Run with hooks hung up; take every one of them off again, whatever happens.

    They act on calls made inside by the thread that came in, and on nobody else's; or, with `acting`, while that is true.
    """
    here: object | None = _mark.thread
    handles: list[Any] = []
    try:
        with _changing:
            for hook in hooks:
                handles.append(hook.hung(acting or (lambda: here is _mark.thread)))
        yield
    finally:
        here = None
        with _changing:
            for handle in handles:
                handle.remove()


def touched(module: nn.Module, *, before_only: bool = False) -> bool:
    """Whether anyone's hook acts on this thread's calls of a module, or a forward stands in place of its class's."""
    hooks = [*module._forward_pre_hooks.values(), *(() if before_only else module._forward_hooks.values())]
    forward = None if before_only else vars(module).get("forward")
    if isinstance(forward, _StandIn):
        hooks += forward.others
        forward = forward.before
    return forward is not None or any(hook.acting() if isinstance(hook, _Guarded) else True for hook in hooks)


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


def record_spot(block: nn.Module, path: str, side: str, keep: Callable[[Tensor], None]) -> Hook:
    """A hook that hands a copy of the spot's tensor to `keep` (models may change it in place later)."""
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

    return Hook(module, "in", enter) if side == "in" else Hook(module, "out", leave)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected, in float32, at the worst position.

    One vector with a huge norm, as many models have at their first token, must not hide the others.
    """
    found, expected = found.float(), expected.float()
    size = torch.linalg.vector_norm(expected, dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float((torch.linalg.vector_norm(found - expected, dim=-1) / size).max())
