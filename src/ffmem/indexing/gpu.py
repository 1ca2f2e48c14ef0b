"""The filter on a GPU: one read of a layer's coefficients finds the few hits that matter, and nothing is told to the host.

Every cell has `width` slots: the first t hold its triggers so far, sorted; the others hold pending hits. `sift` reads a
batch once and puts the hits that pass into pending slots; `GpuTopTriggers.merge_pending` merges them in now and then. A hit
for which no slot is free goes into an overflow list, and is offered again after the next merge. All is exact in any order:
where the overflow list is full too a flag is raised, and the batch is read again by plain torch (`top.best_of_rows`), with
which the tests compare.
"""

from __future__ import annotations

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.indexing import gpu_kernels
from ffmem.indexing.coefficients import DeviceBatch
from ffmem.indexing.top import EMPTY, POSITION_BITS, TopTriggers
from ffmem.model.activation import Activation
from ffmem.run.manifest import Distinct

ROWS, BLOCK, COLUMNS = 8, 256, 16
"""The number of sentences and of cells that one program of `sift` reads, and of prefixes that it reads at a time. A
thread has eight neighbouring cells, sixteen bytes, and all columns of them, so that a maximum over columns needs no
other thread."""
BUSY = 2112
"""The number of programs that keep a large GPU busy, 16 for each processor: where there would be fewer, each reads one
sentence only."""
ACTIVATED_COLUMNS = 8
"""The number of prefixes that are read at a time where the activation is computed too, which takes registers."""
TALLY_PROGRAMS = 32
"""The number of programs that add up what was counted, for each block of cells."""
PACKED = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}
"""Number types of which a GPU compares two at a time; up to `FEW` columns, firings are counted two at a time too."""
FEW = (1 << 15) - 1
ADD_PROGRAMS = 4224
"""The number of programs that put hits into pending slots: 32 for each processor of a large GPU, since at the beginning
of a run everything passes."""
NOTES = 4
"""The number of notes there is room for, as a multiple of a cell's pending slots: most are of prefixes already held."""
OVERFLOW = 1 << 16
"""The number of hits of a layer and sign that the overflow list holds."""
RETRY_PROGRAMS = 264
"""The number of programs that offer the hits of the overflow list again: there are few such hits."""
RETRIES = 2
"""How often the overflow list is offered at each merge: where the text changes, a cell may find many times as many hits
as it has slots."""
SEARCHED = 128
"""The number of prefixes of a hit's sentence that are read together to find its position."""
PAIRS = 16
"""The number of hits that `merge` compares with all others at a time."""
MOST = 256
"""The largest t that these kernels are for: `merge` compares all hits of a cell with one another."""


class GpuTopTriggers(TopTriggers):
    """Top triggers with pending slots behind each cell's triggers, which kernels fill and merge."""

    def __init__(self, cells: int, t: int, distinct: Distinct, device: torch.device | str) -> None:
        super().__init__(cells, t, distinct, device)
        self.width = max(128, triton.next_power_of_2(2 * t))
        self.slots = (
            torch.zeros(cells, self.width, device=device),
            torch.full((cells, self.width), EMPTY, device=device),
            torch.zeros(cells, self.width, 2, dtype=torch.int64, device=device),
        )
        self.coefficient, self.place, self.key = (slots[:, :t] for slots in self.slots)
        self.pending = torch.zeros(cells, dtype=torch.int32, device=device)
        """The number of pending hits of each cell; larger than the number of slots where some hits found none."""
        self.bound = torch.zeros(cells, device=device)
        """The thresholds of all cells side by side in memory, as the kernels read them."""
        # One tensor each, so that all are aligned alike: a kernel is compiled once for each alignment.
        self.overflow = [_overflow_list(device) for _ in range(2)]
        """Two overflow lists: the first has the hits that found no slot. Those that find none again go into the second,
        and the two are swapped."""
        self.overflow_count = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
        self.lost = torch.zeros(1, dtype=torch.int32, device=device)
        """A number above 0 once a hit has been lost because the overflow list was full."""

    @property
    def pending_slots(self) -> int:
        """The number of hits of one cell that may be pending."""
        return self.width - self.t

    def merge_pending(self) -> None:
        """Merge the pending hits into the triggers, and those of the overflow list as far as slots become free."""
        with torch.cuda.device_of(self.pending):
            self._merge()
            for _ in range(RETRIES):
                self._retry_overflow()
                self._merge()

    def _merge(self) -> None:
        gpu_kernels.merge[(self.cells,)](
            self.slots,
            self.pending,
            self.bound,
            self.t,
            EMPTY=EMPTY,
            WIDTH=self.width,
            PAIRS=PAIRS,
            num_warps=4,
        )

    def _retry_overflow(self) -> None:
        gpu_kernels.retry_overflow[(RETRY_PROGRAMS,)](
            self.slots,
            self.pending,
            self.overflow[0],
            self.overflow_count[0],
            self.overflow[1],
            self.overflow_count[1],
            self.lost,
            self.t,
            WIDTH=self.width,
            OVERFLOW=OVERFLOW,
            num_warps=1,
        )
        self.overflow_count[0].zero_()
        self.overflow.reverse()
        self.overflow_count.reverse()

    def flush(self) -> None:
        """Merge in all pending hits, also those of the plain path; a lost one does not show here, but in `lost`."""
        self.merge_pending()
        while self.overflow_count[0].item():
            self.merge_pending()
        super().flush()
        self.bound.copy_(self.threshold)

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave, with nothing pending."""
        super().load(state)
        self.bound.copy_(self.threshold)


def _overflow_list(device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An empty overflow list: tensors for the cell, coefficient, place and key of `OVERFLOW` hits."""
    return (
        torch.zeros(OVERFLOW, dtype=torch.int64, device=device),
        torch.zeros(OVERFLOW, device=device),
        torch.zeros(OVERFLOW, dtype=torch.int64, device=device),
        torch.zeros(OVERFLOW, 2, dtype=torch.int64, device=device),
    )


