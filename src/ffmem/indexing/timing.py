"""The seconds that each step of a run takes."""

from __future__ import annotations

import time


class Timing:
    """The seconds between the marks of a run's steps, by their names, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def mark(self, step: str) -> None:
        """Note that a step ends now; one that has ended before is not noted again."""
        if step not in self.seconds:
            now = time.monotonic()
            self.seconds[step], self._last = round(now - self._last, 3), now
