"""The command `ffmem`: each verb is a command of its own. Torch is loaded only by the verbs that need it."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer
import typer.main

import ffmem
from ffmem.cli import live, making, reading
from ffmem.cli.ending import ended

app = typer.Typer(
    name="ffmem",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="""Read the feed-forward memories of a transformer: what triggers every memory cell, and what its value says.

    Start with `ffmem demo`, or with your own model and text:

    `ffmem index gpt2 wiki.txt -o runs/gpt2`, then `ffmem values runs/gpt2`, then `ffmem show runs/gpt2 L11D1203`.
    A model (`wiki16`) and a text (`pocket`) come with it.
    """,
)

VERBS = (
    making.index,
    making.plan,
    reading.show,
    reading.info,
    making.values,
    reading.experiments,
    reading.report,
    live.trace,
    live.compare,
    live.causal,
    reading.export,
    making.train,
    making.convert,
    making.demo,
)
"""The commands in the order in which `ffmem --help` lists them; each calls the function of its name in Python."""
for verb in VERBS:
    app.command()(verb)
app.command("intervene", hidden=True)(live.compare)  # what it was called before


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"ffmem {ffmem.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 well, 1 with one line about an error, 2 for options that cannot be, 130 or 143
    stopped."""
    ended(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> None:
    # Called as a program, typer would handle errors and signals itself.
    command = typer.main.get_command(app)
    with command.make_context("ffmem", list(arguments) or ["--help"]) as context:
        command.invoke(context)
