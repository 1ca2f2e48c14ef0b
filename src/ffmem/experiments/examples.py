"""The examples of the paper's section 5: one random prefix from each of many random sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from ffmem.corpus.batches import padded, plan_batches
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.files import POCKET
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import Source, open_source, open_sources
from ffmem.corpus.tokens import Encoder, Sentence
from ffmem.errors import CorpusError
from ffmem.experiments.experiment import EXAMPLES
from ffmem.indexing.provenance import sample_of
from ffmem.model.memories import MemoryModel
from ffmem.progress import reporting
from ffmem.run.reader import Index
from ffmem.run.results import check_request

SHARD_TOKENS = 1 << 18


@dataclass(frozen=True)
class Example:
    """A prefix, and the token that really follows it (None at its sentence's end)."""

    ids: Int[np.ndarray, " pos"]
    text: str
    next: int | None


@dataclass(frozen=True)
class Examples:
    """Examples, and where they are from in words for the reader of a result."""

    examples: list[Example]
    drawn_from: str
    asked: int

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        return self.examples[number]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by which a result says how many examples it is from, and where they were drawn."""
        return {"examples": len(self), "examples_asked": self.asked, "examples_from": self.drawn_from}

    def batches(self, bos: int | None, batch_tokens: int) -> Iterator[tuple[list[int], Int[np.ndarray, "batch columns"]]]:
        """The examples in batches of about equal length: numbers, and ids behind the beginning-of-sentence token."""
        start = 0 if bos is None else 1
        lengths = np.array([len(example.ids) for example in self.examples], np.int64)
        for rows in plan_batches(lengths + start, batch_tokens):
            yield rows.tolist(), padded([self.examples[number].ids for number in rows], bos)


def sample_examples(
    model: MemoryModel, index: Index, eval: Any = None, *, count: int = EXAMPLES, seed: int = 0, quiet: bool = False
) -> Examples:
    """Draw `count` examples from `eval`, or from the corpus of the run where none is given.

    Sentences are drawn without replacement, every one with the same chance, then a length of the prefix. A corpus
    that cannot be read again gives the sentences that the run has kept.
    """
    check_request(examples=count, seed=seed)
    chance = np.random.default_rng([seed, 1])
    encoder = Encoder(model.tokenizer, model.context - int(index.manifest.settings.bos))
    corpus = corpus_like(index, encoder, eval)
    if corpus is None:
        kept = _kept(index)
        drawn_from = (
            "sentences that the run kept for its triggers: its corpus cannot be read again, and no eval corpus was given"
        )
        drawn = [kept[number] for number in sorted(chance.permutation(len(kept))[:count].tolist())]
    else:
        names = ", ".join(source.name for source in corpus.sources)
        drawn_from = names + ("" if eval is not None else " (the indexed corpus itself)")
        drawn = _draw(corpus, count, chance, quiet)
    if not drawn:
        raise CorpusError(f"expected sentences to draw examples from, found none in {drawn_from}")
    return Examples([_example(sentence, chance) for sentence in encoder.with_ends(drawn)], drawn_from, count)


def corpus_like(index: Index, encoder: Encoder, eval: Any = None) -> Corpus | None:
    """A text read and cut as the run's was: `eval`, or the run's own where none is given; None where that is gone."""
    manifest, own = index.manifest, eval is None
    sources = corpus_of(index) if own else open_sources(eval, **manifest.reading)
    if sources is None:
        return None
    return Corpus(
        sources,
        encoder,
        Unit.parse(manifest.settings.unit),
        manifest.settings.language,
        manifest.settings.shard_tokens,
        limit_tokens=manifest.settings.limit_tokens if own else None,
        sample=sample_of(manifest) if own else None,
        plain=manifest.settings.wikitext == "plain",
    )


def _example(sentence: Sentence, chance: np.random.Generator) -> Example:
    length = int(chance.integers(1, len(sentence.ids) + 1))
    assert sentence.ends is not None
    following = int(sentence.ids[length]) if length < len(sentence.ids) else None
    return Example(sentence.ids[:length], sentence.text[: sentence.ends[length - 1]], following)


def _draw(corpus: Corpus, count: int, chance: np.random.Generator, quiet: bool) -> list[Sentence]:
    """The sentences with the smallest random numbers, in the order of the corpus, holding a shard at a time."""
    held: list[tuple[float, int, Sentence]] = []
    read = 0
    with reporting("drawing examples", quiet=quiet) as reporter:
        for shard in corpus.stream():
            numbers = chance.random(len(shard.sentences))
            limit = held[-1][0] if len(held) == count else np.inf
            found = np.flatnonzero(numbers < limit).tolist()
            held += [(float(numbers[at]), shard.first + at, shard.sentences[at]) for at in found]
            held = sorted(held, key=lambda one: one[:2])[:count]
            read += len(shard.sentences)
            reporter.update(shard.fraction, f"{read:,} sentences read")
    return [sentence for _, _, sentence in sorted(held, key=lambda one: one[1])]


def corpus_of(index: Index) -> list[Source] | None:
    """The sources of a run's corpus, opened again; None where it is gone or was never a file."""
    names = index.manifest.corpus.sources
    if not all(name in POCKET or name.startswith("hf:") or Path(name).is_file() for name in names):
        return None
    return [open_source(name, **index.manifest.reading) for name in names]


def _kept(index: Index) -> list[Sentence]:
    """The sentences that the run has kept for its triggers."""
    table = index.table("sentences")
    columns = (table.column(name).to_pylist() for name in ("text", "tokens", "ends"))
    return [
        Sentence(text, np.array(ids, np.int32), np.array(ends, np.int32)) for text, ids, ends in zip(*columns, strict=True)
    ]
