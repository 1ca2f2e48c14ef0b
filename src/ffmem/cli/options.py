"""Arguments and options that several commands share, and the note they write to standard error."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run, made by `ffmem index`: a folder or a URL.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Device = Annotated[str, typer.Option(help="`auto`, `cpu`, `cuda`, `cuda:1`, ...")]
Dtype = Annotated[
    str, typer.Option(help="`auto`, `float32`, `bfloat16` or `float16`. Auto: float32 on a CPU, else as stored.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model. Never asked; read it first."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes.")]
OtherModel = Annotated[
    str | None,
    typer.Option("--model", help="The run's model, if it has moved. Its hash is checked.", show_default="the run's"),
]


def note(quiet: bool, text: str) -> None:
    """A line for people beside what a command prints."""
    if not quiet:
        print(f"ffmem: {text}", file=sys.stderr, flush=True)
