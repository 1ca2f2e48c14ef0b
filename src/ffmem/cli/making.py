"""The commands that make something: a run, its values, a trained or converted model, the demonstration; and a plan of a run.

The parameters of a command are the keywords of the Python function of the same name, with the same defaults, so that all of
them are passed on together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffmem.cli.ending import kept
from ffmem.cli.numbers import real, whole, whole_or_auto
from ffmem.cli.options import (
    AsJson,
    Column,
    Corpus,
    Device,
    Dtype,
    MaxRecord,
    OtherModel,
    Quiet,
    Run,
    Top,
    TrustRemoteCode,
    given,
    option,
    some_layers,
)
from ffmem.cli.printing import note, say, say_json
from ffmem.corpus.record import parse_size
from ffmem.text import shown_size

if TYPE_CHECKING:
    from ffmem.indexing.estimate import Estimate


def index(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="`wiki16`, a Hugging Face id, a folder, or a .gguf file.")],
    corpus: Corpus,
    out: Annotated[
        str,
        option(
            "The run to make: a folder, or a URL such as `s3://bucket/x`.",
            "-o",
            "--out",
            metavar="RUN",
            default=False,
            read=given("a folder or a URL for the run"),
        ),
    ],
    top: Top = 50,
    unit: Annotated[str, option("What a sentence is: `sentence`, `line`, or `window:N` tokens.")] = "sentence",
    distinct: Annotated[
        str,
        option(
            "`text`: a sentence offers its best prefix, and equal prefixes count once. `sentence`: its best prefix, "
            "as in the paper's code. `document`: an article, or a record, offers its best. `none`: every prefix counts."
        ),
    ] = "text",
    layers: Annotated[str | None, option("Layers from 1, such as `1-4,16`.", default="all", read=some_layers)] = None,
    limit_tokens: Annotated[
        int | None, option("Stop after this many tokens.", default="none", read=whole("limit-tokens"))
    ] = None,
    sample: Annotated[
        int | None,
        option("Read this many records of the text, drawn at random, instead of all.", default="none", read=whole("sample")),
    ] = None,
    seed: Annotated[int, option("Of the sample.", read=whole("seed", 0))] = 0,
    batch_tokens: Annotated[
        str, option("Tokens a forward, padding included, or `auto`.", read=whole_or_auto("batch-tokens", 1 << 30))
    ] = "auto",
    shard_tokens: Annotated[
        str, option("Tokens between two checkpoints, or `auto`.", read=whole_or_auto("shard-tokens"))
    ] = "auto",
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    device_map: Annotated[
        str | None, option("`auto` spreads the model over all GPUs, or a worker's share of them (needs accelerate).")
    ] = None,
    revision: Annotated[str | None, option("A branch, tag or commit of a model on the hub.")] = None,
    bos: Annotated[str, option("Put the beginning-of-sentence token first: `auto`, `on` or `off`.")] = "auto",
    negative: Annotated[str, option("Keep the most negative prefixes too: `auto` (gated layers), `on` or `off`.")] = "auto",
    stats: Annotated[
        str,
        option("Moments and histograms of all tokens (`full`), of a fixed sample (`sample`), or `off`; `auto` by size."),
    ] = "auto",
    column: Column = "text",
    language: Annotated[str, option("The language whose sentences are split, as a code.")] = "en",
    wikitext: Annotated[
        str,
        option(
            "Text with WikiText's marks (`@-@`, ` ,`): `plain` turns it back to plain text, `keep` leaves it, `auto` "
            "leaves it to the paper's own models."
        ),
    ] = "auto",
    max_record: MaxRecord = "10MB",
    workers: Annotated[
        int | None,
        option(
            "Processes that share the work (by Ray), one a GPU where there are some.",
            default="1; with --address one a GPU",
            read=whole("workers", 1, 100_000),
        ),
    ] = None,
    devices: Annotated[
        str | None,
        option(
            "A device for each worker, such as `cuda:0,cuda:1`, or several for each: `cuda:0+cuda:1,cuda:2+cuda:3`.",
            default="none",
        ),
    ] = None,
    address: Annotated[
        str | None, option("Of a Ray cluster whose machines share the work: `auto` or `ray://...`.", default="none")
    ] = None,
    overwrite: Annotated[bool, option("Delete the run in this folder first.", "--overwrite")] = False,
    quiet: Quiet = False,
) -> None:
    """Find what triggers every memory cell, in one pass over a text.

    Such as `ffmem index gpt2 wiki.txt.xz -o runs/gpt2`; on a machine with four GPUs with `--workers 4`; on eight cores with
    `--device cpu --workers 2` and OMP_NUM_THREADS=4 set, so that workers have no more threads together than there are cores.

    Stopped or killed, the same command continues where it was, with any number of workers: the run comes out the same.
    """
    options = dict(locals())
    from ffmem.indexing.build import build_index
    from ffmem.model.names import refuse_swapped

    refuse_swapped(model, corpus)
    options["corpus"] = _opened(corpus, column, max_record)
    note(quiet, f"loading {model}")
    announced: list[str] = []

    def announce(name: str, estimate: Estimate) -> None:
        announced.append(name)
        tokens = "an unknown number of" if estimate.tokens is None else f"about {estimate.tokens:,}"
        disk, work = shown_size(estimate.run_bytes), shown_size(estimate.work_bytes)
        size = f"the run will take up to {disk} of disk, and {work} more while it is built"
        note(False, f"{name}: {estimate.cells:,} cells; {tokens} tokens; {size}")

    with kept(f"all finished shards are kept in {out}"):
        built = build_index(**options, announce=None if quiet else announce)
    counts = built.counts
    note(
        quiet,
        f"{out}{'' if announced else ', complete already'}: {counts.triggers:,} triggers of {counts.cells:,} cells "
        f"from {counts.tokens:,} tokens, "
        f"{shown_size(built.folder.disk_use())}. Next: ffmem values {out}; ffmem show {out} L1D0",
    )


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="`gpt2`, `paper`, `llama3-8b`, `llama3-70b` or `wiki16`, a folder, or a Hugging Face id. Only its config "
            "is read.",
        ),
    ],
    tokens: Annotated[int, option("Of the text, such as `1e9`.", default=False, read=whole("tokens"))],
    gpus: Annotated[int, option("GPUs in all.", read=whole("gpus", 1, 1_000_000))] = 1,
    top: Top = 50,
    stats: Annotated[bool, option("Statistics of every cell too.", "--stats/--no-stats")] = True,
    gpu_memory: Annotated[float, option("Gigabytes of each GPU.", read=real("gpu-memory", 1, 1_000_000))] = 141,
    as_json: AsJson = False,
) -> None:
    """Tell what an index takes before it is made: time, memory and disk, from measured rates.

    No weights are read, so this works for any model anywhere. Every number rests on what is told below it.
    """
    options = dict(locals())
    del options["as_json"]
    from ffmem.indexing.plan import plan as make

    found = make(**options)
    say_json(found.as_dict(), indent=2) if as_json else say(str(found))


def values(
    run: Run,
    top: Annotated[int, option("Tokens to keep on each side.", read=whole("top", 1, 10_000_000))] = 50,
    norm: Annotated[bool, option("Send values through the final norm first.", "--norm")] = False,
    model: OtherModel = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Add what every cell's value says: its most promoted and most suppressed tokens."""
    options = dict(locals())
    from ffmem.indexing.values import values as add_values

    note(quiet, "loading the run's model")
    index = add_values(**options)
    note(quiet, f"{run}: values of {len(index):,} cells. Next: ffmem show {run} L{index.layers[-1]}D0")


