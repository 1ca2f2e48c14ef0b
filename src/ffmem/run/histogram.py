"""The fixed histogram of a cell's coefficients: signed logarithmic bins, eight to an octave.

Bin `ZERO` holds |m| < 2^-24; k bins above it lie the positive values from 2^(-24 + (k-1)/8), below it the negative
ones. A bin is 9% wide, so its geometric middle is within 4.5% of anything inside. Values from 2^16 share the last bin.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

PER_OCTAVE = 8
LOWEST, HIGHEST = -24, 16
SIDE = PER_OCTAVE * (HIGHEST - LOWEST)
ZERO = SIDE
BINS = 2 * SIDE + 1


def middle(bin: Int[np.ndarray, "*n"] | int) -> np.ndarray:
    """The coefficient that stands for a bin.

    >>> float(middle(ZERO)), round(float(middle(ZERO + 1 + 8 * 24)), 3)
    (0.0, 1.044)
    """
    distance = np.asarray(bin) - ZERO
    size = np.exp2(LOWEST + (np.abs(distance) - 0.5) / PER_OCTAVE)
    return np.where(distance == 0, 0.0, np.sign(distance) * size)


def quantile(bins: Int[np.ndarray, " n"], counts: Int[np.ndarray, " n"], q: float) -> float:
    """The q-quantile (0 to 1) of a histogram given by its bins in use, in ascending order, and their counts."""
    total = int(counts.sum())
    if not total:
        return float("nan")
    rank = q * (total - 1)
    return float(middle(int(bins[np.searchsorted(np.cumsum(counts), rank, side="right")])))
