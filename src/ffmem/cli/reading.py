"""The commands that read a run: show cells, tell what a run is, ask the paper's questions, write a report or tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ffmem.cli.numbers import whole
from ffmem.cli.options import AsJson, Device, Dtype, OtherModel, Quiet, Run, Seed, TrustRemoteCode, given, option
from ffmem.cli.printing import info_lines, note, result_lines, say, say_json, show_json
from ffmem.run.registry import registered
from ffmem.text import shown_size


def show(
    run: Run,
    cells: Annotated[list[str], typer.Argument(metavar="CELL...", help="Such as `L3D17`: layer from 1, cell from 0.")],
    top: Annotated[
        int | None,
        option(
            "Triggers and tokens to show, on each side.", default="10; as JSON all triggers", read=whole("top", 1, 10_000)
        ),
    ] = None,
    as_json: AsJson = False,
    model: OtherModel = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Show cells: their triggers, what their values promote and suppress, their statistics.

    What values say is read from the run; before `ffmem values`, it is computed if the model is given. Beside a token's
    probability stands its z: by how many deviations it stands out from all other tokens.
    """
    from ffmem.run.pages import SHOWN, cell_text
    from ffmem.run.show import show as find

    views = find(run, cells, model=model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    if as_json:
        found = [show_json(view, top) for view in views]
        say_json(found if len(found) > 1 else found[0], indent=2)
    else:
        say("\n\n".join(cell_text(view, top or SHOWN) for view in views))
    index = views[0].index
    if not index.has_values and index.model is None:
        note(False, f"to see what values say: ffmem values {run}")
    elif top is not None and top > (held := views[0].value.kept):
        note(False, f"{held} tokens of each value are kept; to have more: ffmem values {run} --top {top}")


def info(run: Run, as_json: AsJson = False) -> None:
    """Tell what a run was made from, what it holds, what was skipped and why."""
    from ffmem.run.reader import open_index

    found = open_index(run)
    disk = found.folder.disk_use()
    if as_json:
        say_json({**found.manifest.as_dict(), "disk_bytes": disk}, indent=2)
    else:
        say("\n".join(info_lines(found, disk)))


def experiments(
    run: Run,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"`{'`, `'.join(registered())}`.",
            show_default="all",
        ),
    ] = None,
    eval: Annotated[
        list[str] | None,
        option("Text to draw examples from, which the index has not seen; may be repeated.", default="none"),
    ] = None,
    examples: Annotated[
        int | None,
        option("Prefixes to follow through the model.", default="4000; 200 of a control", read=whole("examples")),
    ] = None,
    cells: Annotated[
        int | None,
        option("Cells a layer whose triggers have tokens removed.", default="100; 20 of a control", read=whole("cells")),
    ] = None,
    seed: Seed = 0,
    control: Annotated[
        str | None,
        option(
            "`random`: ask a model of the same shape with fresh random weights instead, to see what training made.",
            default="none",
        ),
    ] = None,
    as_json: AsJson = False,
    model: OtherModel = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Run the paper's experiments on a run and its model; results are kept in the run.

    Without `--eval` the examples are from the indexed text itself, and the results say so. A control's results are kept
    beside the run's own, and are not made again where nothing differs.
    """
    options = dict(locals())
    del options["as_json"]
    from ffmem.corpus.sources import open_source
    from ffmem.run.folder import RESULTS
    from ffmem.run.reader import open_index
    from ffmem.run.results import check_request

    # What is wrong with the request is reported before torch is loaded.
    check_request(names or [], control=control, seed=seed, examples=examples, cells=cells)
    opened = open_index(run)
    corpus = [open_source(name, **opened.manifest.reading) for name in eval] if eval else None

    from ffmem.experiments.run import each_experiment

    note(quiet, "loading the run's model" if control is None else "a model of the same shape with random weights")
    for result in each_experiment(**options | {"run": opened, "names": names or [], "eval": corpus}):
        if as_json:
            say_json(result.as_dict())
        else:
            say("\n".join(result_lines(result)))
    note(quiet, f"kept in {opened.folder.location(RESULTS)}{f'/{control}' if control else ''}")


def report(
    run: Run,
    out: Annotated[
        str | None,
        option(
            "The page to write.",
            "-o",
            "--out",
            metavar="FILE",
            default="RUN/report.html",
            read=given("a file for the page"),
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write what the experiments found beside the paper's numbers: one HTML page, and figures as SVG and PNG.

    The page stands alone: it can be opened, sent and printed without this program. Needs no model and no torch.
    """
    from ffmem.reports.page import figures_beside
    from ffmem.reports.page import report as write
    from ffmem.run.folder import folder_of

    page = write(run, out)
    folder, name = folder_of(page)
    regular = not isinstance(page, Path) or page.is_file()  # else a device or a pipe
    size = f" ({shown_size(folder.size(name))})" if regular else ""
    beside = "; figures beside it" if regular and folder.names(figures_beside(name, out)) else ""
    note(quiet, f"{page}{size}{beside}")


def export(
    run: Run,
    table: Annotated[str, typer.Argument(metavar="triggers|cells|sentences", help="What to write.")],
    format: Annotated[str, option("`jsonl`, `csv` or `parquet`.")] = "jsonl",
    out: Annotated[
        str | None, option("A file.", "-o", "--out", default="standard output", read=given("a file to write"))
    ] = None,
    raw: Annotated[
        bool, option("In `csv`, put no apostrophe before text that a spreadsheet would compute.", "--raw")
    ] = False,
) -> None:
    """Write a run's triggers, cells or sentences for other tools."""
    from ffmem.run.export import export as write

    write(run, table, format=format, out=out, raw=raw)
