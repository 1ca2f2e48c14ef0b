"""Arguments and options of the commands: those that several share, and how what is typed is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ffmem.cells import parse_layers
from ffmem.cli.numbers import whole
from ffmem.errors import FfmemError

MOST_LAYERS = 10_000
"""A number of layers that no model has; how many one has is known when it is loaded."""


def option(help: str, *names: str, default: str | bool = True, read: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """An option of a command: its help, its names if they are not the parameter's, and the function that reads its value.

    `default` is what the help shows in the place of the parameter's default; False shows none.
    """
    return typer.Option(*names, help=help, show_default=default, parser=read, **more)


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
    """The text as it was typed; an error where it names layers that no model has. The model itself says the rest."""
    parse_layers(text, MOST_LAYERS)
    return text


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run, made by `ffmem index`: a folder or a URL.", show_default=False, parser=given("a run")
    ),
]
Corpus = Annotated[
    list[str],
    typer.Argument(
        metavar="CORPUS...",
        help="Text, WikiText, .jsonl or .parquet files (text also .gz .xz .zst), or `hf:ID,config=C,split=S,column=NAME` "
        "for a Hugging Face dataset, or `pocket`, which comes with ffmem.",
    ),
]
Seed = Annotated[int, option("Of everything that is drawn.", read=whole("seed", 0))]
Top = Annotated[int, option("Triggers to keep for each cell.", read=whole("top", 1, 10_000))]
AsJson = Annotated[bool, option("Print JSON instead of text.", "--json")]
Device = Annotated[str, option("`auto`, `cpu`, `cuda`, `cuda:1`, ...")]
Dtype = Annotated[str, option("`auto`, `float32`, `bfloat16` or `float16`. Auto: float32 on a CPU, else as stored.")]
TrustRemoteCode = Annotated[
    bool, option("Run Python code that comes with the model. Never asked; read it first.", "--trust-remote-code")
]
Column = Annotated[str, option("The field or column that holds the text.")]
MaxRecord = Annotated[str, option("The largest record (a line of a file, a row) that is taken; a larger one is an error.")]
Quiet = Annotated[bool, option("No progress, no notes.", "--quiet", "-q")]
OtherModel = Annotated[
    str | None, option("The run's model, if it has moved. Its hash is checked.", "--model", default="the run's")
]
