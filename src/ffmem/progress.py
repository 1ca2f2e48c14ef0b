"""Progress lines, one for anything that takes longer than two seconds, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from ffmem.text import visible

PATIENCE = 2.0
"""The number of seconds before anything is shown."""
PLAIN_EVERY = 10.0
"""The number of seconds between lines where there is no terminal."""


class Reporter:
    """Shows how far a task has come: a bar on a terminal, a line now and then elsewhere, nothing if quiet."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self.what = visible(what)
        self.quiet = quiet
        self.console = Console(stderr=True)
        self.began = self.last = time.monotonic()
        self._bar: Progress | None = None

    def update(self, fraction: float | None, note: str = "") -> None:
        """Report the share done (None if unknown) and a short note."""
        note, now = visible(note), time.monotonic()
        if self.quiet or now - self.began < PATIENCE:
            return
        if self.console.is_terminal:
            self._show(fraction, note)
        elif now - self.last >= PLAIN_EVERY:
            self.last = now
            print(f"{self.what}: {self._share(fraction, now)}{note}", file=sys.stderr, flush=True)

    def _share(self, fraction: float | None, now: float) -> str:
        if not fraction:
            return ""
        left = (now - self.began) * (1 - fraction) / fraction
        return (
            f"{fraction:.0%}, about {left / 60:.0f} min left, "
            if left >= 90
            else f"{fraction:.0%}, about {left:.0f} s left, "
        )

    def _show(self, fraction: float | None, note: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=16),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                # What has no room is this, not the time.
                TextColumn(
                    "{task.fields[note]}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
                ),
                expand=True,
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task(self.what, total=None, note=note)
            self._bar.start()
        self._bar.update(self._task, total=None if fraction is None else 1.0, completed=fraction or 0.0, note=note)

    def close(self) -> None:
        """Take the bar off the screen; nothing is shown from then on."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


@contextmanager
def reporting(what: str, *, quiet: bool = False) -> Iterator[Reporter]:
    """A reporter that leaves the screen clean, whatever happens."""
    reporter = Reporter(what, quiet=quiet)
    try:
        yield reporter
    finally:
        reporter.close()
