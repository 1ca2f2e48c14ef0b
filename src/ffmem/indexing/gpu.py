"""The sieve on a GPU: one read of a layer's coefficients, survivors set aside, nothing told to the host.

Every cell has a row of room for t + w hits: the first t are its triggers so far, sorted; behind them wait up to w
survivors. `sift` reads a batch once; `RoomyTop.merge_waiting` lets the survivors in now and then. A hit that finds no place
is set aside until one is free. All is exact and free of order: where there is no room aside either, a flag is raised and the
batch is read again by the plain path (`top.best_of_rows`), which is also what the tests compare with.
"""

from __future__ import annotations

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.indexing import gpu_kernels
from ffmem.indexing.statistics import Statistics
from ffmem.indexing.top import EMPTY, POSITION_BITS, TopTriggers
from ffmem.model.activation import Activation
from ffmem.run.manifest import Distinct

ROWS, BLOCK, COLUMNS = 8, 256, 16
"""Sentences and cells that one program reads, and prefixes that it reads at a time. A thread has eight neighbouring cells,
sixteen bytes, and all columns of them, so that a maximum over columns needs no other thread."""
BUSY = 2112
"""Programs that keep a large GPU busy, 16 for each processor: where there would be fewer, each reads one sentence only."""
ACTIVATED = 8
"""Prefixes at a time where the activation is made too, which takes registers."""
WARPS = 1
TALLIERS = 32
"""Programs a block of cells that add up what was counted."""
PACKED = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
"""Types of which a GPU compares two at a time; up to `FEW` columns their firings are counted two at a time."""
FEW = (1 << 15) - 1
SETTLERS = 4224
"""Programs that settle survivors: 32 for each processor of a large GPU. In the beginning everything survives."""
NOTES = 4
"""Notes a cell that there is room for, in waiting places: most are of prefixes that are held already."""
SPILLED = 1 << 16
"""Hits of a layer for which there is room aside, where all waiting places are taken."""
TAKERS = 264
"""Programs that take them back: there are few."""
ROUNDS = 2
"""Times at each merge that they are: a cell whose text has just changed may find many times as many as it has places for."""
LOOKED = 128
"""Prefixes of a survivor's sentence that are looked at together for the place where it stands."""
PAIRS = 16
"""Hits that `merge` compares with all others at a time."""
MOST = 256
"""The largest t that these kernels are for: `merge` compares all hits of a cell with one another."""


class RoomyTop(TopTriggers):
    """Top triggers with waiting places behind each cell's: what kernels fill and merge without a word to the host."""

    def __init__(self, cells: int, t: int, distinct: Distinct, device: torch.device | str) -> None:
        super().__init__(cells, t, distinct, device)
        self.width = max(128, triton.next_power_of_2(2 * t))
        self.rooms = (
            torch.zeros(cells, self.width, device=device),
            torch.full((cells, self.width), EMPTY, device=device),
            torch.zeros(cells, self.width, 2, dtype=torch.int64, device=device),
        )
        self.coefficient, self.place, self.key = (room[:, :t] for room in self.rooms)
        self.taken = torch.zeros(cells, dtype=torch.int32, device=device)
        self.bound = torch.zeros(cells, device=device)
        """The thresholds side by side, as the kernels read them."""
        self.set_aside = [_room_aside(device) for _ in range(2)]
        """Hits without a place, in the first one; those that find none again go into the second, which is then the first."""
        # Each begins where memory is aligned alike, or a kernel would be compiled for one and for the other.
        self.aside = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
        """How many are in either."""
        self.lost = torch.zeros(1, dtype=torch.int32, device=device)
        """Whether a hit was lost for want of room even there."""

    @property
    def places(self) -> int:
        """Hits that may wait at one cell."""
        return self.width - self.t

    def merge_waiting(self) -> None:
        """Let the waiting hits in, and of those that were set aside as many as find a place."""
        with torch.cuda.device_of(self.taken):
            self._merge()
            for _ in range(ROUNDS):
                self._take_back()
                self._merge()

    def _merge(self) -> None:
        gpu_kernels.merge[(self.cells,)](
            *self.rooms,
            self.taken,
            self.bound,
            self.t,
            self.width,
            EMPTY=EMPTY,
            WIDTH=self.width,
            PAIRS=PAIRS,
            num_warps=4,
        )

    def _take_back(self) -> None:
        gpu_kernels.take_back[(TAKERS,)](
            *self.rooms,
            self.taken,
            *self.set_aside[0],
            self.aside[0],
            *self.set_aside[1],
            self.aside[1],
            self.lost,
            self.t,
            self.width,
            WIDTH=self.width,
            SPILLED=SPILLED,
            num_warps=1,
        )
        self.aside[0].zero_()
        self.set_aside.reverse()
        self.aside.reverse()

    def settle(self) -> None:
        """Let in all hits, those that came by the plain path too. Whether one was lost is seen before: by `troubles`."""
        self.merge_waiting()
        while self.aside[0].item():
            self.merge_waiting()
        super().settle()
        self.bound.copy_(self.threshold)

    def load(self, state: dict[str, Tensor]) -> None:
        super().load(state)
        self.bound.copy_(self.threshold)


