"""`ffmem`: a verb a command. Torch is loaded only by the verbs that need it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.main

import ffmem
from ffmem.cli import live
from ffmem.cli.ending import ended, kept
from ffmem.cli.numbers import real, whole, whole_or_auto
from ffmem.cli.options import (
    AsJson,
    Device,
    Dtype,
    MaxRecord,
    OtherModel,
    Quiet,
    Run,
    Seed,
    Top,
    TrustRemoteCode,
    given,
    note,
    say,
    say_json,
    some_layers,
)
from ffmem.cli.words import gigabytes, info_lines, result_lines, show_json

if TYPE_CHECKING:
    from ffmem.indexing.estimate import Estimate

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


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"ffmem {ffmem.__version__}")
        raise typer.Exit


@app.command()
def index(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="`wiki16`, a Hugging Face id, a folder, or a .gguf file.")],
    corpus: Annotated[
        list[str],
        typer.Argument(
            metavar="CORPUS...",
            help="Text, WikiText, .jsonl or .parquet files (text also .gz .xz .zst), or "
            "`hf:ID,config=C,split=S,column=NAME` for a Hugging Face dataset, or `pocket`, which comes with ffmem.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            "-o",
            "--out",
            metavar="RUN",
            help="The run to make: a folder, or a URL such as `s3://bucket/x`.",
            show_default=False,
            parser=given("a folder or a URL for the run"),
        ),
    ],
    top: Top = 50,
    unit: Annotated[str, typer.Option(help="What a sentence is: `sentence`, `line`, or `window:N` tokens.")] = "sentence",
    distinct: Annotated[
        str,
        typer.Option(
            help="`text`: a sentence offers its best prefix, and equal prefixes count once. `sentence`: its best prefix, "
            "as in the paper's code. `document`: an article, or a record, offers its best. `none`: every prefix counts."
        ),
    ] = "text",
    layers: Annotated[
        str | None, typer.Option(help="Layers from 1, such as `1-4,16`.", show_default="all", parser=some_layers)
    ] = None,
    limit_tokens: Annotated[
        int | None,
        typer.Option(help="Stop after this many tokens.", show_default="none", parser=whole("limit-tokens")),
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            help="Read this many records of the text, drawn at random, instead of all.",
            show_default="none",
            parser=whole("sample"),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sample.", parser=whole("seed", 0))] = 0,
    batch_tokens: Annotated[
        str,
        typer.Option(help="Tokens a forward, padding included, or `auto`.", parser=whole_or_auto("batch-tokens", 1 << 30)),
    ] = "auto",
    shard_tokens: Annotated[
        str,
        typer.Option(help="Tokens between two checkpoints, or `auto`.", parser=whole_or_auto("shard-tokens")),
    ] = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    device_map: Annotated[
        str | None,
        typer.Option(help="`auto` spreads the model over all GPUs, or a worker's share of them (needs accelerate)."),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit of a model on the hub.")] = None,
    bos: Annotated[str, typer.Option(help="Put the beginning-of-sentence token first: `auto`, `on` or `off`.")] = "auto",
    negative: Annotated[
        str, typer.Option(help="Keep the most negative prefixes too: `auto` (gated layers), `on` or `off`.")
    ] = "auto",
    stats: Annotated[
        str,
        typer.Option(
            help="Moments and histograms of all tokens (`full`), of a fixed sample (`sample`), or `off`; `auto` by size."
        ),
    ] = "auto",
    column: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "text",
    language: Annotated[str, typer.Option(help="The language whose sentences are split, as a code.")] = "en",
    wikitext: Annotated[
        str,
        typer.Option(
            help="Text with WikiText's marks (`@-@`, ` ,`): `plain` turns it back to plain text, `keep` leaves it, `auto` "
            "leaves it to the paper's own models."
        ),
    ] = "auto",
    max_record: MaxRecord = "10MB",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the work (by Ray), one a GPU where there are some.",
            show_default="1; with --address one a GPU",
            parser=whole("workers", 1, 100_000),
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="A device for each worker, such as `cuda:0,cuda:1`, or several for each: `cuda:0+cuda:1,cuda:2+cuda:3`.",
            show_default="none",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Of a Ray cluster whose machines share the work: `auto` or `ray://...`.", show_default="none"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in this folder first.")] = False,
    quiet: Quiet = False,
) -> None:
    """Find what triggers every memory cell, in one pass over a text.

    Such as `ffmem index gpt2 wiki.txt.xz -o runs/gpt2`; on a machine with four GPUs with `--workers 4`; on eight cores with
    `--device cpu --workers 2` and OMP_NUM_THREADS=4 set, so that workers have no more threads together than there are cores.

    Stopped or killed, the same command continues where it was, with any number of workers: the run comes out the same.
    """
    from ffmem.corpus.record import parse_size
    from ffmem.corpus.sources import open_source
    from ffmem.indexing.build import build_index
    from ffmem.model.names import refuse_swapped

    refuse_swapped(model, corpus)
    sources = [open_source(spec, column=column, max_record=parse_size(max_record)) for spec in corpus]
    note(quiet, f"loading {model}")
    announced: list[str] = []

    def announce(name: str, estimate: Estimate) -> None:
        announced.append(name)
        _announce(name, estimate)

    with kept(f"all finished shards are kept in {out}"):
        built = build_index(
            model,
            sources,
            out=out,
            top=top,
            unit=unit,
            distinct=distinct,
            layers=layers,
            limit_tokens=limit_tokens,
            sample=sample,
            seed=seed,
            batch_tokens=batch_tokens,
            shard_tokens=shard_tokens,
            bos=bos,
            negative=negative,
            stats=stats,
            column=column,
            language=language,
            wikitext=wikitext,
            max_record=max_record,
            workers=workers,
            devices=devices,
            address=address,
            overwrite=overwrite,
            quiet=quiet,
            announce=None if quiet else announce,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            device_map=device_map,
            revision=revision,
        )
    counts = built.counts
    note(
        quiet,
        f"{out}{'' if announced else ', complete already'}: {counts['triggers']:,} triggers of {counts['cells']:,} cells "
        f"from {counts['tokens']:,} tokens, "
        f"{gigabytes(built.folder.disk_use())}. Next: ffmem values {out}; ffmem show {out} L1D0",
    )


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="`gpt2`, `paper`, `llama3-8b`, `llama3-70b` or `wiki16`, a folder, or a Hugging Face id. Only its config "
            "is read.",
        ),
    ],
    tokens: Annotated[int, typer.Option(help="Of the text, such as `1e9`.", show_default=False, parser=whole("tokens"))],
    gpus: Annotated[int, typer.Option(help="GPUs in all.", parser=whole("gpus", 1, 1_000_000))] = 1,
    top: Top = 50,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="Statistics of every cell too.")] = True,
    gpu_memory: Annotated[float, typer.Option(help="Gigabytes of each GPU.", parser=real("gpu-memory", 1, 1_000_000))] = 141,
    as_json: AsJson = False,
) -> None:
    """Tell what an index takes before it is made: time, memory, disk and network, from measured rates.

    No weights are read, so this works for any model anywhere. Every number rests on what is told below it.
    """
    from ffmem.indexing.plan import plan as make

    found = make(model, tokens=tokens, gpus=gpus, top=top, stats=stats, gpu_memory=gpu_memory)
    say_json(found.as_dict(), indent=2) if as_json else say(str(found))


@app.command()
def show(
    run: Run,
    cells: Annotated[list[str], typer.Argument(metavar="CELL...", help="Such as `L3D17`: layer from 1, cell from 0.")],
    top: Annotated[
        int | None,
        typer.Option(
            help="Triggers and tokens to show, on each side.",
            show_default="10; as JSON all triggers",
            parser=whole("top", 1, 10_000),
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
    from ffmem.run.reader import open_index

    opened = open_index(run)
    views = [opened[cell] for cell in cells]
    if model is not None and not opened.has_values:
        from ffmem.run.model import model_of

        load = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        opened = open_index(run, model=model_of(opened, model, **load))
        views = [opened[cell] for cell in cells]
    if as_json:
        found = [show_json(view, top) for view in views]
        say_json(found if len(found) > 1 else found[0], indent=2)
    else:
        say("\n\n".join(cell_text(view, top or SHOWN) for view in views))
    if not opened.has_values and opened.model is None:
        note(False, f"to see what values say: ffmem values {run}")
    elif top is not None and top > (held := views[0].value.kept):
        note(False, f"{held} tokens of each value are kept; to have more: ffmem values {run} --top {top}")


@app.command()
def info(run: Run, as_json: AsJson = False) -> None:
    """Tell what a run was made from, what it holds, what was skipped and why."""
    from ffmem.run.reader import open_index

    found = open_index(run)
    disk = found.folder.disk_use()
    if as_json:
        say_json({**found.manifest.as_dict(), "disk_bytes": disk}, indent=2)
    else:
        say("\n".join(info_lines(found, disk)))


@app.command()
def values(
    run: Run,
    top: Annotated[int, typer.Option(help="Tokens to keep on each side.", parser=whole("top", 1, 10_000_000))] = 50,
    norm: Annotated[bool, typer.Option("--norm", help="Send values through the final norm first.")] = False,
    model: OtherModel = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Add what every cell's value says: its most promoted and most suppressed tokens."""
    from ffmem.indexing.values import values as add_values

    note(quiet, "loading the run's model")
    index = add_values(
        run, model, top=top, norm=norm, quiet=quiet, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    note(quiet, f"{run}: values of {len(index):,} cells. Next: ffmem show {run} L{index.layers[-1]}D0")


@app.command()
def experiments(
    run: Run,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="`removal`, `agreement`, `activity`, `composition`, `refinement`, `normaliser`.",
            show_default="all",
        ),
    ] = None,
    eval: Annotated[
        list[str] | None,
        typer.Option(help="Text to draw examples from, which the index has not seen; may be repeated.", show_default="none"),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(
            help="Prefixes to follow through the model.", show_default="4000; 200 of a control", parser=whole("examples")
        ),
    ] = None,
    cells: Annotated[
        int | None,
        typer.Option(
            help="Cells a layer whose triggers have tokens removed.",
            show_default="100; 20 of a control",
            parser=whole("cells"),
        ),
    ] = None,
    seed: Seed = 0,
    control: Annotated[
        str | None,
        typer.Option(
            help="`random`: ask a model of the same shape with fresh random weights instead, to see what training made.",
            show_default="none",
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
    from ffmem.corpus.sources import open_source
    from ffmem.run.folder import RESULTS
    from ffmem.run.reader import open_index
    from ffmem.run.results import check_request

    # What is wrong with the request is told before torch is loaded.
    check_request(names or [], control=control, seed=seed, examples=examples, cells=cells)
    opened = open_index(run)
    corpus = [open_source(name, **opened.manifest.reading) for name in eval] if eval else None

    from ffmem.experiments.run import each_experiment

    note(
        quiet,
        "loading the run's model" if control is None else "a model of the same shape with random weights",
    )
    results = each_experiment(
        opened,
        names or [],
        model=model,
        eval=corpus,
        control=control,
        examples=examples,
        cells=cells,
        seed=seed,
        quiet=quiet,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )
    for result in results:
        if as_json:
            say_json(result.as_dict())
        else:
            say("\n".join(result_lines(result)))
    note(quiet, f"kept in {opened.folder.place(RESULTS)}{f'/{control}' if control else ''}")


@app.command()
def report(
    run: Run,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="The page to write.",
            show_default="RUN/report.html",
            parser=given("a file for the page"),
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
    size = f" ({gigabytes(folder.size(name))})" if regular else ""
    beside = "; figures beside it" if regular and folder.names(figures_beside(name, out)) else ""
    note(quiet, f"{page}{size}{beside}")


app.command()(live.trace)
app.command()(live.intervene)
app.command()(live.causal)


@app.command()
def export(
    run: Run,
    table: Annotated[str, typer.Argument(metavar="triggers|cells|sentences", help="What to write.")],
    format: Annotated[str, typer.Option(help="`jsonl`, `csv` or `parquet`.")] = "jsonl",
    out: Annotated[
        str | None,
        typer.Option("-o", "--out", help="A file.", show_default="standard output", parser=given("a file to write")),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="In `csv`, put no apostrophe before text that a spreadsheet would compute.")
    ] = False,
) -> None:
    """Write a run's triggers, cells or sentences for other tools."""
    from ffmem.run.export import export as write

    write(run, table, format=format, out=out, raw=raw)


@app.command()
def train(
    corpus: Annotated[list[str], typer.Argument(metavar="CORPUS...", help="As for `ffmem index`.")],
    out: Annotated[
        str,
        typer.Option(
            "-o",
            "--out",
            metavar="DIR",
            help="The model folder to make.",
            show_default=False,
            parser=given("a folder for the model"),
        ),
    ],
    size: Annotated[
        str,
        typer.Option(
            help="`small` (d 256, 1,024 cells a layer), `medium` (384, 1,536) or `paper` (1,024, 4,096); 16 layers."
        ),
    ] = "medium",
    minutes: Annotated[
        float | None,
        typer.Option(help="The schedule ends after so many minutes.", show_default="15", parser=real("minutes")),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Or after so many steps.", show_default="none", parser=whole("steps"))
    ] = None,
    valid: Annotated[
        list[str] | None, typer.Option(help="Text for validation; may be repeated.", show_default="the corpus's end")
    ] = None,
    min_count: Annotated[int, typer.Option(help="A word seen less often is unknown.", parser=whole("min-count"))] = 3,
    seed: Annotated[
        int, typer.Option(help="Of the first weights and of the order of the text.", parser=whole("seed", 0))
    ] = 0,
    device: Device = "auto",
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Minutes between two checkpoints.", parser=real("checkpoint-minutes"))
    ] = 5,
    column: Annotated[str, typer.Option(help="The field or column that holds the text.")] = "text",
    max_record: MaxRecord = "10MB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the training in this folder first.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a language model like the paper's: words, adaptive input and softmax, ReLU memories.

    Stopped or killed, the same command continues where it was. The folder it leaves is a model for `ffmem index`.
    """
    from ffmem.corpus.record import parse_size
    from ffmem.corpus.sources import open_source
    from ffmem.training.train import train as run_training

    def opened(specs: list[str]) -> list[Any]:
        return [open_source(spec, column=column, headings=True, max_record=parse_size(max_record)) for spec in specs]

    with kept(f"the training is kept in {out}"):
        run_training(
            opened(corpus),
            out=out,
            size=size,
            minutes=minutes,
            steps=steps,
            valid=opened(valid) if valid else None,
            min_count=min_count,
            seed=seed,
            device=device,
            checkpoint_minutes=checkpoint_minutes,
            column=column,
            max_record=max_record,
            overwrite=overwrite,
            quiet=quiet,
        )
    card = json.loads((Path(out) / "training.json").read_text("utf-8"))
    found = card["perplexity"]
    note(
        quiet,
        f"{out}: {card['step']:,} steps, {card['tokens']:,} tokens, perplexity {found['windows']:.1f} in running text and "
        f"{found['sentences']:.1f} in sentences alone. Next: ffmem index {out} TEXT -o RUN",
    )


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A fairseq folder (`model.pt`, `dict.txt`), a folder of `ffmem train`, or a .gguf file."
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make.", parser=given("a folder to make"))],
    rows8: Annotated[bool, typer.Option("--rows8", help="Weights as 8-bit rows: a quarter of the size.")] = False,
    quiet: Quiet = False,
) -> None:
    """Write the paper's original model, one like it, or a .gguf file as a Hugging Face folder, which loads fast.

    The folder appears whole or not at all; what a conversion that was killed left beside it is cleared by the next.
    """
    from ffmem.model.convert import convert as write

    note(quiet, f"reading {source}")
    folder = write(source, out, rows8=rows8)
    size = gigabytes(sum(file.stat().st_size for file in folder.iterdir()))
    note(quiet, f"{folder}: {size}. Next: ffmem index {folder} TEXT -o RUN")


@app.command()
def demo(
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="RUN",
            help="Keep the run here.",
            show_default="a temporary folder",
            parser=given("a folder for the run"),
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """See it work, offline: the bundled model reads the bundled text.

    Indexes `wiki16` over nine tenths of `pocket`, shows memories worth seeing, runs the paper's experiments on small samples
    of the other tenth, asks the same of random weights, and writes the report. Takes about three minutes on two cores.
    """
    from ffmem.demonstration import demo as run_demo

    run_demo(out, quiet=quiet)


def _announce(name: str, estimate: Estimate) -> None:
    tokens = "an unknown number of" if estimate.tokens is None else f"about {estimate.tokens:,}"
    disk, work = gigabytes(estimate.run_bytes), gigabytes(estimate.work_bytes)
    size = f"the run will take up to {disk} of disk, and {work} more while it is built"
    note(False, f"{name}: {estimate.cells:,} cells; {tokens} tokens; {size}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 well, 1 with one line about an error, 2 for options that cannot be, 130 or 143
    stopped."""
    ended(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: list[str]) -> None:
    # Called as a program, typer would handle errors and signals itself.
    command = typer.main.get_command(app)
    with command.make_context("ffmem", list(arguments) or ["--help"]) as context:
        command.invoke(context)
