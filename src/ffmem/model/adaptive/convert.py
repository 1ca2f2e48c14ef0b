"""Write a model of the paper's kind anew: the original checkpoint as a Hugging Face folder, or any as 8-bit rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ffmem.model.adaptive import rows
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.loading import known_name, quiet_transformers, stored_model
from ffmem.words import ModelError


def convert(source: str | Path, out: str | Path, *, rows8: bool = False) -> Path:
    """Write the model at `source` to the folder `out` and return its path.

    `source` is a fairseq folder or one of a converted or trained model. `rows8` keeps every row of a matrix as 8-bit
    numbers and a scale: a quarter of the size, a little less exact. `out` must not exist; it appears whole or not at all.
    """
    target = Path(out).expanduser()
    if target.exists() or target.is_symlink():
        raise ModelError(f"expected a folder that is not there yet, found {target}; nothing is written over, name another")
    model, tokenizer = stored_model(known_name(source))
    if not isinstance(model, AdaptiveLM):
        raise ModelError(f"{source}: expected a model of the paper's kind (adaptive_lm), found a {type(model).__name__}")
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a conversion that was killed
        temporary.mkdir(parents=True)
        _write(temporary, model, tokenizer, rows8)
        temporary.rename(target)  # fails where someone made a folder with files, or a file, meanwhile
    except Exception as error:  # safetensors has an I/O error of its own
        raise ModelError(f"{target}: the model could not be written there ({error})") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(folder: Path, model: AdaptiveLM, tokenizer: Any, rows8: bool) -> None:
    with quiet_transformers():
        if rows8:
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            rows.save_rows(folder, model.state_dict())
        else:
            model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
