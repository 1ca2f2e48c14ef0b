"""The end of the program: an exit code and at most one line about why, whatever happens.

This is imported before anything slow, so that a signal finds it there from the first moment on.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TextIO

SIGNALS = (signal.SIGINT, signal.SIGTERM)
AGAIN = 0.1
"""The number of seconds after which an interrupt is raised again, in case the code that got it went on without it."""
LONGEST = 600
"""The most characters that a line about an error has."""
IMPORTING = "<frozen importlib"
"""The beginnings of the names of the files of Python's import machinery."""
DEBUG = "FFMEM_DEBUG"
"""The environment variable that makes an error show its traceback."""

_came: int | None = None
"""The first signal that asked this process to end; None as long as none did."""
_over = True
"""Whether the program has done its work, or is ending, so that a signal finds nothing to interrupt."""


class Stop(KeyboardInterrupt):
    """The exception that SIGINT and SIGTERM raise. Where a plain KeyboardInterrupt passes through `exec`, Python ends by
    SIGINT, not by us."""


def ended(run: Callable[[], object], *, for_good: bool = False) -> NoReturn:
    """Do `run`, then exit. SIGINT and SIGTERM raise `Stop` in it, once; an error of it is one line.

    A signal that is ignored, as `nohup` asks for, stays so. With `for_good` the process ends behind this, and no signal
    disturbs what Python does then; without, signals are afterwards as they were before.
    """
    global _came, _over
    before: dict[int, Any] = {}
    code: Any = 0
    unraisable = sys.unraisablehook
    try:
        if not any(signal.getsignal(number) is _stop for number in SIGNALS):
            _came, _over = None, False
            _listen(before)
            # What is taken apart in the midst of its work may complain, to nobody's use.
            sys.unraisablehook = lambda lost: unraisable(lost) if _came is None else None
        for stream in (sys.stdout, sys.stderr):
            if reconfigure := getattr(stream, "reconfigure", None):
                reconfigure(errors="backslashreplace")  # whatever the terminal's encoding lacks
        run()
        _flush()
        _over = True
    except BaseException as error:
        _over = True
        code = _exit_code(error)
    try:
        _flush()
    except OSError:
        # Nobody reads it any more; Python would complain of that at its end.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if before and _came is not None and hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if for_good else handler)
    if not for_good:
        sys.unraisablehook = unraisable
    sys.exit(code)


@contextmanager
def kept(what: str) -> Iterator[None]:
    """Tell whoever interrupts the work in this context what of it is kept, and how to go on."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(f"{what}. Give the same command again to continue.")
        raise


def one_line(text: str) -> str:
    """A text as one line for people: nothing in it is hidden, and its middle is left out if it is too long."""
    from ffmem.text import visible

    line = visible(text)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 200]} … {line[-190:]}"


def _listen(before: dict[int, Any]) -> None:
    with suppress(ValueError):  # in a thread that is not the main one, which alone gets signals
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, _stop)
    if before and hasattr(signal, "SIGALRM"):
        before[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)


def _stop(number: int, frame: FrameType | None) -> None:
    """Interrupt the program, unless it is on its way out: what it cleans up there is not to be cut short."""
    global _came
    if _over:
        return
    _came = _came or number
    if hasattr(signal, "setitimer"):
        # The exception may be lost in a destructor, or in a module that makes do without what it could not import.
        signal.signal(signal.SIGALRM, partial(_again, number))
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        if frame is not None and frame.f_code.co_filename.startswith(IMPORTING):
            return  # cut short here, it could keep the lock of all imports, for which other threads would wait for ever
    if not _interrupted():
        raise Stop


def _again(number: int, _: int, frame: FrameType | None) -> None:
    """Call whoever handles the signal now, as if it had come once more.

    It is not sent: a library that ends may have put the default in the place of a handler, which would end us on the spot.
    """
    handler = signal.getsignal(number)
    if handler is not signal.SIG_IGN:
        (handler if callable(handler) else _stop)(number, frame)


def _interrupted() -> bool:
    """Whether an interrupt is on its way out: it is being handled, or has left a generator, which is being closed."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | GeneratorExit):
        error = error.__context__
    return error is not None


def _exit_code(error: BaseException) -> Any:
    """Print one line about the error that a program ends with, and give its exit code."""
    from ffmem.errors import FfmemError

    if isinstance(error, SystemExit):
        return error.code
    if _came is not None or isinstance(error, KeyboardInterrupt):
        notes = getattr(error, "__notes__", [])
        if isinstance(error, FfmemError | OSError):  # of what was still to be done
            notes = [f"error: {_known(error)}"]
        _say("; ".join(["stopped", *notes]))
        return 128 + (_came or signal.SIGINT)
    if (code := getattr(error, "exit_code", None)) is not None:  # typer's: a version, a page of help, a wrong option
        if format_message := getattr(error, "format_message", None):
            context = getattr(error, "ctx", None)
            _say(f"error: {format_message().rstrip('.')}" + (f"; see {context.command_path} --help" if context else ""))
        return code
    if isinstance(error, BrokenPipeError) and _unread(sys.stdout):
        return 0  # the reader, such as head, has seen enough
    if isinstance(error, OSError) and error.filename is None:
        try:
            _flush()
        except OSError as named:
            error = named
    if os.environ.get(DEBUG):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, FfmemError | OSError):
        _say(f"error: {_known(error)}")
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # the latter is torch's
        _say(f"error: out of memory {' '.join(str(error).split())}".rstrip())
    else:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        _say(f"error: unexpected {what}; please report this, {DEBUG}=1 shows where it comes from")
    return 1


def _known(error: Exception) -> str:
    """The message of an error that was foreseen; for an error of the system, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        print(one_line(f"ffmem: {text}"), file=sys.stderr, flush=True)


def _flush() -> None:
    stream = sys.stdout
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def _unread(stream: TextIO) -> bool:
    """Whether the reader of a stream is gone, so that nothing more can be written to it."""
    try:
        asked = select.poll()
        asked.register(stream.fileno(), 0)
        return bool(asked.poll(0))
    except AttributeError:  # a system without poll
        return True
    except (OSError, ValueError):  # a stream without a file
        return False
