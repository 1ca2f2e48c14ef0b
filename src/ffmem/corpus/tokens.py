"""Units of text as token ids: cut to the model's context, with the character each token ends at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int, UInt8

if TYPE_CHECKING:
    import pyarrow as pa

Ids = Int[np.ndarray, " pos"]
NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Sentence:
    """A unit as it is fed, the beginning-of-sentence token left out.

    `ends[j]` is the number of characters of `text` that the first j+1 tokens cover. A tokenizer that knows no offsets takes
    long to find it; there it is None until somebody needs it, which is the case for the sentences that triggers point to.
    """

    text: str
    ids: Ids
    ends: Ids | None = None


class Encoder:
    """Turns texts into sentences of at most `limit` tokens, with any Hugging Face tokenizer.

    Where a tokenizer is no more than its engine, that is called directly and is all that another process gets: it need
    not import transformers, which takes many times as long as starting it.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.with_offsets = bool(getattr(tokenizer, "is_fast", False))

    @cached_property
    def engine(self) -> Any:
        """A copy of the tokenizer's engine, which takes a while for a large vocabulary; None where the tokenizer does more
        than it."""
        return _engine(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        engine = self.engine
        return vars(self) | ({} if engine is None else {"tokenizer": None})

    def encode(self, texts: Sequence[str]) -> Iterator[list[Sentence]]:
        """The sentences of each text: none if it has no token, several if it is longer than the limit."""
        for text, (ids, offsets) in zip(texts, self._encoded(list(texts)), strict=True):
            ends = None if offsets is None else _ends(offsets)
            sentence = Sentence(text, np.array(ids, np.int32), ends)
            if len(ids) <= self.limit:
                yield [sentence] if ids else []
            else:
                yield list(self._windows(*self.with_ends([sentence])))

    def _encoded(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]] | None]]:
        """The token ids of each text, and the offsets of its tokens where they are known."""
        if not texts:
            return  # some tokenizers refuse to be called for nothing
        if self.engine is not None:
            for encoding in self.engine.encode_batch(texts, add_special_tokens=False):
                yield encoding.ids, encoding.offsets
            return
        settings = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        found = self.tokenizer(texts, return_offsets_mapping=self.with_offsets, **settings)
        yield from zip(found["input_ids"], found.get("offset_mapping") or repeat(None), strict=False)

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
        """The same sentences with their `ends`, those of a tokenizer that knows no offsets with the text it decodes to."""
        return [self._decoded(sentence) if sentence.ends is None else sentence for sentence in sentences]

    def _decoded(self, sentence: Sentence) -> Sentence:
        ids = sentence.ids.tolist()
        text = self.tokenizer.decode(ids)
        ends = np.array([min(len(text), len(self.tokenizer.decode(ids[: n + 1]))) for n in range(len(ids))], np.int32)
        return Sentence(text, sentence.ids, np.maximum.accumulate(ends))


def _ends(offsets: list[tuple[int, int]]) -> Ids:
    return np.maximum.accumulate(np.array([end for _, end in offsets], np.int32))


