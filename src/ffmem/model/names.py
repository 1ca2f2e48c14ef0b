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
from ffmem.text import visible

BUNDLED = {"wiki16": Path(__file__).with_name("wiki16")}
"""The folder of each model that comes with ffmem, by the model's name."""
HUB_SECONDS = 5.0
"""How long the hub may take to answer whether it has a model."""
_ENDINGS = (
    ".gguf",
    ".pt",
    ".bin",
    ".safetensors",
    ".json",
    ".txt",
    ".tokens",
    ".gz",
    ".xz",
    ".zst",
    ".jsonl",
    ".parquet",
)
"""Endings of file names, which no name of a model on the hub has."""


@dataclass(frozen=True)
class Location:
    """Where transformers finds a model: `folder` (or a hub id) and keyword arguments for every `from_pretrained`."""

    folder: str
    arguments: dict[str, Any]

    @property
    def gguf(self) -> Path | None:
        """The path of the model's GGUF file; None for a model in any other format."""
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
    looks_local = isinstance(source, Path) or source.startswith((".", "/", "~")) or source.lower().endswith(_ENDINGS)
    if looks_local or str(source).count("/") > 1 or "\\" in str(source):
        raise ModelError(f"expected a model folder or a .gguf file, found nothing at {visible(str(source))}")
    return str(source)


def locate(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Location:
    """Where to read the model of a name that `known_name` gave; an error where it is neither on disk nor on the hub.

    Code that a folder brings with it is never run unless that is allowed: transformers is always told, and so never asks.
    The hub is asked once and given a few seconds; if it does not answer, the model has to be in the cache.
    """
    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision:
        arguments["revision"] = revision
    if name.endswith(".gguf"):
        return Location(str(Path(name).parent), arguments | {"gguf_file": Path(name).name})
    folder = str(BUNDLED.get(name, name))
    if not Path(folder).is_dir():
        return Location(folder, arguments | _on_hub(name, revision))
    if not (Path(folder) / "config.json").is_file() and not is_fairseq(Path(folder)):
        raise ModelError(
            f"{visible(name)}: expected config.json and weights of a transformers model, or fairseq's model.pt and "
            "dict.txt, found no config.json"
        )
    return Location(folder, arguments)


def refuse_swapped(model: str, others: Sequence[str]) -> None:
    """Raise an error where a command's arguments are swapped: a text was given as the model, and a model as the text."""
    texts = model == "pocket" or any(sign.isspace() for sign in model) or model.lower().endswith(_ENDINGS) or _is_file(model)
    for other in others:
        if texts and _is_model(other) and not _is_model(model):
            raise ModelError(f"{visible(other)} is a model and {visible(model)} a text: the other way round?")


def is_fairseq(folder: Path) -> bool:
    """Whether a folder holds a fairseq language model rather than a transformers one."""
    files = ((folder / name).is_file() for name in ("model.pt", "dict.txt"))
    return all(files) and not (folder / "config.json").exists()


def _is_file(name: str) -> bool:
    """Whether there is a file of this name; a name that the file system does not take is none."""
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
    """Arguments that keep transformers to the cache if the hub does not answer; an error if neither has the model."""
    try:
        validate_repo_id(name)
    except errors.HFValidationError as error:
        raise ModelError(
            f"{visible(name)}: expected a model folder that is there or a Hugging Face id such as `gpt2` or `org/name`, "
            "found neither"
        ) from error
    try:
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
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
