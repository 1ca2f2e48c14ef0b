"""How a comparison shows itself: lines of text for a terminal, and tables in a notebook."""

from __future__ import annotations

from html import escape
from math import exp
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from ffmem.run.pages import PAGE_COLUMNS, html_table
from ffmem.text import beginning, ending, padded, shown_token, visible, width

if TYPE_CHECKING:
    from ffmem.live.comparison import Comparison, Shift, Side

TOKEN_WIDTH = 20
"""Characters of a token in a table."""


def comparison_lines(found: Comparison, columns: int) -> list[str]:
    """All of it, at most so many columns a line."""
    lines = [
        *_asked(found, columns),
        "",
        f"next token behind {shown_token(found.behind)}, position {found.position}",
        f"    {'baseline':<{TOKEN_WIDTH + 10}}edited",
        *_tops(found.baseline, found.edited),
        "",
        f"    {'token':<{TOKEN_WIDTH}}{'baseline':>9}{'edited':>9}{'Δ log p':>9}" + "   of controls" * bool(found.controls),
        *(_shift(shift) for shift in found.shifts),
        "",
        *_found(found),
    ]
    if texts := _texts(found):
        lines += ["", *texts]
    return [beginning(line, columns) for line in lines]


def comparison_page(found: Comparison) -> str:
    """The same as tables of HTML."""
    tops = zip(found.baseline.top, found.edited.top, strict=True)
    changes = ["token", "baseline", "edited", "Δ log p", *(["of controls"] if found.controls else [])]
    shifts = [[shown_token(shift.token), *_numbers(shift)] for shift in found.shifts]
    parts = [
        _paragraph(_asked(found, PAGE_COLUMNS)),
        html_table(
            ["", "baseline", "", "edited", ""],
            [
                [str(rank), *(text for token, _, log_prob in both for text in (shown_token(token), f"{exp(log_prob):.2%}"))]
                for rank, both in enumerate(tops, 1)
            ],
            f"next token behind {shown_token(found.behind)}, position {found.position}",
        ),
        html_table(changes, shifts),
        _paragraph([*_found(found), *_texts(found)]),
    ]
    return f"<div>{''.join(parts)}</div>"


def _paragraph(lines: list[str]) -> str:
    return f"<p>{'<br>'.join(map(escape, lines))}</p>"


def _asked(found: Comparison, columns: int) -> list[str]:
    """The prompt, of a long one the end, and the edits."""
    scope = {"all": "all positions", "generated": "generated tokens only"}.get(str(found.at), f"the prompt's {found.at}")
    edits = "  ".join(edit.shown for edit in found.edits)
    return [f"prompt    {ending(visible(found.prompt), columns - 10)}", f"edits     {edits}  at {scope}"]


def _found(found: Comparison) -> list[str]:
    """How large the change is, beside the controls'."""
    lines = [f"KL(baseline‖edited) {found.kl:.4g}: {found.verdict}"]
    if found.controls:
        kl, sizes = (mean_and_spread(part) for part in (found.control_kl, [control.size for control in found.controls]))
        lines += [
            f"controls  KL {_told(kl, '.3g')}, the same edit on random cells of the same layer",
            f"          size |Δm|·‖v‖ {_told(sizes, '.3g')}, the edit's {found.size:.3g}; seed {found.seed}",
        ]
    return lines


def _texts(found: Comparison) -> list[str]:
    """What both write, if they were asked to."""
    if not found.baseline.generated and not found.edited.generated:
        return []
    return [f"baseline  … {visible(found.baseline.text)}", f"edited    … {visible(found.edited.text)}"]


def mean_and_spread(values: list[float]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation (n-1), each None where there are too few.

    >>> mean_and_spread([1.0, 3.0]), mean_and_spread([1.0])
    ((2.0, 1.4142135623730951), (1.0, None))
    """
    return fmean(values) if values else None, stdev(values) if len(values) > 1 else None


def _tops(baseline: Side, edited: Side) -> list[str]:
    rows = enumerate(zip(baseline.top, edited.top, strict=True), 1)
    return [f"{rank:>3} " + "  ".join(f"{_cut(t)}{exp(p):>8.2%}" for t, _, p in both) for rank, both in rows]


def _shift(shift: Shift) -> str:
    *numbers, beside = [*_numbers(shift), ""][:4]
    return f"    {_cut(shift.token)}{''.join(f'{number:>9}' for number in numbers)}   {beside}".rstrip()


def _numbers(shift: Shift) -> list[str]:
    """Both probabilities, the change, and that of the controls where there are some."""
    numbers = [f"{exp(shift.baseline):.2%}", f"{exp(shift.edited):.2%}", f"{shift.change:+.3f}"]
    return [*numbers, _told(mean_and_spread(shift.controls), "+.3f")] if shift.controls else numbers


def _told(numbers: tuple[float | None, float | None], form: str) -> str:
    mean, spread = numbers
    return f"{mean:{form}}" + ("" if spread is None else f" ± {spread:{form.lstrip('+')}}")


def _cut(token: str) -> str:
    """A token in quotes, cut to its column and padded to it."""
    shown = shown_token(token)
    return padded(shown if width(shown) < TOKEN_WIDTH else beginning(shown, TOKEN_WIDTH - 2) + "”", TOKEN_WIDTH)
