"""Batches of sentences of about equal length, and the hashes that tell their prefixes and documents apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

PADDING = 0.05
"""The largest share of a batch that may be padding."""
_SALT = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Batch:
    """A batch: rows of about equal length, padded on the right."""

    ids: Int[np.ndarray, "batch columns"]
    """Token ids, the beginning-of-sentence token first where there is one."""
    lengths: Int[np.ndarray, " batch"]
    """The number of tokens of each row, the beginning-of-sentence token not counted."""
    sentences: Int[np.ndarray, " batch"]
    """The number of each row's sentence in the corpus."""
    keys: Int[np.ndarray, "batch pos 2"]
    """A hash of every prefix, or of its document; column j belongs to the prefix of j+1 tokens."""
    start: int
    """The column of the first token: 1 behind a beginning-of-sentence token, else 0."""

    @property
    def tokens(self) -> int:
        """The number of tokens of all rows, without padding and beginning-of-sentence tokens."""
        return int(self.lengths.sum())


def padded(sequences: Sequence[Int[np.ndarray, " _"]], bos: int | None) -> Int[np.ndarray, "batch columns"]:
    """Sequences as rows, padded on the right, behind the beginning-of-sentence token where there is one.

    >>> padded([np.array([5, 6]), np.array([7])], 0).tolist()
    [[0, 5, 6], [0, 7, 0]]
    """
    start = 0 if bos is None else 1
    ids = np.full((len(sequences), start + max(map(len, sequences))), bos or 0, np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[start : start + len(sequence)] = sequence
    return ids


def plan_batches(lengths: Int[np.ndarray, " n"], batch_tokens: int) -> list[Int[np.ndarray, " rows"]]:
    """Groups of sentence indices, shortest first: each at most `batch_tokens` wide × high, at most 5% of it padding.

    >>> [rows.tolist() for rows in plan_batches(np.array([3, 40, 41, 3]), 100)]
    [[0, 3], [1, 2]]
    """
    order = np.argsort(lengths, kind="stable")
    sizes = lengths[order]
    filled = np.cumsum(sizes)
    groups, begin = [], 0
    while begin < len(sizes):
        # No group is longer than this, since none of the others is shorter than the first.
        end = min(len(sizes), begin + batch_tokens // max(1, int(sizes[begin])) + 1)
        area = np.arange(1, end - begin + 1) * sizes[begin:end]
        padding = area - (filled[begin:end] - filled[begin] + sizes[begin])
        full = (area > batch_tokens) | (padding > PADDING * area)
        full[0] = False
        stop = begin + int(full.argmax()) if full.any() else end
        groups.append(order[begin:stop])
        begin = stop
    return groups


def prefix_keys(ids: Int[np.ndarray, "batch pos"]) -> Int[np.ndarray, "batch pos 2"]:
    """A 128-bit hash of every prefix of every row: equal for equal prefixes, whatever follows.

    Each (token, position) is mixed to a random-looking pair of words and the prefix's are added up, so all prefixes
    cost one running sum. Two different prefixes collide with probability 2^-128.

    >>> a, b = prefix_keys(np.array([[5, 6, 7], [5, 6, 8]]))
    >>> bool((a[1] == b[1]).all()), bool((a[2] == b[2]).all())
    (True, False)
    """
    batch, pos = ids.shape
    position = np.arange(pos, dtype=np.uint64) << np.uint64(32)
    words = ids.astype(np.uint64) | position
    lanes = [mix(words + salt).cumsum(axis=1, dtype=np.uint64) for salt in (_SALT, ~_SALT)]
    return np.stack([mix(lane) for lane in lanes], axis=-1).view(np.int64).reshape(batch, pos, 2)


def document_keys(documents: Int[np.ndarray, " batch"], pos: int) -> Int[np.ndarray, "batch pos 2"]:
    """The same 128-bit hash for every prefix of every row of a document, by its number.

    >>> a, b, c = document_keys(np.array([7, 7, 8]), 5)
    >>> bool((a == b).all()), bool((a == a[0]).all()), bool((a == c).any())
    (True, True, False)
    """
    words = documents.astype(np.uint64)
    keys = np.stack([mix(mix(words + salt)) for salt in (_SALT, ~_SALT)], axis=-1).view(np.int64)
    return np.repeat(keys[:, None], pos, axis=1)


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit changes every output bit with probability one half."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
