"""Spread: mean and standard deviation of the scores that a vector gives to many words, without the scores themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

WORDS = 1 << 14
"""Words that are read at a time."""


@dataclass(frozen=True)
class Cloud:
    """Where the words of a piece lie: the scores of a row then have a known mean and deviation without being made.

    The covariance is of the words with their centre taken away, so that nothing cancels where all of them lie on one side.
    """

    centre: Float[Tensor, " inputs"]
    covariance: Float[Tensor, "inputs inputs"]
    has_bias: bool = False
    """Whether the last input is a one that is put behind a row, for the words' biases."""

    @classmethod
    def of(cls, words: Float[Tensor, "size width"], bias: Float[Tensor, " size"] | None = None, scale: float = 1.0) -> Cloud:
        """Of words whose scores are scale · (row·word + bias)."""

        def parts() -> Iterator[Tensor]:
            for start in range(0, len(words), WORDS):
                part = words[start : start + WORDS].float()
                if bias is not None:
                    part = torch.cat([part, bias[start : start + WORDS].float()[:, None]], 1)
                yield part * scale

        centre = (torch.stack([part.double().sum(0) for part in parts()]).sum(0) / len(words)).float()
        squares = centre.new_zeros(len(centre), len(centre))
        for part in parts():
            away = part - centre
            squares += away.T @ away
        return cls(centre, squares / len(words), bias is not None)

    def spread(self, inputs: Float[Tensor, "n width"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """Mean and standard deviation of the scores of each row."""
        x = inputs.float()
        if self.has_bias:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        return x @ self.centre, ((x @ self.covariance) * x).sum(1).clamp(min=0).sqrt()
