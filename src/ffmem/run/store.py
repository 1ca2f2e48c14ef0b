"""The stores that hold the files of a run: a folder of this machine, or an object store that an fsspec URL names."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from stat import S_ISREG
from typing import Any

from ffmem.atomic import atomic_file, is_unfinished, refused
from ffmem.errors import RunError
from ffmem.text import quoted

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""The extra of this package that each kind of URL needs: `pip install 'ffmem[s3]'`."""
SETTINGS = {
    "s3": ("AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"),
    "gcs": ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"),
}
"""The environment variables from which an extra takes its credentials, and those from which it takes its endpoint."""


class LocalStore:
    """The files of a folder of this machine, by names such as `work/shard-00003.arrow`.

    `RunFolder` says what the methods do that it has too.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path

    def location(self, name: str) -> Path:
        return self.path / name

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        target = self.path / name
        with refused(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as temporary:
            yield temporary

    def file(self, name: str) -> Path:
        path = self.path / name
        path.stat()
        return path

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        yield self.file(name)

    def read_bytes(self, name: str, end: int | None = None) -> bytes:
        with (self.path / name).open("rb") as handle:
            return handle.read(end)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def sizes(self, under: str) -> dict[str, int]:
        """The size of every file in a folder and the folders below, links to folders and unfinished files left out."""
        found: dict[str, int] = {}
        for path in (self.path / under).rglob("*"):
            name = path.relative_to(self.path)
            with suppress(OSError):  # a dead link, or a file that has just been deleted
                facts = path.stat()
                if S_ISREG(facts.st_mode) and not any(map(is_unfinished, name.parts)):
                    found[name.as_posix()] = facts.st_size
        return found

    def entries(self) -> set[str] | None:
        """The names of files and folders at the top, unfinished ones left out; None where there is no such folder."""
        if not self.path.is_dir():
            return None
        return {path.name for path in self.path.iterdir() if not is_unfinished(path.name)}

    def remove(self, *names: str) -> None:
        for path in (self.path / name for name in names):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        above = {parent for name in names for parent in PurePath(name).parents if parent.name}
        for folder in sorted(above, reverse=True):  # the deepest first
            with suppress(OSError):  # others' files are in it, or it is a link
                (self.path / folder).rmdir()


class ObjectStore:
    """The files below an fsspec URL: each is one put, and is read from a copy in a temporary folder of this process."""

    def __init__(self, url: str) -> None:
        if re.search(r"[*?\[\]]", url):  # fsspec would delete all that matches
            raise RunError(f"expected a URL without * ? [ ], found {url}")
        if not url.partition("://")[2].strip("/"):
            raise RunError(f"expected a URL with a bucket, such as 's3://bucket/runs/x', found {url}")
        self.path: str = url.rstrip("/")

    def location(self, name: str) -> str:
        return f"{self.path}/{name}"

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="put-", dir=_scratch()) as folder:
            temporary = Path(folder) / PurePath(name).name
            with refused(self.location(name), room=f"in {tempfile.gettempdir()} (or set TMPDIR)"):
                yield temporary
            with self._asked("written", name) as (fs, path):
                fs.put_file(str(temporary), path)
                if "/" not in name:  # a table or manifest, which its writer will read; not what a worker leaves behind
                    os.replace(temporary, self._copy(name, fs.info(path)))

    def file(self, name: str) -> Path:
        with self._asked("read", name) as (fs, path):
            copy = self._copy(name, _file_facts(fs, path))
            if not copy.exists():
                with tempfile.TemporaryDirectory(prefix="get-", dir=_scratch()) as folder:
                    fs.get_file(path, f"{folder}/file")
                    os.replace(f"{folder}/file", copy)
            return copy

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="get-", dir=_scratch()) as folder:
            fetched = Path(folder) / PurePath(name).name
            with self._asked("read", name) as (fs, path):
                _file_facts(fs, path)
                fs.get_file(path, str(fetched))
            yield fetched

    def read_bytes(self, name: str, end: int | None = None) -> bytes:
        with self._asked("read", name) as (fs, path):
            return fs.cat_file(path, end=end)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file in one request, replacing one of this name."""
        with self._asked("written", name) as (fs, path):
            fs.pipe_file(path, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file if there is none; False where there is one.

        A store that cannot put a file on that condition is asked first whether there is one.
        """
        with self._asked("written", name) as (fs, path):
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except (PermissionError, FileNotFoundError):
                raise
            except Exception:  # every store has errors of its own for what it cannot do
                if fs.exists(path):
                    return False
                fs.pipe_file(path, data)
            return True

    def size(self, name: str) -> int:
        with self._asked("read", name) as (fs, path):
            return int(_file_facts(fs, path)["size"])

    def sizes(self, under: str) -> dict[str, int]:
        """The size of every file in a folder and the folders below."""
        found: dict[str, int] = {}
        with suppress(FileNotFoundError), self._asked("listed", under) as (fs, path):
            root, below = path.removesuffix(under), path.rstrip("/") + "/"
            for file, facts in fs.find(below.rstrip("/"), detail=True).items():
                # A console may have put an empty object where it shows a folder; a file of that very name is no folder.
                if file.startswith(below) and not file.endswith("/") and facts["type"] == "file":
                    found[file.removeprefix(root)] = int(facts["size"])
        return found

    def entries(self) -> set[str] | None:
        return {name.partition("/")[0] for name in self.sizes("")} or None

    def remove(self, *names: str) -> None:
        if not names:
            return
        with suppress(FileNotFoundError), self._asked("deleted", names[0]) as (fs, first):
            root = first.removesuffix(names[0])
            # Many go together, each by its own name; never all that lies below one.
            fs.rm([root + name for name in names]) if len(names) > 1 else fs.rm_file(first)

    def _copy(self, name: str, facts: dict[str, Any]) -> Path:
        """The path of this process's copy of a file, a new path as soon as the store reports a change of the file.

        So a table that is mapped stays as it is when the file is written anew.
        """
        mark = repr((self.path, name, sorted((key, str(value)) for key, value in facts.items())))
        folder = _scratch() / hashlib.sha256(mark.encode()).hexdigest()[:32]
        folder.mkdir(exist_ok=True)
        return folder / PurePath(name).name

    @contextmanager
    def _asked(self, what: str, name: str) -> Iterator[tuple[Any, str]]:
        """The file system and the path of a file in it; what the store refuses becomes one line that says what to try.

        A file that is missing is a FileNotFoundError. fsspec keeps one file system a process and thread, so it is asked for
        each time; and since others write too, no listing may be remembered.
        """
        location = self.location(name).rstrip("/")
        kind = EXTRAS.get(self.path.partition("://")[0].lower())
        try:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.path, use_listings_cache=False)
            yield fs, f"{root.rstrip('/')}/{name}"
        except FileNotFoundError as error:
            if what == "written":
                raise RunError(f"{location}: cannot be written: {_reason(error)}; make the bucket first") from error
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location) from error
        except ImportError as error:
            advice = f"pip install 'ffmem[{kind}]'" if kind else _reason(error)
            raise RunError(f"{location}: needs a package that is not installed: {advice}") from error
        except Exception as error:  # every store has errors of its own
            advice = _advice(error, kind)
            raise RunError(f"{location}: cannot be {what}: {_reason(error)}" + (f"; {advice}" if advice else "")) from error


def store_at(location: str | Path) -> LocalStore | ObjectStore:
    """The store that a path or URL names.

    >>> store_at("runs/gpt2").path, store_at("file:///runs/gpt2").path, store_at("memory://runs/gpt2/").path
    (PosixPath('runs/gpt2'), PosixPath('/runs/gpt2'), 'memory://runs/gpt2')
    """
    if not isinstance(location, (str, Path)):
        raise RunError(f"expected a folder, a file or a URL by its name, found {quoted(location)}")
    if not str(location):
        raise RunError("expected a folder, a file or a URL, found an empty name")
    if re.match(r"\w{2,}:/(?!/)", str(location)):  # as a Path writes it, too
        raise RunError(f"expected a folder, or a URL as a string such as 's3://bucket/runs/x', found {location}")
    if is_url(location):
        return ObjectStore(str(location))
    return LocalStore(Path(str(location).removeprefix("file://")).expanduser())


def is_url(location: str | Path) -> bool:
    """Whether a path or URL names something that is not on this machine.

    >>> is_url("s3://bucket/run"), is_url("file:///tmp/run"), is_url("C:/run")
    (True, False, False)
    """
    return re.match(r"(?!file:)[A-Za-z][\w+.-]*://", str(location)) is not None


def _file_facts(fs: Any, path: str) -> dict[str, Any]:
    """The facts that a store gives on a file; FileNotFoundError for a folder of that name."""
    facts: dict[str, Any] = fs.info(path)
    if facts["type"] != "file":
        raise FileNotFoundError(path)
    return facts


def _advice(error: Exception, kind: str | None) -> str:
    """Advice on an error of a store, which needs the extra of this `kind`; empty where nothing is known."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"make room in {tempfile.gettempdir()}, or set TMPDIR to where there is some"
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return "give a folder or a URL such as s3://bucket/runs/x or gs://bucket/runs/x"
    credentials, endpoint = SETTINGS.get(kind or "", ("", ""))
    if isinstance(error, PermissionError) or "credential" in str(error).lower():
        return f"check the credentials and what they allow ({credentials})" if kind else "check what its credentials allow"
    return f"check the network ({endpoint})" if kind and "connect" in f"{type(error).__name__} {error}".lower() else ""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


_scratch_folders: dict[tuple[int, str], Path] = {}
"""The folder, for each process, of what it has fetched; a forked process inherits its parent's entry."""


def _scratch() -> Path:
    """The folder of this process for what it has fetched; a forked child has its own."""
    mine = os.getpid(), tempfile.gettempdir()
    if mine not in _scratch_folders:
        from multiprocessing.util import Finalize

        _scratch_folders[mine] = Path(tempfile.mkdtemp(prefix="ffmem-", dir=mine[1]))
        Finalize(None, forget, exitpriority=0)  # not atexit, which workers of multiprocessing end without
    _scratch_folders[mine].mkdir(mode=0o700, exist_ok=True)  # a machine may sweep what has lain there for days
    return _scratch_folders[mine]


def forget() -> None:
    """Delete all that this process has fetched: before its end, or by whoever ends it without one."""
    for (process, _), path in list(_scratch_folders.items()):
        if process == os.getpid():
            shutil.rmtree(path, ignore_errors=True)
