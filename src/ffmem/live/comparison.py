"""The comparison of a model as it is with the model edited: what each says to a prompt, side by side, with controls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ffmem.cells import Cell
from ffmem.errors import FfmemError
from ffmem.live.blocks import WIDTH, Block, Column, Shown, Table, Text
from ffmem.live.control import draw_controls
from ffmem.live.edits import Edit, parse_edits, resolve, statistics_for
from ffmem.live.intervene import applying
from ffmem.live.scope import Scope
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.tokens import greedy, log_probs_at, prompt_ids, token_id, token_texts
from ffmem.run.reader import Index
from ffmem.text import ending, shown_token, visible

UNLIKE = 0.2
"""The relative difference between the controls' mean size and the edit's above which a verdict names it."""


@dataclass(frozen=True)
class TopToken:
    """One of the likeliest next tokens."""

    token: str
    id: int
    log_prob: float
    probability: float


@dataclass(frozen=True)
class Side:
    """One of the two models compared: its top predictions, most likely first, and what it generates."""

    top: list[TopToken]
    generated: list[int]
    """The ids of the tokens that it generates."""
    text: str
    """The text that it generates."""


@dataclass(frozen=True)
class TokenChange:
    """A token's log-probability in the model as it is and edited, and how the controls change it."""

    token: str
    id: int
    baseline_log_prob: float
    edited_log_prob: float
    change: float
    control_mean: float | None
    """The mean change under the controls; None without any."""
    control_spread: float | None
    """The standard deviation (n-1) of the changes under the controls; None for fewer than two."""


@dataclass(frozen=True)
class Control:
    """The same edits on other cells, and what they do to the prediction."""

    cells: list[Cell]
    size: float
    """The control's |Δm|·‖v‖ (see `Comparison.size`)."""
    kl: float


