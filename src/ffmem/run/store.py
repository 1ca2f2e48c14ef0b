"""Where the files of a run lie: a folder of this machine, or an object store that an fsspec URL names."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from ffmem.atomic import atomic_file, is_unfinished, refused, sweep
from ffmem.errors import RunError
from ffmem.text import quoted

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""What to install for a kind of store: `pip install 'ffmem[s3]'`."""
SETTINGS = {
    "s3": ("AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL and AWS_DEFAULT_REGION"),
    "gcs": ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST"),
}
"""Where an extra looks for who asks, and for whom to ask."""
_folders: dict[tuple[int, str], Path] = {}
"""Where each process keeps what it has fetched; a forked one knows its parent's."""
_fetched: dict[Path, str] = {}
"""The copies that this process has, and what the store said of each when it was made."""


class Store(ABC):
    """The files of one run, by names such as `work/shard-00003.arrow`."""

    path: Path | str
    """The folder or URL, for people and for opening it again."""

    @abstractmethod
    def place(self, name: str) -> Path | str:
        """Where a file lies, for people."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[Path]:
        """A temporary path; when the block ends well the whole file takes the name, folders above it included."""

    @abstractmethod
    def file(self, name: str) -> Path:
        """A local path with the contents of this file; FileNotFoundError where there is none."""

    @abstractmethod
    def reading(self, name: str) -> AbstractContextManager[Path]:
        """As `file`, for large files that are read once: what was fetched is gone when the block ends."""

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """The contents of a file; FileNotFoundError where there is none."""

    @abstractmethod
    def append(self, name: str, text: str) -> None:
        """Add to the end of a file, which may not be there yet."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def size(self, name: str) -> int:
        """In bytes; FileNotFoundError where there is none."""

    @abstractmethod
    def entries(self) -> set[str] | None:
        """The names of files and folders at the top, unfinished ones left out; None where there is no such folder."""

    @abstractmethod
    def names(self, under: str) -> list[str]:
        """The files in a folder of the run and in folders below, sorted, unfinished ones left out."""

    @abstractmethod
    def remove(self, *names: str) -> None:
        """Delete these files, those that are there, and then the folders of the run that this has left empty."""

    @abstractmethod
    def sweep(self, *under: str) -> None:
        """Delete what killed processes have left half written in these folders."""

    @abstractmethod
    def used(self) -> int:
        """The bytes of all files."""


def store_at(place: str | Path) -> Store:
    """The store that a path or URL names.

    >>> store_at("runs/gpt2").path, store_at("file:///runs/gpt2").path, store_at("memory://runs/gpt2/").path
    (PosixPath('runs/gpt2'), PosixPath('/runs/gpt2'), 'memory://runs/gpt2')
    """
    if not isinstance(place, (str, Path)):
        raise RunError(f"expected a folder, a file or a URL by its name, found {quoted(place)}")
    if not str(place):
        raise RunError("expected a folder, a file or a URL, found an empty name")
    if re.match(r"\w{2,}:/(?!/)", str(place)):  # as a Path writes it, too
        raise RunError(f"expected a folder, or a URL as a string such as 's3://bucket/runs/x', found {place}")
    if is_url(place):
        return ObjectStore(str(place))
    return LocalStore(Path(str(place).removeprefix("file://")).expanduser())


def is_url(place: str | Path) -> bool:
    """Whether a place is not on this machine.

    >>> is_url("s3://bucket/run"), is_url("file:///tmp/run"), is_url("C:/run")
    (True, False, False)
    """
    return re.match(r"(?!file:)[A-Za-z][\w+.-]*://", str(place)) is not None


