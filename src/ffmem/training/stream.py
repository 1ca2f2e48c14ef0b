"""A corpus as one stream of word ids, the sentence mark before every sentence, and the vocabulary it is written in."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import trainers

from ffmem.corpus.sentences import Segmenter, Unit
from ffmem.corpus.sources import Source, is_heading
from ffmem.model.adaptive.tokenizer import SPECIALS, WikiTokenizer, wiki_tokenizer
from ffmem.progress import Reporter
from ffmem.words import CorpusError

MARK = SPECIALS.index("</s>")
UNKNOWN = SPECIALS.index("<unk>")
CHUNK = 8192
"""Sentences that are split together, by as many threads as there are cores."""

Ids = Int[np.ndarray, " _tokens"]


def sentences(sources: Sequence[Source], reporter: Reporter | None = None, what: str = "") -> Iterator[str]:
    """All sentences of a corpus. A heading is one sentence."""
    segmenter = Segmenter(Unit("sentence"))
    skipped: Counter[str] = Counter()
    for number, source in enumerate(sources):
        for record in source.records(skipped):
            yield from [record.strip()] if is_heading(record) else segmenter.split(record)
            if reporter is not None:
                reporter.update((number + (source.fraction() or 0.0)) / len(sources), what)


def vocabulary(sources: Sequence[Source], *, min_count: int, reporter: Reporter | None = None) -> list[str]:
    """Every word that occurs `min_count` times or more, the most frequent first, equal ones by name."""
    counter = wiki_tokenizer([]).backend_tokenizer
    trainer = trainers.WordLevelTrainer(vocab_size=1 << 40, min_frequency=min_count, show_progress=False)
    counter.train_from_iterator(sentences(sources, reporter, "counting words"), trainer)
    found = counter.get_vocab(with_added_tokens=False)
    words = sorted((word for word in found if word not in SPECIALS), key=found.__getitem__)
    if not words:
        raise CorpusError(f"expected words that occur {min_count} times or more, found none; give more text")
    return words


def encoded(sources: Sequence[Source], tokenizer: WikiTokenizer, reporter: Reporter | None = None) -> Iterator[Ids]:
    """The stream in pieces."""
    texts = sentences(sources, reporter, "numbering words")
    while chunk := list(islice(texts, CHUNK)):
        rows = [row.ids for row in tokenizer.backend_tokenizer.encode_batch_fast(chunk, add_special_tokens=False)]
        yield np.fromiter(chain.from_iterable([MARK, *row] for row in rows if row), np.int32)


def write_stream(sources: Sequence[Source], tokenizer: WikiTokenizer, out: Path, reporter: Reporter | None = None) -> None:
    """The stream as a file of int32."""
    temporary = out.with_name(out.name + ".tmp")
    with temporary.open("wb") as file:
        for piece in encoded(sources, tokenizer, reporter):
            piece.tofile(file)
    if not temporary.stat().st_size:
        raise _no_text(sources)
    os.replace(temporary, out)


def read_stream(sources: Sequence[Source], tokenizer: WikiTokenizer) -> Ids:
    """The stream of a text that fits into memory."""
    parts = list(encoded(sources, tokenizer))
    if not sum(map(len, parts)):
        raise _no_text(sources)
    return np.concatenate(parts)


def _no_text(sources: Sequence[Source]) -> CorpusError:
    return CorpusError(f"expected text, found none in {', '.join(source.name for source in sources)}")
