"""Spots: the tensors that flow through named points of a block, and hooks that read them, each for its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.errors import ModelError

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-5}
"""The relative error that rounding may leave between two ways to compute one tensor in full precision."""
HALF_TOLERANCE = 2e-2
"""The relative error that rounding may leave between two ways to compute one tensor in bfloat16 or float16."""


@dataclass
class LayerTensors:
    """What flowed through every layer in one forward, a list entry a layer: at all positions, or at one of each row."""

    m: list[Float[Tensor, "*batch cells"]]
    """Each layer's coefficients."""
    product: list[Float[Tensor, "*batch d"]]
    """The output of each value matrix, m·V + b, before any norm that the block may apply to it."""
    r: list[Float[Tensor, "*batch d"]]
    """The residual stream that each feed-forward layer is added to."""
    y: list[Float[Tensor, "*batch d"]]
    """What each feed-forward layer adds to the stream."""
    o: list[Float[Tensor, "*batch d"]]
    """The stream behind each feed-forward layer, r + y."""


@dataclass
class Recording(LayerTensors):
    """What flowed through every layer at all positions of a batch, and the logits that came of it."""

    logits: Float[Tensor, "batch pos vocab"]


def module_at(root: nn.Module, path: str, what: str) -> nn.Module:
    """The submodule at a dotted path, or an error that names both."""
    try:
        found = root.get_submodule(path)
    except AttributeError as error:
        raise ModelError(f"expected {what} at {path!r} in {type(root).__name__}: {error}") from error
    return found


class _ThreadMark(threading.local):
    """An object of each thread's own, by which it is known: a thread's number may have been that of an earlier thread."""

    def __init__(self) -> None:
        self.thread = object()


_mark = _ThreadMark()
_changing = threading.RLock()
"""A lock for adding and removing hooks. A thread may take it twice: it may collect another reader's garbage meanwhile."""


@dataclass(frozen=True, eq=False)
class Hook:
    """A function that is called when a module is: before its forward (`in`), after it (`out`) or in its place (`instead`).

    `in`: `call(module, args, kwargs)` may return other arguments, as such a pair. `out`: `call(module, args, output)` may
    return another output. `instead`: `call(*args, **kwargs)` returns what the module's forward would.
    """

    module: nn.Module
    side: Literal["in", "out", "instead"]
    call: Callable[..., Any]

    def attach(self, acting: Callable[[], bool]) -> Any:
        """Register the hook for calls at which `acting()` is true; returns a handle whose `remove` undoes it."""
        if self.side == "instead":
            return _StandIn.attach(self.module, _Guarded(self.call, acting))
        if self.side == "in":
            return self.module.register_forward_pre_hook(_Guarded(self.call, acting), with_kwargs=True)
        return self.module.register_forward_hook(_Guarded(self.call, acting))


@dataclass(frozen=True, eq=False)
class _Guarded:
    """A hook that does nothing while `acting()` is false.

    Torch collects a module's hooks first and looks up how to call each later: if another thread adds or removes the hook in
    between, it is called without keyword arguments, or after it was removed.
    """

    call: Callable[..., Any]
    acting: Callable[[], bool]

    def __call__(self, *given: Any) -> Any:
        return self.call(*given) if self.acting() else None


class _StandIn:
    """A module's forward while hooks stand in its place: each acts in its own thread, the module's own in all others."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before = vars(module).get("forward")
        """A forward that was set on the module itself, as packages do that spread a model over devices."""
        self.others: tuple[_Guarded, ...] = ()

    @classmethod
    def attach(cls, module: nn.Module, other: _Guarded) -> _Handle:
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
    """Removes a hook that stands in a module's place, and puts back the module's forward when the last such hook goes."""

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
    """Register hooks inside, and remove every one of them at the end, whatever happens.

    They act on calls that are made inside by the thread that entered, and on no other thread's; or, if `acting` is given,
    while `acting()` is true.
    """
    here: object | None = _mark.thread
    handles: list[Any] = []
    try:
        with _changing:
            for hook in hooks:
                handles.append(hook.attach(acting or (lambda: here is _mark.thread)))
        yield
    finally:
        here = None
        with _changing:
            for handle in handles:
                handle.remove()


def touched(module: nn.Module, *, before_only: bool = False) -> bool:
    """Whether a hook acts on this thread's calls of a module, or another forward stands in place of its class's.

    With `before_only` only hooks that are called before the forward count.
    """
    hooks = [*module._forward_pre_hooks.values(), *(() if before_only else module._forward_hooks.values())]
    forward = None if before_only else vars(module).get("forward")
    if isinstance(forward, _StandIn):
        hooks += forward.others
        forward = forward.before
    return forward is not None or any(hook.acting() if isinstance(hook, _Guarded) else True for hook in hooks)


def first_tensor(value: object) -> Tensor | None:
    """The tensor in a module's arguments or output: the value itself, or the first of a tuple; None if there is none."""
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
    """A hook that gives `keep` a copy of the tensor at a spot of a block; a copy, because models may change it in place."""
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
    """The norm of `found - expected` over the norm of `expected`, in float32, at the position where it is largest.

    Positions are compared one by one: the first token's vector has a huge norm in many models and would hide the others.
    """
    found, expected = found.float(), expected.float()
    size = torch.linalg.vector_norm(expected, dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return float((torch.linalg.vector_norm(found - expected, dim=-1) / size).max())
