"""Capture: everything that flows along the stream at some positions of one prompt, caught in one forward."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.model.memories import MemoryModel


@dataclass(frozen=True)
class Flow:
    """One layer: from what it gets to what it hands on. Without norms on that way, carried is before, joined r, after o."""

    before: Float[Tensor, "n d"]
    carried: Float[Tensor, "n d"]
    """What attention is added to."""
    joined: Float[Tensor, "n d"]
    """Carried plus attention."""
    r: Float[Tensor, "n d"]
    m: Float[Tensor, "n cells"]
    product: Float[Tensor, "n d"]
    """m·V and the value bias, in front of any norm."""
    y: Float[Tensor, "n d"]
    o: Float[Tensor, "n d"]
    """r + y"""
    after: Float[Tensor, "n d"]

    def at(self, rows: Int[Tensor, " rows"]) -> Flow:
        """Some of the positions."""
        return Flow(**{part.name: getattr(self, part.name)[rows] for part in fields(self)})


@torch.inference_mode()
def capture(model: MemoryModel, ids: Int[Tensor, "1 pos"], columns: Int[Tensor, " n"]) -> list[Flow]:
    """A flow a layer, at these columns of the fed ids. The vocabulary projection is not computed."""
    family = model.family
    spots = {
        "before": "block.in",
        "carried": family.carried,
        "joined": family.joined or family.r,
        "r": family.r,
        "m": f"{family.value}.in",
        "product": f"{family.value}.out",
        "y": family.y,
        "o": family.o,
        "after": "block.out",
    }

    def pick(tensor: Tensor) -> Tensor:
        return tensor[0, columns.to(tensor.device)]

    def forward(ids: Tensor) -> None:
        model.model.base_model(input_ids=ids.to(model.device), use_cache=False)

    found, _ = model.record_spots(ids, spots, pick, forward)
    return [Flow(**{name: tensors[layer] for name, tensors in found.items()}) for layer in range(model.layers)]
