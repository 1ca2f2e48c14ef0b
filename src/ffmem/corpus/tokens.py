"""Units of text as token ids: cut to the model's context, with the character each token ends at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from ffmem.corpus.sentences import Segmenter

Ids = Int[np.ndarray, " pos"]


@dataclass(frozen=True)
class Sentence:
    """A unit as it is fed, the beginning-of-sentence token left out.

    `ends[j]` is the number of characters of `text` that the first j+1 tokens cover. It is None until somebody needs
    it, which is the case for the few sentences that triggers point to.
    """

    text: str
    ids: Ids
    ends: Ids | None = None


class Encoder:
    """Turns texts into sentences of at most `limit` tokens, with any Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.with_offsets = bool(getattr(tokenizer, "is_fast", False))

    def encode(self, texts: Sequence[str]) -> Iterator[list[Sentence]]:
        """For every text its sentences: none if it has no token, several if it is longer than the limit."""
        for text, ids in zip(texts, self._ids(texts), strict=True):
            if len(ids) <= self.limit:
                yield [Sentence(text, np.asarray(ids, np.int32))] if ids else []
            else:
                yield list(self._windows(*self.with_ends([Sentence(text, np.asarray(ids, np.int32))])))

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        encoding = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoding["input_ids"]

    def _windows(self, sentence: Sentence) -> Iterator[Sentence]:
        assert sentence.ends is not None
        for start in range(0, len(sentence.ids), self.limit):
            stop = min(start + self.limit, len(sentence.ids))
            before = int(sentence.ends[start - 1]) if start else 0
            yield Sentence(
                sentence.text[before : sentence.ends[stop - 1]],
                sentence.ids[start:stop],
                sentence.ends[start:stop] - before,
            )

    def with_ends(self, sentences: Sequence[Sentence]) -> list[Sentence]:
        """The same sentences with their `ends`.

        A tokenizer that knows no offsets gives the text it decodes to, and ends measured on that.
        """
        missing = [sentence for sentence in sentences if sentence.ends is None]
        if not missing:
            return list(sentences)
        found = iter(self._with_offsets(missing) if self.with_offsets else map(self._decoded, missing))
        return [next(found) if sentence.ends is None else sentence for sentence in sentences]

    def _with_offsets(self, sentences: list[Sentence]) -> Iterator[Sentence]:
        texts = [sentence.text for sentence in sentences]
        encoding = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for sentence, offsets in zip(sentences, encoding["offset_mapping"], strict=True):
            ends = np.array([end for _, end in offsets], np.int32)
            assert len(ends) == len(sentence.ids), "the tokenizer gave other tokens the second time"
            yield Sentence(sentence.text, sentence.ids, np.maximum.accumulate(ends))

    def _decoded(self, sentence: Sentence) -> Sentence:
        ids = sentence.ids.tolist()
        text = self.tokenizer.decode(ids)
        ends = np.array([min(len(text), len(self.tokenizer.decode(ids[: n + 1]))) for n in range(len(ids))], np.int32)
        return Sentence(text, sentence.ids, np.maximum.accumulate(ends))


@dataclass(frozen=True)
class Cut:
    """Records as sentences, in a few flat arrays that travel between processes at little cost."""

    texts: list[str]
    ids: Int[np.ndarray, " tokens"]
    lengths: Int[np.ndarray, " sentences"]
    """Tokens of each sentence."""
    units: list[list[int]]
    """For each record the number of sentences of each of its units."""
    ends: dict[int, Ids]
    """The `ends` that are known, by the number of the sentence."""

    def records(self) -> Iterator[list[list[Sentence]]]:
        """For each record its units' sentences."""
        stops = np.cumsum(self.lengths).tolist()
        number = 0
        for counts in self.units:
            units = []
            for count in counts:
                group = []
                for one in range(number, number + count):
                    ids = self.ids[stops[one - 1] if one else 0 : stops[one]]
                    group.append(Sentence(self.texts[one], ids, self.ends.get(one)))
                units.append(group)
                number += count
            yield units


def cut_records(tools: tuple[Segmenter, Encoder], records: list[str]) -> Cut:
    """Segment and tokenize some records in one call of the tokenizer."""
    segmenter, encoder = tools
    texts = [list(segmenter.split(record)) for record in records]
    encoded = encoder.encode([text for units in texts for text in units])
    groups = [[next(encoded) for _ in units] for units in texts]
    sentences = [sentence for units in groups for group in units for sentence in group]
    return Cut(
        texts=[sentence.text for sentence in sentences],
        ids=np.concatenate([np.zeros(0, np.int32), *(sentence.ids for sentence in sentences)]),
        lengths=np.array([len(sentence.ids) for sentence in sentences], np.int32),
        units=[[len(group) for group in units] for units in groups],
        ends={number: sentence.ends for number, sentence in enumerate(sentences) if sentence.ends is not None},
    )


def prefix_keys(ids: Int[np.ndarray, "batch pos"]) -> Int[np.ndarray, "batch pos 2"]:
    """A 128-bit hash of every prefix of every row: equal for equal prefixes, whatever follows.

    Each (token, position) is mixed to a random-looking pair of words and the prefix's are added up, so all prefixes
    cost one running sum. Two different prefixes collide with probability 2^-128.

    >>> a, b = prefix_keys(np.array([[5, 6, 7], [5, 6, 8]]))
    >>> bool((a[1] == b[1]).all()), bool((a[2] == b[2]).all())
    (True, False)
    """
    batch, pos = ids.shape
    place = np.arange(pos, dtype=np.uint64) << np.uint64(32)
    words = ids.astype(np.uint64) | place
    lanes = [_mix(words + salt).cumsum(axis=1, dtype=np.uint64) for salt in (_SALT, ~_SALT)]
    return np.stack([_mix(lane) for lane in lanes], axis=-1).view(np.int64).reshape(batch, pos, 2)


_SALT = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit changes every output bit with probability one half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
