"""A caller's request for a run, checked once, and how it becomes the settings of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch

from ffmem.cells import parse_layers
from ffmem.corpus.record import parse_size
from ffmem.corpus.sentences import Unit
from ffmem.errors import FfmemError
from ffmem.indexing.layer_statistics import installed_statistics, sample_every
from ffmem.indexing.provenance import ModelInfo
from ffmem.indexing.top import POSITION_BITS
from ffmem.model.tokens import check_bos
from ffmem.run.manifest import MOST, Distinct, Settings

BATCH_TOKENS = {"cpu": 4096, "cuda": 1 << 17}
"""The most tokens of a batch, by the kind of device."""
SHARD_TOKENS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""The number of tokens of a shard, by the kind of device."""
FULL_STATISTICS = 1 << 15
"""The number of tokens up to which statistics are full by default: a sample of fewer would be thin."""
CHOICES = {
    "distinct": get_args(Distinct),
    "negative": ("auto", "on", "off"),
    "stats": ("auto", "full", "sample", "off"),
    "wikitext": ("auto", "keep", "plain"),
}


@dataclass(frozen=True)
class Request:
    """The settings of a run as a caller gives them, some of them `auto`."""

    top: int
    unit: str
    distinct: Any
    layers: Any
    limit_tokens: int | None
    sample: int | None
    seed: int
    batch_tokens: int | str
    shard_tokens: int | str
    bos: str
    negative: str
    stats: str
    column: str
    language: str
    wikitext: str
    max_record: int | str

    def __post_init__(self) -> None:
        for name, options in CHOICES.items():
            if (value := getattr(self, name)) not in options:
                raise FfmemError(f"expected {name} {', '.join(options[:-1])} or {options[-1]}, found {value!r}")
        bounds = {"top": (1, 10_000), "limit_tokens": (1, MOST - 1), "sample": (1, MOST - 1), "seed": (0, MOST - 1)}
        for name, (least, most) in bounds.items():
            number = getattr(self, name)
            if number is not None and (type(number) is not int or not least <= number <= most):
                shown = name.replace("_", "-")
                raise FfmemError(f"expected {shown} as a whole number from {least:,} to {most:,}, found {number!r}")
        object.__setattr__(self, "unit", str(Unit.parse(self.unit)))
        object.__setattr__(self, "max_record", parse_size(self.max_record))
        for name in ("batch_tokens", "shard_tokens"):
            object.__setattr__(self, name, _count(name.replace("_", "-"), getattr(self, name)))

    def for_model(self, model: ModelInfo) -> dict[str, Any]:
        """The settings by name, for this model; those stay `auto` that depend on the corpus or the device."""
        facts = model.facts
        named = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "max_record"}
        return named | {
            "layers": parse_layers(self.layers, facts.layers),
            "seed": None if self.sample is None else self.seed,
            "bos": check_bos(self.bos, facts.bos, facts.name),
            "negative": facts.gated if self.negative == "auto" else self.negative == "on",
        }

    def shard_size(self, model: ModelInfo) -> int:
        """The number of tokens of a shard, on which the parts of the corpus depend too."""
        auto = SHARD_TOKENS.get(model.facts.device, SHARD_TOKENS["cpu"])
        return auto if self.shard_tokens == "auto" else int(self.shard_tokens)

    def window(self, model: ModelInfo) -> int:
        """The most tokens that a sentence may have behind its beginning-of-sentence token."""
        bos = check_bos(self.bos, model.facts.bos, model.facts.name)
        context = min(model.facts.context - int(bos), (1 << POSITION_BITS) - 1)
        tokens = Unit.parse(self.unit).tokens
        if tokens > context:
            raise FfmemError(f"expected windows of at most {context:,} tokens, the model's context, found {self.unit}")
        return min(context, tokens or context)


def resolve(wanted: dict[str, Any], model: ModelInfo, about: Callable[[], int | None]) -> Settings:
    """Settings with every `auto` decided, once, when the run is created; `about` estimates the tokens of the corpus."""
    facts, settings = model.facts, dict(wanted)
    if settings["batch_tokens"] == "auto":
        settings["batch_tokens"] = auto_batch_tokens(facts.cells, facts.dtype, facts.device, model.layer_bytes)
    if settings["stats"] == "auto":
        tokens = about()
        settings["stats"] = "sample" if tokens is None or tokens > FULL_STATISTICS else "full"
    if settings["stats"] != "off":
        settings["statistics"] = list(installed_statistics())
    if settings["stats"] == "sample":
        settings["stats_every"] = sample_every(facts.device, about())
    return Settings(**settings)


def auto_batch_tokens(cells: list[int], dtype: str, device: str, layer_bytes: int) -> int:
    """The number of tokens of a batch that keeps the device busy and fits well into its memory: a power of two. `cells`
    are those of each layer."""
    width = max(cells) * getattr(torch, dtype).itemsize
    most = 1 << (max(1, layer_bytes // width).bit_length() - 1)
    return min(most, BATCH_TOKENS.get(device, BATCH_TOKENS["cpu"]))


def _count(name: str, value: int | str) -> int | str:
    if value == "auto":
        return value
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise FfmemError(f"expected {name} auto or a number of at least 1, found {value!r}")
    return count
