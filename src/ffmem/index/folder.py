"""The run folder: files written whole or not at all, a manifest that knows their hashes, one writer at a time."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ffmem.index.lock import WRITER, Claim, folder_lock
from ffmem.index.store import UNFINISHED, ObjectStore, is_url, store_at
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
"""Every table that a run may hold."""
REQUIRED = {"state", "model", "tokenizer", "corpus", "settings", "environment"}

FOLDERS = (WORK, RESULTS, FIGURES)
PARTS = (*FOLDERS, PAGE, *(f"{name}{ending}" for name in (*TABLES, LOG, MANIFEST) for ending in (UNFINISHED, "")))
"""All that may lie in a run, whole or half written; the manifest goes last when a run is deleted."""

_verified: dict[Path, tuple[int, int, int, str]] = {}
"""Files whose hash this process has checked: inode, size, time of change, hash."""


class RunFolder:
    """A folder, local or in an object store, that holds one run. The manifest says `building` until all files are in place.

    Files go by names such as `work/shard-00003.arrow`. Processes may write different files of one run at the same time.

    >>> folder = RunFolder("memory://runs/example")
    >>> with folder.writing("work/a.txt") as path:
    ...     _ = path.write_text("whole")
    >>> folder.names("work"), folder.read_bytes("work/a.txt"), folder.file("work/a.txt").read_text()
    (['work/a.txt'], b'whole', 'whole')
    """

    def __init__(self, path: str | Path) -> None:
        self.files = files = store_at(path)
        self.path: Any = files.path  # a Path, or a URL as a string
        self.place, self.file, self.reading = files.place, files.file, files.reading
        self.read_bytes, self.exists, self.names, self.size = files.read_bytes, files.exists, files.names, files.size
        self.remove, self.remove_tree, self.disk_use = files.remove, files.remove_tree, files.used
        self._claim: Claim | None = None

    @property
    def work(self) -> Path:
        return self / WORK

    def __truediv__(self, name: str) -> Path:
        assert isinstance(self.path, Path), f"{self.path}: not on this machine, use file() or writing()"
        return self.path / name

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, None where there is no run; an error where it cannot be understood."""
        file = self.place(MANIFEST)
        try:
            manifest = json.loads(self.read_bytes(MANIFEST).decode("utf-8"))
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
        """The manifest of a finished run, all of whose files are as they were written.

        In an object store only their sizes are looked at here, their hashes when they are fetched (`table`).
        """
        manifest = self.manifest()
        if manifest is None:
            what = "an empty folder or other files" if self.files.entries() is not None else "nothing"
            raise RunError(f"{self.path}: expected a run folder (with {MANIFEST}), found {what}; make one with ffmem index")
        if manifest["state"] != "complete":
            raise RunError(f"{self.path}: this run is not finished; give the same ffmem index command again to continue it")
        for name, expected in manifest["files"].items():
            if is_url(self.path):
                self._sized(name, expected)
            else:
                self._verified(name, expected)
        return manifest

    def _sized(self, name: str, expected: dict[str, Any]) -> None:
        try:
            size = self.size(name)
        except FileNotFoundError as error:
            raise RunError(f"{self._shown(name)}: missing from the run; build the run again (--overwrite)") from error
        if size != expected["bytes"]:
            raise RunError(f"{self._shown(name)}: truncated or altered: {size:,} bytes, expected {expected['bytes']:,}")

    def table(self, name: str, expected: dict[str, Any]) -> Path:
        """A local path with a table of a run that is `complete`, for mapping."""
        return self._verified(name, expected) if is_url(self.path) else self.file(name)

    def _verified(self, name: str, expected: dict[str, Any]) -> Path:
        self._sized(name, expected)
        file = self.file(name).absolute()
        mark = _mark(file, expected["sha256"])
        if _verified.get(file) != mark:
            if file_hash(file) != expected["sha256"]:
                place = self._shown(name)
                raise RunError(
                    f"{place}: altered since it was written (its hash differs); build the run again (--overwrite)"
                )
            _verified[file] = mark
        return file

    def _shown(self, name: str) -> Path | str:
        place = self.place(name)
        return place.absolute() if isinstance(place, Path) else place

    def clear(self) -> None:
        """Delete the run, and nothing that is not part of it; a folder that was never a run is left alone."""
        entries = self.files.entries() or set()
        if entries - {*PARTS, WRITER} and MANIFEST not in entries:
            raise RunError(f"{self.path} exists and is not an ffmem run: choose another folder")
        for name in PARTS:
            if name in entries:
                (self.remove_tree if name in FOLDERS else self.remove)(name)

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        whole = {**manifest, "format": FORMAT}
        text = json.dumps({**whole, "hash": _seal(whole)}, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        with self.writing(MANIFEST) as temporary:
            # What UTF-8 lacks are halves of names that are not in it; JSON writes them the same way.
            temporary.write_text(text, "utf-8", "backslashreplace")

    def described(self, *names: str) -> dict[str, dict[str, Any]]:
        """Size and hash of files, as the manifest holds them."""
        files = [self.file(name).absolute() for name in names]
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(file_hash, files))
        _verified.update({file: _mark(file, digest) for file, digest in zip(files, digests, strict=True)})
        return {
            name: {"bytes": file.stat().st_size, "sha256": digest}
            for name, file, digest in zip(names, files, digests, strict=True)
        }

    def log(self, event: str, **facts: Any) -> None:
        """Note times and other things that differ from run to run."""
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "event": event, **facts})
        if self._claim:
            self._claim.confirm()
        self.files.append(LOG, line + "\n")

    @contextmanager
    def locked(self, *, quiet: bool = False) -> Iterator[None]:
        """Be the only writer. In an object store this is looked at again before each file is put."""
        if not isinstance(self.files, ObjectStore):
            with folder_lock(self.path):
                yield
            return
        self._claim = Claim(self.files)
        try:
            self._claim.take(quiet=quiet)
            yield
        finally:
            self._claim.release()
            self._claim = None

    @property
    def writer(self) -> str | None:
        """The name in which the only writer of a run in an object store writes."""
        return self._claim.id if self._claim else None

    def write_as(self, writer: str | None) -> None:
        """Write in this name, which another process has taken, as long as it is the only writer."""
        if writer is not None and isinstance(self.files, ObjectStore):
            self._claim = Claim(self.files, writer)

    def check_writer(self) -> None:
        """An error where this process was the only writer and is not any more. Cheap, since it asks the store rarely."""
        if self._claim:
            self._claim.check()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A temporary path; when the block ends well the whole file takes the name, folders above it included."""
        with self.files.writing(name) as path:
            yield path
            if self._claim:
                self._claim.confirm()


def folder_of(file: str | Path) -> tuple[RunFolder, str]:
    """The folder of a file, which may be a URL, and the file's name there.

    >>> folder, name = folder_of("s3://bucket/pages/mine.html")
    >>> folder.path, name
    ('s3://bucket/pages', 'mine.html')
    """
    place = store_at(file).path
    if isinstance(place, Path):
        return RunFolder(place.parent), place.name
    above, _, name = place.rpartition("/")
    if not is_url(above):
        raise RunError(f"expected a file in a bucket or folder, found {place}")
    return RunFolder(above), name


def _seal(manifest: dict[str, Any]) -> str:
    """The hash of a manifest, which it carries itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _mark(file: Path, digest: str) -> tuple[int, int, int, str]:
    """What tells that a file is still the one that had this hash."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, digest


def file_hash(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
