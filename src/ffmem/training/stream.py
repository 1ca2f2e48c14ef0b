"""A corpus as one stream of word ids, the sentence mark before every sentence, and the vocabulary it is written in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from jaxtyping import Int

from ffmem.atomic import atomic_file
from ffmem.corpus.readers import cores, shared
from ffmem.corpus.sentences import Segmenter, Unit
from ffmem.corpus.sources import Source
from ffmem.corpus.wikitext import is_heading
from ffmem.errors import CorpusError
from ffmem.model.adaptive.tokenizer import SPECIALS, WikiTokenizer, split_words
from ffmem.progress import Reporter

MARK = SPECIALS.index("</s>")
UNKNOWN = SPECIALS.index("<unk>")
CHUNK = 1 << 20
"""Characters that one process splits at a time."""

Ids = Int[np.ndarray, " _tokens"]


def sentences(segmenter: Segmenter, records: Sequence[str]) -> Iterator[str]:
    """The sentences of some records. A heading is one sentence."""
    for record in records:
        yield from [record.strip()] if is_heading(record) else segmenter.split(record)


def count_words(segmenter: Segmenter, records: Sequence[str]) -> Counter[str]:
    return Counter(chain.from_iterable(split_words(list(sentences(segmenter, records)))))


def number_words(tools: tuple[Segmenter, WikiTokenizer], records: Sequence[str]) -> Ids:
    """The words of some records as ids, a mark before each sentence that has any."""
    segmenter, tokenizer = tools
    texts = list(sentences(segmenter, records))
    rows = [row.ids for row in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return np.fromiter(chain.from_iterable([MARK, *row] for row in rows if row), np.int32)


def vocabulary(
    sources: Sequence[Source], *, min_count: int, reporter: Reporter | None = None, workers: int | None = None
) -> list[str]:
    """Every word that occurs `min_count` times or more, the most frequent first, equal ones by name."""
    counts: Counter[str] = Counter()
    chunks = _chunks(sources, reporter, "counting words")
    for found in shared(count_words, Segmenter(Unit("sentence")), chunks, workers=workers or cores()):
        counts.update(found)
    words = [word for word, count in counts.items() if count >= min_count and word not in SPECIALS]
    if not words:
        raise CorpusError(f"expected words that occur {min_count} times or more, found none; give more text")
    return sorted(words, key=lambda word: (-counts[word], word))


def encoded(
    sources: Sequence[Source],
    tokenizer: WikiTokenizer,
    reporter: Reporter | None = None,
    workers: int | None = None,
) -> Iterator[Ids]:
    """The stream in pieces."""
    tools = (Segmenter(Unit("sentence")), tokenizer)
    yield from shared(number_words, tools, _chunks(sources, reporter, "numbering words"), workers=workers or cores())


def _chunks(sources: Sequence[Source], reporter: Reporter | None, what: str) -> Iterator[list[str]]:
    """Records in lists of about `CHUNK` characters."""
    skipped: Counter[str] = Counter()
    waiting: list[str] = []
    size = 0
    for number, source in enumerate(sources):
        for record in source.records(skipped):
            waiting.append(record)
            size += len(record)
            if size >= CHUNK:
                yield waiting
                waiting, size = [], 0
                if reporter is not None:
                    reporter.update((number + (source.fraction() or 0.0)) / len(sources), what)
    if waiting:
        yield waiting
    if reporter is not None:
        reporter.update(1.0, what)


def write_stream(sources: Sequence[Source], tokenizer: WikiTokenizer, out: Path, reporter: Reporter | None = None) -> None:
    """The stream as a file of int32."""
    with atomic_file(out) as path:
        with path.open("wb") as file:
            for piece in encoded(sources, tokenizer, reporter):
                file.write(piece.data)  # tofile does not say why it fails
        if not path.stat().st_size:
            raise _no_text(sources)


def read_stream(sources: Sequence[Source], tokenizer: WikiTokenizer) -> Ids:
    """The stream of a text that fits into memory."""
    parts = list(encoded(sources, tokenizer))
    if not sum(map(len, parts)):
        raise _no_text(sources)
    return np.concatenate(parts)


def _no_text(sources: Sequence[Source]) -> CorpusError:
    return CorpusError(f"expected text, found none in {', '.join(source.name for source in sources)}")
