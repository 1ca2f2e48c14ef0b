"""The manifest: what a run was made from and what it holds, as one typed object, checked as a whole when it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

FORMAT = 3
"""The format of the manifest and of the files that it names; another one is refused."""
MOST = 1 << 63
"""The limit that all numbers of a run stay below."""
State = Literal["building", "complete"]
Distinct = Literal["text", "sentence", "document", "none"]
"""The thing in which two triggers of a cell must differ: their prefix, sentence or document, or nothing."""


class ManifestError(ValueError):
    """An error that says what is wrong with a manifest, in words that follow the name of its file."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts in a manifest on the model that the run was made with."""

    name: str
    in_memory: bool
    revision: str | None
    hash: str
    architecture: str
    family: str
    found_by_shape: bool
    layers: int
    cells: list[int]
    """The number of cells of each layer."""
    d: int
    gated: bool
    vocabulary: int
    context: int
    bos: int | None
    device: str
    dtype: str


@dataclass(frozen=True)
class TokenizerFacts:
    """The facts in a manifest on the tokenizer that the run was made with."""

    hash: str


@dataclass(frozen=True)
class CorpusFacts:
    """The facts in a manifest on the text that the run was made from."""

    sources: list[str]
    """The names of the files and data sets, in the order in which they were read."""
    hash: str = ""
    """The hash of all records that were read; empty while the run is being made."""
    records: list[int] | None = None
    """The number of records of each part, from which a sample was drawn; None without a sample."""
    max_record: int = 0
    """The most bytes that a record may have."""


@dataclass(frozen=True)
class Settings:
    """The settings of a run, every `auto` decided."""

    top: int
    unit: str
    distinct: Distinct
    layers: list[int]
    limit_tokens: int | None
    batch_tokens: int
    shard_tokens: int
    bos: bool
    negative: bool
    stats: str
    language: str
    column: str
    wikitext: str
    """The treatment of WikiText's marks: `keep` or `plain`."""
    sample: int | None = None
    """The number of records that were drawn from the corpus; None for all of it."""
    seed: int | None = None
    """The seed with which that sample was drawn."""
    stats_every: int | None = None
    """The divisor of sampled statistics, which measure tokens with (sentence + position) divisible by it; else None."""
    statistics: list[str] = field(default_factory=list)
    """The names of other packages' statistics that the run gathers, beside ffmem's own."""

    @property
    def has_stats(self) -> bool:
        """Whether the run holds statistics of its cells."""
        return self.stats != "off"

    @property
    def every(self) -> int:
        """The divisor of (sentence + position) by which measured tokens are chosen: 1 for all tokens, 0 for none."""
        return self.stats_every if self.stats_every is not None else int(self.stats == "full")

    @property
    def measured(self) -> str:
        """The tokens that the statistics are of, in words."""
        return f"tokens with (sentence + position) divisible by {self.stats_every}" if self.stats_every else self.stats

    @property
    def hash(self) -> str:
        """A hash of all settings."""
        return json_hash(asdict(self))


@dataclass(frozen=True)
class Counts:
    """The counts of a finished run: what it has read, and what it has found."""

    records: int = 0
    sentences: int = 0
    tokens: int = 0
    shards: int = 0
    cells: int = 0
    triggers: int = 0
    sentences_kept: int = 0
    cut_to_context: int = 0
    padding_share: float = 0.0
    measured_tokens: int = 0


