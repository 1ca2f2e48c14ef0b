"""Batches as a function of the step: which windows of the stream a step reads, wherever training was stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from queue import Queue

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ffmem.model.adaptive.bands import Tail, tails_of
from ffmem.model.adaptive.config import BandShape
from ffmem.training.state import uninterrupted
from ffmem.training.stream import MARK, Ids

AHEAD = 4
"""Number of steps whose windows a background thread holds ready."""


@dataclass(frozen=True)
class Windows:
    """Windows of equal length as rows of token ids. Targets are the inputs moved by one; `tails` holds, for each band of
    rare words, which targets lie in it and their numbers inside it."""

    ids: Int[Tensor, "batch pos"]
    targets: Int[Tensor, " tokens"]
    tails: list[Tail]

    def to(self, device: torch.device) -> Windows:
        def move(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

        tails = [(move(rows), move(inside)) for rows, inside in self.tails]
        return Windows(move(self.ids), move(self.targets), tails)


class Reader:
    """The stream cut anew in every epoch: shifted by chance, shuffled by chance, each window begun with a sentence."""

    def __init__(self, stream: Ids, bands: Sequence[BandShape], *, seed: int) -> None:
        self.stream, self.bands, self.seed = stream, list(bands), seed
        self.starts = np.flatnonzero(stream == MARK)
        self._epoch = lru_cache(4)(self._shuffled)

    def _shuffled(self, length: int, epoch: int) -> Int[np.ndarray, " windows"]:
        """The positions in the stream at which the windows of an epoch begin, in the order in which they are read."""
        chance = np.random.default_rng([self.seed, length, epoch])
        nominal = np.arange(chance.integers(length), len(self.stream) - length, length)
        # A window begins with the sentence that covers its nominal position, and must end inside the stream.
        at = self.starts[np.searchsorted(self.starts, nominal, side="right") - 1]
        return chance.permutation(at)

    def epoch_windows(self, length: int) -> int:
        """How many windows of this length one epoch has, at least one."""
        return max(1, (len(self.stream) - 2 * length) // length)

    def windows(self, step: int, length: int, count: int) -> Windows:
        """The windows of one step (from 0): a function of seed, step, length and count alone."""
        size = self.epoch_windows(length)
        begins = [
            int(self._epoch(length, number // size)[number % size]) for number in range(step * count, (step + 1) * count)
        ]
        rows = np.stack([self.stream[begin : begin + length + 1] for begin in begins]).astype(np.int64)
        ids, targets = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].flatten())
        return Windows(ids, targets, tails_of(targets, self.bands[1:]))

    def steps(self, first: int, shapes: Sequence[tuple[int, int]]) -> Iterator[list[Windows]]:
        """The steps from `first` on, without end, prepared by a background thread."""
        ready: Queue[list[Windows] | BaseException] = Queue(AHEAD)
        stopped = threading.Event()

        def prepare() -> None:
            step = first
            try:
                while not stopped.is_set():
                    ready.put([self.windows(step, length, count) for length, count in shapes])
                    step += 1
            except BaseException as error:  # handed to the reader, who raises it
                ready.put(error)

        thread = threading.Thread(target=prepare, name="ffmem-batches", daemon=True)
        thread.start()
        try:
            while True:
                with uninterrupted():  # an interrupt in the midst of the queue's own work would leave its lock taken
                    item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            while thread.is_alive():
                while not ready.empty():
                    ready.get()
                thread.join(0.05)
