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
"""The number of cells (or cases) below which a share says little; resamples of so few do not show how little."""
AGAIN = "interval: not there, run it again"
RUN_CONTROL = f"control not run: ffmem experiments RUN --control {CONTROL}"


@dataclass(frozen=True)
class Rule:
    """The range of numbers in which a claim is right: above or below a number, or from `least` to `most`."""

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
    """A number computed from a result (or one of its draws), the rule that it must meet, and how it is put in words."""

    name: str
    statistic: Callable[[Result], int | float | None]
    rule: Rule
    say: Callable[[float], str] = share
    of: str = ""
    """The words behind the number, such as `in layer 3`."""


@dataclass(frozen=True)
class Reading:
    """The measures by which a claim is read off one result, of `n` units, with words beside them.

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
    """A claim's finding on one model: its numbers, of what they are, words beside them, and the verdict that follows."""

    verdict: Verdict
    words: str
    n: str = ""
    numbers: tuple[Number, ...] = ()

    @property
    def beside(self) -> str:
        """The words that stand beside the numbers: a note, what is missing, and of how many units they are."""
        lacking = any(number.value is not None and number.low is None for number in self.numbers)
        words = "; ".join(filter(None, (self.words, AGAIN if lacking else "")))
        return f"{words} ({self.n})".strip() if self.n else words

    @property
    def text(self) -> str:
        """The numbers and all words in one line, as a reader sees them."""
        return "; ".join(filter(None, (*(number.text for number in self.numbers), self.beside))).replace("; (", " (")


NOT_RUN = Finding("not measured", "not run")


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and how it is judged; once judged, also what was found on this model and on random weights."""

    id: str
    figure: str
    """The figure in which the paper says it, such as `Fig 3`."""
    claim: str
    paper: str
    """The paper's own finding, in words."""
    rule: str
    """The rule of the verdict, in words."""
    read: Callable[[Result], Reading] = field(repr=False, compare=False)
    """A function that reads the claim off a result."""
    found: Finding = NOT_RUN
    control: Finding | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on this model."""
        return self.found.verdict

    @property
    def here(self) -> str:
        """The finding on this model, as text."""
        return self.found.text

    @property
    def n(self) -> str:
        """The units that the claim's numbers are of on this model, as text."""
        return self.found.n

    @property
    def value(self) -> int | float | None:
        """The first of the claim's numbers on this model, None without any."""
        return self.found.numbers[0].value if self.found.numbers else None

    @property
    def low(self) -> float | None:
        """The lower end of the first number's interval."""
        return self.found.numbers[0].low if self.found.numbers else None

    @property
    def high(self) -> float | None:
        """The upper end of the first number's interval."""
        return self.found.numbers[0].high if self.found.numbers else None

    @property
    def evidence(self) -> str:
        """A word on whether a claim that holds is evidence, which it is not where it holds on random weights too; empty
        for one that does not hold."""
        if self.verdict != "holds":
            return ""
        if self.control is None:
            return "control not run"
        worth: dict[Verdict, str] = {"holds": "no evidence", "does not hold": "evidence"}
        return worth.get(self.control.verdict, f"control {self.control.verdict}")


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
    """The verdict of several together: a claim holds where all its numbers meet their rules, and falls with one."""
    for verdict in ("not measured", "does not hold", "undecided"):
        if verdict in verdicts:
            return verdict
    return "holds"
