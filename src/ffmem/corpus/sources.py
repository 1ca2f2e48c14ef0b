"""Where text comes from: files, Hugging Face datasets, iterables. One record after another, never all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ffmem.corpus.files import PACKED, POCKET, JsonLines, Pocket, TextFile, special
from ffmem.corpus.parquet import ParquetFile
from ffmem.corpus.record import MAX_RECORD, listed, text_of
from ffmem.errors import CorpusError
from ffmem.text import visible

LINES_OF_JSON = (".jsonl", ".ndjson")


@runtime_checkable
class Source(Protocol):
    """Something that gives records of text."""

    @property
    def name(self) -> str: ...

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        """The texts in order; what is left out on purpose is counted in `skipped`."""
        ...

    def fraction(self) -> float | None:
        """How much of the source has been read, where that is known."""
        ...

    def size(self) -> int | None:
        """Its size in bytes on disk, where it has one."""
        ...


@dataclass
class Dataset:
    """A Hugging Face dataset, streamed: `Dataset("Salesforce/wikitext", config="wikitext-103-raw-v1", split="train")`."""

    id: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    max_record: int = field(default=MAX_RECORD, repr=False)

    @property
    def name(self) -> str:
        parts = [
            self.id,
            *([f"config={self.config}"] if self.config else []),
            f"split={self.split}",
            f"column={self.column}",
        ]
        return "hf:" + ",".join(parts)

    @classmethod
    def parse(cls, text: str, column: str = "text", max_record: int = MAX_RECORD) -> Dataset:
        """Read `hf:ID[,config=C][,split=S][,column=NAME]`.

        >>> Dataset.parse("hf:Salesforce/wikitext,config=wikitext-2-raw-v1")
        Dataset(id='Salesforce/wikitext', config='wikitext-2-raw-v1', split='train', column='text')
        """
        name, *options = text.removeprefix("hf:").split(",")
        chosen = {"column": column}
        for option in options:
            key, equals, value = option.partition("=")
            if key not in ("config", "split", "column") or not equals:
                raise CorpusError(f"expected hf:ID,config=...,split=...,column=..., found {option!r} in {text!r}")
            chosen[key] = value
        return cls(name, **chosen, max_record=max_record)

    def size(self) -> int | None:
        return None

    def fraction(self) -> float | None:
        return None

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        name = visible(self.name)
        try:
            import datasets
        except ImportError as error:
            raise CorpusError(f"{name} needs the datasets package: pip install 'ffmem[datasets]'") from error
        for number, row in enumerate(self._rows(datasets)):
            yield from _field(row, self.column, f"{name}: row {number}", skipped, self.max_record)

    def _rows(self, datasets: Any) -> Iterator[dict[str, Any]]:
        try:
            yield from datasets.load_dataset(self.id, self.config, split=self.split, streaming=True)
        except Exception as error:  # the library raises many kinds, all of them about this name
            raise CorpusError(
                f"{visible(self.name)}: cannot be loaded: {(str(error).strip() or repr(error)).splitlines()[0]}"
            ) from error


@dataclass
class Texts:
    """A Python iterable of strings (or of mappings with a text column)."""

    texts: Iterable[Any]
    column: str = "text"
    name: str = "iterable"
    read: int = 0
    max_record: int = MAX_RECORD

    def size(self) -> int | None:
        return None

    def fraction(self) -> float | None:
        return self.read / max(1, len(self.texts)) if isinstance(self.texts, Sequence) else None

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        self.read = 0
        for number, value in enumerate(self.texts):
            self.read += 1
            where = f"item {number} of the corpus"
            if isinstance(value, dict):
                yield from _field(value, self.column, where, skipped, self.max_record)
            else:
                yield from text_of(value, where, skipped, self.max_record)


def open_sources(
    corpus: object, *, column: str = "text", headings: bool = False, max_record: int = MAX_RECORD
) -> list[Source]:
    """The sources a user means: a path, a `hf:` name, a `Dataset`, a list of those, or an iterable of strings.

    A string alone is a path; strings in a list are texts, so a list of files is a list of `Path`s.
    """
    if isinstance(corpus, (str, Path, Source)):
        return [open_source(corpus, column=column, headings=headings, max_record=max_record)]
    if isinstance(corpus, (list, tuple)) and corpus and all(isinstance(part, (Path, Source)) for part in corpus):
        return [open_source(part, column=column, headings=headings, max_record=max_record) for part in corpus]
    if isinstance(corpus, (list, tuple)) and _are_files(corpus):
        raise CorpusError(f"strings in a list are texts, but {corpus[0]} is a file: give files as Path(...)")
    if isinstance(corpus, Iterable):
        return [Texts(corpus, _name(column, "the name of a column"), max_record=max_record)]
    raise CorpusError(f"expected a path, a hf: name or an iterable of strings as the corpus, found {type(corpus).__name__}")


def _are_files(texts: Sequence[Any]) -> bool:
    """Whether strings look like names of files that exist, rather than texts."""
    short = 0 < len(texts) <= 100 and all(isinstance(text, str) and 0 < len(text) < 256 for text in texts)
    return short and all("\0" not in text and Path(text).is_file() for text in texts)


def open_source(
    spec: str | Path | Source, *, column: str = "text", headings: bool = False, max_record: int = MAX_RECORD
) -> Source:
    """One source, by the name or the ending of its file; `headings` keeps a text file's headings as records."""
    _name(column, "the name of a column")
    if not isinstance(spec, (str, Path)):
        _name(spec.name, "the name of a source")
        return spec
    _name(str(spec), "the name of a file")
    if isinstance(spec, str) and spec.startswith("hf:"):
        return Dataset.parse(spec, column, max_record)
    if isinstance(spec, str) and spec in POCKET:
        return Pocket(headings=headings, title=spec, max_record=max_record)
    path = _file(Path(spec))
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    kind = suffixes[-1] if suffixes else ""
    if kind == ".parquet":
        return ParquetFile(path, column, max_record=max_record)
    if kind in LINES_OF_JSON:
        return JsonLines(path, column=column, max_record=max_record)
    if kind == ".json":
        raise CorpusError(f"{visible(str(path))}: expected text, .jsonl (an object a line) or .parquet, found .json")
    return TextFile(path, headings=headings, max_record=max_record)


def _file(path: Path) -> Path:
    """A path that names a file."""
    shown = visible(str(path))
    try:
        path = path.expanduser()
        if path.is_dir():
            raise CorpusError(f"{shown} is a folder: give its files, for instance {shown}/*.txt")
        if not path.exists():
            raise CorpusError(f"{shown}: no such file; the text that comes with ffmem is called pocket")
        if found := special(path):
            raise CorpusError(found)
    except (OSError, RuntimeError, ValueError) as error:
        raise CorpusError(f"{shown}: expected a file, found {getattr(error, 'strerror', None) or error}") from error
    return path


def _name(name: str, what: str) -> str:
    """A name that can be written into a run: the bytes of a file's need not be UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"expected {what} in UTF-8, found {visible(name)}: rename it, or link it under another name"
        ) from error
    return name


def _field(row: dict[str, Any], column: str, where: str, skipped: Counter[str], limit: int) -> Iterator[str]:
    if column not in row:
        raise CorpusError(f"{where}: expected a column {column!r}, found {listed(row)}; name it with --column")
    return text_of(row[column], where, skipped, limit)


def can_be_read_again(source: Source) -> bool:
    """Whether a source gives its records more than once: all but an iterator do."""
    return not isinstance(source, Texts) or isinstance(source.texts, Sequence)