@dataclass(frozen=True)
class Controls:
    """All controls of a comparison, and how many were asked for."""

    asked: int
    seed: int
    kl_mean: float | None
    kl_spread: float | None
    size_mean: float | None
    smaller_kl: int
    """The number of controls with a smaller KL divergence than the edit."""
    each: list[Control]


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """A model as it is and edited, side by side. Logarithms are natural; the KL divergence is KL(baseline‖edited), in
    nats."""

    model: str
    prompt: str
    tokens: list[str]
    """The prompt's tokens, the beginning-of-sentence token left out."""
    bos: bool
    """Whether a beginning-of-sentence token was put before the prompt."""
    edits: list[Edit]
    at: Scope
    position: int
    """The index, from 0, of the token behind which predictions are compared: the first generated one if `at="generated"`."""
    behind: str
    """The text of the token behind which predictions are compared."""
    baseline: Side
    edited: Side
    tokens_compared: list[TokenChange]
    """The chosen tokens, then all others of both top lists."""
    kl: float
    size: float
    """The edit's |Δm|·‖v‖: how far it moves what a cell adds to the stream, as a mean over its cells and over the edited
    tokens that reach the prediction."""
    control: Controls
    verdict: str
    """The edit's KL divergence beside the controls', in words."""

    @property
    def larger_than(self) -> int:
        """The number of controls with a smaller KL divergence than the edit."""
        return self.control.smaller_kl

    def as_dict(self) -> dict[str, Any]:
        """The comparison as the dict that `ffmem compare --json` prints."""
        return super().as_dict() | {"edits": [str(edit) for edit in self.edits], "at": str(self.at)}

    def blocks(self) -> list[Block]:
        """The blocks shown: what was asked, both models' predictions, how tokens fare, how large the change is, what both
        generate."""
        scope = {"all": "all positions", "generated": "generated tokens only"}.get(str(self.at), f"the prompt's {self.at}")
        edits = "  ".join(edit.shown for edit in self.edits)
        found: list[Block] = [
            Text([f"prompt    {ending(visible(self.prompt), WIDTH - 10)}", f"edits     {edits}  at {scope}"]),
            self._top_table(),
            self._change_table(),
            Text(self._effect()),
        ]
        if self.baseline.generated or self.edited.generated:
            sides = (("baseline", self.baseline), ("edited", self.edited))
            found.append(Text([f"{name:<8}  … {visible(side.text)}" for name, side in sides]))
        return found

    def _top_table(self) -> Table:
        columns = [Column("", 3, right=True, gap=0)]
        for name, gap in (("baseline", 1), ("edited", 2)):
            columns += [Column(name, 20, gap=gap), Column("", 7, right=True)]
        rows = [
            [str(rank), *(text for one in both for text in (shown_token(one.token), f"{one.probability:.2%}"))]
            for rank, both in enumerate(zip(self.baseline.top, self.edited.top, strict=True), 1)
        ]
        return Table(columns, rows, f"next token behind {shown_token(self.behind)}, position {self.position}")

    def _change_table(self) -> Table:
        numbers = [Column(name, 8, right=True) for name in ("baseline", "edited", "Δ log p")]
        beside = [Column("of controls", gap=3)] if self.control.each else []
        rows = []
        for one in self.tokens_compared:
            row = [shown_token(one.token), f"{exp(one.baseline_log_prob):.2%}", f"{exp(one.edited_log_prob):.2%}"]
            controls = [_shown((one.control_mean, one.control_spread), "+.3f")] if beside else []
            rows.append([*row, f"{one.change:+.3f}", *controls])
        return Table([Column("token", 20, gap=4), *numbers, *beside], rows)

    def _effect(self) -> list[str]:
        """The block on how large the change is, beside the controls'."""
        control = self.control
        lines = [f"KL(baseline‖edited) {self.kl:.4g}: {self.verdict}"]
        if control.each:
            kl, sizes = (control.kl_mean, control.kl_spread), mean_and_spread([one.size for one in control.each])
            lines.append(f"controls  KL {_shown(kl, '.3g')}, the same edit on random cells of the same layer")
            lines.append(f"          size |Δm|·‖v‖ {_shown(sizes, '.3g')}, the edit's {self.size:.3g}; seed {control.seed}")
        return lines

    def __repr__(self) -> str:
        edits = "  ".join(edit.shown for edit in self.edits)
        return f"Comparison({edits} in {visible(self.model)}: KL {self.kl:.3g}, {self.verdict})"


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
    """Compare a model's answer to a prompt with that under edits (see `intervene`), and with edits of other cells.

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
    (behind,) = Scope.parse(position).tokens(len(ids))
    if later and behind != len(ids) - 1:
        raise FfmemError(f"expected position -1 where only generated tokens are edited, found {position}")
    fed, here = ids, scope
    if later:
        # The last token fed is then the only one generated.
        fed, here = [*ids, *greedy(loaded, [*first, *ids], 1)], Scope.parse("-1")
        behind = len(ids)
    touched = here.tokens(len(fed))
    if touched[0] > behind:
        raise FfmemError(f"expected a position from {touched[0]} on, where the edits begin, found {position}")
    row, column = torch.tensor([[*first, *fed]]), len(first) + behind

    def log_probs(others: list[Edit]) -> Float[Tensor, " vocab"]:
        with applying(loaded, resolve(loaded, others, index), here):
            # Summing to 1 in float64: what rounding leaves would be seen in a small divergence.
            return log_probs_at(loaded, row, torch.tensor([column]))[0].double().log_softmax(0)

    before, after = log_probs([]), log_probs(parsed)
    columns = [len(first) + token for token in touched if token <= behind]
    size, drawn = draw_controls(loaded, parsed, row, columns, column, count=control, seed=seed, run=index)
    beside = [log_probs(others) for others, _ in drawn]
    kl = divergence(before, after)
    controls = [
        Control(list(dict.fromkeys(cell for edit in others for cell in edit.cells)), own, divergence(before, scores))
        for (others, own), scores in zip(drawn, beside, strict=True)
    ]
    effects = _controls(kl, controls, control, seed)
    tops = [_top_tokens(loaded, scores, top) for scores in (before, after)]
    followed = list(dict.fromkeys([*chosen, *(one.id for found in tops for one in found)]))
    plain = greedy(loaded, [*first, *ids], generate)
    with applying(loaded, changes, scope):
        new = greedy(loaded, [*first, *ids], generate)
    baseline, edited = (
        Side(found, ids, loaded.tokenizer.decode(ids, skip_special_tokens=True) if ids else "")
        for found, ids in zip(tops, (plain, new), strict=True)
    )
    return Comparison(
        model=loaded.name,
        prompt=prompt,
        tokens=token_texts(loaded, ids),
        bos=put,
        edits=parsed,
        at=scope,
        position=behind,
        behind=token_texts(loaded, [fed[behind]])[0],
        baseline=baseline,
        edited=edited,
        tokens_compared=[
            _token_change(id, text, before, after, beside)
            for id, text in zip(followed, token_texts(loaded, followed), strict=True)
        ],
        kl=kl,
        size=size,
        control=effects,
        verdict=_verdict(kl, size, effects),
    )


def _top_tokens(model: MemoryModel, log_probs: Float[Tensor, " vocab"], count: int) -> list[TopToken]:
    found = log_probs.topk(min(count, len(log_probs)))
    ids = found.indices.tolist()
    columns = zip(token_texts(model, ids), ids, found.values.tolist(), strict=True)
    return [TopToken(text, id, log_prob, exp(log_prob)) for text, id, log_prob in columns]


def _token_change(id: int, text: str, before: Tensor, after: Tensor, beside: list[Tensor]) -> TokenChange:
    """The change of a token's log-probability under the edit and under the controls."""
    baseline, edited = float(before[id]), float(after[id])
    controls = mean_and_spread([float(other[id]) - baseline for other in beside])
    return TokenChange(text, id, baseline, edited, edited - baseline, *controls)


def _controls(kl: float, each: list[Control], asked: int, seed: int) -> Controls:
    """The controls together, beside an edit that has this KL divergence."""
    size_mean, _ = mean_and_spread([one.size for one in each])
    smaller = sum(one.kl < kl for one in each)
    return Controls(asked, seed, *mean_and_spread([one.kl for one in each]), size_mean, smaller, each)


def _verdict(kl: float, size: float, control: Controls) -> str:
    """The edit's KL divergence beside the controls', in words."""
    if not kl:
        return "nothing that this prediction depends on is changed"
    count = len(control.each)
    if control.size_mean is None:
        return "no controls" if not control.asked else "no controls: the layer has no other cells to draw"
    few = "" if count == control.asked else f" ({control.asked} asked, the layer has too few other cells)"
    share = control.size_mean / size if size else 1.0
    # A layer's largest cell has none of its size: then a larger effect says less.
    other = "" if abs(share - 1) <= UNLIKE else f", whose size is {share:.0%} of the edit's"
    return f"larger than {control.smaller_kl} of {count} controls{few}{other}"


def divergence(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> float:
    """KL(p‖q) of two distributions given as log-probabilities, in nats; rounding leaves nothing below 0."""
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), torch.zeros_like(p))
    return max(0.0, float(terms.sum()))


def mean_and_spread(values: list[float]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation (n-1), each None where there are too few.

    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([1.0])
    ((2.0, 1.4142135623730951), (1.0, None))
    """
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None


def _shown(numbers: tuple[float | None, float | None], form: str) -> str:
    mean, spread = numbers
    return f"{mean:{form}}" + ("" if spread is None else f" ± {spread:{form.lstrip('+')}}")
