"""How a comparison shows itself: lines of text for a terminal."""

from __future__ import annotations

from math import exp
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from ffmem.text import shown_token, visible

if TYPE_CHECKING:
    from ffmem.live.comparison import Comparison, Shift, Side

TOKEN_WIDTH = 20
"""Characters of a token in a table."""


def comparison_lines(found: Comparison, width: int) -> list[str]:
    """All of it, at most `width` characters a line."""
    scope = {"all": "all positions", "generated": "generated tokens only"}.get(str(found.at), f"the prompt's {found.at}")
    lines = [
        f"prompt    {visible(found.prompt)}",
        f"edits     {'  '.join(edit.shown for edit in found.edits)}  at {scope}",
        "",
        f"next token behind {shown_token(found.behind)}, position {found.position}",
        f"    {'baseline':<{TOKEN_WIDTH + 10}}edited",
        *_tops(found.baseline, found.edited),
        "",
        f"    {'token':<{TOKEN_WIDTH}}{'baseline':>9}{'edited':>9}{'Δ log p':>9}" + "   of controls" * bool(found.controls),
        *(_shift(shift) for shift in found.shifts),
        "",
        f"KL(baseline‖edited) {found.kl:.4g}: {found.verdict}",
    ]
    if found.controls:
        kl, sizes = (mean_and_spread(part) for part in (found.control_kl, [control.size for control in found.controls]))
        lines += [
            f"controls  KL {_told(kl, '.3g')}, the same edit on random cells of the same layer",
            f"          size |Δm|·‖v‖ {_told(sizes, '.3g')}, the edit's {found.size:.3g}; seed {found.seed}",
        ]
    if found.baseline.generated or found.edited.generated:
        lines += ["", f"baseline  … {visible(found.baseline.text)}", f"edited    … {visible(found.edited.text)}"]
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


def mean_and_spread(values: list[float]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation (n-1), each None where there are too few.

    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([1.0])
    ((2.0, 1.4142135623730951), (1.0, None))
    """
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None


def _tops(baseline: Side, edited: Side) -> list[str]:
    rows = enumerate(zip(baseline.top, edited.top, strict=True), 1)
    return [f"{rank:>3} " + "  ".join(f"{_cut(t):<{TOKEN_WIDTH}}{exp(p):>8.2%}" for t, _, p in both) for rank, both in rows]


def _shift(shift: Shift) -> str:
    numbers = f"{exp(shift.baseline):>9.2%}{exp(shift.edited):>9.2%}{shift.change:>+9.3f}"
    beside = f"   {_told(mean_and_spread(shift.controls), '+.3f')}" if shift.controls else ""
    return f"    {_cut(shift.token):<{TOKEN_WIDTH}}{numbers}{beside}"


def _told(numbers: tuple[float | None, float | None], form: str) -> str:
    mean, spread = numbers
    return f"{mean:{form}}" + ("" if spread is None else f" ± {spread:{form.lstrip('+')}}")


def _cut(token: str) -> str:
    """A token in quotes, cut to its column."""
    shown = shown_token(token)
    return shown if len(shown) < TOKEN_WIDTH else shown[: TOKEN_WIDTH - 3] + "…”"
