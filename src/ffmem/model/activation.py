"""The activation: the function that makes coefficients, where it is a module that a pass may compute in its own way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from ffmem.model.spots import Hook, touched

HALVES = (torch.bfloat16, torch.float16)
"""Types of which there are few enough numbers to try them all."""
PIECE = 511
"""Numbers in a piece that is smaller than what a block of a GPU's threads takes, and no multiple of a vector."""


@dataclass(frozen=True)
class Activation:
    """A module that takes each number by itself. Whoever computes it otherwise gets the same bits."""

    module: nn.Module
    kind: Literal["relu", "table"]
    table: Shaped[Tensor, "65536"] | None = None
    """What it makes of every 16-bit number, by that number's bits."""

    @staticmethod
    def of(module: nn.Module, like: Tensor) -> Activation | None:
        """What is known of a module for numbers of this type on this device; None where it cannot be known."""
        if type(module) is nn.ReLU:
            return None if module.inplace else Activation(module, "relu")
        table = _table(module, like) if like.dtype in HALVES else None
        return None if table is None else Activation(module, "table", table)


@torch.inference_mode()
def _table(module: nn.Module, like: Tensor) -> Shaped[Tensor, "65536"] | None:
    """All answers, if each depends on its own number alone, and not on where in a tensor that stands."""
    numbers = torch.arange(1 << 16, device=like.device).to(torch.int16).view(like.dtype)
    rows = numbers.flip(0).view(256, 256)
    try:
        made, backwards = module(numbers), module(rows)
        # What is left behind the last full vector, or block, is another piece of code.
        pieces = torch.cat([module(piece.clone()) for piece in numbers.split(PIECE)])
    except Exception:  # not a function of numbers, whatever else it is
        return None
    if backwards.shape != rows.shape or any(one.dtype != like.dtype for one in (made, backwards, pieces)):
        return None
    alike = all(_same_bits(made, other) for other in (backwards.flatten().flip(0), pieces))
    return made if alike else None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one.view(torch.int16) == other.view(torch.int16)) | (one.isnan() & other.isnan())).all())


class Watch:
    """Finds, in one forward, the module of a block whose output is what enters its value matrix."""

    def __init__(self, block: nn.Module, value: nn.Module) -> None:
        self.value = value
        self.modules = [one for one in block.modules() if one is not value and not any(one.children())]
        self.calls: Counter[nn.Module] = Counter()
        self.made: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.found: nn.Module | None = None

    def hooks(self) -> list[Hook]:
        return [*(Hook(one, "out", self._left) for one in self.modules), Hook(self.value, "in", self._entered)]

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.calls[module] += 1
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(output, Tensor) and output.shape == args[0].shape:
            self.made[module] = (output, output.clone())

    def _entered(self, _: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> None:
        # Nothing may have been done to it on the way, in place either.
        for module, (output, copy) in self.made.items():
            same = args[0].data_ptr() == output.data_ptr() and args[0].numel() == output.numel()
            if same and self.found is None and torch.equal(args[0].flatten(), copy.flatten()):
                self.found = module

    def activation(self) -> Activation | None:
        """What was found, if it is called once, by its class's own forward, and nobody else looks at it or changes it."""
        module = self.found
        if module is None or self.calls[module] != 1 or touched(module):
            return None
        return Activation.of(module, self.made[module][0])
