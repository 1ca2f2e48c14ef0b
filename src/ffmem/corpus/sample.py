"""A random sample of a corpus's records: the same for the same seed, wherever reading is stopped and whoever reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int

from ffmem.corpus.batches import mix

STEP = 1 << 20
"""The number of records whose hashes are compared at a time."""


@dataclass(frozen=True)
class Sample:
    """`size` of a corpus's records, or all if it has no more, drawn by `seed`: every record with the same chance.

    >>> Sample(3, 0, [6, 4]).numbers.tolist(), Sample(20, 0, [4]).numbers.tolist()
    ([6, 8, 10], [1, 2, 3, 4])
    """

    size: int
    seed: int
    records: Sequence[int]
    """The number of records of each part of the whole corpus."""

    @cached_property
    def total(self) -> int:
        """The number of records of the whole corpus."""
        return sum(self.records)

    @cached_property
    def numbers(self) -> Int[np.ndarray, " size"]:
        """The numbers of the records that are drawn, from 1, in order.

        A record's hash depends on the seed and its number alone, and those with the smallest are drawn; so a smaller sample
        is a part of a larger one. No two hashes are equal, since mixing can be undone.
        """
        key = mix(np.array([self.seed], np.uint64))
        drawn = np.zeros(0, np.uint64)
        for begin in range(0, self.total, STEP):
            drawn = np.append(drawn, np.arange(begin + 1, min(begin + STEP, self.total) + 1, dtype=np.uint64))
            if len(drawn) > self.size:
                drawn = drawn[mix(mix(drawn) + key).argpartition(self.size - 1)[: self.size]]
        return np.sort(drawn).astype(np.int64)

    def of_part(self, part: int) -> Int[np.ndarray, " n"]:
        """The numbers, from 0 in the part, of the records of a part that are drawn."""
        first = sum(self.records[:part])
        begin, end = np.searchsorted(self.numbers, [first + 1, first + self.records[part] + 1])
        return self.numbers[begin:end] - first - 1
