"""Frozen norms: a norm as the linear map it was at each position, its scale held at the value it had there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ffmem.errors import ModelError

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative error of a frozen norm against what the norm gave."""
HALF_TOLERANCE = 5e-2
"""The same in bfloat16 and float16."""


@dataclass(frozen=True)
class Frozen:
    """x -> scale · (x - its mean, where centred) + bias, a scale for each of n positions; it may also be a plain factor."""

    scale: Float[Tensor, "n d"]
    centred: bool
    bias: Float[Tensor, " d"]

    @classmethod
    def of(cls, norm: nn.Module | None, x: Float[Tensor, "n d"], out: Float[Tensor, "n d"], what: str) -> Frozen:
        """What `norm` did when it made `out` of `x`; without a norm, `out` may be `x` times a number.

        The norm is asked and not read, so that neither its class nor how it writes its weight matters: zeros give its
        bias, a vector of mean zero its weight, ones tell whether it centres. Its scale is then fitted to `out`, and a
        module that is no norm at all does not fit.
        """
        kind, x, out = out.dtype, x.float(), out.float()
        d = x.shape[1]
        weight, bias, centred = torch.ones_like(x[0]), torch.zeros_like(x[0]), False
        if norm is not None:
            flat, probe = torch.ones_like(x[0]), _balanced(d).to(x)
            zeros, ones, made = norm(torch.stack([0 * flat, 16 * flat, 16 * probe]).to(kind)).float()
            weight, bias = (made - zeros) / probe, zeros
            centred = bool(torch.linalg.vector_norm(ones - bias) < 0.5 * torch.linalg.vector_norm(weight))
        shaped = weight * (x - x.mean(1, keepdim=True) if centred else x)
        wanted = out - bias
        fitted = (shaped * wanted).sum(1) / shaped.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)
        error = torch.linalg.vector_norm(fitted[:, None] * shaped - wanted, dim=1)
        bound = TOLERANCE.get(kind, HALF_TOLERANCE) * torch.linalg.vector_norm(out, dim=1)
        if not bool((error <= bound).all()):
            kinds = "a norm that scales its input" if norm is not None else "the FFN's own output times a number"
            raise ModelError(f"expected {kinds} at {what}, found something else: contributions cannot be told apart")
        return cls(fitted[:, None] * weight, centred, bias)

    def pulled(self, g: Float[Tensor, "k n d"]) -> Float[Tensor, "k n d"]:
        """Readouts of what comes out as readouts of what goes in."""
        g = g * self.scale
        return g - g.mean(-1, keepdim=True) if self.centred else g

    def constant(self, g: Float[Tensor, "k n d"]) -> Float[Tensor, "k n"]:
        """What the bias alone gives to each readout."""
        return g @ self.bias


def _balanced(d: int) -> Float[Tensor, " d"]:
    """A vector of mean zero without a zero in it.

    >>> _balanced(5).tolist()
    [1.0, -1.0, 1.0, 1.0, -2.0]
    """
    found = torch.ones(d)
    found[1::2] = -1
    if d % 2:
        found[-3:] = torch.tensor([1.0, 1.0, -2.0])
    return found
