"""Write a file or a folder whole or not at all, and leave what is there as it was until then.

The one way in which ffmem writes: into a hidden folder beside the target, which is locked as long as its writer lives, so
that what a killed process left can be told from what another one is still writing.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ffmem.errors import RunError

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None  # type: ignore[assignment]

_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.ffmem-tmp")


def is_unfinished(name: str) -> bool:
    """Whether a name is that of a hidden folder in which ffmem is writing something.

    >>> is_unfinished(".cells.csv.0123456789abcdef.ffmem-tmp"), is_unfinished("cells.csv.tmp")
    (True, False)
    """
    return _UNFINISHED.fullmatch(name) is not None


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A path to write a file to; when the block ends well it replaces the target, synced, and else nothing has changed.

    A target that is there keeps its mode and owner; where it is a link, what it points to is replaced; and a device or pipe
    is itself what is written to. An OSError of the block becomes one line that names the target.
    """
    with refused(target):
        try:
            before = target.stat()
        except FileNotFoundError:
            before = None
        if before and stat.S_ISDIR(before.st_mode):
            raise RunError(f"expected a file, found a folder at {target}: give the name of a file in it")
        if before and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        if before and not stat.S_ISREG(before.st_mode):
            yield target
            return
        real = Path(os.path.realpath(target))
        with _hidden(real, 0o700 if before else 0o777) as folder:
            temporary = folder / real.name
            yield temporary
            _permit(temporary, before, new=folder.stat().st_mode & 0o666)
            _sync(temporary)
            os.replace(temporary, real)
            _sync(real.parent)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A folder to write files to; when the block ends well it becomes the target, synced, and else nothing has changed.

    Folders above the target are made. A target that has come to be there meanwhile is an OSError, unless it is an empty
    folder. What killed writers left half written beside it is deleted first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent)
    with _hidden(target, 0o777) as folder:
        temporary = folder / target.name
        temporary.mkdir()
        yield temporary
        for path in temporary.rglob("*"):
            _sync(path)
        temporary.rename(target)
        _sync(target.parent)


@contextmanager
def refused(target: object, *, room: object = "there") -> Iterator[None]:
    """Say in one line that a target could not be written and where to make room; an OSError about another file passes."""
    try:
        yield
    except BrokenPipeError:  # its reader has seen enough, which is no refusal
        raise
    except OSError as error:
        name = str(error.filename or target)
        if name != str(target) and ".ffmem-tmp" not in name:
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"; make room {room} and give the same command again"
        elif error.errno == errno.ENOENT:
            advice = "; make its folder first"
        raise RunError(f"{target}: cannot be written: {reason}{advice}") from error


def sweep(folder: Path) -> None:
    """Delete what processes that were killed have left half written in a folder, and nothing that is still being written."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for path in [Path(entry.path) for entry in entries if is_unfinished(entry.name) and not entry.is_symlink()]:
            with suppress(OSError):  # it is no folder, or not ours to open
                lock = FolderLock(path)
                if lock.take():
                    shutil.rmtree(path, ignore_errors=True)
                lock.release()


class FolderLock:
    """The system's lock on a folder, which one process at a time can have and which ends with it, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handle: int | None = None

    def take(self) -> bool | None:
        """Try to lock the folder: True if it is this process's now, False where another one has it or the folder is gone.
        None where that cannot be known, since the system or the file system has no locks.

        None where that cannot be known, since the system or the file system has no locks.
        """
        if fcntl is None:
            return None
        try:
            self._handle = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = self.folder.exists()
        except (BlockingIOError, FileNotFoundError):
            taken = False
        except OSError:
            if self._handle is None:
                raise
            return None
        if not taken:
            self.release()
        return taken

    def release(self) -> None:
        """Give the lock to whoever asks next."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


@contextmanager
def _hidden(target: Path, mode: int) -> Iterator[Path]:
    """A locked hidden folder beside a target, which is deleted when the block ends with whatever was left in it."""
    while True:
        folder = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.ffmem-tmp")
        lock = FolderLock(folder)
        try:
            folder.mkdir(mode)
            if lock.take() is not False:  # else another process took it for a left-over before it was locked
                yield folder
                return
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


def _permit(file: Path, before: os.stat_result | None, *, new: int) -> None:
    """Give a file the mode and owner of the file that it replaces, or the mode that a new file has here."""
    now = file.stat()
    mode = stat.S_IMODE(before.st_mode) if before else new
    with suppress(OSError):  # who may not give it away keeps it
        if before and (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
            os.chown(file, before.st_uid, before.st_gid)
    with suppress(OSError):  # a file system without modes
        if stat.S_IMODE(now.st_mode) != mode:
            file.chmod(mode)


def _sync(path: Path) -> None:
    """Wait until a file, or on POSIX the list of a folder's files, is on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
