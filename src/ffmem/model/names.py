"""Where a model is found by its name: among the bundled ones, on disk, in the Hugging Face cache, on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from ffmem.errors import ModelError
from ffmem.model.adaptive.fairseq import is_fairseq
from ffmem.text import visible

BUNDLED = {"wiki16": Path(__file__).with_name("wiki16")}
"""Models that come with ffmem, by their names."""
PATIENCE = 5.0
"""Seconds for the hub to answer whether it has a model."""
_FILES = (".gguf", ".pt", ".bin", ".safetensors", ".json", ".txt", ".tokens", ".gz", ".xz", ".zst", ".jsonl", ".parquet")
"""What the name of a file ends with, and that of a model on the hub does not."""


@dataclass(frozen=True)
class Place:
    """Where transformers finds a model: the first argument of every `from_pretrained`, and the others."""

    folder: str
    arguments: dict[str, Any]

    @property
    def gguf(self) -> Path | None:
        """The GGUF file, if it is one."""
        file = self.arguments.get("gguf_file")
        return Path(self.folder, file) if file else None


def known_name(source: str | Path) -> str:
    """A bundled model's name or an id as it is; a local folder or file by its absolute path, for a run to find it again."""
    if source in BUNDLED:
        return str(source)
    if not str(source):
        raise ModelError("expected a model's name, a folder or a .gguf file, found an empty name")
    try:
        path = Path(source).expanduser()
        there = path.exists()
    except (RuntimeError, OSError, ValueError) as error:  # no such home, a name too long, a null byte
        raise ModelError(f"expected a model folder, found nothing at {visible(str(source))} ({error})") from error
    if there:
        if path.is_file() and path.suffix != ".gguf":
            raise ModelError(f"expected a model folder or a .gguf file, found the file {visible(str(source))}")
        return str(path.resolve())
    looks_local = isinstance(source, Path) or source.startswith((".", "/", "~")) or source.lower().endswith(_FILES)
    if looks_local or str(source).count("/") > 1 or "\\" in str(source):
        raise ModelError(f"expected a model folder or a .gguf file, found nothing at {visible(str(source))}")
    return str(source)


def place_of(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Place:
    """Where the model of this name, one that `known_name` gave, is to be read from.

    Code that a folder brings with it is never run unless that is allowed: transformers is always told, and so never asks.
    The hub is asked once and given a few seconds; where it is not reached, the cache has to do.
    """
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision:
        arguments["revision"] = revision
    if name.endswith(".gguf"):
        return Place(str(Path(name).parent), arguments | {"gguf_file": Path(name).name})
    folder = str(BUNDLED.get(name, name))
    if not Path(folder).is_dir():
        return Place(folder, arguments | _on_hub(name, revision))
    if not (Path(folder) / "config.json").is_file() and not is_fairseq(Path(folder)):
        raise ModelError(
            f"{visible(name)}: expected config.json and weights of a transformers model, or fairseq's model.pt and "
            "dict.txt, found no config.json"
        )
    return Place(folder, arguments)


def refuse_swapped(model: str, others: Sequence[str]) -> None:
    """An error where a command's arguments are in the wrong order: a text stands for the model, and a model for the text."""
    texts = model == "pocket" or any(sign.isspace() for sign in model) or model.lower().endswith(_FILES) or _is_file(model)
    for other in others:
        if texts and _is_model(other) and not _is_model(model):
            raise ModelError(f"{visible(other)} is a model and {visible(model)} a text: the other way round?")


def _is_file(name: str) -> bool:
    try:
        return Path(name).expanduser().is_file()
    except (RuntimeError, OSError, ValueError):
        return False


def _is_model(name: str) -> bool:
    """Whether a model of this name is bundled or on disk."""
    folder = Path(name)
    known = name in BUNDLED or (name.endswith(".gguf") and _is_file(name))
    return known or _is_file(str(folder / "config.json")) or (_is_file(str(folder / "model.pt")) and is_fairseq(folder))


def _on_hub(name: str, revision: str | None) -> dict[str, Any]:
    """The argument that keeps transformers to the cache where the hub is not reached; an error if neither has the model."""
    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise ModelError(
            f"{visible(name)}: expected a model folder that is there or a Hugging Face id such as `gpt2` or `org/name`, "
            "found neither"
        ) from error
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=PATIENCE)
        return {}
    except errors.RepositoryNotFoundError:
        why = "not on the hub (or it is private: `hf auth login`)"
    except errors.RevisionNotFoundError:
        why = f"on the hub, but without a revision {visible(str(revision))}"
    except errors.OfflineModeIsEnabled:
        why = "and the hub is not asked, because HF_HUB_OFFLINE is set"
    except Exception as error:  # no network, no such host, a proxy's answer, a timeout: all of them the same here
        why = f"and the hub is not reached ({(str(error).strip().splitlines() or [type(error).__name__])[0][:80]})"
    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision), str):
        return {"local_files_only": True}
    first, _, rest = name.partition("/")
    here = f" ({visible(first)} is a folder here, without {visible(rest)})" if rest and Path(first).is_dir() else ""
    raise ModelError(f"{visible(name)}: found no such folder{here}, not in the Hugging Face cache, {why}")
