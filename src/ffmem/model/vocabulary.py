"""The vocabulary projection: what a vector of the residual stream says about the next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

CHUNK_ELEMENTS = 1 << 26
"""Logits held at a time: 256 MB in float32."""


@runtime_checkable
class Vocabulary(Protocol):
    """From vectors to words. `norm=True` sends a vector through the model's final norm first."""

    @property
    def size(self) -> int: ...

    def log_probs(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> Float[Tensor, "n vocab"]: ...

    def top(
        self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False
    ) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]: ...

    def extremes(self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False) -> Extremes: ...

    def rank(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Int[Tensor, " n"]: ...

    def judge(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Judged: ...


@dataclass(frozen=True)
class Extremes:
    """The k most promoted and the k most suppressed tokens of each vector, best and worst first."""

    promoted: Int[Tensor, "n k"]
    promoted_log_prob: Float[Tensor, "n k"]
    suppressed: Int[Tensor, "n k"]
    suppressed_log_prob: Float[Tensor, "n k"]


@dataclass(frozen=True)
class Judged:
    """Each vector's first token, and how it stands to a given one."""

    top: Int[Tensor, " n"]
    top_log_prob: Float[Tensor, " n"]
    log_prob: Float[Tensor, " n"]
    """of the given token"""
    rank: Int[Tensor, " n"]
    """of the given token, from 1"""


class ChunkedVocabulary(ABC):
    """All that follows from `size` and `log_probs`, in chunks of rows: never more than `CHUNK_ELEMENTS` at a time."""

    @property
    @abstractmethod
    def size(self) -> int: ...

    @abstractmethod
    def log_probs(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> Float[Tensor, "n vocab"]: ...

    def _chunked(self, h: Float[Tensor, "n d"], of: Callable[[slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        step = max(1, CHUNK_ELEMENTS // self.size)
        parts = [of(slice(start, start + step)) for start in range(0, max(1, len(h)), step)]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @torch.inference_mode()
    def top(self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """Log-probabilities and ids of the k most likely tokens, most likely first."""
        log_prob, ids = self._chunked(h, lambda rows: tuple(self.log_probs(h[rows], norm=norm).topk(min(k, self.size))))
        return log_prob, ids

    @torch.inference_mode()
    def extremes(self, h: Float[Tensor, "n d"], k: int, *, norm: bool = False) -> Extremes:
        k = min(k, self.size)

        def ends(rows: slice) -> tuple[Tensor, ...]:
            log_probs = self.log_probs(h[rows], norm=norm)
            high, low = log_probs.topk(k), log_probs.topk(k, largest=False)
            return high.indices, high.values, low.indices, low.values

        return Extremes(*self._chunked(h, ends))

    def rank(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Int[Tensor, " n"]:
        """How many tokens are at least as likely as `token`, itself counted, the smaller id first among equals: from 1."""
        return self.judge(h, token, norm=norm).rank

    @torch.inference_mode()
    def judge(self, h: Float[Tensor, "n d"], token: Int[Tensor, " n"], *, norm: bool = False) -> Judged:
        """What each vector puts first, and what it thinks of a token of its own, in one projection."""

        def judged(rows: slice) -> tuple[Tensor, ...]:
            log_probs = self.log_probs(h[rows], norm=norm)
            first = log_probs.max(1)
            ids = token[rows].to(log_probs.device)[:, None]
            own = log_probs.gather(1, ids)
            earlier = (log_probs == own) & (torch.arange(self.size, device=log_probs.device) < ids)
            return first.indices, first.values, own[:, 0], 1 + ((log_probs > own) | earlier).sum(1)

        return Judged(*self._chunked(h, judged))


@dataclass(frozen=True)
class SoftmaxVocabulary(ChunkedVocabulary):
    """softmax(cap(scale · (h·E + b))), as almost every model has it."""

    unembedding: nn.Linear
    norm: nn.Module | None = None
    project: nn.Module | None = None
    softcap: float | None = None
    scale: float = 1.0

    @property
    def size(self) -> int:
        return self.unembedding.weight.shape[0]

    def _rows(self, h: Float[Tensor, "n d"], norm: bool) -> Float[Tensor, "n inputs"]:
        weight = self.unembedding.weight
        h = h.to(weight.device, weight.dtype)
        if norm and self.norm is not None:
            h = self.norm(h)
        return h if self.project is None else self.project(h)

    @torch.inference_mode()
    def log_probs(self, h: Float[Tensor, "n d"], *, norm: bool = False) -> Float[Tensor, "n vocab"]:
        logits = self.unembedding(self._rows(h, norm)).float() * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return torch.log_softmax(logits, dim=-1)
