"""Sources of text: files, Hugging Face datasets, iterables. They give one record after another, never all at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ffmem.corpus.files import PACKED, POCKET, JsonLines, Pocket, TextFile, special
from ffmem.corpus.parquet import ParquetFile
from ffmem.corpus.record import MAX_RECORD, Record, Rows, Stretch, field_of, in_chunks
from ffmem.errors import CorpusError
from ffmem.text import visible

LINES_OF_JSON = (".jsonl", ".ndjson")
PIECES = 1 << 10
"""The most stretches that a Hugging Face dataset is read in."""
ROW_BITS = 26
"""The shift in the position of a dataset's row, which is the number of its file << ROW_BITS, plus its number in there."""
LOOKED_AT = 64
"""The number of items of a list that are looked at to tell how long its texts are."""


@runtime_checkable
class Source(Protocol):
    """Something that gives records of text.

    One that also has `stretches(size)` and `chunks(begin, end)`, as all of ours have, can be read from the middle.
    """

    @property
    def name(self) -> str:
        """The name by which messages and the manifest call the source."""
        ...

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        """The texts in order; what is left out on purpose is counted in `skipped`."""
        ...

    def fraction(self) -> float | None:
        """The share of the source that has been read, from 0 to 1; None where that is not known."""
        ...

    def size(self) -> int | None:
        """The number of bytes of the source on disk; None where it has no size."""
        ...


class Chunk(Protocol):
    """A chunk: some consecutive records of a source, which any process can look at."""

    @property
    def share(self) -> float | None:
        """The share of the stretch of the source that has been read once this chunk is, None where it is not known."""
        ...

    def records(self, skipped: Counter[str]) -> Iterator[Record]:
        """The records of the chunk in order; what is left out is counted in `skipped`."""
        ...


def stretches_of(source: Source, size: int) -> list[Stretch]:
    """The stretches of about `size` bytes that a source can be read in; a single one where it only gives its records."""
    found: list[Stretch] = source.stretches(size) if hasattr(source, "stretches") else [(0, None, source.size())]
    return found


def chunks_of(source: Source, begin: int, end: int | None) -> Iterator[Chunk]:
    """The records of a stretch of a source, in chunks."""
    if hasattr(source, "chunks"):
        yield from source.chunks(begin, end)
        return
    skipped: Counter[str] = Counter()

    def values() -> Iterator[Any]:
        for text in source.records(skipped):
            if skipped:
                yield skipped.copy()
                skipped.clear()
            yield text
        if skipped:
            yield skipped

    limit = getattr(source, "max_record", MAX_RECORD)
    yield from in_chunks(values(), f"{visible(source.name)}: record {{}}", 1, limit)


def can_be_read_again(source: Source) -> bool:
    """Whether a source gives its records more than once, which an iterator does not."""
    return not isinstance(source, Texts) or source.is_sequence