def sift(
    m: Float[Tensor, "batch columns cells"],
    rows: range,
    batch: DeviceBatch,
    *,
    tops: list[GpuTopTriggers],
    counts: dict[str, Tensor],
    nonfinite: Int[Tensor, "1"],
    activation: Activation | None = None,
    x: Float[Tensor, "batch columns cells"] | None = None,
) -> None:
    """Read these rows of a batch once: hits that pass go to their cells' pending slots, what was counted to `counts`.

    `tops` are the positive triggers and, where they are wanted, the negative ones. `counts` has a layer's tensors of
    `active`, `maximum` and `minimum`, or is empty. What is not finite raises `nonfinite`. With an activation, `x` is what
    goes into it: these rows of `m`, padding included, are made from it on the way.
    """
    high, low = tops[0], tops[-1]
    cells, blocks = m.shape[2], triton.cdiv(m.shape[2], BLOCK)
    each = ROWS if len(rows) * blocks >= ROWS * BUSY else 1
    groups = triton.cdiv(len(rows), each)
    most = min(len(rows), NOTES * high.pending_slots) * cells
    noted = torch.zeros(len(tops), dtype=torch.int32, device=m.device)
    lines = torch.empty(3, len(tops) * most, dtype=torch.int32, device=m.device)
    notes = (lines[0], lines[1], lines[2].view(torch.float32))
    by_group = (nonfinite, nonfinite, nonfinite)  # any pointer: the kernel does not touch them without counts
    if counts:
        extremes = torch.empty(2, groups, cells, dtype=m.dtype, device=m.device)
        by_group = (torch.empty(groups, cells, dtype=torch.int32, device=m.device), extremes[0], extremes[1])
    packed = PACKED.get(m.dtype, "") if m.is_cuda and m.shape[1] <= FEW else ""
    gpu_kernels.sift[(blocks, groups)](
        m if x is None else x,
        m,
        m if activation is None or activation.table is None else activation.table,
        batch.lengths,
        high.bound,
        low.bound,
        noted,
        notes,
        by_group,
        nonfinite,
        rows.start,
        rows.stop,
        cells,
        batch.start,
        m.shape[1],
        m.stride(0),
        m.stride(1),
        most,
        NEGATIVE=len(tops) > 1,
        STATISTICS=bool(counts),
        ACTIVATION=activation.kind if activation else "",
        PACKED=packed,
        ROWS=each,
        BLOCK=BLOCK,
        COLUMNS=ACTIVATED_COLUMNS if activation else COLUMNS,
        num_warps=1,
    )
    if counts:
        gpu_kernels.tally[(blocks, TALLY_PROGRAMS)](
            by_group, (counts["active"], counts["maximum"], counts["minimum"]), groups, cells, BLOCK=BLOCK, num_warps=1
        )
    for side, top in enumerate(tops):
        gpu_kernels.add_noted[(ADD_PROGRAMS,)](
            m,
            batch.lengths,
            batch.sentences,
            batch.keys,
            top.slots,
            top.pending,
            top.overflow[0],
            top.overflow_count[0],
            top.lost,
            noted[side:],
            notes,
            side * most,
            batch.start,
            m.stride(0),
            m.stride(1),
            batch.keys.stride(0),
            top.t,
            most,
            POSITION_BITS=POSITION_BITS,
            NEGATIVE=side > 0,
            BY_SENTENCE=top.distinct == "sentence",
            WIDTH=top.width,
            OVERFLOW=OVERFLOW,
            COLUMNS=SEARCHED,
            num_warps=1,
        )
