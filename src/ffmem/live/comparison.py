"""Comparison: what a model says to a prompt as it is and edited, side by side, with controls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.errors import FfmemError
from ffmem.live.comparison_pages import comparison_lines, comparison_page, mean_and_spread
from ffmem.live.control import Control, draw_controls
from ffmem.live.edits import Edit, parse_edits, resolve, statistics_for
from ffmem.live.intervene import applying
from ffmem.live.scope import Scope
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import greedy, log_probs_at, prompt_ids, token_id, token_texts
from ffmem.run.reader import Index
from ffmem.text import visible

UNLIKE = 0.2
"""How far the controls' mean size may be from the edit's, relative to it, before a verdict says so."""


@dataclass(frozen=True)
class Shift:
    """A token's log-probability in the model as it is and edited, and its change under each control."""

    token: str
    id: int
    baseline: float
    edited: float
    controls: list[float]

    @property
    def change(self) -> float:
        return self.edited - self.baseline

    def as_dict(self) -> dict[str, Any]:
        numbers = {"baseline_log_prob": self.baseline, "edited_log_prob": self.edited, "change": self.change}
        mean, spread = mean_and_spread(self.controls)
        return {"token": self.token, "id": self.id} | numbers | {"control_mean": mean, "control_spread": spread}


@dataclass(frozen=True)
class Side:
    """One of the two models: its top predictions, most likely first, and what it generates."""

    top: list[tuple[str, int, float]]
    """Token, id and log-probability."""
    generated: list[int]
    text: str
    """What it generates, as text."""

    def as_dict(self) -> dict[str, Any]:
        top = [{"token": t, "id": id, "log_prob": p, "probability": float(np.exp(p))} for t, id, p in self.top]
        return {"top": top, "generated": self.generated, "text": self.text}


@dataclass(frozen=True, repr=False)
class Comparison:
    """Baseline and edited, side by side. All logarithms are natural; the KL divergence is KL(baseline‖edited), in nats."""

    model: str
    prompt: str
    tokens: list[str]
    """The prompt's tokens, the beginning-of-sentence token left out."""
    bos: bool
    """Whether a beginning-of-sentence token was put first."""
    edits: list[Edit]
    at: Scope
    position: int
    """The token behind which predictions are compared, from 0. With `at="generated"` it is the first generated one."""
    behind: str
    """Its text."""
    baseline: Side
    edited: Side
    shifts: list[Shift]
    """The chosen tokens, then all others of both top lists."""
    kl: float
    size: float
    """|Δm|·‖v‖ of the edit (see `Control.size`)."""
    controls: list[Control]
    control_kl: list[float]
    control_asked: int
    seed: int

    @property
    def larger_than(self) -> int:
        """How many controls have a smaller KL divergence."""
        return sum(kl < self.kl for kl in self.control_kl)

    @property
    def verdict(self) -> str:
        """The edit's KL divergence beside the controls', in words."""
        if not self.kl:
            return "nothing that this prediction depends on is changed"
        if not self.controls:
            return "no controls" if not self.control_asked else "no controls: the layer has no other cells to draw"
        count = len(self.controls)
        few = "" if count == self.control_asked else f" ({self.control_asked} asked, the layer has too few other cells)"
        share = sum(control.size for control in self.controls) / count / self.size if self.size else 1.0
        # A layer's largest cell has none of its size: then a larger effect says less.
        other = "" if abs(share - 1) <= UNLIKE else f", whose size is {share:.0%} of the edit's"
        return f"larger than {self.larger_than} of {count} controls{few}{other}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what `ffmem intervene --json` prints."""
        mean, spread = mean_and_spread(self.control_kl)
        each = [
            {"cells": [str(cell) for cell in control.cells], "size": control.size, "kl": kl}
            for control, kl in zip(self.controls, self.control_kl, strict=True)
        ]
        return {
            "model": self.model,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "bos": self.bos,
            "edits": [str(edit) for edit in self.edits],
            "at": str(self.at),
            "position": self.position,
            "behind": self.behind,
            "baseline": self.baseline.as_dict(),
            "edited": self.edited.as_dict(),
            "tokens_compared": [shift.as_dict() for shift in self.shifts],
            "kl": self.kl,
            "size": self.size,
            "control": {
                "asked": self.control_asked,
                "seed": self.seed,
                "kl_mean": mean,
                "kl_spread": spread,
                "size_mean": mean_and_spread([control.size for control in self.controls])[0],
                "smaller_kl": self.larger_than,
                "each": each,
            },
            "verdict": self.verdict,
        }

    def lines(self, width: int = 100) -> list[str]:
        """For people, at most `width` characters a line."""
        return comparison_lines(self, width)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        edits = "  ".join(edit.shown for edit in self.edits)
        return f"Comparison({edits} in {visible(self.model)}: KL {self.kl:.3g}, {self.verdict})"

    def _repr_html_(self) -> str:
        return comparison_page(self)


