"""Write a file whole or not at all, and leave what is there as it was until then."""

from __future__ import annotations

import errno
import os
import re
import secrets
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
    """Whether a name is that of a folder in which ffmem writes a file before it takes its place.

    >>> is_unfinished(".cells.csv.0123456789abcdef.ffmem-tmp"), is_unfinished("cells.csv.tmp")
    (True, False)
    """
    return _UNFINISHED.fullmatch(name) is not None


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path to write a file to; when the block ends well it takes the target's place, synced, and else nothing has changed.

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
        with _beside(real, 0o700 if before else 0o777) as folder:
            temporary = folder / real.name
            yield temporary
            _permit(temporary, before, new=folder.stat().st_mode & 0o666)
            _sync(temporary, os.O_RDWR)
            os.replace(temporary, real)
            if os.name == "posix":
                _sync(real.parent, os.O_RDONLY)


@contextmanager
def refused(place: object, *, room: object = "there") -> Iterator[None]:
    """Say in one line that a place could not be written, and where to make room; what is told of other files stays."""
    try:
        yield
    except BrokenPipeError:  # its reader has seen enough, which is no refusal
        raise
    except OSError as error:
        name = str(error.filename or place)
        if name != str(place) and ".ffmem-tmp" not in name:
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        advice = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"; make room {room} and give the same command again"
        elif error.errno == errno.ENOENT:
            advice = "; make its folder first"
        raise RunError(f"{place}: cannot be written: {reason}{advice}") from error


def sweep(folder: Path) -> None:
    """Delete what processes that were killed have left half written in a folder, and nothing that is still being written."""
    if fcntl is None:  # whether it is still being written cannot be told
        return
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for path in [Path(entry.path) for entry in entries if is_unfinished(entry.name)]:
            with suppress(OSError):  # somebody holds it, or somebody else has swept it
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _emptied(path)
                finally:
                    os.close(handle)


@contextmanager
def _beside(target: Path, mode: int) -> Iterator[Path]:
    """A folder beside a target, gone when the block ends, whatever a library leaves in it that writes there.

    Its lock says that it is in use, and ends with the process, however that ends.
    """
    handle: int | None = None
    folder = target
    try:
        while True:  # until it is held before another process sweeps it
            folder = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.ffmem-tmp")
            folder.mkdir(mode)
            if fcntl is None:
                break
            with suppress(FileNotFoundError):
                handle = os.open(folder, os.O_RDONLY)
                if _taken(handle, folder):
                    break
                os.close(handle)
                handle = None
        yield folder
    finally:
        if folder is not target and folder.exists():
            _emptied(folder)
        if handle is not None:
            os.close(handle)


def _taken(handle: int, folder: Path) -> bool:
    """Hold a folder; False where it has just been swept."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, which nobody sweeps
        return True
    return folder.exists()


def _emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
    folder.rmdir()


def _permit(file: Path, before: os.stat_result | None, *, new: int) -> None:
    """The mode and owner of the file before, or what a new file has here."""
    now = file.stat()
    mode = stat.S_IMODE(before.st_mode) if before else new
    with suppress(OSError):  # who may not give it away keeps it
        if before and (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
            os.chown(file, before.st_uid, before.st_gid)
    with suppress(OSError):  # a file system without modes
        if stat.S_IMODE(now.st_mode) != mode:
            file.chmod(mode)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
