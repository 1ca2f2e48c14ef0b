"""The declaration of an experiment: its question, columns, computation, figures and claims. One file holds it all.

No torch is imported here, nor at the top of a file that declares an experiment: reports are made without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ffmem.experiments.markup import Raw
from ffmem.experiments.panels import Axis, Panel
from ffmem.experiments.rules import Claim
from ffmem.run.reader import Index
from ffmem.run.results import Result

if TYPE_CHECKING:
    from ffmem.experiments.examples import Examples
    from ffmem.experiments.observe import Observer
    from ffmem.model.memories import MemoryModel

EXAMPLES = 4000
"""The number of prefixes that are followed through the model, as many as in the paper."""


def followed(observer: Callable[..., Observer]) -> Callable[..., Result]:
    """A function that runs, alone, an experiment that watches examples go by: it draws them, shows them to the observer
    in one pass over the model, and keeps its result in the run."""

    def run(
        model: Any,
        index: Index,
        eval: Any = None,
        *,
        examples: int = EXAMPLES,
        seed: int = 0,
        quiet: bool = False,
        **own: Any,
    ) -> Result:
        """Run the experiment and give its result; further keywords are the observer's own."""
        from ffmem.experiments.observe import follow

        return follow(model, index, [partial(observer, **own)], eval, examples=examples, seed=seed, quiet=quiet)[0]

    return run


@dataclass(frozen=True)
class Figure:
    """A figure of one experiment: what a reader should see in it, and how its panels are made from a result."""

    name: str
    """The name of the figure's files: the experiment's name, with `_2` and so on behind it where it has several figures."""
    number: str
    """The name that a heading gives it: `Fig 3`."""
    title: str
    see: str
    """The two or three sentences that tell a reader who has not read the paper what to look for."""
    alt: str
    """The text for those who cannot see the figure."""
    panels: Callable[[Result, Axis, Result | None], Sequence[Panel]]
    """A function that makes the panels from the result, the axis of layers, and the same result on random weights (None
    where that was not run)."""


@dataclass(frozen=True)
class Section:
    """A part of the report that is neither a claim nor a figure, such as a table of examples to read."""

    order: int
    """The section's rank: parts with a smaller number come first."""
    heading: str
    """The section's heading; parts with the same one stand below it together."""
    show: Callable[[Index, Result | None], Sequence[Raw]]
    """A function that gives the part as HTML from the index and the result; where the result is None, `missing` says how
    to make it."""


@dataclass(frozen=True)
class Experiment:
    """A question asked of a model and its index, and all that the command line, the report and the docs say of it."""

    name: str
    question: str
    columns: Mapping[str, str]
    """The meaning of each column of the result's rows, in the order of the columns."""
    run: Callable[..., Result]
    """The function `ffmem.experiments.NAME(model, index, ...)`, which keeps its result in the run (`Result.saved`). Of
    the keywords `eval`, `examples`, `cells`, `seed` and `quiet` it is given those that it has."""
    figures: Sequence[Figure] = ()
    claims: Callable[[], Sequence[Claim]] = tuple
    """The paper's claims that its results are judged by; made when first needed."""
    sections: Sequence[Section] = ()
    observer: Callable[[MemoryModel, Examples], Observer] | None = None
    """The observer of an experiment that watches examples go by (`run` is `followed` of it), else None. All that have one
    share one pass over the examples."""
    most_examples: int | None = None
    """The most examples that are taken, however many are asked for; None without a limit."""
    most_control_examples: int | None = None
    """The most examples that are taken for the control, which is asked of random weights; None without a limit."""
    order: int = 100
    """The number by which experiments are run and shown; those of equal numbers go by name."""

    def plot(self, result: Result, *, layers: int | None = None) -> Any:
        """All figures of a result of this experiment side by side, for a notebook."""
        from ffmem.experiments.charts import plot

        return plot(self.figures, result, layers)
