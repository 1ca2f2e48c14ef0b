"""Errors that a user can mend, all of one base: one line that says what was expected, what was found, where, what to try."""

from __future__ import annotations


class FfmemError(Exception):
    """Something a user can mend. The message is one line: expected, found, where, what to try."""


class ModelError(FfmemError):
    """A model that cannot be loaded or read."""


class CorpusError(FfmemError):
    """A text source that cannot be read."""


class RunError(FfmemError):
    """A run folder that is missing, damaged, unfinished or made from something else."""


class CellError(FfmemError, KeyError):
    """A cell name that cannot be read, or a cell or layer that is not there."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""
