"""The commands that need a live model: trace a prompt, compare with edited cells, check what a cell causes."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ffmem.cli.numbers import MANY, real, whole
from ffmem.cli.options import AsJson, Device, Dtype, OtherModel, Quiet, Run, Seed, TrustRemoteCode
from ffmem.cli.printing import note, say, say_json

Model = Annotated[str, typer.Argument(metavar="MODEL", help="`wiki16`, a Hugging Face id, a folder, or a .gguf file.")]
Prompt = Annotated[str, typer.Argument(metavar="PROMPT", help="The text that the model reads.", show_default=False)]
SomeRun = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="A run of this model, for what is known of its cells.")
]


def trace(
    model: Model,
    prompt: Prompt,
    at: Annotated[str, typer.Option(help="Tokens of the prompt to read in full: `-1`, `4`, `2:5` or `all`.")] = "-1",
    target: Annotated[
        str | None, typer.Option(help="A token to follow, its space included.", show_default="what the model says")
    ] = None,
    cells: Annotated[
        int, typer.Option(help="Promoting and suppressing cells to list, each.", parser=whole("cells", 0))
    ] = 10,
    of: Annotated[str, typer.Option(help="Contributions to the model's `output` or to each `layer`'s own.")] = "output",
    run: SomeRun = None,
    grid: Annotated[bool, typer.Option("--grid", help="Also what every layer would say at every token.")] = False,
    as_json: AsJson = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Show how a prediction comes to be: layer by layer, and which memory cells push a token up or down.

    Contributions are direct ones to the token's final logit, with their sign, and add up to it.
    """
    options = dict(locals())
    for name in ("as_json", "quiet"):
        del options[name]
    from ffmem.live.trace import trace as follow
    from ffmem.model.names import refuse_swapped

    refuse_swapped(model, [prompt])
    note(quiet, f"loading {model}")
    found = follow(**options)
    say_json(found.as_dict(), indent=2) if as_json else say(str(found))


def compare(
    model: Model,
    prompt: Prompt,
    edit: Annotated[
        list[str],
        typer.Option(
            help="`L3D1=0` set, `L3D1*2` multiply, `L3D1+1` add, `L3D1~q0.99*2` twice its 0.99-quantile (with `--run`); "
            "sets: `L3D1,L3D2=0`, `@cells.txt=0`. May be repeated.",
            show_default=False,
        ),
    ],
    at: Annotated[str, typer.Option(help="`all`, `generated`, or tokens of the prompt: `3:`, `2:5`, `-1`.")] = "all",
    run: SomeRun = None,
    position: Annotated[
        int,
        typer.Option(help="The token of the prompt behind which predictions are compared.", parser=whole("position", -MANY)),
    ] = -1,
    token: Annotated[
        list[str] | None, typer.Option(help="A token to follow, its space included; may be repeated.", show_default="none")
    ] = None,
    top: Annotated[int, typer.Option(help="Predictions to show.", parser=whole("top"))] = 5,
    generate: Annotated[int, typer.Option(help="Tokens to generate, greedily.", parser=whole("generate", 0))] = 20,
    control: Annotated[
        int,
        typer.Option(help="How many random cells get the same edit, to compare with.", parser=whole("control", 0, 10_000)),
    ] = 5,
    seed: Annotated[int, typer.Option(help="Of the random cells.", parser=whole("seed", 0))] = 0,
    export: Annotated[bool, typer.Option("--export", help="Print the edit as Python for transformers instead.")] = False,
    as_json: AsJson = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Change the coefficients of some cells and see what the model says then.

    Baseline and edited stand side by side: predictions, KL divergence, what both generate, and the same edit on random
    cells of the same layer, about as large, as a control.
    """
    from ffmem.live.comparison import compare as compare_edited
    from ffmem.live.recipe import recipe

    edits: dict[str, Any] = {"at": at, "run": run, "device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    note(quiet, f"loading {model}")
    if export:
        print(recipe(model, *edit, **edits), end="")
        return
    asked: dict[str, Any] = {"position": position, "tokens": token or (), "top": top, "generate": generate}
    found = compare_edited(model, prompt, *edit, **edits, **asked, control=control, seed=seed)
    say_json(found.as_dict(), indent=2) if as_json else say(str(found))


def causal(
    run: Run,
    cells: Annotated[
        list[str], typer.Argument(metavar="CELL...", help="Such as `L3D17`, or `@cells.txt`.", show_default=False)
    ],
    eval: Annotated[list[str], typer.Option(help="Text that the index has not seen; may be repeated.", show_default=False)],
    prefixes: Annotated[int, typer.Option(help="Prefixes a cell at most.", parser=whole("prefixes"))] = 200,
    tokens: Annotated[int, typer.Option(help="Top tokens of the value that are its promise.", parser=whole("tokens"))] = 5,
    quantile: Annotated[
        float,
        typer.Option(help="A cell fires above this quantile of its own coefficients.", parser=real("quantile", 0, 1)),
    ] = 0.999,
    seed: Seed = 0,
    as_json: AsJson = False,
    model: OtherModel = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Does a cell do what its value promises? Switch it off where it fires, and where it does not.

    Prefixes of a held-out text whose coefficient is above the cell's quantile are compared with others of the same last
    token and about the same length; changes are of log-probabilities, with 95% intervals.
    """
    options = dict(locals())
    del options["as_json"]
    from ffmem.corpus.sources import open_source
    from ffmem.live.causal import causal as check
    from ffmem.live.causal import causal_lines
    from ffmem.live.edits import parse_cells
    from ffmem.run.folder import RESULTS
    from ffmem.run.reader import open_index

    opened = open_index(run)
    corpus = [open_source(name, **opened.manifest.reading) for name in eval]
    wanted = [cell for name in cells for cell in parse_cells(name)]
    note(quiet, "loading the run's model")
    result = check(**options | {"run": opened, "cells": wanted, "eval": corpus})
    if as_json:
        say_json(result.as_dict())
    else:
        say("\n".join(causal_lines(result)))
    note(quiet, f"kept in {opened.folder.location(RESULTS)}")
