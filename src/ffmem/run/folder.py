"""The run folder: files written whole or not at all, a manifest that knows their hashes, one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from ffmem.atomic import sweep
from ffmem.errors import RunError
from ffmem.run.lock import WRITER, WriterFile, only_writer
from ffmem.run.manifest import FileFacts, Manifest, ManifestError
from ffmem.run.registry import registered
from ffmem.run.store import ObjectStore, is_url, store_at
from ffmem.text import visible

MANIFEST, WORK, LOG = "manifest.json", "work", "log.jsonl"
RESULTS = "results"
"""The folder, in a run, of the results of experiments."""
PAGE, FIGURES = "report.html", "figures"
"""The names, in a run, of the report's page and of the folder of its figures."""
TRIGGERS, CELLS, SENTENCES, TOKENS, VALUES = (
    f"{name}.arrow" for name in ("triggers", "cells", "sentences", "tokens", "values")
)
VALUES_ANEW = "values-2.arrow"
"""The other name of the file of values: values made anew take the free one, so that the earlier stay until then."""

FOLDERS = ("", WORK, RESULTS, f"{RESULTS}/random", FIGURES)


@cache
def _parts() -> re.Pattern[str]:
    """The names of all that ffmem writes in a run beside its manifest, as a pattern. A file of another name is never
    touched, wherever it lies."""
    names = "|".join(registered())
    return re.compile(
        "|".join(
            (
                *map(re.escape, (TRIGGERS, CELLS, SENTENCES, TOKENS, VALUES, VALUES_ANEW, LOG, PAGE)),
                # Runs of format 2 had no parts: what is left of one is ours to delete too.
                rf"{WORK}/(state-\d+\.safetensors|shard-(\d{{5,}}-)?\d{{6,}}\.(arrow|safetensors))",
                rf"{RESULTS}/(random/)?({names}|causal)\.(json|parquet)",
                rf"{FIGURES}/(fig\d+|({names})(_\d+)?)\.(svg|png)",
            )
        )
    )


def is_part(name: str) -> bool:
    """Whether a file of this name in a run is one that ffmem wrote; False for the manifest."""
    return _parts().fullmatch(name) is not None


_verified: dict[Path, tuple[int, int, int, str]] = {}
"""Files whose hash this process has checked: inode, size, time of change, hash."""