@dataclass(frozen=True)
class FileFacts:
    """The size and the hash of a file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ValueFacts:
    """The facts in a manifest on how the run's values were projected onto the vocabulary."""

    top: int
    norm: bool
    dtype: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of a run. While it is `building`, what will be known at its end only is empty."""

    state: State
    ffmem: str
    model: ModelFacts
    tokenizer: TokenizerFacts
    corpus: CorpusFacts
    settings: Settings
    environment: dict[str, str | int]
    counts: Counts = field(default_factory=Counts)
    skipped: dict[str, int] = field(default_factory=dict)
    files: dict[str, FileFacts] = field(default_factory=dict)
    values: ValueFacts | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the run is finished, so that all counts, hashes and files are known."""
        return self.state == "complete"

    @property
    def reading(self) -> dict[str, Any]:
        """The keywords that `open_sources` had when the run was made, so that another text can be opened in the same way."""
        return {"column": self.settings.column, "max_record": self.corpus.max_record}

    @property
    def provenance(self) -> str:
        """A hash of all that is known of a run when it begins; it stands in every file of the unfinished work."""
        corpus = replace(self.corpus, hash="", max_record=0)  # the latter may grow
        begun = replace(self, state="building", corpus=corpus, counts=Counts(), skipped={}, files={})
        return json_hash(replace(begun, values=None).as_dict())

    @property
    def identity(self) -> dict[str, str]:
        """The hashes that tell this run from any other: of all that it was made from, and of the tables it holds."""
        tables = {name: facts.sha256 for name, facts in self.files.items() if not name.startswith("values")}
        return {
            "model": self.model.hash,
            "tokenizer": self.tokenizer.hash,
            "corpus": self.corpus.hash,
            "settings": self.settings.hash,
            "tables": json_hash(tables),
        }

    def as_dict(self) -> dict[str, Any]:
        """The manifest as a dict for JSON, without its format and hash."""
        return asdict(self)

    def as_json(self) -> str:
        """The text of the manifest's file: all of it, the format, and a hash of both."""
        whole = {**self.as_dict(), "format": FORMAT}
        return json.dumps({**whole, "hash": json_hash(whole)}, indent=2, ensure_ascii=False, sort_keys=True) + "\n"

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read what `as_json` wrote; a `ManifestError` says what is wrong with anything else."""
        try:
            found = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"damaged, not an ffmem manifest ({error})") from error
        if not isinstance(found, dict) or "format" not in found:
            raise ManifestError("damaged, not an ffmem manifest (it names no format)")
        if found["format"] != FORMAT:
            version = str(found["format"])[:20]
            raise ManifestError(f"expected format {FORMAT}, found {version}, which another ffmem has written")
        if found.pop("hash", None) != json_hash(found):
            raise ManifestError("altered since it was written (its hash differs)")
        del found["format"]
        manifest: Manifest = _typed(cls, found, "it")
        if problem := manifest._problem():
            raise ManifestError(f"altered since it was written ({problem})")
        return manifest

    @classmethod
    def resembles(cls, data: bytes, *, damaged: bool) -> bool:
        """Whether these bytes are a manifest that ffmem wrote, in whatever format; `damaged` is the answer where they are
        not JSON."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return damaged
        return isinstance(found, dict) and found.keys() >= _needed(cls)

    def _problem(self) -> str:
        """The reason why the manifest's parts cannot belong together, in words; empty where they do."""
        layers, cells = self.settings.layers, self.model.cells
        if len(cells) != self.model.layers or min(cells, default=0) < 1:
            return f"{self.model.layers} layers with cells {str(cells)[:40]}"
        if not layers or layers != sorted(set(layers)) or not 1 <= layers[0] <= layers[-1] <= self.model.layers:
            return f"layers {str(layers)[:40]} of a model that has {self.model.layers}"
        if self.is_complete and self.counts.cells != sum(cells[layer - 1] for layer in layers):
            return f"{self.counts.cells} cells in layers that have {sum(cells[layer - 1] for layer in layers)}"
        if outside := [name for name in self.files if "/" in name or "\\" in name or name.startswith(".")]:
            return f"a file {outside[0]!r} outside the run"
        return ""


def json_hash(value: Any) -> str:
    """The hash of what JSON can hold, whatever the order of its names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A value of JSON as this type: a dataclass, a list, a dict by names, an option, a number, a text or a truth."""
    if is_dataclass(kind):
        return _object(kind, value, where)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal and value in parts:
        return value
    if origin is UnionType:
        options = [one for one in parts if _fits(one, value)]
        if options:
            return _typed(options[0], value, where)
    elif origin is list and isinstance(value, list):
        return [_typed(parts[0], one, f"{where}[{at}]") for at, one in enumerate(value)]
    elif origin is dict and isinstance(value, dict):
        return {name: _typed(parts[1], one, f"{where}.{name}") for name, one in value.items()}
    elif origin is None and _fits(kind, value):
        return float(value) if kind is float else value
    raise ManifestError(f"altered since it was written ({where}: expected {_named(kind)}, found {repr(value)[:40]})")


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value is of a plain type, and no number negative or too large; booleans are not numbers, whole numbers
    may be floats."""
    if is_dataclass(kind):
        return isinstance(value, dict)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool) and 0 <= value < MOST
    return isinstance(value, get_origin(kind) or kind)


def _object(kind: Any, value: Any, where: str) -> Any:
    """An object of JSON as a dataclass of this kind, every field checked."""
    if not isinstance(value, Mapping):
        raise ManifestError(f"altered since it was written ({where}: expected an object, found {repr(value)[:40]})")
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise ManifestError(f"altered since it was written ({where} has an unknown {min(unknown)[:40]!r})")
    if missing := _needed(kind) - value.keys():
        raise ManifestError(f"altered since it was written ({where} lacks {min(missing)!r})")
    return kind(**{name: _typed(hints[name], one, f"{where}.{name}".removeprefix("it.")) for name, one in value.items()})


def _needed(kind: Any) -> set[str]:
    """The fields of a dataclass that have no default."""
    return {one.name for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING}


@lru_cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _named(kind: Any) -> str:
    """A type in words, for an error."""
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    if get_origin(kind) is UnionType:
        return " or ".join(_named(one) for one in get_args(kind))
    plain = {int: "a number", float: "a number", str: "a text", bool: "true or false", NoneType: "null"}
    return plain.get(get_origin(kind) or kind, {list: "a list", dict: "an object"}.get(get_origin(kind), "an object"))