def _engine(tokenizer: Any) -> Any:
    """The engine of a tokenizer whose class adds nothing of its own to a call of it, set as such a call would; else None."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    from transformers import PreTrainedTokenizerFast as Plain

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, Plain)
        or kind.__call__ is not Plain.__call__
        or kind._encode_plus is not Plain._encode_plus
    ):
        return None
    engine = copy(tokenizer.backend_tokenizer)
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = tokenizer.split_special_tokens
    return engine


@dataclass(frozen=True)
class Sentences:
    """Many sentences in a few flat arrays: cheap to make, to join, to sort and to send to another process."""

    text: UInt8[np.ndarray, " bytes"]
    """All texts one after the other, in UTF-8."""
    sizes: Int[np.ndarray, " sentences"]
    """The number of bytes of each sentence's text."""
    ids: Int[np.ndarray, " tokens"]
    lengths: Int[np.ndarray, " sentences"]
    """The number of tokens of each sentence."""
    ends: Int[np.ndarray, " tokens"]
    """For each token, the number of characters of its sentence's text up to its end; -1 where that is not known."""

    @cached_property
    def stops(self) -> Int[np.ndarray, " sentences"]:
        """The index in `ids` behind the last token of each sentence."""
        return np.cumsum(self.lengths, dtype=np.int64)

    @cached_property
    def text_stops(self) -> Int[np.ndarray, " sentences"]:
        """The index in `text` behind the last byte of each sentence."""
        return np.cumsum(self.sizes, dtype=np.int64)

    @property
    def texts(self) -> pa.LargeStringArray:
        """The texts as Arrow has them; nothing is copied."""
        import pyarrow as pa  # not by those that only read and tokenize

        offsets = pa.py_buffer(np.append(0, self.text_stops))
        return pa.LargeStringArray.from_buffers(len(self), offsets, pa.py_buffer(self.text))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Sentence:
        number = range(len(self))[number]
        stop = int(self.stops[number])
        own = slice(stop - int(self.lengths[number]), stop)
        # Copies: a view would keep all the others.
        ids, ends = self.ids[own].copy(), self.ends[own].copy()
        text = self.text[(end := int(self.text_stops[number])) - int(self.sizes[number]) : end]
        return Sentence(text.tobytes().decode(), ids, None if (ends < 0).any() else ends)

    def __iter__(self) -> Iterator[Sentence]:
        return (self[number] for number in range(len(self)))

    def between(self, first: int, last: int) -> Sentences:
        """The sentences from number `first` on and before `last`."""
        if (first, last) == (0, len(self)):
            return self
        tokens, text = (
            slice(*((int(stops[number - 1]) if number else 0) for number in (first, last)))
            for stops in (self.stops, self.text_stops)
        )
        own = slice(first, last)
        return Sentences(self.text[text], self.sizes[own], self.ids[tokens], self.lengths[own], self.ends[tokens])

    def take(self, rows: Int[np.ndarray, " n"]) -> Sentences:
        """The sentences with these numbers, in this order."""
        import pyarrow as pa

        lengths = self.lengths[rows]
        begins = np.repeat(self.stops[rows] - np.cumsum(lengths), lengths)
        flat = begins + np.arange(len(begins))
        _, _, text = self.texts.take(pa.array(rows)).buffers()
        return Sentences(np.frombuffer(text or b"", np.uint8), self.sizes[rows], self.ids[flat], lengths, self.ends[flat])

    def padded(self, rows: Int[np.ndarray, " batch"], bos: int | None) -> Int[np.ndarray, "batch columns"]:
        """These sentences as rows, padded on the right, behind the beginning-of-sentence token where there is one."""
        start = 0 if bos is None else 1
        lengths = self.lengths[rows]
        column = np.arange(int(lengths.max()))
        real = column < lengths[:, None]
        ids = np.full((len(rows), start + len(column)), bos or 0, np.int64)
        ids[:, start:][real] = self.ids[((self.stops[rows] - lengths)[:, None] + column)[real]]
        return ids

    @staticmethod
    def of(sentences: Sequence[Sentence]) -> Sentences:
        """Sentences in flat arrays from a list of single ones."""
        texts = [sentence.text.encode() for sentence in sentences]
        return Sentences(
            text=np.frombuffer(b"".join(texts), np.uint8),
            sizes=np.array([len(text) for text in texts], np.int32),
            ids=np.concatenate([NONE, *(sentence.ids for sentence in sentences)]),
            lengths=np.array([len(sentence.ids) for sentence in sentences], np.int32),
            ends=np.concatenate([NONE, *(_known(sentence) for sentence in sentences)]),
        )

    @staticmethod
    def join(parts: Sequence[Sentences]) -> Sentences:
        """One set of sentences from several, one behind the other."""
        return Sentences(
            text=np.concatenate([np.zeros(0, np.uint8), *(part.text for part in parts)]),
            sizes=np.concatenate([NONE, *(part.sizes for part in parts)]),
            ids=np.concatenate([NONE, *(part.ids for part in parts)]),
            lengths=np.concatenate([NONE, *(part.lengths for part in parts)]),
            ends=np.concatenate([NONE, *(part.ends for part in parts)]),
        )


def _known(sentence: Sentence) -> Ids:
    return np.full_like(sentence.ids, -1) if sentence.ends is None else sentence.ends
