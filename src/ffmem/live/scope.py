"""The scope of an edit: the positions at which it acts, kept right while a model generates with or without a cache."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from ffmem.cells import DIGITS
from ffmem.errors import FfmemError
from ffmem.text import beginning

EXPECTED = "all, generated, a position such as 4 or -1, or a range such as 3: or 2:5"

SHOWN = 60
"""The number of columns that an error shows of what cannot be read as positions."""

_NUMBER = rf"[+-]?[0-9]{{1,{DIGITS}}}"


@dataclass(frozen=True)
class Scope:
    """Positions of a text: all, those generated, or some of the prompt's tokens.

    The prompt's tokens are counted as Python counts, from 0 or from the end, a beginning-of-sentence token not counted.
    `all` is every position, that of the beginning-of-sentence token and of generated tokens too; `3:` ends with the
    prompt.

    >>> Scope.parse("2:5").tokens(4)
    [2, 3]
    """

    text: str
    part: slice | int | None = None
    """The prompt's tokens that are meant; None for `all` and `generated`."""

    @classmethod
    def parse(cls, at: str | int | slice | Scope) -> Scope:
        """Read `all`, `generated`, an index or a slice, or their text; an error for anything else."""
        if isinstance(at, Scope):
            return at
        if isinstance(at, slice):
            at = ":".join("" if end is None else str(end) for end in (at.start, at.stop)) + ("" if at.step is None else ":")
        text = str(at).strip()
        if text in ("all", "generated"):
            return cls(text)
        if re.fullmatch(_NUMBER, text):
            return cls(text, int(text))
        if match := re.fullmatch(rf"({_NUMBER})?\s*:\s*({_NUMBER})?", text):
            return cls(text, slice(*(None if end is None else int(end) for end in match.groups())))
        raise FfmemError(f"expected positions as {EXPECTED}, found {beginning(repr(at), SHOWN)}")

    def tokens(self, count: int) -> list[int]:
        """The indices, from 0, of the tokens meant of a prompt of `count` tokens; an error with the valid range where
        there are none."""
        if self.part is None:
            return list(range(count)) if self.text == "all" else []
        if isinstance(self.part, slice):
            found = list(range(count))[self.part]
            if not found:
                raise FfmemError(
                    f"expected a range with some of the prompt's {count} tokens (0 to {count - 1}), found {self}"
                )
            return found
        if not -count <= self.part < count:
            raise FfmemError(f"expected a position from 0 to {count - 1} or from -{count} to -1, found {self}")
        return [self.part % count]

    def __str__(self) -> str:
        return self.text


@dataclass
class _Prompt:
    """The columns of a prompt, and which of them are to be edited in each row."""

    width: int
    chosen: Bool[Tensor, "batch width"]


class Columns:
    """The columns of each forward that a scope means: forwards are followed from a prompt to what is generated behind it.

    A forward without a cache is a prompt of its own, unless `generate` makes it and its ids go on by one column where
    those of the forward before ended. Padding is known by the attention mask; without one every column is a token.
    """

    def __init__(self, scope: Scope, bos: int | None) -> None:
        self.scope, self.bos = scope, bos
        self.where: Bool[Tensor, "batch columns"] | None = None
        """True at the columns to edit in the forward that is under way; None before the first forward."""
        self._prompt: _Prompt | None = None
        self._seen = 0
        self._ids: Tensor | None = None

    def follow(self, ids: Tensor, past: int, mask: Tensor | None, generating: bool) -> None:
        """Note that a forward begins, by its ids (or embeddings), the columns that a cache holds, and the attention mask."""
        columns = past + ids.shape[1]
        if past:
            if self._prompt is None or past > self._seen:
                raise FfmemError(
                    f"expected the prompt inside intervene, found a forward behind {past} cached columns that were made "
                    "outside it: use at='all', or make the cache inside"
                )
        elif self._ids is not None and self._ids.shape == ids.shape and bool((self._ids == ids).all()):
            pass  # the same forward, as a model hands it to the module inside it
        elif not (generating and self._goes_on(ids)):
            self._prompt = self._read(ids, mask)
        assert self._prompt is not None
        self._seen, self._ids = columns, None if past else ids.detach().clone()
        chosen, more = self._prompt.chosen, max(0, columns - self._prompt.width)
        behind = torch.full((len(chosen), more), self.scope.text == "generated", device=chosen.device)
        self.where = torch.cat([chosen, behind], 1)[:, past:columns]

    def _goes_on(self, ids: Tensor) -> bool:
        before, prompt = self._ids, self._prompt
        if before is None or prompt is None or before.dim() != ids.dim() or before.shape[0] != ids.shape[0]:
            return False
        # Beams change rows behind the prompt, never in it.
        same = ids[:, : prompt.width] == before[:, : prompt.width]
        return ids.shape[1] == before.shape[1] + 1 and bool(same.all())

    def _read(self, ids: Tensor, mask: Tensor | None) -> _Prompt:
        """Find a prompt's columns that the scope means; an error where it lies outside the prompt."""
        batch, width = ids.shape[:2]
        real = torch.ones(batch, width, dtype=torch.bool)
        if mask is not None and mask.shape == (batch, width):
            real = mask.cpu() != 0
        chosen = torch.zeros(batch, width, dtype=torch.bool)
        for row in range(batch):
            columns = real[row].nonzero()[:, 0].tolist()
            if columns and ids.dim() == 2 and self.bos is not None and int(ids[row, columns[0]]) == self.bos:
                columns = columns[1:]
            if self.scope.part is not None:
                chosen[row, [columns[token] for token in self.scope.tokens(len(columns))]] = True
        return _Prompt(width, chosen.to(ids.device))


def following(columns: Columns) -> Callable[..., None]:
    """A hook for a module that takes ids: it reports every forward to `columns`; all forwards are of one thread."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments | kwargs
        ids = given.get("input_ids")
        if ids is None:
            ids = given.get("inputs_embeds")
        if ids is None:
            return
        cache, mask = given.get("past_key_values"), given.get("attention_mask")
        past = 0 if cache is None else int(cache.get_seq_length())
        generating = bool(given.get("return_dict"))  # as generate calls a model, and nobody has to otherwise
        columns.follow(ids, past, mask if isinstance(mask, Tensor) else None, generating)

    return enter
