"""Checks of a stored model's config before anything is allocated: ffmem reads its kind, and its sizes can be true."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from math import inf, prod
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from transformers.models.auto import modeling_auto as auto

from ffmem.errors import ModelError
from ffmem.model.families import FAMILIES
from ffmem.model.names import Location
from ffmem.text import visible

READ = "ffmem reads decoders that predict the next token, with one dense feed-forward layer a block"

# What a model that cannot be a causal language model is, by the first of transformers' tables that knows its type.
_OTHERS = (
    ("a model of pictures and text", auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ("a model of pictures and text", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ("a vision model", auto.MODEL_FOR_IMAGE_MAPPING_NAMES),
    ("a vision model", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ("a speech model", auto.MODEL_FOR_CTC_MAPPING_NAMES),
    ("a speech model", auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
    ("an encoder, which reads both ways", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
)

MOST_LAYERS = 1_024
MOST_WIDTH = 1 << 24
"""The largest size of anything but layers and positions in a config; no vocabulary and no width comes near 16 million."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WIDTHS = (
    *("vocab_size", "hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "head_dim", "d_kv", "embedding_size"),
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"),
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_key_value_heads", "num_kv_heads"),
)
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_LIMITS = dict.fromkeys(_LAYERS, MOST_LAYERS) | dict.fromkeys(_WIDTHS, MOST_WIDTH) | dict.fromkeys(_POSITIONS, 1 << 31)
PACKED = 8
"""How many weights one byte, or one stored number, holds at most where weights are quantized."""
MISSING = 1 << 26
"""How many weights may be missing from the files: transformers then names the part that lacks them."""
TABLES = 1 << 30
"""How many numbers that are no weights, such as masks and sinusoids, a model may keep in any case."""


# ---- its kind


def refuse_other_kinds(config: Any, name: str) -> None:
    """Raise an error that says what a model is if ffmem does not read its kind; an unknown type passes."""
    if kind := _kind(config):
        raise ModelError(f"{visible(name)} is a {visible(str(config.model_type))}, {kind}; {READ}")


def _kind(config: Any) -> str | None:
    """What the model of a config is, in words, if ffmem does not read that kind; None for a decoder or an unknown type."""
    own = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder with a decoder"
    if experts := experts_of(config):
        return f"a decoder with {experts} experts a layer"
    if own in FAMILIES:
        return None
    if own not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return next((kind for kind, types in _OTHERS if own in types), None)
    # An encoder that can be made a decoder says whether it was: `xlm` by `causal`, all others by `is_decoder`.
    one_way = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    return None if one_way or own not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES else "an encoder, which reads both ways"


def refuse_headless(config: Any, name: str) -> None:
    """Raise an error for a model that was saved without an unembedding and does not use its embeddings as one."""
    stored = (getattr(config, "architectures", None) or [""])[0]
    if (
        stored
        and auto.MODEL_MAPPING_NAMES.get(config.model_type) == stored
        and not getattr(config, "tie_word_embeddings", False)
    ):
        raise ModelError(f"{visible(name)} is a {stored}, a trunk without an unembedding, so it predicts no token; {READ}")


def experts_of(config: object) -> int:
    """The number of experts in a feed-forward layer of a model with this config; 0 for a dense model.

    >>> experts_of(type("Config", (), {"num_local_experts": 8}))
    8
    """
    parts = [config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)]
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    counts = [getattr(part, name, None) for part in parts if part is not None for name in names]
    return max((count for count in counts if isinstance(count, int) and count > 1), default=0)


# ---- its sizes


def refuse_mad_sizes(config: Mapping[str, Any], name: str) -> None:
    """Raise an error where a stored config has a size that is no whole number or that no model has.

    transformers' config classes may make lists as long as these numbers say, so the file's own text is checked.
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
    """(dotted path, key, value) of every single value in a config; lists are passed over."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{above}{key}.")
        elif key == "attention_types":  # of gpt_neo: kinds of layers, and how often they come again
            yield from ((f"{above}{key}", "repeated_layers", times) for times in _numbers(value))
        else:
            yield f"{above}{key}", str(key), value


def _numbers(value: Any) -> Iterator[int | float]:
    """All numbers of a list of lists, depth first; nothing for a value that is no list."""
    for part in value if isinstance(value, list) else ():
        if isinstance(part, (int, float)):
            yield part
        else:
            yield from _numbers(part)


def empty_model(config: Any, name: str) -> Any:
    """The model that a config describes, on the `meta` device: its tensors have shapes and no numbers."""
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # sizes that do not go together reach torch and transformers as many kinds
        why = visible(first_line(error))[:200]
        raise ModelError(
            f"{visible(name)}: expected a causal language model whose sizes go together, found: {why}"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's text without a colon at its end, or the name of the error's class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(" :")


def refuse_larger_than_files(config: Any, name: str, location: Location) -> None:
    """Raise an error where a config describes more weights than the files beside it hold, before any is allocated."""
    held = _held(location)
    if not held:
        return  # no weights, or none here yet: transformers says so
    if getattr(config, "quantization_config", None) is not None:
        held *= PACKED
    empty = empty_model(config, name)
    described = sum(one.numel() for one in empty.parameters())
    if described > 2 * held + MISSING:
        raise ModelError(
            f"{visible(name)}: expected as many weights as the config says ({_named(config)}: {described:,}), "
            f"found files for {held:,} at most; one of them is damaged or of another model"
        )
    if (tables := sum(one.numel() for one in empty.buffers())) > held + TABLES:
        raise ModelError(f"{visible(name)}: its config describes tables of {tables:,} numbers beside {described:,} weights")


def _named(config: Any) -> str:
    """The main sizes of a config, named as the config names them, for an error."""
    text = config.get_text_config()
    sizes = {name: getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size")}
    return ", ".join(f"{name} {value:,}" for name, value in sizes.items() if isinstance(value, int))


def _held(location: Location) -> int:
    """The largest number of weights that the files of a model can hold; 0 where there are none on disk."""
    if location.gguf:
        return PACKED * location.gguf.stat().st_size
    folder = Path(location.folder)
    if files := sorted(folder.glob("*.safetensors")):
        return sum(map(_numbers_of, files))
    return sum(map(bytes_of_archive, sorted(folder.glob("*.bin"))))


def _numbers_of(path: Path) -> int:
    """The number of weights in a safetensors file by its header, which opening it compares with the file's length."""
    with safetensors.safe_open(path, framework="pt") as file:
        return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def bytes_of_archive(path: Path) -> int:
    """The size of a torch file in bytes; an error if it unpacks to more than that, which no file that torch wrote does."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > size:
            raise ModelError(
                f"{visible(str(path))}: expected weights that are not compressed, found {size:,} bytes "
                f"that unpack to {unpacked:,}"
            )
    return size
