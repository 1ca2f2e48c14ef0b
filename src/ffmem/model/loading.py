"""Load a model: the bundled one, a Hugging Face id, a folder, a GGUF file, or a module in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from ffmem.errors import ModelError
from ffmem.model.adaptive.fairseq import load_fairseq
from ffmem.model.adaptive.network import register
from ffmem.model.check import refuse_unfit_tokenizer, refuse_unless_sound
from ffmem.model.config_check import (
    READ,
    first_line,
    refuse_headless,
    refuse_larger_than_files,
    refuse_mad_sizes,
    refuse_other_kinds,
)
from ffmem.model.discovery import discover
from ffmem.model.families import FAMILIES
from ffmem.model.identity import model_hash
from ffmem.model.memories import MemoryModel
from ffmem.model.names import Location, is_fairseq, known_name, locate
from ffmem.model.process import Shared, parsed_once
from ffmem.text import visible

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def load_model(
    source: str | Path | Any,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
) -> MemoryModel:
    """Load a causal transformer and check that its memories can be read.

    `source` is `wiki16`, which comes with ffmem, a Hugging Face id, a local folder (the original model as fairseq wrote
    it too), a `.gguf` file, or a `PreTrainedModel` in memory (with its `tokenizer`). `device="auto"` takes a GPU where
    there is one; `dtype="auto"` is float32 on a CPU and the checkpoint's own on a GPU. A model in memory stays where and
    as it is, in eval mode; no weight is ever changed. `trust_remote_code=True` runs Python code that comes with the model.
    """
    refuse_wrong_settings(
        tokenizer=tokenizer, revision=revision, device=device, dtype=dtype, device_map=device_map, trust=trust_remote_code
    )
    if isinstance(source, MemoryModel):
        _refuse_other(source, device, dtype)
        return source
    check_device_map(device, device_map)
    in_memory = not isinstance(source, (str, Path))
    if in_memory:
        if not isinstance(source, transformers.PreTrainedModel):
            raise ModelError(f"expected a model id, a folder or a transformers model, found {type(source).__name__}")
        model, name = source, source.config._name_or_path or type(source).__name__
        refuse_other_kinds(model.config, name)
        if tokenizer is None:
            raise ModelError(f"{type(source).__name__} is in memory: give its tokenizer too (tokenizer=...)")
    else:
        name = known_name(source)
        device_of(device)  # a device that is not there is told before weights are read for it
        model, loaded_tokenizer = stored_model(
            name, revision, device_map, tokenizer=tokenizer, trust_remote_code=trust_remote_code
        )
        tokenizer = tokenizer or loaded_tokenizer
    if model.get_output_embeddings() is None:
        raise ModelError(f"{name} is a {type(model).__name__}, a trunk without an unembedding; {READ}")
    refuse_unfit_tokenizer(tokenizer, model, name)
    model.eval()
    keep = in_memory and device == "auto"
    target = model.device if device_map or keep else device_of(device)
    wanted = model.dtype if in_memory and dtype == "auto" else _dtype(dtype, target, model.dtype)
    # A caller may change a model in memory between two calls; one that was loaded here is ours.
    fingerprint = partial(model_hash, model) if in_memory else cache(partial(model_hash, model))
    if in_memory and (wanted != model.dtype or target.type != model.device.type):
        raise ModelError(
            f"{name} is in memory as {model.dtype} on {model.device.type} and is not changed there: "
            f"move it first with model.to({target.type!r}, {wanted})"
        )
    if wanted != model.dtype:
        fingerprint()  # identity is that of the weights as they were stored
        model.to(wanted)
    if not device_map and model.device != target:
        model.to(target)
    row = FAMILIES.get(model.config.model_type)
    loaded = MemoryModel(
        model=model,
        tokenizer=tokenizer,
        family=row.for_config(model.config) if row else discover(model),
        name=name,
        revision=revision,
        found_by_shape=row is None,
        in_memory=in_memory,
        trust_remote_code=trust_remote_code,
        fingerprint=fingerprint,
    )
    refuse_unless_sound(loaded)
    return loaded


def stored_model(
    name: str,
    revision: str | None = None,
    device_map: str | None = None,
    *,
    tokenizer: Any = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A stored model in the dtype it was stored in, and its tokenizer: the one given or the one beside the weights."""
    location = locate(name, revision=revision, trust_remote_code=trust_remote_code)
    if is_fairseq(Path(location.folder)) and not location.gguf:
        return load_fairseq(location.folder)
    register()
    with parsed_once() if location.gguf else nullcontext(), quiet_transformers():
        config = read_config(location, name)
        try:
            if tokenizer is None:
                tokenizer = _tokenizer(location, name)
            if not trust_remote_code:
                refuse_larger_than_files(config, name, location)
            extra: dict[str, Any] = {"device_map": device_map} if device_map else {}
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                location.folder, dtype="auto", output_loading_info=True, **location.arguments, **extra
            )
        except ModelError:
            raise
        except Exception as error:  # transformers, tokenizers and safetensors raise many kinds, all of them about this name
            raise unloadable(error, name) from error
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ModelError(
            f"{name}: it does not fit on the devices there are, and weights off them cannot be read; use --dtype"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{name}: expected weights for every part of the model, found none for {_first_names(missing)}")
    return model, tokenizer


def read_config(location: Location, name: str) -> Any:
    """A stored model's config; an error if its sizes cannot be true or ffmem does not read its kind."""
    try:
        with quiet_transformers():
            own = {key: value for key, value in location.arguments.items() if key != "trust_remote_code"}
            refuse_mad_sizes(transformers.PreTrainedConfig.get_config_dict(location.folder, **own)[0], name)
            config = transformers.AutoConfig.from_pretrained(location.folder, **location.arguments)
    except ModelError:
        raise
    except Exception as error:  # transformers raises many kinds here too
        raise unloadable(error, name) from error
    refuse_other_kinds(config, name)
    refuse_headless(config, name)
    return config


def _tokenizer(location: Location, name: str) -> Any:
    """The tokenizer beside a model's weights; an error that says so, not transformers' own, if it has no file at all."""
    kinds = ("*token*", "vocab*", "merges*", "*.model", "*.py")
    if (
        not location.gguf
        and Path(location.folder).is_dir()
        and not any(any(Path(location.folder).glob(kind)) for kind in kinds)
    ):
        raise ModelError(
            f"{visible(name)}: expected a tokenizer beside the weights, found none of its files (such as tokenizer.json); "
            "add them, or in Python give tokenizer="
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(location.folder, **location.arguments)
    except Exception as error:  # transformers and tokenizers raise many kinds here too
        raise unloadable(error, name, expected="a tokenizer beside the weights") from error


def unloadable(
    error: Exception, name: str, *, expected: str = "a causal language model on disk or on the Hugging Face hub"
) -> ModelError:
    """An error of one line for a model that transformers cannot load, made from transformers' own error."""
    why = visible(first_line(error))
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{visible(name)} brings Python code of its own, which is not run; if you have read it and trust it, "
            "say --trust-remote-code (in Python trust_remote_code=True)"
        )
    if isinstance(error, ImportError):
        return ModelError(f"{visible(name)}: loading it needs a package that is not installed ({why})")
    return ModelError(f"{visible(name)}: expected {expected}, found: {why[:300]}")


def refuse_wrong_settings(
    *, tokenizer: Any, revision: Any, device: Any, dtype: Any, device_map: Any, trust: Any = False
) -> None:
    """Raise an error for a setting of `load_model` that is of the wrong type, and for an unknown dtype."""
    for what, value, example in (
        ("revision", revision, "'main'"),
        ("device", device, "'cpu'"),
        ("dtype", dtype, "'float16'"),
        ("device_map", device_map, "'auto'"),
    ):
        if not isinstance(value, str) and not (value is None and what in ("revision", "device_map")):
            raise ModelError(f"expected {what} to be a name such as {example}, found {visible(repr(value))[:60]}")
    if not isinstance(trust, bool):
        raise ModelError(f"expected trust_remote_code to be True or False, found {visible(repr(trust))[:60]}")
    if dtype != "auto":
        _dtype(dtype, torch.device("cpu"), torch.float32)
    if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "get_vocab")):
        raise ModelError(f"expected a transformers tokenizer, found {visible(repr(tokenizer))[:60]}")