def compare(
    model: MemoryModel | Any,
    prompt: str,
    *edits: str | tuple[Any, str] | Edit,
    at: str | int | slice | Scope = "all",
    run: str | Path | Index | None = None,
    position: int = -1,
    tokens: Iterable[str | int] = (),
    top: int = 5,
    generate: int = 20,
    control: int = 5,
    seed: int = 0,
    bos: str = "auto",
    **load: Any,
) -> Comparison:
    """What the edits (see `intervene`) change of a model's answer to a prompt, and what they change on other cells.

    Predictions are compared behind one token of the prompt (`position`, as Python counts, a beginning-of-sentence token
    not counted); where only generated tokens are edited, behind the first that the model as it is generates. `tokens`
    are followed besides the `top` of both models. Both generate `generate` tokens greedily. `control` times the same
    edits are made on random cells of the same layers, drawn with `seed` from those whose edit is as large in |Δm|·‖v‖.
    """
    for name, number, least in (("top", top, 1), ("generate", generate, 0), ("control", control, 0), ("seed", seed, 0)):
        if number < least:
            raise FfmemError(f"expected {name} of at least {least}, found {number}")
    scope, parsed = Scope.parse(at), parse_edits(edits)
    loaded = load_model(model, **load)
    index = statistics_for(loaded, run)
    changes = resolve(loaded, parsed, index)
    put = loaded.check_bos(bos)
    later = str(scope) == "generated"
    ids = prompt_ids(loaded, prompt, bos=put, room=max(generate, int(later)))
    chosen = [token_id(loaded, token) for token in tokens]
    first = [loaded.bos] if put and loaded.bos is not None else []
    place = Scope.parse(position).tokens(len(ids))[0]
    if later and place != len(ids) - 1:
        raise FfmemError(f"expected position -1 where only generated tokens are edited, found {position}")
    fed, here = ids, scope
    if later:
        # The last token fed is then the only one generated.
        fed, here = [*ids, *greedy(loaded, [*first, *ids], 1)], Scope.parse("-1")
        place = len(ids)
    touched = here.tokens(len(fed))
    if touched[0] > place:
        raise FfmemError(f"expected a position from {touched[0]} on, where the edits begin, found {position}")
    row, column = torch.tensor([[*first, *fed]]), torch.tensor([len(first) + place])

    def under(others: list[Edit]) -> Float[Tensor, " vocab"]:
        with applying(loaded, resolve(loaded, others, index), here):
            # Summing to 1 in float64: what rounding leaves would be seen in a small divergence.
            return log_probs_at(loaded, row, column)[0].double().log_softmax(0)

    before, after = under([]), under(parsed)
    columns = [len(first) + token for token in touched if token <= place]
    drawn = draw_controls(loaded, parsed, row, columns, int(column), count=control, seed=seed, run=index)
    beside = [under(one.edits) for one in drawn.found]
    tops = [scores.topk(min(top, len(scores))) for scores in (before, after)]
    followed = list(dict.fromkeys([*chosen, *(id for found in tops for id in found.indices.tolist())]))
    texts = dict(zip(followed, token_texts(loaded, followed), strict=True))
    plain = greedy(loaded, [*first, *ids], generate)
    with applying(loaded, changes, scope):
        new = greedy(loaded, [*first, *ids], generate)
    sides = [
        Side(
            [(texts[id], id, score) for score, id in zip(found.values.tolist(), found.indices.tolist(), strict=True)],
            generated,
            loaded.tokenizer.decode(generated, skip_special_tokens=True) if generated else "",
        )
        for found, generated in zip(tops, (plain, new), strict=True)
    ]
    return Comparison(
        model=loaded.name,
        prompt=prompt,
        tokens=token_texts(loaded, ids),
        bos=put,
        edits=parsed,
        at=scope,
        position=place,
        behind=token_texts(loaded, [fed[place]])[0],
        baseline=sides[0],
        edited=sides[1],
        shifts=_shifts(texts, before, after, beside),
        kl=divergence(before, after),
        size=drawn.size,
        controls=drawn.found,
        control_kl=[divergence(before, other) for other in beside],
        control_asked=control,
        seed=seed,
    )


def _shifts(texts: dict[int, str], before: Tensor, after: Tensor, beside: list[Tensor]) -> list[Shift]:
    """How each of these tokens fares."""
    return [
        Shift(text, id, float(before[id]), float(after[id]), [float(other[id] - before[id]) for other in beside])
        for id, text in texts.items()
    ]


def divergence(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> float:
    """KL(p‖q) of two distributions given as log-probabilities, in nats; rounding leaves nothing below 0."""
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), torch.zeros_like(p))
    return max(0.0, float(terms.sum()))
