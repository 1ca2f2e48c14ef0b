"""Whether a model's sizes can be true: a config is compared with the weights beside it before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf, prod
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers

from ffmem.errors import ModelError
from ffmem.model.archive import bytes_of_archive
from ffmem.model.names import Place
from ffmem.text import visible

MOST_LAYERS = 1_024
MOST = 1 << 24
"""Of any other size of a config; 16 million, which no vocabulary and no width comes near."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WIDTHS = (
    *("vocab_size", "hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "head_dim", "d_kv", "embedding_size"),
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"),
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_key_value_heads", "num_kv_heads"),
)
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_LIMITS = dict.fromkeys(_LAYERS, MOST_LAYERS) | dict.fromkeys(_WIDTHS, MOST) | dict.fromkeys(_POSITIONS, 1 << 31)
PACKED = 8
"""Numbers that a byte, or a stored number, holds at most where weights are quantized."""
SLACK = 1 << 26
"""Weights that may be missing in any case: transformers then names the part that they are missing for."""
TABLES = 1 << 30
"""Numbers that a model may compute and keep beside its weights: masks, sinusoids."""


def refuse_mad_sizes(config: Mapping[str, Any], name: str) -> None:
    """An error where a config, as it is written, has a size that is no whole number or that no model has.

    A config's class may already make lists as long as these numbers say, so they are looked at before it is.
    """
    for path, key, value in _walk(config):
        where = f"{visible(name)}: expected {visible(path)} to be"
        if key in _LIMITS and (isinstance(value, (bool, str)) or (isinstance(value, float) and value % 1)):
            raise ModelError(f"{where} a whole number, found {visible(repr(value))[:60]}")
        # Other names of layers are counts, places or lists of places.
        most = _LIMITS.get(key) or (MOST_LAYERS if key.endswith(("_layer", "_layers")) else inf)
        if isinstance(value, (int, float)) and not (1 if key in _LIMITS else -inf) <= value <= most:
            least = "1 to" if key in _LIMITS else "at most"
            raise ModelError(f"{where} {least} {most:,}, found {value:,}; the config is damaged")


def _walk(config: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of everything in a config that is neither a table nor a list."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{above}{key}.")
        elif key == "attention_types":  # of gpt_neo: kinds of layers, and how often they come again
            yield from ((f"{above}{key}", "repeated_layers", times) for times in _numbers(value))
        else:
            yield f"{above}{key}", str(key), value


def _numbers(value: Any) -> Iterator[int | float]:
    for part in value if isinstance(value, list) else ():
        if isinstance(part, (int, float)):
            yield part
        else:
            yield from _numbers(part)


def empty_model(config: Any, name: str) -> Any:
    """The model that a config describes, with shapes and without numbers."""
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # sizes that do not go together reach torch and transformers as many kinds
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"{visible(name)}: expected a causal language model whose sizes go together, found: {visible(why)[:200]}"
        ) from error


def refuse_larger_than_files(config: Any, name: str, place: Place) -> None:
    """An error where a config describes more weights than the files beside it hold, so that nothing is made for them."""
    held = _held(place)
    if not held:
        return  # no weights, or none here yet: transformers says so
    if getattr(config, "quantization_config", None) is not None:
        held *= PACKED
    empty = empty_model(config, name)
    described = sum(one.numel() for one in empty.parameters())
    if described > 2 * held + SLACK:
        raise ModelError(
            f"{visible(name)}: expected as many weights as the config says ({_named(config)}: {described:,}), "
            f"found files for {held:,} at most; one of them is damaged or of another model"
        )
    if (tables := sum(one.numel() for one in empty.buffers())) > held + TABLES:
        raise ModelError(f"{visible(name)}: its config describes tables of {tables:,} numbers beside {described:,} weights")


def _named(config: Any) -> str:
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    return ", ".join(f"{name} {value:,}" for name, value in sizes.items() if isinstance(value, int))


def _held(place: Place) -> int:
    """How many numbers the weight files of a place hold at most; 0 where there are none on disk."""
    if place.gguf:
        return PACKED * place.gguf.stat().st_size
    folder = Path(place.folder)
    if files := sorted(folder.glob("*.safetensors")):
        return sum(map(_numbers_of, files))
    return sum(map(bytes_of_archive, sorted(folder.glob("*.bin"))))


def _numbers_of(path: Path) -> int:
    """All numbers of a safetensors file, by its header, which is as true as the file is long."""
    with safetensors.safe_open(path, framework="pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
