"""Load a model: the bundled one, a Hugging Face id, a folder, a GGUF file, or a module in memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from ffmem.model.adaptive.fairseq import is_fairseq, load_fairseq
from ffmem.model.adaptive.network import register
from ffmem.model.check import refuse_unless_sound
from ffmem.model.discovery import discover
from ffmem.model.families import FAMILIES, experts_of
from ffmem.model.identity import model_hash
from ffmem.model.memories import MemoryModel
from ffmem.model.process import Shared
from ffmem.words import ModelError

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
BUNDLED = {"wiki16": Path(__file__).with_name("wiki16")}
"""Models that come with ffmem, by their names."""


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

    `source` is `wiki16`, which comes with ffmem, a Hugging Face id, a local folder (the original model as fairseq wrote
    it too), a `.gguf` file, or a `PreTrainedModel` in memory (with its `tokenizer`). `device="auto"` takes a GPU where
    there is one; `dtype="auto"` is float32 on a CPU and the checkpoint's own on a GPU. A model in memory stays where and
    as it is, in eval mode; no weight is ever changed.
    """
    if isinstance(source, MemoryModel):
        _refuse_other(source, device, dtype)
        return source
    check_spread(device, device_map)
    in_memory = not isinstance(source, (str, Path))
    if in_memory:
        if not isinstance(source, transformers.PreTrainedModel):
            raise ModelError(f"expected a model id, a folder or a transformers model, found {type(source).__name__}")
        if tokenizer is None:
            raise ModelError(f"{type(source).__name__} is in memory: give its tokenizer too (tokenizer=...)")
        model, name = source, source.config._name_or_path or type(source).__name__
    else:
        name = known_name(source)
        model, loaded_tokenizer = stored_model(name, revision, device_map)
        tokenizer = tokenizer or loaded_tokenizer
    _refuse_unreadable(model.config, name)
    if model.get_output_embeddings() is None:
        raise ModelError(f"{name}: expected a language model, found a {type(model).__name__} without an unembedding")
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
        fingerprint=fingerprint,
    )
    refuse_unless_sound(loaded)
    return loaded


def known_name(source: str | Path) -> str:
    """A bundled model's name or an id as it is; a local folder or file by its absolute path, for a run to find it again."""
    if source in BUNDLED:
        return str(source)
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise ModelError(f"expected a model folder, found nothing at {source} ({error})") from error
    if path.exists():
        return str(path.resolve())
    looks_local = isinstance(source, Path) or str(source).startswith((".", "/", "~")) or str(source).endswith(".gguf")
    if looks_local or str(source).count("/") > 1:
        raise ModelError(f"expected a model folder or a .gguf file, found nothing at {source}")
    return str(source)


def stored_model(name: str, revision: str | None = None, device_map: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer in the dtype they were stored in."""
    folder = str(BUNDLED.get(name, name))
    if is_fairseq(Path(folder)):
        return load_fairseq(folder)
    where: dict[str, Any] = {"revision": revision} if revision else {}
    if name.endswith(".gguf"):
        where["gguf_file"] = Path(name).name
        folder = str(Path(name).parent)
    elif Path(folder).is_dir() and not (Path(folder) / "config.json").is_file():
        raise ModelError(
            f"{name}: expected config.json and weights of a transformers model, or fairseq's model.pt and dict.txt, "
            "found no config.json"
        )
    register()
    try:
        if "gguf_file" not in where:
            _refuse_unreadable(transformers.AutoConfig.from_pretrained(folder, **where), name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
        extra: dict[str, Any] = {"device_map": device_map} if device_map else {}
        with quiet_transformers():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", output_loading_info=True, **where, **extra
            )
    except ModelError:
        raise
    except ImportError as error:
        raise ModelError(f"{name}: loading it needs a package that is not installed ({_first_line(error)})") from error
    except Exception as error:  # transformers, tokenizers and safetensors raise many kinds, all of them about this name
        raise ModelError(
            f"{name}: expected a causal language model on disk or on the Hugging Face hub, found: {_first_line(error)}"
        ) from error
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ModelError(
            f"{name}: it does not fit on the devices there are, and weights off them cannot be read; use --dtype"
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{name}: expected weights for every part of the model, found none for {_few(missing)}")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(f"{name}: expected a tokenizer beside the weights, found one without words; add its files")
    return model, tokenizer


def _refuse_other(model: MemoryModel, device: str, dtype: str) -> None:
    """A model that is loaded stays as it is: an error where something else is asked for."""
    if dtype != "auto" and _dtype(dtype, model.device, model.dtype) != model.dtype:
        raise ModelError(f"{model.name} is loaded as {model.dtype}, found dtype {dtype!r}: load it so")
    if device != "auto" and device_of(device).type != model.device.type:
        raise ModelError(f"{model.name} is loaded on {model.device}, found device {device!r}: load it there")


def _refuse_unreadable(config: Any, name: str) -> None:
    """An error for what is known to be out of reach, by name."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is a {config.model_type}, an encoder with a decoder; only decoders are supported yet")
    if experts := experts_of(config):
        raise ModelError(
            f"{name} is a {config.model_type} with {experts} experts a layer; "
            "models with experts are not supported yet, use a dense one"
        )


def check_spread(device: str, device_map: str | None) -> None:
    """An error where a device is named for a model that is spread over all, or nothing is there to spread it."""
    if device_map and device not in ("auto", "cuda"):
        raise ModelError(
            f"device_map {device_map!r} spreads a model over all GPUs, found device {device!r} too: leave one out"
        )
    if device_map and not find_spec("accelerate"):
        raise ModelError(f"device_map {device_map!r} needs the accelerate package: pip install 'ffmem[multigpu]'")


def device_of(device: str) -> torch.device:
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
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else stored
    if dtype not in DTYPES:
        raise ModelError(f"expected dtype auto, {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[dtype]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0].rstrip(" :")


@Shared
@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' own progress bars and load reports off a user's screen."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()