@dataclass
class Dataset:
    """A Hugging Face dataset, streamed: `Dataset("Salesforce/wikitext", config="wikitext-103-raw-v1", split="train")`.

    Its unit is the file that it is kept in.
    """

    id: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    max_record: int = field(default=MAX_RECORD, repr=False)

    @property
    def name(self) -> str:
        """The name of the dataset as it is typed, `hf:ID,config=...`."""
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
        """None, since a dataset has no size on disk that is known."""
        return None

    def fraction(self) -> float | None:
        """None, since a streamed dataset does not say how much of it has been read."""
        return None

    def stretches(self, size: int) -> list[Stretch]:
        """The files of the dataset, in at most `PIECES` stretches; their sizes are not known."""
        files = self._loaded.num_shards
        step = -(-files // PIECES)
        return [(begin, min(files, begin + step), None) for begin in range(0, files, step)]

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        """The texts of the dataset in order; what is left out is counted in `skipped`."""
        for rows in self.chunks():
            yield from (text for _, text in rows.records(skipped) if text is not None)

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[Rows]:
        """The rows of these files, some at a time."""
        files = self._loaded.num_shards
        for file in range(begin, files if end is None else end):
            where = visible(self.name) + (f": file {file}" if files > 1 else "")
            part = self._loaded.shard(files, file) if files > 1 else self._loaded
            for rows in in_chunks(self._values(part, where), f"{where}: row {{}}", 0, self.max_record):
                yield replace(rows, before=file << ROW_BITS)

    def _values(self, part: Any, where: str) -> Iterator[Any]:
        try:
            for number, row in enumerate(part):
                yield field_of(row, self.column, f"{where}: row {number}")
        except CorpusError:
            raise
        except Exception as error:  # the library raises many kinds, all of them about this name
            raise self._unreadable(error) from error

    @cached_property
    def _loaded(self) -> Any:
        """The dataset, opened with the datasets package as a stream."""
        try:
            import datasets
        except ImportError as error:
            raise CorpusError(f"{visible(self.name)} needs the datasets package: pip install 'ffmem[datasets]'") from error
        try:
            return datasets.load_dataset(self.id, self.config, split=self.split, streaming=True)
        except Exception as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> CorpusError:
        return CorpusError(f"{visible(self.name)}: cannot be loaded: {(str(error).strip() or repr(error)).splitlines()[0]}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_loaded"}


@dataclass
class Texts:
    """A Python iterable of strings (or of mappings with a text column). Its unit is the item."""

    texts: Iterable[Any]
    column: str = "text"
    name: str = "iterable"
    read: int = 0
    max_record: int = MAX_RECORD

    @property
    def is_sequence(self) -> bool:
        """Whether items can be read from the middle, and again: those of a list, or of a dataset that is in memory."""
        return isinstance(self.texts, Sequence) or (hasattr(self.texts, "select") and hasattr(self.texts, "__len__"))

    def size(self) -> int | None:
        """None, since texts in memory have no size on disk."""
        return None

    def fraction(self) -> float | None:
        """The share of the iterable that `records` has read; None where its length is not known."""
        return self.read / max(1, len(self.texts)) if self.is_sequence else None  # type: ignore[arg-type]

    def stretches(self, size: int) -> list[Stretch]:
        """Stretches of items that have about `size` bytes of text, judged by some of them; an iterator is a single one."""
        if not self.is_sequence:
            return [(0, None, None)]
        texts: Sequence[Any] = self.texts  # type: ignore[assignment]
        numbers = {len(texts) * at // LOOKED_AT for at in range(LOOKED_AT)} if len(texts) else set()
        values = [texts[number] for number in sorted(numbers)]
        lengths = [len(str(value.get(self.column)) if isinstance(value, dict) else str(value)) for value in values]
        mean = max(1.0, sum(lengths) / max(1, len(lengths)))
        step = max(1, int(size / mean))
        ends = ((begin, min(len(texts), begin + step)) for begin in range(0, len(texts), step))
        return [(begin, end, round((end - begin) * mean)) for begin, end in ends]

    def records(self, skipped: Counter[str]) -> Iterator[str]:
        """The texts in order; what is left out is counted in `skipped`."""
        self.read = 0
        for number, value in enumerate(self._values(0, None)):
            self.read += 1
            row = Rows("item {} of the corpus", number, [value], self.max_record, None)
            yield from (text for _, text in row.records(skipped) if text is not None)

    def chunks(self, begin: int = 0, end: int | None = None) -> Iterator[Rows]:
        """The items from `begin` to `end`, in chunks."""
        total = None if not self.is_sequence else (len(self.texts) if end is None else end) - begin  # type: ignore[arg-type]
        return in_chunks(self._values(begin, end), "item {} of the corpus", begin, self.max_record, total)

    def _values(self, begin: int, end: int | None) -> Iterator[Any]:
        """The text of each item; an item that has none is given as it is."""
        texts: Any = self.texts
        items = (texts[number] for number in range(begin, end)) if self.is_sequence and end is not None else iter(texts)
        for number, value in enumerate(items, begin):
            yield field_of(value, self.column, f"item {number} of the corpus") if isinstance(value, dict) else value


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
