"""What an experiment declares: its question, its columns, its computation, its figures, its claims. One file holds it all.

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
"""Prefixes that are followed through the model, as many as in the paper."""


def followed(observer: Callable[..., Observer]) -> Callable[..., Result]:
    """What runs an experiment that watches examples go by, alone: it draws them, shows them to the observer in one pass over
    the model, and keeps its result in the run."""

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
        """The result; further keywords are the observer's own."""
        from ffmem.experiments.observe import follow

        return follow(model, index, [partial(observer, **own)], eval, examples=examples, seed=seed, quiet=quiet)[0]

    return run


@dataclass(frozen=True)
class Figure:
    """A figure of one experiment: what a reader should see in it, and how its panels are made from a result."""

    name: str
    """Its files are called so: the experiment's name, with `_2` and so on behind it where it has several."""
    number: str
    """The name that a heading gives it: `Fig 3`."""
    title: str
    see: str
    """Two or three sentences for a reader who has not read the paper."""
    alt: str
    """A text for those who cannot see it."""
    panels: Callable[[Result, Axis, Result | None], Sequence[Panel]]
    """Called with the result, the axis of layers, and the same result on random weights (None where that was not run)."""


@dataclass(frozen=True)
class Section:
    """A part of the report that is neither a claim nor a figure, such as a table of examples to read."""

    order: int
    """Parts with a smaller number come first."""
    heading: str
    """Parts of one heading stand below it together."""
    show: Callable[[Index, Result | None], Sequence[Raw]]
    """It gives the part as HTML from the index and the result; where the result is None, `missing` says how to make it."""


@dataclass(frozen=True)
class Experiment:
    """A question asked of a model and its index, and all that the command line, the report and the docs say of it."""

    name: str
    question: str
    columns: Mapping[str, str]
    """What each column of the result's rows means, in the order of the columns."""
    run: Callable[..., Result]
    """`ffmem.experiments.NAME(model, index, ...)`, which keeps its result in the run (`Result.saved`). Of the keywords
    `eval`, `examples`, `cells`, `seed` and `quiet` it is given those that it has."""
    figures: Sequence[Figure] = ()
    claims: Callable[[], Sequence[Claim]] = tuple
    """The paper's claims that its results are judged by; made when first needed."""
    sections: Sequence[Section] = ()
    observer: Callable[[MemoryModel, Examples], Observer] | None = None
    """Of an experiment that watches examples go by: what does so (`run` is `followed` of it). All that have one share one
    pass over the examples."""
    most_examples: int | None = None
    """No more examples than this are taken, however many are asked for."""
    most_control_examples: int | None = None
    """No more examples than this are taken for the control, which is asked of random weights."""
    order: int = 100
    """Experiments are run and shown by this number, those of equal numbers by name."""

    def plot(self, result: Result, *, layers: int | None = None) -> Any:
        """All its figures side by side, for a notebook."""
        from ffmem.experiments.charts import plot

        return plot(self.figures, result, layers)