def _room_aside(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For cell, coefficient, place and key of hits that find no place."""
    return (
        torch.zeros(SPILLED, dtype=torch.int64, device=device),
        torch.zeros(SPILLED, device=device),
        torch.zeros(SPILLED, dtype=torch.int64, device=device),
        torch.zeros(SPILLED, 2, dtype=torch.int64, device=device),
    )


def sift(
    m: Float[Tensor, "batch columns cells"],
    rows: range,
    *,
    start: int,
    lengths: Int[Tensor, " batch"],
    sentences: Int[Tensor, " batch"],
    keys: Int[Tensor, "batch pos 2"],
    tops: list[RoomyTop],
    statistics: Statistics | None,
    odd: Int[Tensor, "1"],
    activation: Activation | None = None,
    x: Float[Tensor, "batch columns cells"] | None = None,
) -> None:
    """Read these rows of a batch once: survivors to their waiting places, firings and extremes to the statistics.

    `tops` are the positive triggers and, where they are wanted, the negative ones; `start` is the first token's column.
    What is not finite raises `odd`. With an activation, `x` is what goes into it: these rows of `m`, padding included, are
    made from it on the way.
    """
    high, low = tops[0], tops[-1]
    cells, blocks = m.shape[2], triton.cdiv(m.shape[2], BLOCK)
    each = ROWS if len(rows) * blocks >= ROWS * BUSY else 1
    groups = triton.cdiv(len(rows), each)
    most = min(len(rows), NOTES * high.places) * cells
    noted = torch.zeros(len(tops), dtype=torch.int32, device=m.device)
    lines = torch.empty(3, len(tops), most, dtype=torch.int32, device=m.device)
    notes = (lines[0], lines[1], lines[2].view(torch.float32))
    counted = (odd, odd, odd)
    if statistics:
        extremes = torch.empty(2, groups, cells, dtype=m.dtype, device=m.device)
        counted = (torch.empty(groups, cells, dtype=torch.int32, device=m.device), extremes[0], extremes[1])
    packed = PACKED.get(m.dtype, "") if m.is_cuda and m.shape[1] <= FEW else ""
    gpu_kernels.sift[(blocks, groups)](
        m if x is None else x,
        m,
        m if activation is None or activation.table is None else activation.table,
        lengths,
        high.bound,
        low.bound,
        noted,
        *notes,
        *counted,
        odd,
        rows.start,
        rows.stop,
        cells,
        start,
        m.shape[1],
        m.stride(0),
        m.stride(1),
        most,
        NEGATIVE=len(tops) > 1,
        STATISTICS=statistics is not None,
        ACTIVATION=activation.kind if activation else "",
        PACKED=packed,
        ROWS=each,
        BLOCK=BLOCK,
        COLUMNS=ACTIVATED if activation else COLUMNS,
        num_warps=WARPS,
    )
    if statistics:
        gpu_kernels.tally[(blocks, TALLIERS)](
            *counted,
            statistics.active,
            statistics.maximum,
            statistics.minimum,
            groups,
            cells,
            BLOCK=BLOCK,
            num_warps=1,
        )
    for side, top in enumerate(tops):
        gpu_kernels.settle[(SETTLERS,)](
            m,
            lengths,
            sentences,
            keys,
            *top.rooms,
            top.taken,
            *top.set_aside[0],
            top.aside[0],
            top.lost,
            noted[side:],
            *(part[side] for part in notes),
            start,
            m.stride(0),
            m.stride(1),
            keys.stride(0),
            top.t,
            top.width,
            most,
            POSITION_BITS=POSITION_BITS,
            NEGATIVE=side > 0,
            BY_SENTENCE=top.distinct == "sentence",
            WIDTH=top.width,
            SPILLED=SPILLED,
            COLUMNS=LOOKED,
            num_warps=1,
        )