class LocalStore(Store):
    """A folder: files are synced and renamed."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path

    def place(self, name: str) -> Path:
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

    def read_bytes(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def append(self, name: str, text: str) -> None:
        with refused(self.path / name), (self.path / name).open("a", encoding="utf-8") as handle:
            handle.write(text)

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def entries(self) -> set[str] | None:
        if not self.path.is_dir():
            return None
        return {path.name for path in self.path.iterdir() if not is_unfinished(path.name)}

    def names(self, under: str) -> list[str]:
        files = (path.relative_to(self.path) for path in (self.path / under).rglob("*") if path.is_file())
        return sorted(path.as_posix() for path in files if not any(map(is_unfinished, path.parts)))

    def remove(self, *names: str) -> None:
        for path in (self.path / name for name in names):
            if not path.is_dir():
                path.unlink(missing_ok=True)
        above = {parent for name in names for parent in PurePath(name).parents if parent.name}
        for folder in sorted(above, reverse=True):  # the deepest first
            with suppress(OSError):  # others' files are in it, or it is a link
                (self.path / folder).rmdir()

    def sweep(self, *under: str) -> None:
        for folder in under:
            sweep(self.path / folder)

    def used(self) -> int:
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


class ObjectStore(Store):
    """What an fsspec URL names: a file is one put, and is read from a copy in a temporary folder of this process."""

    def __init__(self, url: str) -> None:
        if re.search(r"[*?\[\]]", url):  # fsspec would delete all that matches
            raise RunError(f"expected a URL without * ? [ ], found {url}")
        if not url.partition("://")[2].strip("/"):
            raise RunError(f"expected a URL with a bucket, such as 's3://bucket/runs/x', found {url}")
        self.path: str = url.rstrip("/")
        self.protocol = url.partition("://")[0].lower()

    def place(self, name: str) -> str:
        return f"{self.path}/{name}"

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="put-", dir=_kept()) as folder:
            temporary = Path(folder) / name.rpartition("/")[2]
            with refused(self.place(name), room=f"in {tempfile.gettempdir()} (or set TMPDIR)"):
                yield temporary
            with self._asked("written", name):
                fs, root = self._reached()
                fs.put_file(str(temporary), f"{root}/{name}")
                if "/" not in name:  # a table or manifest, which its writer will read; not what a worker leaves behind
                    self._keep(name, temporary, _mark(fs.info(f"{root}/{name}")))

    def file(self, name: str) -> Path:
        with self._asked("read", name):
            fs, root = self._reached()
            mark = _mark(_file(fs.info(f"{root}/{name}"), self.place(name)))
            copy = self._copy(name)
            if _fetched.get(copy) != mark or not copy.exists():
                with tempfile.TemporaryDirectory(prefix="get-", dir=_kept()) as folder:
                    fetched = Path(folder) / "file"
                    fs.get_file(f"{root}/{name}", str(fetched))
                    self._keep(name, fetched, mark)
            return copy

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="get-", dir=_kept()) as folder:
            fetched = Path(folder) / name.rpartition("/")[2]
            with self._asked("read", name):
                fs, root = self._reached()
                _file(fs.info(f"{root}/{name}"), self.place(name))
                fs.get_file(f"{root}/{name}", str(fetched))
            yield fetched

    def read_bytes(self, name: str) -> bytes:
        with self._asked("read", name):
            fs, root = self._reached()
            return fs.cat_file(f"{root}/{name}")

    def append(self, name: str, text: str) -> None:
        """Read, append, put: for one writer."""
        try:
            before = self.read_bytes(name)
        except FileNotFoundError:
            before = b""
        self.put(name, before + text.encode())

    def put(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with self._asked("written", name):
            fs, root = self._reached()
            fs.pipe_file(f"{root}/{name}", data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file if there is none; False where there is one.

        A store that cannot put a file on that condition is asked first whether there is one.
        """
        with self._asked("written", name):
            fs, root = self._reached()
            try:
                fs.pipe_file(f"{root}/{name}", data, mode="create")
            except FileExistsError:
                return False
            except (PermissionError, FileNotFoundError):
                raise
            except Exception:  # every store has errors of its own for what it cannot do
                if fs.exists(f"{root}/{name}"):
                    return False
                fs.pipe_file(f"{root}/{name}", data)
            return True

    def exists(self, name: str) -> bool:
        try:
            with self._asked("read", name):
                fs, root = self._reached()
                fs.info(f"{root}/{name}")
        except FileNotFoundError:
            return False
        return True

    def size(self, name: str) -> int:
        with self._asked("read", name):
            fs, root = self._reached()
            return int(_file(fs.info(f"{root}/{name}"), self.place(name))["size"])

    def entries(self) -> set[str] | None:
        return {name.partition("/")[0] for name in self._found("")} or None

    def names(self, under: str) -> list[str]:
        return sorted(self._found(under))

    def remove(self, *names: str) -> None:
        if not names:
            return
        for name in names:
            self._copy(name).unlink(missing_ok=True)
        with suppress(FileNotFoundError), self._asked("deleted", names[0]):
            fs, root = self._reached()
            paths = [f"{root}/{name}" for name in names]
            # Many go together, each by its own name; never all that lies below one.
            fs.rm(paths) if len(paths) > 1 else fs.rm_file(paths[0])

    def sweep(self, *under: str) -> None:
        """Nothing is ever half written: a file is one put."""

    def used(self) -> int:
        return sum(self._found("").values())

    def _found(self, under: str) -> dict[str, int]:
        """The size of every file below a folder of the run."""
        try:
            with self._asked("listed", under):
                fs, root = self._reached()
                below = f"{root}/{under}".rstrip("/") + "/"
                found = fs.find(below.rstrip("/"), detail=True)
        except FileNotFoundError:
            return {}
        # A console may have put an empty object where it shows a folder; a file of that very name is no folder.
        return {
            path[len(root) + 1 :]: int(facts["size"])
            for path, facts in found.items()
            if path.startswith(below) and not path.endswith("/") and facts["type"] == "file"
        }

    def _copy(self, name: str) -> Path:
        return _kept() / hashlib.sha256(self.path.encode()).hexdigest()[:16] / name

    def _keep(self, name: str, local: Path, mark: str) -> None:
        """Make this file the copy; a table that is mapped from the one before stays as it is."""
        copy = self._copy(name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.replace(local, copy)
        _fetched[copy] = mark

    def _reached(self) -> tuple[Any, str]:
        """The file system and the path in it. Asked each time: fsspec keeps one a process and thread."""
        from fsspec.core import url_to_fs

        # Others write too, so no listing may be remembered.
        fs, root = url_to_fs(self.path, use_listings_cache=False)
        return fs, root.rstrip("/")

    @contextmanager
    def _asked(self, what: str, name: str) -> Iterator[None]:
        """Say what the store refused in one line, and what to try. A missing file is the caller's to tell."""
        place = self.place(name).rstrip("/")
        try:
            yield
        except FileNotFoundError as error:
            if what == "written":
                raise RunError(f"{place}: cannot be written: {_reason(error)}; make the bucket first") from error
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place) from error
        except ImportError as error:
            extra = EXTRAS.get(self.protocol)
            advice = f"pip install 'ffmem[{extra}]'" if extra else _reason(error)
            raise RunError(f"{place}: needs a package that is not installed: {advice}") from error
        except Exception as error:  # every store has errors of its own
            advice = self._advice(error)
            raise RunError(f"{place}: cannot be {what}: {_reason(error)}" + (f"; {advice}" if advice else "")) from error

    def _advice(self, error: Exception) -> str:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return f"make room in {tempfile.gettempdir()}, or set TMPDIR to where there is some"
        if isinstance(error, ValueError) and "Protocol not known" in str(error):
            return "give a folder or a URL such as s3://bucket/runs/x or gs://bucket/runs/x"
        who, where = SETTINGS.get(EXTRAS.get(self.protocol, ""), ("", ""))
        if isinstance(error, PermissionError) or "credential" in str(error).lower():
            return f"check the credentials and what they allow ({who})" if who else "check what its credentials allow"
        return f"check the network ({where})" if "connect" in f"{type(error).__name__} {error}".lower() and where else ""


def _file(facts: dict[str, Any], place: str) -> dict[str, Any]:
    """What a store says of a file; a folder of that name is none."""
    if facts["type"] != "file":
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
    return facts


def _mark(facts: dict[str, Any]) -> str:
    """Changes when the file does: its size, hash, time and whatever else the store says of it."""
    return repr(sorted((name, str(value)) for name, value in facts.items()))


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _kept() -> Path:
    """The folder of this process for what it has fetched; a forked child has its own."""
    mine = os.getpid(), tempfile.gettempdir()
    if mine not in _folders:
        from multiprocessing.util import Finalize

        _folders[mine] = Path(tempfile.mkdtemp(prefix="ffmem-", dir=mine[1]))
        Finalize(None, forget, exitpriority=0)  # not atexit, which workers of multiprocessing end without
    _folders[mine].mkdir(mode=0o700, exist_ok=True)  # a machine may sweep what has lain there for days
    return _folders[mine]


def forget() -> None:
    """Delete all that this process has fetched: before its end, or by whoever ends it without one."""
    for (process, _), path in list(_folders.items()):
        if process == os.getpid():
            shutil.rmtree(path, ignore_errors=True)