def _refuse_other(model: MemoryModel, device: str, dtype: str) -> None:
    """Raise an error where a model that is loaded already is wanted on another device or in another dtype."""
    if dtype != "auto" and _dtype(dtype, model.device, model.dtype) != model.dtype:
        raise ModelError(f"{model.name} is loaded as {model.dtype}, found dtype {dtype!r}: load it so")
    if device != "auto" and device_of(device).type != model.device.type:
        raise ModelError(f"{model.name} is loaded on {model.device}, found device {device!r}: load it there")


def check_device_map(device: str, device_map: str | None) -> None:
    """Raise an error where a device and a device map exclude each other, or accelerate, which maps devices, is missing."""
    if device_map and device not in ("auto", "cuda"):
        raise ModelError(
            f"device_map {device_map!r} spreads a model over all GPUs, found device {device!r} too: leave one out"
        )
    if device_map and not find_spec("accelerate"):
        raise ModelError(f"device_map {device_map!r} needs the accelerate package: pip install 'ffmem[multigpu]'")


def device_of(device: str) -> torch.device:
    """The torch device of this name, `auto` being a GPU if there is one; an error if torch cannot use it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        known = torch.device(device)
    except RuntimeError as error:
        raise ModelError(f"expected a device such as cpu, cuda or cuda:1, found {device!r}") from error
    try:
        torch.empty(0, device=known)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(
            f"{device} was asked for, but torch {torch.__version__} sees no such device "
            f"(CUDA devices: {torch.cuda.device_count()}); use --device cpu"
        ) from error
    return known


def _dtype(dtype: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The torch dtype of this name; `auto` is float32 on a CPU and the stored dtype elsewhere."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else stored
    if dtype not in DTYPES:
        raise ModelError(f"expected dtype auto, {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[dtype]


def _first_names(names: list[str]) -> str:
    """The first three names of a list and how many more there are, for an error."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@Shared
@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers shows neither progress bars nor load reports."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
