"""Load a model: a Hugging Face id, a folder, a GGUF file, or a module in memory."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from ffmem.model.check import refuse_unless_sound
from ffmem.model.discovery import discover
from ffmem.model.families import FAMILIES, experts_of
from ffmem.model.identity import model_hash
from ffmem.model.memories import MemoryModel
from ffmem.words import ModelError

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
) -> MemoryModel:
    """Load a causal transformer and check that its memories can be read.

    `source` is a Hugging Face id, a local folder, a `.gguf` file, or a `PreTrainedModel` in memory (with its
    `tokenizer`). `device="auto"` takes a GPU where there is one; `dtype="auto"` is float32 on a CPU and the
    checkpoint's own on a GPU. The model is never changed.
    """
    if isinstance(source, MemoryModel):
        return source
    in_memory = not isinstance(source, (str, Path))
    if in_memory:
        if not isinstance(source, transformers.PreTrainedModel):
            raise ModelError(f"expected a model id, a folder or a transformers model, found {type(source).__name__}")
        if tokenizer is None:
            raise ModelError(f"{type(source).__name__} is in memory: give its tokenizer too (tokenizer=...)")
        model, name = source, source.config._name_or_path or type(source).__name__
        _refuse_experts(model.config, name)
    else:
        name = _name(source)
        model, loaded_tokenizer = _from_pretrained(name, revision, device_map)
        tokenizer = tokenizer or loaded_tokenizer
    model.eval()
    keep = in_memory and device == "auto"
    target = model.device if device_map or keep else torch.device(_device(device))
    wanted = model.dtype if in_memory and dtype == "auto" else _dtype(dtype, target, model.dtype)
    fingerprint = cache(lambda: model_hash(model))
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
        fingerprint=fingerprint,
    )
    refuse_unless_sound(loaded)
    return loaded


def _name(source: str | Path) -> str:
    """An id as it is; a local folder or file by its absolute path, so that a run can find it again."""
    path = Path(source).expanduser()
    if path.exists():
        return str(path.resolve())
    looks_local = isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).endswith(".gguf")
    if looks_local or str(source).count("/") > 1:
        raise ModelError(f"expected a model folder or a .gguf file, found nothing at {source}")
    return str(source)


def _from_pretrained(name: str, revision: str | None, device_map: str | None) -> tuple[Any, Any]:
    """Model and tokenizer in the dtype they were stored in."""
    where: dict[str, Any] = {"revision": revision} if revision else {}
    if name.endswith(".gguf"):
        where["gguf_file"] = Path(name).name
        name = str(Path(name).parent)
    elif (folder := Path(name)).is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: expected config.json and weights of a transformers model, found no config.json")
    try:
        if "gguf_file" not in where:
            config = transformers.AutoConfig.from_pretrained(name, **where)
            _refuse_experts(config, name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **where)
        extra: dict[str, Any] = {"device_map": device_map} if device_map else {}
        with _Quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto", **where, **extra)
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"{name}: loading it needs a package that is not installed ({_first_line(error)})") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"{name}: expected a causal language model on disk or on the Hugging Face hub, found: {_first_line(error)}"
        ) from error
    return model, tokenizer


def _refuse_experts(config: Any, name: str) -> None:
    if experts := experts_of(config):
        raise ModelError(
            f"{name} is a {config.model_type} with {experts} experts a layer; "
            "models with experts are not supported yet, use a dense one"
        )


def _device(device: str) -> str:
    if device != "auto":
        try:
            known = torch.device(device)
        except RuntimeError as error:
            raise ModelError(f"expected a device such as cpu, cuda or cuda:1, found {device!r}") from error
        if known.type == "cuda" and not torch.cuda.is_available():
            raise ModelError(f"{device} was asked for, but torch {torch.__version__} sees no CUDA device; use --device cpu")
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _dtype(dtype: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else stored
    if dtype not in DTYPES:
        raise ModelError(f"expected dtype auto, {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[dtype]


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0].rstrip(" :")


class _Quiet:
    """Keep transformers' own progress bars and load reports off a user's screen."""

    def __enter__(self) -> None:
        self.level = transformers.logging.get_verbosity()
        self.bars = transformers.logging.is_progress_bar_enabled()
        transformers.logging.set_verbosity(logging.ERROR)
        transformers.logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers.logging.set_verbosity(self.level)
        if self.bars:
            transformers.logging.enable_progress_bar()
