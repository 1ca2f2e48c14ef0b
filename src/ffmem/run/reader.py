"""Read an index: cells, their triggers, values and statistics, straight from the files. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ffmem.cells import SIGNS, Cell, Trigger
from ffmem.errors import CellError, FfmemError, RunError
from ffmem.run import pages
from ffmem.run.folder import RunFolder, values_of
from ffmem.run.histogram import middle, quantile
from ffmem.run.manifest import Counts, Manifest
from ffmem.text import quoted, visible

if TYPE_CHECKING:
    from ffmem.model.memories import MemoryModel

CELL_COLUMNS = (
    *("layer", "index", "first_trigger", "positive_triggers", "negative_triggers"),
    *("active", "maximum", "minimum", "mean", "variance", "bins", "counts"),
)
"""The columns of the table of cells; others are from statistics of other packages."""


def open_index(run: str | Path, *, model: MemoryModel | Any = None) -> Index:
    """Open a finished run, in a folder or at a URL. With its `model`, values can be projected that were not stored.

    `model` is one already or anything that `load_model` takes. One that did not make the run is an error.
    """
    folder = RunFolder(run)
    return Index(folder, folder.complete(), model)


@lru_cache(maxsize=32)
def _mapped(path: Path, inode: int, changed: int) -> pa.Table:
    """A table, mapped once in this process as long as its file stays the same."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


