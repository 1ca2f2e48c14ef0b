"""A result is data: a tidy table, its facts, and what they were made with, kept in the run folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ffmem.index.folder import RESULTS
from ffmem.index.reader import Index
from ffmem.words import FfmemError, RunError

EXPERIMENTS = ("removal", "agreement", "activity", "composition", "refinement", "normaliser")
"""Their names, in the order in which they are run."""
CONTROLS = ("random",)
MOST = 10_000_000
"""Of anything that is counted: what is asked for beyond that is a slip."""


def check_request(
    names: Iterable[str] = (), *, control: str | None = None, seed: int | None = 0, **counts: int | None
) -> list[str]:
    """The experiments that are meant (all if none is named); an error where a name or a number cannot be."""
    wanted = list(names) or list(EXPERIMENTS)
    if unknown := [name for name in wanted if name not in EXPERIMENTS]:
        raise FfmemError(f"expected experiments among {', '.join(EXPERIMENTS)}, found {unknown[0]!r}")
    if control is not None and control not in CONTROLS:
        raise FfmemError(f"expected a control among {', '.join(CONTROLS)}, found {control!r}")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise FfmemError(f"expected a seed of at least 0 and below 2^63, found {seed}")
    for name, count in counts.items():
        if count is not None and not 1 <= count <= MOST:
            bound = "at least 1" if count < 1 else f"at most {MOST:,}"
            raise FfmemError(f"expected {name} of {bound}, found {count}")
    return [name for name in EXPERIMENTS if name in wanted]


@dataclass(frozen=True)
class Result:
    """What an experiment found. Rows have one entry a layer unless the experiment says otherwise; shares are 0 to 1.

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
    """What the same experiment finds on cells (or examples) drawn again from its own with replacement: of each draw the
    `rows` and `facts` that claims are judged by, no more."""
    control: str | None = None
    """`random` where this was found on a model of the same shape with fresh random weights; None for the run's model."""

    @property
    def table(self) -> pa.Table:
        """The rows as an Arrow table: `.to_pandas()`, or `polars.from_arrow(...)`."""
        return pa.Table.from_pylist(self.rows)

    def plot(self) -> Any:
        """The figures of this result beside the paper's, for a notebook (needs `pip install 'ffmem[report]'`)."""
        # By name: figures are drawn in a room below this one.
        return import_module("ffmem.reports.figures").plot(self)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers that are none become null."""
        whole = {
            "experiment": self.experiment,
            "seed": self.seed,
            "settings": self.settings,
            "rows": self.rows,
            "facts": self.facts,
            "resamples": self.resamples,
            "control": self.control,
        }
        return _plain(whole)

    def saved(self, index: Index) -> Result:
        """This result, once `results/NAME.json` and `results/NAME.parquet` are in the run, each whole or not at all.

        A control's are in `results/random/`.
        """
        name = _name(self.experiment, self.control)
        with index.folder.writing(f"{name}.parquet") as path:
            pq.write_table(self.table, path)
        text = _written(self.as_dict())
        with index.folder.writing(f"{name}.json") as path:
            path.write_text(text, "utf-8")
        return self


def load_result(index: Index, experiment: str, control: str | None = None) -> Result:
    """A result that was saved in this run: of its model, or of a control."""
    name = f"{_name(experiment, control)}.json"
    again = f"ffmem experiments {index.path} {experiment}{f' --control {control}' if control else ''}"
    try:
        found = json.loads(index.folder.read_bytes(name).decode("utf-8"))
        return Result(**{part.name: found[part.name] for part in fields(Result)})
    except FileNotFoundError as error:
        raise RunError(f"{index.path} has no result {experiment}: make it with {again}") from error
    except (ValueError, KeyError, TypeError) as error:
        place = index.folder.place(name)
        raise RunError(f"{place}: damaged; make it again with {again}") from error


def saved_results(index: Index, control: str | None = None) -> list[str]:
    """The names of the results in a run: of its model, or of a control."""
    folder = PurePosixPath(_name("", control))
    found = (PurePosixPath(name) for name in index.folder.names(RESULTS))
    return sorted(name.stem for name in found if name.suffix == ".json" and name.parent == folder)


def _name(experiment: str, control: str | None) -> str:
    return str(PurePosixPath(RESULTS, control or "", experiment))


def _written(whole: dict[str, Any]) -> str:
    """JSON to be read by people too; of the draws, which are many and small, a line each."""
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
