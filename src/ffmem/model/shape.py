"""The sizes that decide a model's cost, from its config alone: no weights are read, so the model may be of any size."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from ffmem.errors import ModelError
from ffmem.model.adaptive.network import register
from ffmem.model.config_check import empty_model
from ffmem.model.families import FAMILIES
from ffmem.model.loading import quiet_transformers, read_config
from ffmem.model.memories import MemoryModel
from ffmem.model.names import known_name, locate
from ffmem.model.process import parsed_once
from ffmem.text import visible

_LLAMA3 = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2"},
    "paper": {"model_type": "adaptive_lm"},
    "llama3-8b": _LLAMA3
    | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32},
    "llama3-70b": _LLAMA3
    | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64},
}
"""The configs of well-known shapes by name, which need no files. The defaults of `adaptive_lm` are the paper's model."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its cost depends on."""

    name: str
    layers: int
    d: int
    cells: list[int]
    """The number of cells of each layer."""
    gated: bool
    parameters: int
    block_parameters: int
    """The number of parameters of all blocks together."""
    last_value: int
    """The number of parameters of the last value matrix, which a pass over a corpus does not reach."""
    attention: int
    """The width of all attention heads of a layer together."""

    def flops(self, length: int) -> float:
        """Floating-point operations a token up to the last layer's coefficients, in a sentence of `length` tokens."""
        return 2.0 * (self.block_parameters - self.last_value) + 4.0 * self.layers * length * self.attention


def shape_of(model: str | Path) -> Shape:
    """The shape of a model: one of `SHAPES`, or one that `load_model` would find by this name.

    >>> shape = shape_of("llama3-8b")
    >>> sum(shape.cells), shape.gated, shape.parameters
    (458752, True, 8030261248)
    """
    config, name = _config(model)
    row = FAMILIES.get(config.model_type)
    if row is None:
        raise ModelError(
            f"{name}: expected a model of a known family ({', '.join(FAMILIES)}), found a {visible(str(config.model_type))}"
        )
    with quiet_transformers():
        empty = empty_model(config, name)
    memories = MemoryModel(model=empty, tokenizer=None, family=row.for_config(config), name=name)
    heads = memories.config.num_attention_heads
    return Shape(
        name=name,
        layers=memories.layers,
        d=memories.d,
        cells=memories.cells,
        gated=memories.family.gated,
        parameters=sum(one.numel() for one in empty.parameters()),
        block_parameters=sum(one.numel() for block in memories.blocks for one in block.parameters()),
        last_value=memories.cells[-1] * memories.d,
        attention=heads * (getattr(memories.config, "head_dim", None) or memories.d // heads),
    )


def _config(model: str | Path) -> tuple[Any, str]:
    register()
    if model in SHAPES:
        return transformers.AutoConfig.for_model(**SHAPES[str(model)]), str(model)
    name = known_name(model)
    try:
        location = locate(name)
    except ModelError as error:
        raise ModelError(f"{error}; {', '.join(SHAPES)} can be planned for without files") from error
    with parsed_once() if location.gguf else nullcontext():
        return read_config(location, name), name