class Index:
    """Every memory cell of a run: `index["L3D17"]`, or iterate over all of them."""

    def __init__(self, folder: RunFolder, manifest: Manifest, model: MemoryModel | Any = None) -> None:
        self.folder, self.manifest = folder, manifest
        self.path = folder.path
        self.layers: list[int] = manifest.settings.layers
        self._model: MemoryModel | None = None
        if model is not None:
            from ffmem.run.model import model_of

            self._model = model_of(self, model)
        self._tables: dict[str, pa.Table] = {}

    @property
    def model(self) -> MemoryModel | None:
        """The run's own model, if it was opened with it; no other can be set."""
        return self._model

    @property
    def counts(self) -> Counts:
        """The counts of what the run has read and found: tokens, sentences, triggers and others."""
        return self.manifest.counts

    @cached_property
    def has_values(self) -> bool:
        """Whether the run has projected values, so that no model is needed to show them."""
        return values_of(self.manifest) is not None

    @cached_property
    def _cells(self) -> dict[int, range]:
        """The rows of each layer's cells in the tables of cells and values."""
        rows: dict[int, range] = {}
        begin = 0
        for layer in self.layers:
            end = begin + self.manifest.model.cells[layer - 1]
            rows[layer], begin = range(begin, end), end
        return rows

    def __len__(self) -> int:
        """The number of cells in the run."""
        return sum(map(len, self._cells.values()))

    def __getitem__(self, name: str | Cell) -> CellView:
        cell = Cell.parse(name)
        rows = self._cells.get(cell.layer)
        if rows is None:
            first, last = self.layers[0], self.layers[-1]
            whole = last - first + 1 == len(self.layers)
            layers = f"{first} to {last}" if whole else ", ".join(map(str, self.layers))
            raise CellError(f"{cell}: this run has layers {layers}, found layer {cell.layer}")
        if not 0 <= cell.index < len(rows):
            raise CellError(f"{cell}: layer {cell.layer} has cells 0 to {len(rows) - 1}, found {cell.index}")
        return CellView(self, cell, rows[cell.index])

    def __iter__(self) -> Iterator[CellView]:
        for layer, rows in self._cells.items():
            for index, row in enumerate(rows):
                yield CellView(self, Cell(layer, index), row)

    def table(self, name: str) -> pa.Table:
        """A table of the run, mapped from its file: triggers, cells, sentences, tokens or values."""
        if name not in self._tables:
            file = (name == "values" and values_of(self.manifest)) or f"{name}.arrow"
            if file not in self.manifest.files:
                names = ", ".join(sorted({*(known.partition(".")[0] for known in self.manifest.files)} - {"values-2"}))
                advice = f"add it with ffmem values {self.path}" if name == "values" else f"it has {names}"
                raise RunError(f"{self.path} has no table {visible(str(name))}: {advice}")
            try:
                path = self.folder.table(file, self.manifest.files[file])
            except FileNotFoundError as error:
                raise RunError(f"{self.path} has changed since it was opened ({file} is gone): open it again") from error
            stat = path.stat()
            self._tables[name] = _mapped(path, stat.st_ino, stat.st_mtime_ns)
        return self._tables[name]

    def token(self, id: int) -> str:
        """The text of a token, its space kept."""
        return self.table("tokens").column("text")[id].as_py()

    def sentences(self, rows: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Rows of the table of sentences, each read once."""
        wanted = np.unique(np.fromiter(rows, np.int64))
        batches = self.table("sentences").to_batches()
        begins = np.cumsum([0, *(batch.num_rows for batch in batches)])
        found: dict[int, dict[str, Any]] = {}
        # A take over all batches would copy the whole table.
        for at in np.unique(np.searchsorted(begins, wanted, side="right") - 1).tolist():
            here = wanted[(wanted >= begins[at]) & (wanted < begins[at + 1])]
            found |= zip(here.tolist(), batches[at].take(pa.array(here - begins[at])).to_pylist(), strict=True)
        return found

    def triggers(self, first: CellView, count: int) -> Iterator[Trigger]:
        """The triggers of `count` cells from this one on: positive before negative, by rank."""
        cells = self.table("cells").slice(first.row, count)
        begin = cells.column("first_trigger")[0].as_py() if count else 0
        names = [Cell(*pair) for pair in zip(*(cells.column(c).to_pylist() for c in ("layer", "index")), strict=True)]
        counts = list(zip(*(cells.column(f"{s}_triggers").to_pylist() for s in ("positive", "negative")), strict=True))
        rows = self.table("triggers").slice(begin, sum(map(sum, counts))).to_pylist()
        sentences = self.sentences(row["row"] for row in rows)
        following = iter(rows)
        for cell, both in zip(names, counts, strict=True):
            for sign, number in zip(SIGNS, both, strict=True):
                for rank, row in enumerate(islice(following, number), 1):
                    prefix, token = self._split(sentences[row["row"]], row["position"])
                    yield Trigger(cell, sign, rank, row["coefficient"], row["sentence"], row["position"], prefix, token)

    def _split(self, sentence: dict[str, Any], position: int) -> tuple[str, str | None]:
        """A prefix of `position` tokens as text, and the token after it (None at the sentence's end).

        A token that is part of a character has no text of its own; then the vocabulary's name for it stands in.
        """
        text, ends, tokens = sentence["text"], sentence["ends"], sentence["tokens"]
        prefix = text[: ends[position - 1]]
        if position == len(tokens):
            return prefix, None
        return prefix, text[ends[position - 1] : ends[position]] or self.token(tokens[position])

    def __repr__(self) -> str:
        return f"Index({str(self.path)!r}: {len(self):,} cells of {visible(self.manifest.model.name)})"

    def _repr_html_(self) -> str:
        return pages.index_page(self)


@dataclass(frozen=True)
class CellView:
    """A memory cell of an index, whose parts are read from the run's files when they are asked for."""

    index: Index
    cell: Cell
    row: int

    @property
    def name(self) -> str:
        """The cell's name, such as `L3D17`."""
        return str(self.cell)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The cell's row in the table of cells."""
        return self.index.table("cells").slice(self.row, 1).to_pylist()[0]

    @cached_property
    def triggers(self) -> Triggers:
        """The prefixes with the largest coefficients of the cell, best first."""
        return Triggers(trigger for trigger in self._both if trigger.sign == "+")

    @cached_property
    def negative_triggers(self) -> Triggers:
        """The prefixes with the cell's lowest coefficients, lowest first; empty where the run did not look for them."""
        return Triggers(trigger for trigger in self._both if trigger.sign == "-")

    @cached_property
    def _both(self) -> list[Trigger]:
        return list(self.index.triggers(self, 1))

    @cached_property
    def stats(self) -> CellStatistics:
        """The cell's statistics over the corpus: how often and how strongly it fires."""
        if "active" not in self.facts:
            raise RunError(f"{self.index.path} was built with stats off: build it again to have statistics")
        return CellStatistics(self.facts, self.index.counts.tokens, self.index.counts.measured_tokens)

    @cached_property
    def value(self) -> Value:
        """The cell's value as the tokens that it promotes and suppresses."""
        return Value(self)

    def __repr__(self) -> str:
        return pages.cell_text(self)

    def _repr_html_(self) -> str:
        return pages.cell_page(self)


class Triggers(tuple[Trigger, ...]):
    """A cell's triggers in order of rank; a slice of them is one too."""

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        return Triggers(found) if isinstance(which, slice) else found

    def __repr__(self) -> str:
        return pages.triggers_text(self)

    def _repr_html_(self) -> str:
        return pages.triggers_page(self)


@dataclass(frozen=True, repr=False)
class CellStatistics:
    """A cell's coefficients over the corpus: firings and extremes of all tokens, the rest of the measured ones."""

    facts: dict[str, Any]
    tokens: int
    measured: int

    @property
    def firings(self) -> int:
        """The number of tokens with a coefficient above 0."""
        return self.facts["active"]

    @property
    def active(self) -> float:
        """The share of tokens with a coefficient above 0."""
        return self.firings / max(1, self.tokens)

    @property
    def histogram(self) -> list[tuple[float, int]]:
        """The middle of every bin in use and how many measured tokens fell into it, in ascending order."""
        return list(zip(middle(np.array(self.facts["bins"], int)).tolist(), self.facts["counts"], strict=True))

    @property
    def maximum(self) -> float:
        """The largest coefficient of all tokens."""
        return self.facts["maximum"]

    @property
    def minimum(self) -> float:
        """The smallest coefficient of all tokens."""
        return self.facts["minimum"]

    @property
    def mean(self) -> float:
        """The mean coefficient of the measured tokens."""
        return self.facts["mean"] if self.measured else float("nan")

    @property
    def variance(self) -> float:
        """The variance of the measured tokens' coefficients."""
        return self.facts["variance"] if self.measured else float("nan")

    def quantile(self, q: float) -> float:
        """The q-quantile (0 to 1) of the measured coefficients, within 5%."""
        if not isinstance(q, (int, float)) or not 0 <= q <= 1:
            raise FfmemError(f"expected a quantile from 0 to 1, found {quoted(q)}")
        found = quantile(np.array(self.facts["bins"], int), np.array(self.facts["counts"], int), q)
        return float(np.clip(found, self.minimum, self.maximum))

    @property
    def others(self) -> dict[str, Any]:
        """The columns of statistics that other packages add, by name."""
        return {name: value for name, value in self.facts.items() if name not in CELL_COLUMNS}

    def as_dict(self) -> dict[str, Any]:
        """The statistics as a dict for JSON; a number that was not measured is None."""
        names = ("firings", "active", "maximum", "minimum", "mean", "variance")
        found = {name: getattr(self, name) for name in names} | {
            f"q{q:g}": self.quantile(q) for q in (0.5, 0.9, 0.99, 0.999)
        }
        found |= {"measured_tokens": self.measured} | self.others
        return {name: None if isinstance(x, float) and np.isnan(x) else x for name, x in found.items()}

    def __repr__(self) -> str:
        return f"CellStatistics({pages.statistics_text(self)})"

    def _repr_html_(self) -> str:
        return pages.statistics_page(self)


@dataclass(frozen=True, repr=False)
class TokenProbability:
    """A token and the probability that a vector gives it when it is sent to the vocabulary."""

    token: str
    id: int
    probability: float
    z: float | None = None
    """The number of standard deviations by which a value sets the token's log-probability apart from those of all tokens.
    None where the vector is not a value, and in runs whose values were made before there was a z."""

    def __repr__(self) -> str:
        return f"TokenProbability({pages.token_text(self)})"

    def _repr_html_(self) -> str:
        return escape(pages.token_text(self))


@dataclass(frozen=True, repr=False)
class Value:
    """A cell's value as a distribution over the vocabulary: from the run's stored projection, else from its model."""

    cell: CellView

    def top(self, k: int = 10) -> list[TokenProbability]:
        """The k tokens that the value promotes most, the most promoted first."""
        return self._tokens("promoted", k)

    def bottom(self, k: int = 10) -> list[TokenProbability]:
        """The k tokens that the value suppresses most, the most suppressed first."""
        return self._tokens("suppressed", k)

    @property
    def kept(self) -> int:
        """The number of tokens that are known on each side."""
        return len(self._row["promoted"])

    @property
    def max_probability(self) -> float:
        """The largest probability that the value gives to any token."""
        return self.top(1)[0].probability

    @property
    def norm(self) -> float:
        """The length of the value vector."""
        return self._row["norm"]

    @property
    def _row(self) -> dict[str, Any]:
        return self._stored if self.cell.index.has_values else self._live

    @cached_property
    def _stored(self) -> dict[str, Any]:
        return self.cell.index.table("values").slice(self.cell.row, 1).to_pylist()[0]

    @cached_property
    def _live(self) -> dict[str, Any]:
        model = self.cell.index.model
        if model is None:
            run = self.cell.index.path
            raise RunError(f"{run} has no value projections: add them with ffmem values {run}, or open it with its model")
        from ffmem.run.model import project

        cell = self.cell.cell
        return project(model, model.values(cell.layer)[cell.index][None], k=100).to_pylist()[0]

    def _tokens(self, side: str, k: int) -> list[TokenProbability]:
        ids, log_probs = self._row[side], self._row[f"{side}_log_prob"]
        zs = self._row.get(f"{side}_z", [None] * len(ids))
        if type(k) is not int or not 0 <= k <= len(ids):
            raise RunError(
                f"expected at most the {len(ids)} tokens that are known of each value, found {quoted(k)}; "
                "ffmem values --top keeps more"
            )
        return [
            TokenProbability(self.cell.index.token(id), id, float(np.exp(log_prob)), z)
            for id, log_prob, z in zip(ids[:k], log_probs[:k], zs[:k], strict=True)
        ]

    def __repr__(self) -> str:
        return pages.value_text(self)

    def _repr_html_(self) -> str:
        return pages.value_page(self)
