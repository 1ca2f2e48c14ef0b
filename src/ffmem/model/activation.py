"""The activation function: which module makes a layer's coefficients, and whether other code may compute the same bits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from ffmem.model.spots import Hook, touched

HALVES = (torch.bfloat16, torch.float16)
"""Dtypes with so few numbers that an activation can be tried on all of them."""
UNEVEN = 511
"""A length below what one block of a GPU's threads computes, and no multiple of a vector's: other code computes its end."""


@dataclass(frozen=True)
class Activation:
    """An activation module that maps each number by itself, so that other code that computes it gets the same bits."""

    module: nn.Module
    kind: Literal["relu", "table"]
    table: Shaped[Tensor, "65536"] | None = None
    """The activation of every 16-bit number, in the order of the numbers' bits; None for ReLU."""

    @staticmethod
    def of(module: nn.Module, like: Tensor) -> Activation | None:
        """The activation of a module in the dtype and on the device of `like`; None if no other code may compute it."""
        if type(module) is nn.ReLU:
            return None if module.inplace else Activation(module, "relu")
        table = _table(module, like) if like.dtype in HALVES else None
        return None if table is None else Activation(module, "table", table)


@torch.inference_mode()
def _table(module: nn.Module, like: Tensor) -> Shaped[Tensor, "65536"] | None:
    """A module's output for every 16-bit number; None if an output depends on anything else, such as its index."""
    numbers = torch.arange(1 << 16, device=like.device).to(torch.int16).view(like.dtype)
    rows = numbers.flip(0).view(256, 256)
    try:
        made, backwards = module(numbers), module(rows)
        # Another piece of code may compute what is left behind the last full vector, or block.
        pieces = torch.cat([module(piece.clone()) for piece in numbers.split(UNEVEN)])
    except Exception:  # not a function of numbers, whatever else it is
        return None
    if backwards.shape != rows.shape or any(one.dtype != like.dtype for one in (made, backwards, pieces)):
        return None
    alike = all(_same_bits(made, other) for other in (backwards.flatten().flip(0), pieces))
    return made if alike else None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two 16-bit tensors are equal bit for bit, all NaNs counted as equal."""
    if one.shape != other.shape:
        return False
    return bool(((one.view(torch.int16) == other.view(torch.int16)) | (one.isnan() & other.isnan())).all())


class ActivationFinder:
    """Hooks that find, in one forward, the module of a block whose unchanged output enters the value matrix."""

    def __init__(self, block: nn.Module, value: nn.Module) -> None:
        self.value = value
        self.modules = [one for one in block.modules() if one is not value and not any(one.children())]
        self.calls: Counter[nn.Module] = Counter()
        self.made: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.found: nn.Module | None = None

    def hooks(self) -> list[Hook]:
        """The hooks to hold during the one forward."""
        return [*(Hook(one, "out", self._left) for one in self.modules), Hook(self.value, "in", self._entered)]

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.calls[module] += 1
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.shape == args[0].shape:
            self.made[module] = (output, output.clone())

    def _entered(self, _: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> None:
        # Nothing may have changed the output on the way, not even in place.
        for module, (output, copy) in self.made.items():
            same = args[0].data_ptr() == output.data_ptr() and args[0].numel() == output.numel()
            if same and self.found is None and torch.equal(args[0].flatten(), copy.flatten()):
                self.found = module

    def activation(self) -> Activation | None:
        """The activation that was found; None if its module was called more than once or has a hook or another forward."""
        module = self.found
        if module is None or self.calls[module] != 1 or touched(module):
            return None
        return Activation.of(module, self.made[module][0])
