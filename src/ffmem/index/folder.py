"""The run folder: files written whole or not at all, a manifest that knows their hashes, one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ffmem.words import RunError

FORMAT = 1
MANIFEST, WORK, LOG = "manifest.json", "work", "log.jsonl"
RESULTS = "results"
"""The folder of what experiments found."""
PAGE, FIGURES = "report.html", "figures"
"""The report of a run."""
TRIGGERS, CELLS, SENTENCES, TOKENS, VALUES = (
    f"{name}.arrow" for name in ("triggers", "cells", "sentences", "tokens", "values")
)
TABLES = (TRIGGERS, CELLS, SENTENCES, TOKENS, VALUES)
"""Every name that a run may hold; the manifest goes last when a run is deleted."""
REQUIRED = {"state", "model", "tokenizer", "corpus", "settings", "environment"}

_verified: dict[Path, tuple[int, int, int, str]] = {}
"""Files whose hash this process has checked: inode, size, time of change, hash."""


class RunFolder:
    """A folder that holds one run. The manifest says `building` until all files are in place."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.work = self.path / WORK

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, None where there is no run; an error where it cannot be understood."""
        file = self.path / MANIFEST
        try:
            manifest = json.loads(file.read_text("utf-8"))
            version = manifest["format"]
            seal = manifest.pop("hash", None)
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise RunError(f"expected a run folder, found a file at {self.path}") from error
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{file}: damaged, not an ffmem manifest ({error}); start over with --overwrite") from error
        if version != FORMAT:
            raise RunError(f"{file}: expected format {FORMAT}, found {version}; read it with the ffmem that wrote it")
        if seal != _seal(manifest) or not manifest.keys() >= REQUIRED:
            raise RunError(f"{file}: altered since it was written (its hash differs); start over with --overwrite")
        return manifest

    def complete(self) -> dict[str, Any]:
        """The manifest of a finished run, all of whose files are as they were written."""
        manifest = self.manifest()
        if manifest is None:
            what = "an empty folder or other files" if self.path.is_dir() else "nothing"
            raise RunError(f"{self.path}: expected a run folder (with {MANIFEST}), found {what}; make one with ffmem index")
        if manifest["state"] != "complete":
            raise RunError(f"{self.path}: this run is not finished; give the same ffmem index command again to continue it")
        for name, expected in manifest["files"].items():
            self._verify(name, expected)
        return manifest

    def _verify(self, name: str, expected: dict[str, Any]) -> None:
        file = (self.path / name).absolute()
        try:
            stat = file.stat()
        except FileNotFoundError as error:
            raise RunError(f"{file}: missing from the run; build the run again (--overwrite)") from error
        if stat.st_size != expected["bytes"]:
            raise RunError(f"{file}: truncated or altered: {stat.st_size:,} bytes, expected {expected['bytes']:,}")
        mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns, expected["sha256"])
        if _verified.get(file) != mark:
            if file_hash(file) != expected["sha256"]:
                raise RunError(f"{file}: altered since it was written (its hash differs); build the run again (--overwrite)")
            _verified[file] = mark

    def _parts(self) -> list[Path]:
        """What of a run lies here, whole or half written, the manifest last."""
        names = [*TABLES, LOG, MANIFEST]
        files = [self.path / f"{name}{ending}" for name in names for ending in (".tmp", "")]
        return [
            path for path in (self.work, self.path / RESULTS, self.path / FIGURES, self.path / PAGE, *files) if path.exists()
        ]

    def clear(self) -> None:
        """Delete the run, and nothing that is not part of it; a folder that was never a run is left alone."""
        parts = self._parts()
        foreign = set(self.path.iterdir()) - set(parts) if self.path.is_dir() else set()
        if foreign and not (self.path / MANIFEST).exists():
            raise RunError(f"{self.path} exists and is not an ffmem run: choose another folder")
        for path in parts:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        whole = {**manifest, "format": FORMAT}
        text = json.dumps({**whole, "hash": _seal(whole)}, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        with self.writing(MANIFEST) as temporary:
            temporary.write_text(text, "utf-8")

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A temporary path; when the block ends well it is synced and takes the name."""
        target = self.path / name
        temporary = target.with_name(target.name + ".tmp")
        try:
            yield temporary
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
            os.replace(temporary, target)
            _sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def described(self, *names: str) -> dict[str, dict[str, Any]]:
        """Size and hash of files, as the manifest holds them."""
        files = {}
        for name in names:
            file = self.path / name
            files[name] = {"bytes": file.stat().st_size, "sha256": file_hash(file)}
        return files

    def log(self, event: str, **facts: Any) -> None:
        """Note times and other things that differ from run to run."""
        with (self.path / LOG).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "event": event, **facts}) + "\n")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the only writer. The lock is on the folder itself and ends with the process, however that ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise RunError(f"expected a folder for the run, found a file at {self.path}") from error
        except OSError as error:
            raise RunError(f"{self.path}: cannot be made: {error.strerror}") from error
        try:
            import fcntl
        except ImportError:  # Windows has no flock
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(
                    f"{self.path}: another process is writing this run; wait for it or choose another folder"
                ) from error
            except OSError:
                pass  # a file system without locks
            yield
        finally:
            os.close(handle)

    def disk_use(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def _seal(manifest: dict[str, Any]) -> str:
    """The hash of a manifest, which it carries itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
