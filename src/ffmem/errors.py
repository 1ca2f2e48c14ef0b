"""Errors that a user can mend, all of one base: one line that says what was expected, what was found, where, what to try."""

from __future__ import annotations


class FfmemError(Exception):
    """An error that a user can mend. The message is one line: expected, found, where, what to try."""


class ModelError(FfmemError):
    """An error about a model that cannot be loaded or read."""


class CorpusError(FfmemError):
    """An error about a text source that cannot be read."""


class RunError(FfmemError):
    """An error about a run folder that is missing, damaged, unfinished or made from something else."""


class CellError(FfmemError, KeyError):
    """An error about a cell name that cannot be read, or a cell or layer that is not there."""

    def __str__(self) -> str:  # KeyError would show the repr
        return str(self.args[0]) if self.args else ""
