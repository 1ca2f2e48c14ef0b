"""Claims and their verdicts: a number, its interval over resamples, the rule that both must meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

from ffmem.experiments.numbers import share
from ffmem.experiments.resampling import interval
from ffmem.run.results import CONTROL, Result

Verdict = Literal["holds", "does not hold", "undecided", "not measured", "does not apply"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "undecided", "not measured", "does not apply")
FEW = 30
"""Cells (or cases) below which a share says little; resamples of so few do not tell how little."""
AGAIN = "interval: not there, run it again"
RUN_CONTROL = f"control not run: ffmem experiments RUN --control {CONTROL}"


@dataclass(frozen=True)
class Rule:
    """The stretch of numbers with which a claim is right: above or below a number, or from `least` to `most`."""

    above: int | float = -inf
    below: int | float = inf
    least: int | float = -inf
    most: int | float = inf

    def verdict(self, values: Iterable[int | float]) -> Verdict:
        """The verdict on a number and the ends of its interval together.

        >>> Rule(above=0).verdict([2, 1, 3]), Rule(above=0).verdict([2, -1, 3]), Rule(least=5, most=6).verdict([2, 1, 3])
        ('holds', 'undecided', 'does not hold')
        """
        under, over = zip(
            *((x <= self.above or x < self.least, x >= self.below or x > self.most) for x in values), strict=True
        )
        if not any((*under, *over)):
            return "holds"
        # Numbers on both sides have some between them that meet the rule.
        return "does not hold" if all(under) or all(over) else "undecided"


@dataclass(frozen=True)
class Measure:
    """How a number is computed from a result (or one of its draws), the rule that it must meet, and how it is said."""

    name: str
    statistic: Callable[[Result], int | float | None]
    rule: Rule
    say: Callable[[float], str] = share
    of: str = ""
    """What stands behind the number: `in layer 3`."""


@dataclass(frozen=True)
class Reading:
    """How a claim is read off one result: by these measures, of `n` units, with words beside them.

    Where it cannot be read, `verdict` and `words` say so and why.
    """

    words: str
    measures: Sequence[Measure] = ()
    n: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Number:
    """A number that a claim was judged by, with its 95% interval where the result holds resamples."""

    name: str
    value: int | float | None
    low: float | None
    high: float | None
    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Finding:
    """A claim on one model: its numbers, of what they are, words beside them, and the verdict that follows."""

    verdict: Verdict
    words: str
    n: str = ""
    numbers: tuple[Number, ...] = ()

    @property
    def beside(self) -> str:
        """What stands beside the numbers: words, what is missing, and of how many units they are."""
        lacking = any(number.value is not None and number.low is None for number in self.numbers)
        said = "; ".join(filter(None, (self.words, AGAIN if lacking else "")))
        return f"{said} ({self.n})".strip() if self.n else said

    @property
    def text(self) -> str:
        """Everything in one line, as a reader sees it."""
        return "; ".join(filter(None, (*(number.text for number in self.numbers), self.beside))).replace("; (", " (")


NOT_RUN = Finding("not measured", "not run")


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and how it is judged; once judged, what was found on this model and on random weights."""

    id: str
    figure: str
    """Where the paper says it: `Fig 3`."""
    claim: str
    paper: str
    """What the paper found."""
    rule: str
    """The rule in words."""
    read: Callable[[Result], Reading] = field(repr=False, compare=False)
    """How a result is read by it."""
    found: Finding = NOT_RUN
    control: Finding | None = None

    @property
    def verdict(self) -> Verdict:
        return self.found.verdict

    @property
    def here(self) -> str:
        return self.found.text

    @property
    def n(self) -> str:
        return self.found.n

    @property
    def value(self) -> int | float | None:
        """The first of its numbers."""
        return self.found.numbers[0].value if self.found.numbers else None

    @property
    def low(self) -> float | None:
        return self.found.numbers[0].low if self.found.numbers else None

    @property
    def high(self) -> float | None:
        return self.found.numbers[0].high if self.found.numbers else None

    @property
    def evidence(self) -> str:
        """What a claim that holds is worth: nothing where it holds on random weights too. Empty for one that does not."""
        if self.verdict != "holds":
            return ""
        if self.control is None:
            return "control not run"
        told: dict[Verdict, str] = {"holds": "no evidence", "does not hold": "evidence"}
        return told.get(self.control.verdict, f"control {self.control.verdict}")


def find(reading: Reading, result: Result) -> Finding:
    """Compute a claim's numbers on a result and on all its resamples, and judge them."""
    if reading.verdict is not None:
        return Finding(reading.verdict, reading.words, reading.n)
    numbers = tuple(_number(measure, result) for measure in reading.measures)
    return Finding(_together([number.verdict for number in numbers]), reading.words, reading.n, numbers)


def _number(measure: Measure, result: Result) -> Number:
    value, ends = measure.statistic(result), _ends(measure, result)
    if value is None or not isfinite(value):
        return Number(measure.name, None, None, None, "not measured", "")
    low, high = ends or (None, None)
    span = "" if ends is None else f"({measure.say(ends[0])} to {measure.say(ends[1])})"
    text = " ".join(filter(None, (measure.name, measure.say(value), span, measure.of)))
    return Number(measure.name, value, low, high, measure.rule.verdict([value, *(ends or ())]), text)


def _ends(measure: Measure, result: Result) -> tuple[float, float] | None:
    try:
        return interval(measure.statistic(draw) for draw in result.draws)
    except (KeyError, TypeError, ValueError):  # resamples without what this number needs
        return None


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """A claim holds where all its numbers meet their rules, and falls with one that does not."""
    for verdict in ("not measured", "does not hold", "undecided"):
        if verdict in verdicts:
            return verdict
    return "holds"
