"""Write a model anew: the original checkpoint or a GGUF file as a Hugging Face folder, the paper's kind as 8-bit rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ffmem.atomic import atomic_folder
from ffmem.errors import ModelError
from ffmem.model.adaptive import rows
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.loading import quiet_transformers, stored_model
from ffmem.model.names import known_name
from ffmem.text import visible


def convert(source: str | Path, out: str | Path, *, rows8: bool = False) -> Path:
    """Write the model at `source` to the folder `out` and return its path.

    `source` is a fairseq folder, one of a converted or trained model, or a `.gguf` file, whose weights are written as
    floats. `rows8` keeps every row of a matrix as 8-bit numbers and a scale: a quarter of the size, a little less exact.
    `out` must not exist; it appears whole or not at all.
    """
    target = Path(out).expanduser()
    if target.exists() or target.is_symlink():
        raise ModelError(f"expected a folder that is not there yet, found {target}; nothing is written over, name another")
    name = known_name(source)
    model, tokenizer = stored_model(name)
    if not isinstance(model, AdaptiveLM) and (rows8 or not name.endswith(".gguf")):
        kinds = "a model of the paper's kind (adaptive_lm)" + ("" if rows8 else " or a .gguf file")
        raise ModelError(f"{visible(str(source))}: expected {kinds}, found a {type(model).__name__}")
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)  # of a GGUF file, whose weights are plain numbers by now
    try:
        with atomic_folder(target) as folder:
            try:
                _write(folder, model, tokenizer, rows8)
            except Exception as error:  # safetensors has an I/O error of its own, which names no file
                raise ModelError(f"{_last(folder, target)}: the model could not be written there ({error})") from error
    except OSError as error:
        raise ModelError(f"{target}: the model could not be written there ({error})") from error
    return target


def _write(folder: Path, model: Any, tokenizer: Any, rows8: bool) -> None:
    with quiet_transformers():
        if rows8:
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            rows.save_rows(folder, model.state_dict())
        else:
            model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _last(folder: Path, target: Path) -> Path:
    """The file in `folder` that was written last, by the name that it would have had in `target`."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return target / max(files, key=lambda path: path.stat().st_mtime_ns).relative_to(folder) if files else target