def train(
    corpus: Corpus,
    out: Annotated[
        str,
        option(
            "The model folder to make.", "-o", "--out", metavar="DIR", default=False, read=given("a folder for the model")
        ),
    ],
    size: Annotated[
        str, option("`small` (d 256, 1,024 cells a layer), `medium` (384, 1,536) or `paper` (1,024, 4,096); 16 layers.")
    ] = "medium",
    minutes: Annotated[
        float | None, option("The schedule ends after so many minutes.", default="15", read=real("minutes"))
    ] = None,
    steps: Annotated[int | None, option("Or after so many steps.", default="none", read=whole("steps"))] = None,
    valid: Annotated[list[str] | None, option("Text for validation; may be repeated.", default="the corpus's end")] = None,
    min_count: Annotated[int, option("A word seen less often is unknown.", read=whole("min-count"))] = 3,
    seed: Annotated[int, option("Of the first weights and of the order of the text.", read=whole("seed", 0))] = 0,
    device: Device = "auto",
    checkpoint_minutes: Annotated[float, option("Minutes between two checkpoints.", read=real("checkpoint-minutes"))] = 5,
    column: Column = "text",
    max_record: MaxRecord = "10MB",
    overwrite: Annotated[bool, option("Delete the training in this folder first.", "--overwrite")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a language model like the paper's: words, adaptive input and softmax, ReLU memories.

    Stopped or killed, the same command continues where it was. The folder it leaves is a model for `ffmem index`.
    """
    options = dict(locals())
    from ffmem.training.train import train as run_training

    options["corpus"] = _opened(corpus, column, max_record, headings=True)
    options["valid"] = _opened(valid, column, max_record, headings=True) if valid else None
    with kept(f"the training is kept in {out}"):
        run_training(**options)
    card = json.loads((Path(out) / "training.json").read_text("utf-8"))
    found = card["perplexity"]
    note(
        quiet,
        f"{out}: {card['step']:,} steps, {card['tokens']:,} tokens, perplexity {found['windows']:.1f} in running text and "
        f"{found['sentences']:.1f} in sentences alone. Next: ffmem index {out} TEXT -o RUN",
    )


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A fairseq folder (`model.pt`, `dict.txt`), a folder of `ffmem train`, or a .gguf file."
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make.", parser=given("a folder to make"))],
    rows8: Annotated[bool, option("Weights as 8-bit rows: a quarter of the size.", "--rows8")] = False,
    quiet: Quiet = False,
) -> None:
    """Write the paper's original model, one like it, or a .gguf file as a Hugging Face folder, which loads fast.

    The folder appears whole or not at all; what a conversion that was killed left beside it is cleared by the next.
    """
    from ffmem.model.convert import convert as write

    note(quiet, f"reading {source}")
    folder = write(source, out, rows8=rows8)
    size = shown_size(sum(file.stat().st_size for file in folder.iterdir()))
    note(quiet, f"{folder}: {size}. Next: ffmem index {folder} TEXT -o RUN")


def demo(
    out: Annotated[
        str | None,
        option(
            "Keep the run here.",
            "-o",
            "--out",
            metavar="RUN",
            default="a temporary folder",
            read=given("a folder for the run"),
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


def _opened(names: list[str], column: str, max_record: str, *, headings: bool = False) -> list[Any]:
    """The sources of a corpus, from names as they were typed."""
    from ffmem.corpus.sources import open_source

    size = parse_size(max_record)
    return [open_source(name, column=column, headings=headings, max_record=size) for name in names]
