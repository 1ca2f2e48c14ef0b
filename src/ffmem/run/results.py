"""A result is data: a tidy table, its facts, and what they were made with, kept in the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.errors import FfmemError, RunError
from ffmem.run.folder import RESULTS
from ffmem.run.manifest import json_hash
from ffmem.run.pages import COLUMNS, html_table
from ffmem.run.reader import Index
from ffmem.run.registry import all_experiments
from ffmem.text import beginning, visible

CONTROL = "random"
"""The one control there is: a model of the same shape with random weights."""
MOST = 10_000_000
"""The limit on anything that a caller counts (examples, cells, draws): a larger number is taken for a slip."""
WAIT = 600.0
"""The number of seconds that a result waits for another process which writes the same run."""


def check_request(
    names: Iterable[str] = (), *, control: str | None = None, seed: int | None = 0, **counts: int | None
) -> list[str]:
    """The experiments that are meant (all if none is named); an error where a name or a number cannot be."""
    wanted = list(names) or list(all_experiments())
    if unknown := [name for name in wanted if name not in all_experiments()]:
        raise FfmemError(f"expected experiments among {', '.join(all_experiments())}, found {unknown[0]!r}")
    if control is not None and control != CONTROL:
        raise FfmemError(f"expected control {CONTROL}, found {control!r}")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise FfmemError(f"expected a seed of at least 0 and below 2^63, found {seed}")
    for name, count in counts.items():
        if count is not None and not 1 <= count <= MOST:
            bound = "at least 1" if count < 1 else f"at most {MOST:,}"
            raise FfmemError(f"expected {name} of {bound}, found {count}")
    return [name for name in all_experiments() if name in wanted]


SHOWN_ROWS, CELL_COLUMNS = 40, 40
"""The number of rows that a notebook shows, and of characters in each of their cells."""


@dataclass(frozen=True, repr=False)
class Result:
    """The result of an experiment. Rows have one entry a layer unless the experiment says otherwise; shares are 0 to 1.

    >>> result = Result("activity", 0, {}, [{"layer": 1, "active_median": 0.5}])
    >>> result.table.column("active_median").to_pylist()
    [0.5]
    """

    experiment: str
    seed: int
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    facts: dict[str, Any] = field(default_factory=dict)
    resamples: list[dict[str, Any]] = field(default_factory=list)
    """The results of the same experiment on cells (or examples) drawn again from its own with replacement: of each draw
    only the `rows` and `facts` that claims are judged by."""
    control: str | None = None
    """`random` where this was found on a model of the same shape with fresh random weights; None for the run's model."""

    def __repr__(self) -> str:
        control = "" if self.control is None else f" of the control {self.control}"
        columns = ", ".join(self.rows[0]) if self.rows else "none"
        return beginning(visible(f"Result({self.experiment}{control}: {len(self.rows)} rows of {columns})"), COLUMNS)

    def _repr_html_(self) -> str:
        """The first rows as an HTML table; where a cell holds a list, its beginning is shown."""
        columns = list(dict.fromkeys(name for row in self.rows[:SHOWN_ROWS] for name in row))
        rows = [[_cell(row.get(name)) for name in columns] for row in self.rows[:SHOWN_ROWS]]
        more = len(self.rows) - SHOWN_ROWS
        title = f"{self.experiment}{'' if self.control is None else f' ({self.control})'}"
        return html_table(columns, rows, visible(title)) + (f"<i>and {more:,} more rows</i>" if more > 0 else "")

    @property
    def draws(self) -> list[Result]:
        """The resamples, each as a result that holds only what claims are judged by."""
        return [replace(self, rows=draw["rows"], facts=draw["facts"], resamples=[]) for draw in self.resamples]

    @property
    def table(self) -> pa.Table:
        """The rows as an Arrow table: `.to_pandas()`, or `polars.from_arrow(...)`."""
        return pa.Table.from_pylist(self.rows)

    def plot(self, *, layers: int | None = None) -> Any:
        """The figures of this result beside the paper's, for a notebook (needs `pip install 'ffmem[report]'`).

        `layers` is the model's depth; without it, the last layer that the result has a row for.
        """
        experiment = all_experiments().get(self.experiment)
        if experiment is None or not experiment.figures:
            made = ", ".join(name for name, one in all_experiments().items() if one.figures)
            raise FfmemError(f"expected a result of {made}, found {self.experiment!r}")
        return experiment.plot(self, layers=layers)

    def as_dict(self) -> dict[str, Any]:
        """The result as a dict for JSON, in which infinite numbers and NaN become null."""
        return _plain(vars(self))

    def saved(self, index: Index) -> Result:
        """Write `results/NAME.json` and `results/NAME.parquet` into the run, each whole or not at all; gives the result.

        A control's are in `results/random/`.
        """
        name = _name(self.experiment, self.control)
        with index.folder.locked(wait=WAIT):
            now = index.folder.manifest()
            if now is None or now.identity != index.manifest.identity:
                raise RunError(f"{index.path}: made anew since it was opened; the result {self.experiment} is not of it")
            with index.folder.writing(f"{name}.parquet") as path:
                pq.write_table(self.table, path)
            content = {"run": now.identity, **self.as_dict()}
            with index.folder.writing(f"{name}.json") as path:
                path.write_text(_written(content | {"hash": json_hash(content)}), "utf-8", "backslashreplace")
        return self


def load_result(index: Index, experiment: str, control: str | None = None) -> Result:
    """A result that was saved in this run, of its model or of a control; an error where it is altered or another run's."""
    name = f"{_name(experiment, control)}.json"
    location = index.folder.location(name)
    again = f"make it with ffmem experiments {index.path} {experiment}{f' --control {control}' if control else ''}"
    try:
        found = json.loads(index.folder.read_bytes(name).decode("utf-8"))
        if found.pop("hash") != json_hash(found):
            raise RunError(f"{location}: altered since it was written (its hash differs); {again}")
        if found.pop("run") != index.manifest.identity:
            raise RunError(f"{location}: the result of another run; {again}")
        result = Result(**found)
    except FileNotFoundError as error:
        raise RunError(f"{index.path} has no result {experiment}: {again}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{location}: damaged; {again}") from error
    if (result.experiment, result.control) != (experiment, control):
        raise RunError(f"{location}: the result {result.experiment} under the name of another; {again}")
    return result


def saved_results(index: Index, control: str | None = None) -> list[str]:
    """The names of the results in a run: of its model, or of a control."""
    folder = PurePosixPath(_name("", control))
    found = (PurePosixPath(name) for name in index.folder.names(RESULTS))
    return sorted(name.stem for name in found if name.suffix == ".json" and name.parent == folder)


def _cell(value: Any) -> str:
    """A value of a row as the text that a table shows."""
    value = _plain(value)
    if value is None:
        return "–"
    if isinstance(value, list):
        value = ", ".join(map(_cell, value))
    return beginning(visible(f"{value:.4g}" if isinstance(value, float) else str(value)), CELL_COLUMNS)


def _name(experiment: str, control: str | None) -> str:
    return str(PurePosixPath(RESULTS, control or "", experiment))


def _written(whole: dict[str, Any]) -> str:
    """A result as JSON that people can read too: the draws, which are many and small, take a line each."""
    draws = [json.dumps(draw, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for draw in whole["resamples"]]
    text = json.dumps(whole | {"resamples": []}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Nothing else in it can begin a line so: a line break inside a text is written as \\n.
    return text.replace('\n "resamples": []', '\n "resamples": [' + ",".join(f"\n  {draw}" for draw in draws) + "]", 1)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if hasattr(value, "item"):  # a number of numpy or torch
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
