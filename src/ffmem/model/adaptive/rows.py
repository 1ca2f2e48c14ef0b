"""Weights in a quarter of their float32 size: every row of a matrix as 8-bit numbers and one scale."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float, Int8
from torch import Tensor

from ffmem.errors import ModelError

FILE = "rows8.safetensors"
SCALE = ":scale"
"""What is appended to a matrix's name to name the scales of its rows."""


def to_rows(weight: Float[Tensor, "rows width"]) -> tuple[Int8[Tensor, "rows width"], Float[Tensor, " rows"]]:
    """Each row as 8-bit numbers and a scale, chosen so that the row's largest entry becomes 127.

    >>> to_rows(torch.tensor([[0.5, -1.0], [0.0, 0.0]]))[0].tolist()
    [[64, -127], [0, 0]]
    """
    scale = weight.float().abs().amax(1) / 127
    safe = torch.where(scale > 0, scale, 1.0)[:, None]
    return (weight.float() / safe).round().clamp(-127, 127).to(torch.int8), scale


def from_rows(numbers: Int8[Tensor, "rows width"], scale: Float[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
    """The float32 matrix of 8-bit rows and their scales."""
    return numbers.float() * scale[:, None]


def pack(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name as they are stored: matrices as 8-bit rows and scales, vectors, which are few, in float32."""
    packed = {}
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            packed[name], packed[name + SCALE] = to_rows(tensor)
        else:
            packed[name] = tensor.float()
    return packed


def unpack(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float32 weights by name of what `pack` gave; an error if a matrix and its scales do not fit."""
    alone = [name for name, part in packed.items() if part.dtype == torch.int8 and name + SCALE not in packed]
    if alone:
        raise ModelError(f"expected a scale for every row, found none for {alone[0]} in {FILE}; write the folder again")
    for name, part in packed.items():
        scale = packed.get(name + SCALE)
        if scale is not None and (part.dtype != torch.int8 or part.dim() != 2 or scale.shape != part.shape[:1]):
            raise ModelError(
                f"expected {name} in {FILE} as 8-bit rows with a scale each, found {part.dtype} of {list(part.shape)} "
                f"and scales of {list(scale.shape)}; write the folder again"
            )
    return {
        name: from_rows(tensor, packed[name + SCALE]) if name + SCALE in packed else tensor
        for name, tensor in packed.items()
        if not name.endswith(SCALE)
    }


def in_folder(folder: Path) -> bool:
    """Whether a folder's weights are 8-bit rows: other weights that were saved beside them later take precedence."""
    return (folder / FILE).is_file() and not any(folder.glob("model*.safetensors*"))


def save_rows(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write weights to a folder as 8-bit rows."""
    safetensors.torch.save_file(pack(weights), folder / FILE, {"format": "pt"})


def load_rows(folder: Path) -> dict[str, Tensor]:
    """The float32 weights of a folder that holds 8-bit rows."""
    return unpack(safetensors.torch.load_file(folder / FILE))
