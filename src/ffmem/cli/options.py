"""Arguments and options that several commands share, and the note they write to standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ffmem.cells import parse_layers
from ffmem.cli.numbers import whole
from ffmem.errors import FfmemError
from ffmem.text import visible

MOST_LAYERS = 10_000
"""More than any model has; how many one has is known when it is loaded."""


def given(what: str) -> Callable[[str], str]:
    """Reads a name that must not be empty: the empty one would be the folder where the program was started.

    What writes tables takes no names but in UTF-8.
    """

    def read(text: str) -> str:
        if not text:
            raise FfmemError(f"expected {what}, found an empty name")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise FfmemError(f"expected {what} with a name in UTF-8, found {text}")
        return text

    return read


def some_layers(text: str) -> str:
    """Refuses what no model has; the model says the rest."""
    parse_layers(text, MOST_LAYERS)
    return text


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run, made by `ffmem index`: a folder or a URL.",
        show_default=False,
        parser=given("a run"),
    ),
]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.", parser=whole("seed", 0))]
Top = Annotated[int, typer.Option(help="Triggers to keep for each cell.", parser=whole("top", 1, 10_000))]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Device = Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda`, `cuda:1`, ...")]
Dtype = Annotated[
    str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`. Auto: float32 on a CPU, else as stored.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model. Never asked; read it first."),
]
MaxRecord = Annotated[
    str, typer.Option(help="The largest record (a line of a file, a row) that is taken; a larger one is an error.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]
OtherModel = Annotated[
    str | None,
    typer.Option("--model", help="The run's model, if it has moved. Its hash is checked.", show_default="the run's"),
]


def note(quiet: bool, text: str) -> None:
    """A line for people beside what a command prints."""
    if not quiet:
        print(visible(f"ffmem: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print lines for people: whatever they hold of corpora, tokens and names can only be read."""
    print("\n".join(map(visible, text.split("\n"))), flush=True)


def say_json(value: Any, *, indent: int | None = None) -> None:
    """Print JSON for a program, which a person at a terminal may read too: what a terminal would obey is escaped in it."""
    unicode = "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    text = json.dumps(value, ensure_ascii=not unicode, indent=indent)
    print(re.sub(r"[^\n -~]", _escaped, text), flush=True)


def _escaped(found: re.Match[str]) -> str:
    return found[0] if visible(found[0]) == found[0] else json.dumps(found[0])[1:-1]
