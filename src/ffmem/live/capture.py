"""Capture: everything that flows along the stream at some positions of one prompt, caught in one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.model.memories import MemoryModel
from ffmem.model.spots import hooked, record_spot, spots_of
from ffmem.words import ModelError


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
    kept: dict[tuple[int, str], Tensor] = {}
    length = ids.shape[1]

    def keeper(key: tuple[int, str]) -> Callable[[Tensor], None]:
        def keep(tensor: Tensor) -> None:
            found = tensor.reshape(length, -1)[columns.to(tensor.device)]
            kept[key] = kept[key] + found if key in kept else found

        return keep

    installs = [
        record_spot(block, path, side, keeper((layer, expression)))
        for layer, block in enumerate(model.blocks)
        for expression in set(spots.values())  # a tensor that has several names is copied once
        for path, side in spots_of(expression)
    ]
    with hooked(*installs):
        model.model.base_model(input_ids=ids.to(model.device), use_cache=False)
    for name, expression in spots.items():
        for layer in range(model.layers):
            if (layer, expression) not in kept:
                raise ModelError(f"{model.name}: nothing flowed through {expression!r} ({name}) in layer {layer + 1}")
    return [Flow(**{name: kept[layer, expression] for name, expression in spots.items()}) for layer in range(model.layers)]