class RunFolder:
    """A folder, local or in an object store, that holds one run. The manifest says `building` until all files are there.

    Files go by names such as `work/shard-00003.arrow`. Processes may write different files of one run at the same time.

    >>> folder = RunFolder("memory://runs/example")
    >>> with folder.writing("work/a.txt") as path:
    ...     _ = path.write_text("whole")
    >>> folder.names("work"), folder.read_bytes("work/a.txt"), folder.file("work/a.txt").read_text()
    (['work/a.txt'], b'whole', 'whole')
    """

    def __init__(self, path: str | Path) -> None:
        self.store = store_at(path)
        self.path: Any = self.store.path  # a Path, or a URL as a string
        self._writer_file: WriterFile | None = None

    def location(self, name: str) -> Any:
        """The path of a file of the run on this machine, or its URL as a string, for messages."""
        return self.store.location(name)

    def exists(self, name: str) -> bool:
        """Whether the run has a file of this name."""
        try:
            self.store.size(name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def size(self, name: str) -> int:
        """The number of bytes of a file; FileNotFoundError where there is none."""
        return self.store.size(name)

    def names(self, under: str) -> list[str]:
        """The files in a folder of the run and in the folders below, sorted, unfinished ones left out."""
        return sorted(self.store.sizes(under))

    def disk_use(self) -> int:
        """The number of bytes of all files of the run."""
        return sum(self.store.sizes("").values())

    def read_bytes(self, name: str, end: int | None = None) -> bytes:
        """The contents of a file, or its first `end` bytes; FileNotFoundError where there is none."""
        return self.store.read_bytes(name, end)

    def file(self, name: str) -> Path:
        """A local path with the contents of a file; FileNotFoundError where there is none."""
        return self.store.file(name)

    def reading(self, name: str) -> AbstractContextManager[Path]:
        """A local path like that of `file`, for a large file read once: its fetched copy is deleted when the block ends."""
        return self.store.reading(name)

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A temporary path; when the block ends well the whole file takes the name, folders above it included."""
        with self.store.writing(name) as path:
            yield path
            if self._writer_file:
                self._writer_file.confirm()

    def remove(self, *names: str) -> None:
        """Delete those of these files that are there, and then the folders of the run that this has left empty."""
        self.store.remove(*names)

    @property
    def work(self) -> Path:
        """The folder of the unfinished work, for runs on this machine."""
        return self / WORK

    def __truediv__(self, name: str) -> Path:
        assert isinstance(self.path, Path), f"{self.path}: not on this machine, use file() or writing()"
        return self.path / name

    def manifest(self) -> Manifest | None:
        """The manifest, None where there is no run; an error where it cannot be understood."""
        try:
            return Manifest.parse(self.read_bytes(MANIFEST))
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise RunError(f"expected a run folder, found a file at {self.path}") from error
        except ManifestError as error:
            raise RunError(
                f"{self.location(MANIFEST)}: {error}; put the right one back, or start over with --overwrite"
            ) from error

    def complete(self) -> Manifest:
        """The manifest of a finished run, all of whose files are as they were written.

        In an object store only their sizes are looked at here, their hashes when they are fetched (`table`).
        """
        manifest = self.manifest()
        if manifest is None:
            what = "an empty folder or other files" if self.store.entries() is not None else "nothing"
            raise RunError(f"{self.path}: expected a run folder (with {MANIFEST}), found {what}; make one with ffmem index")
        if not manifest.is_complete:
            raise RunError(f"{self.path}: this run is not finished; give the same ffmem index command again to continue it")
        check = self._check_size if is_url(self.path) else self._check_hash
        wrong: list[RunError] = []
        for name, expected in manifest.files.items():
            try:
                check(name, expected)
            except RunError as error:
                wrong.append(error)
        if len(wrong) > 1 and len(wrong) >= len(manifest.files) - 1:  # runs of one model have the same table of tokens
            raise RunError(
                f"{self.location(MANIFEST)}: not the manifest of this run: {len(wrong)} of its {len(manifest.files)} files "
                "are not as it says; put the right one back, or build the run again (--overwrite)"
            )
        if wrong:
            raise wrong[0]
        return manifest

    def _check_size(self, name: str, expected: FileFacts) -> None:
        """An error where a file of the run is missing, or has another size than its manifest says."""
        try:
            size = self.size(name)
        except FileNotFoundError as error:
            raise RunError(f"{self.location(name)}: missing from the run; build the run again (--overwrite)") from error
        if size != expected.bytes:
            raise RunError(f"{self.location(name)}: truncated or altered: {size:,} bytes, expected {expected.bytes:,}")

    def table(self, name: str, expected: FileFacts) -> Path:
        """A local path with a table of a run that is `complete`, for mapping."""
        return self._check_hash(name, expected) if is_url(self.path) else self.file(name)

    def _check_hash(self, name: str, expected: FileFacts) -> Path:
        """The local path of a file of the run, which has the hash that its manifest says; an error where it has not."""
        self._check_size(name, expected)
        file = self.file(name).absolute()
        mark = _mark(file, expected.sha256)
        if _verified.get(file) != mark:
            if file_hash(file) != expected.sha256:
                raise RunError(
                    f"{self.location(name)}: altered since it was written (its hash differs); build the run again "
                    "(--overwrite)"
                )
            _verified[file] = mark
        return file

    def parts(self, *under: str) -> list[str]:
        """The files that ffmem wrote, in the whole run or in some folders of it, the manifest left out."""
        # On this machine each folder is listed by itself too: one that is a link is not entered from above.
        folders = under or (("",) if is_url(self.path) else FOLDERS)
        found = {name for folder in folders for name in self.names(folder)}
        return sorted(filter(is_part, found))

    def check_own(self, *, overwrite: bool = False) -> None:
        """An error where no run may be written: something lies here, and no manifest says that it is a run of ffmem.

        A manifest that cannot be read may be overwritten where it is beyond doubt what is left of one of ours: nothing but
        parts of a run lies beside it.
        """
        try:
            found = self.manifest() is not None
        except RunError as error:
            self._check_remains(error)
            if not overwrite:
                raise
            return
        if not found and (others := (self.store.entries() or set()) - {WRITER}):
            other = visible(min(others))
            raise RunError(f"{self.path} exists and is not an ffmem run ({other} is in it): choose another folder")

    def _check_remains(self, error: RunError) -> None:
        """An error where a manifest that cannot be read is another program's, or lies beside files that are not ours."""
        if not self.exists(MANIFEST):  # what is here is no folder
            raise error
        if not Manifest.resembles(self.read_bytes(MANIFEST), damaged=bool(self.parts())):
            raise RunError(
                f"{self.path} exists and is not an ffmem run (its {MANIFEST} is none of ffmem's): choose another folder"
            ) from error
        if others := sorted(set(self.names("")) - {*self.parts(), MANIFEST, WRITER}):
            raise RunError(
                f"{self.location(MANIFEST)}: damaged, and {visible(others[0])} is not of the run: choose another folder, or "
                "delete what is left of the run yourself"
            ) from error

    def clear(self, *under: str) -> None:
        """Delete what ffmem wrote, in the whole run or in some folders of it, and nothing else.

        The manifest stays: it says whose the folder is until another replaces it.
        """
        self.remove(*reversed(self.parts(*under)))  # a worker's state before its shards, which do not count without it

    def sweep(self) -> None:
        """Delete what processes that were killed have left half written; an object store has no such thing."""
        if isinstance(self.path, Path):
            for folder in FOLDERS:
                sweep(self.path / folder)

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest, in place of the one before."""
        # What UTF-8 lacks are halves of names that are not in it; JSON writes them the same way.
        data = manifest.as_json().encode("utf-8", "backslashreplace")
        assert Manifest.parse(data) == manifest, "what is written could not be read"
        with self.writing(MANIFEST) as temporary:
            temporary.write_bytes(data)

    def described(self, *names: str) -> dict[str, FileFacts]:
        """The size and the hash of each of these files, as the manifest holds them."""
        files = [self.file(name).absolute() for name in names]
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(file_hash, files))
        _verified.update({file: _mark(file, digest) for file, digest in zip(files, digests, strict=True)})
        return {
            name: FileFacts(file.stat().st_size, digest) for name, file, digest in zip(names, files, digests, strict=True)
        }

    def log(self, event: str, **facts: Any) -> None:
        """Add a line to the log: what happened, when, and other things that differ from run to run."""
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), "event": event, **facts})
        before = self.read_bytes(LOG) if self.exists(LOG) else b""
        with self.writing(LOG) as path:
            path.write_bytes(before + line.encode() + b"\n")

    @contextmanager
    def locked(self, *, quiet: bool = False, wait: float = 0.0) -> Iterator[None]:
        """Be the only writer. In an object store this is looked at again before each file is put.

        Where another process writes, its end is awaited for `wait` seconds.
        """
        with only_writer(self.store, wait=wait, quiet=quiet) as self._writer_file:
            self.sweep()
            try:
                yield
            finally:
                self._writer_file = None

    @property
    def writer(self) -> str | None:
        """The name in which the only writer of a run in an object store writes."""
        return self._writer_file.id if self._writer_file else None

    def write_as(self, writer: str | None) -> None:
        """Write in this name, which another process has taken, as long as it is the only writer."""
        if writer is not None and isinstance(self.store, ObjectStore):
            self._writer_file = WriterFile(self.store, writer)

    def check_writer(self) -> None:
        """An error where this process was the only writer and is not any more. Cheap, since it asks the store rarely."""
        if self._writer_file:
            self._writer_file.check()


def folder_of(file: str | Path) -> tuple[RunFolder, str]:
    """The folder of a file, which may be a URL, and the file's name there.

    >>> folder, name = folder_of("s3://bucket/pages/mine.html")
    >>> folder.path, name
    ('s3://bucket/pages', 'mine.html')
    """
    location = store_at(file).path
    if isinstance(location, Path):
        return RunFolder(location.parent), location.name
    above, _, name = location.rpartition("/")
    if not is_url(above):
        raise RunError(f"expected a file in a bucket or folder, found {location}")
    return RunFolder(above), name


def refuse_part(file: str | Path, *, but: str = "") -> None:
    """An error where a file that a user names is one of a run's own, `but` this one: writing it would end the run."""
    location = store_at(file).path
    above, names = location if isinstance(location, str) else os.path.realpath(location), ""
    for _ in range(3):  # results/random/agreement.json lies deepest
        above, _, name = above.rpartition("/")
        names = f"{name}/{names}".rstrip("/")
        own = names != but and (names == MANIFEST or is_part(names))
        if own and above and is_url(above) == is_url(file) and RunFolder(above).exists(MANIFEST):
            raise RunError(f"{file}: this file is part of the run {above}; name another")


def values_of(manifest: Manifest) -> str | None:
    """The file of a run that holds its values, None where it has none."""
    return next((name for name in (VALUES, VALUES_ANEW) if name in manifest.files), None)


def _mark(file: Path, digest: str) -> tuple[int, int, int, str]:
    """Numbers that are the same as long as a file is the one that had this hash."""
    stat = file.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, digest


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write an uncompressed Arrow file, so that a reader can map it and touch only what it needs."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
