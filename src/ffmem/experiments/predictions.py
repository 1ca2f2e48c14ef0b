"""What every value of a layer predicts on its own, streamed: cells × vocabulary is never held."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ffmem.cells import Sign
from ffmem.model.memories import MemoryModel


@dataclass(frozen=True)
class Predictions:
    """A value's most likely token (the smaller id among equals) and its probability, max pᵢ."""

    top: Int[np.ndarray, " cells"]
    probability: Float[np.ndarray, " cells"]


Known = dict[tuple[int, bool, Sign], Predictions]
"""What values predict by layer, norm and sign: experiments that follow one another need not find it again."""


def predictions_of(
    model: MemoryModel, layer: int, *, norm: bool = False, sign: Sign = "+", known: Known | None = None
) -> Predictions:
    """What the values of a layer (from 1) predict; with sign "-", what they promote at a negative coefficient."""
    if known is not None and (layer, norm, sign) in known:
        return known[layer, norm, sign]
    # Not `top`, which leaves open what comes first among equals: in half precision the best are often equal.
    log_prob, top = model.vocabulary.best(signed_values(model, layer, sign), norm=norm)
    return Predictions(top.cpu().numpy(), log_prob.exp().cpu().numpy())


def signed_values(model: MemoryModel, layer: int, sign: Sign = "+") -> Float[Tensor, "cells d"]:
    """v or −v. The vector is turned round, not its ranking: under a bias or an adaptive softmax they differ."""
    values = model.values(layer)
    return values if sign == "+" else -values
