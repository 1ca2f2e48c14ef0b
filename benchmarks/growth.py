"""How a pass grows: time, peak memory and survivors as the corpus, the cells and the triggers are doubled four times each.

    python -m benchmarks.growth -o FILE --text wiki.train.01of12.txt.xz     all of it
    python -m benchmarks.growth --page                                                  only the plot, again
    python -m benchmarks.growth --scale 16                                              a sixteenth of the tokens, to try it

Every point is a process of its own: a GPT-2 of random weights (4 layers of 128) on one thread over text whose words are
drawn independently. Its time is in processor seconds, and as a ratio to the bare trunk on the same batches in turn. Its
memory is the peak of a whole run, text to run folder, over what was resident before. A survivor is a hit that passes its
cell's threshold: of N sentences that each offer a cell one hit in random order, about t·ln(N/t) + t do.

With `--text`, the bundled model reads real text in the order of its articles and the same sentences shuffled, in shards
so short that each is of a few articles only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared import DOCS, RESULTS, bare, measured_here, processor

GROWN = "<!-- grown -->"
LAYERS, D = 4, 128
WORDS = 5_000
SHARD, BATCH = 1 << 14, 4096
TOKENS, CELLS, TOP = 1 << 16, 512, 10
"""What stays the same while something else is doubled."""
SWEEPS = {"tokens": 1 << 15, "cells": CELLS, "top": TOP}
"""What is doubled, and where it starts."""
UNITS = {"tokens": "tokens", "cells": "cells a layer", "top": "triggers a cell"}
TIMES = 4
ARTICLES = 1 << 13
"""Tokens of a shard of real text: two or three articles."""
READ, EVERY = 1 << 17, 4
"""Tokens of real text, and of how many batches one also goes through the bare trunk."""


@dataclass
class Point:
    """A run of this size, then what it took."""

    tokens: int
    cells: int
    top: int
    sentences: int = 0
    seconds: float = 0.0
    """Of the pass, without reading the text."""
    ratio: float = 0.0
    """To the bare trunk."""
    median_ratio: float = 0.0
    """Of a batch's."""
    memory: int = 0
    survivors: float = 0.0
    """A cell."""
    expected: float = 0.0


def timed(point: Point) -> Point:
    """The pass of a point, by the clock."""
    import torch

    from ffmem.corpus.files import TextFile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "corpus.txt"
        point.sentences = _write(text, point.tokens)
        found = _timed(_model(point.cells), [TextFile(text)], SHARD, top=point.top, every=1)
    point.seconds, point.ratio, point.median_ratio, point.survivors = found
    point.expected = _expected(point.sentences, point.top)
    return point


def memory_of(point: Point) -> int:
    """The peak of a whole run over what is resident after a tiny one, which has loaded all that is loaded once."""
    import torch

    import ffmem

    torch.set_num_threads(1)
    model = _model(point.cells)
    options: dict[str, Any] = {"unit": "line", "top": point.top, "batch_tokens": BATCH, "shard_tokens": SHARD}
    with tempfile.TemporaryDirectory() as folder:
        for name, tokens in (("tiny", 500), ("text", point.tokens)):
            _write(Path(folder) / f"{name}.txt", tokens)
        with _peak_memory():
            ffmem.build_index(
                model, Path(folder) / "tiny.txt", out=Path(folder) / "1", quiet=True, stats="sample", **options
            )
        with _peak_memory() as peak:
            ffmem.build_index(
                model, Path(folder) / "text.txt", out=Path(folder) / "2", quiet=True, stats="sample", **options
            )
    return peak[0]


def ordered(texts: list[str], tokens: int, *, shuffled: bool) -> dict[str, float]:
    """The bundled model on real text, in the order of articles or not."""
    import torch

    import ffmem
    from ffmem.corpus.sentences import Segmenter, Unit
    from ffmem.corpus.sources import Texts, open_source

    torch.set_num_threads(1)
    model = ffmem.load_model("wiki16")
    segmenter = Segmenter(Unit("sentence"), "en")
    records = (record for text in texts for record in open_source(text).records(Counter()))
    sentences: list[str] = []
    read = 0
    for sentence in (piece for record in records for piece in segmenter.split(record)):
        sentences.append(sentence)
        read += len(sentence.split())
        if read >= tokens:
            break
    if shuffled:
        random.Random(0).shuffle(sentences)
    _, ratio, middle, survivors = _timed(model, [Texts(sentences)], ARTICLES, top=50, every=EVERY)
    return {
        "sentences": len(sentences),
        "ratio": round(ratio, 3),
        "median_ratio": round(middle, 3),
        "survivors": round(survivors, 1),
        "expected": round(_expected(len(sentences), 50), 1),
    }


def _timed(model: Any, sources: list[Any], shard_tokens: int, *, top: int, every: int) -> tuple[float, float, float, float]:
    """Seconds of the pass, its ratio to the bare trunk (of all and the median of a batch's), and survivors a cell."""
    import torch

    from ffmem.corpus.corpus import Corpus
    from ffmem.corpus.sentences import Unit
    from ffmem.corpus.tokens import Encoder
    from ffmem.indexing.collect import LayerCollector, read_batch

    plan = Corpus(sources, Encoder(model.tokenizer, model.context - 1), Unit("line"), "en", shard_tokens)
    collectors = {
        layer: LayerCollector(
            layer, cells, t=top, distinct="text", negative=False, every=16, device=torch.device("cpu"), fused=False
        )
        for layer, cells in enumerate(model.cells, 1)
    }
    spent, both, ratios = 0.0, [0.0, 0.0], []
    with _survivors() as passed:
        for shard in plan.stream():
            for number, batch in enumerate(shard.batches(BATCH, model.bos)):
                alone = 0.0
                if number % every == 0:
                    if not spent:
                        bare(model, batch.ids)
                    began = time.process_time()
                    bare(model, batch.ids)
                    alone = time.process_time() - began
                began = time.process_time()
                read_batch(model, batch, collectors)
                mine = time.process_time() - began
                spent += mine
                if alone:
                    both[0] += mine
                    both[1] += alone
                    ratios.append(mine / alone)
            began = time.process_time()
            for collector in collectors.values():
                collector.end_shard()
            ending = time.process_time() - began
            spent += ending
            both[0] += ending / every
    return spent, both[0] / both[1], median(ratios), passed[0] / sum(model.cells)


@contextmanager
def _survivors() -> Iterator[list[int]]:
    """Counts the hits that pass a threshold, from outside."""
    from ffmem.indexing.top import TopTriggers

    add, passed = TopTriggers.add, [0]

    def counting(self: Any, hits: Any) -> None:
        passed[0] += len(hits)
        add(self, hits)

    TopTriggers.add = counting  # type: ignore[method-assign]
    try:
        yield passed
    finally:
        TopTriggers.add = add  # type: ignore[method-assign]


@contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """Bytes by which resident memory rose at most: Linux forgets an earlier peak on request."""
    status = Path("/proc/self/status")

    def value(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before, found = value("VmRSS"), [0]
    yield found
    found[0] = value("VmHWM") - before


def _expected(sentences: int, t: int) -> float:
    return t * log(sentences / t) + t if sentences > t else float(sentences)


def _write(path: Path, tokens: int) -> int:
    """Sentences of independent words, of corpus-like lengths; how many."""
    chooser = random.Random(tokens)
    written = sentences = 0
    with path.open("w") as handle:
        while written < tokens:
            length = max(3, min(120, round(chooser.lognormvariate(3.0, 0.55))))
            handle.write(" ".join(f"w{chooser.randrange(1, WORDS)}" for _ in range(length)) + "\n")
            written += length
            sentences += 1
    return sentences


def _model(cells: int) -> Any:
    from benchmarks.index import make_model

    return make_model(LAYERS, D, cells=cells, vocabulary=WORDS)


PROMPT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Makes freed memory go back at once, so that what is resident is what is held."""


def _in_a_process(task: str, arguments: dict[str, Any], **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", "--task", json.dumps([task, arguments])],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


def sweeps(scale: int, repeat: int) -> dict[str, list[dict[str, Any]]]:
    """Every point `repeat` times: the medians."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, start in SWEEPS.items():
        found[name] = []
        for doubling in range(TIMES + 1):
            sizes = {"tokens": TOKENS, "cells": CELLS, "top": TOP} | {name: start << doubling}
            sizes["tokens"] //= scale
            points = [_in_a_process("time", sizes) for _ in range(repeat)]
            middle = {key: median(point[key] for point in points) for key in points[0]}
            middle["memory"] = _in_a_process("memory", sizes, **PROMPT)
            found[name].append(middle)
            print(name, middle, file=sys.stderr, flush=True)
    return found


def plot(found: dict[str, Any]) -> str:
    """What is doubled from left to right, what it takes from top to bottom: SVG."""
    from ffmem.experiments.charts import altair, svg

    alt = altair()
    rows = []
    for name, points in found["sweeps"].items():
        for point in points:
            takes = {
                "seconds": "pass",
                "bare": "bare trunk",
                "memory": "pass",
                "survivors": "measured",
                "expected": "t·ln(N/t) + t",
            }
            values = point | {"bare": point["seconds"] / point["ratio"], "memory": point["memory"] / 1e6}
            rows += [
                {
                    "of": name,
                    "size": point[name],
                    "what": {"bare": "seconds", "expected": "survivors"}.get(key, key),
                    "line": line,
                    "value": values[key],
                }
                for key, line in takes.items()
            ]
    titles = {"seconds": "processor seconds", "memory": "peak memory, MB", "survivors": "survivors a cell"}
    charts = [
        alt.hconcat(
            *(_chart(alt, [row for row in rows if (row["of"], row["what"]) == (name, what)], title) for name in SWEEPS)
        )
        for what, title in titles.items()
    ]
    return svg(alt.vconcat(*charts).resolve_scale(color="independent", strokeDash="independent"))


def _chart(alt: Any, rows: list[dict[str, Any]], title: str) -> Any:
    name, sizes = rows[0]["of"], sorted({row["size"] for row in rows})
    flat = rows[0]["what"] == "memory"
    legend = alt.Legend(orient="top") if name == "tokens" else None
    ticks = alt.Axis(format=",", values=sizes[::2], grid=False)
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_line(point=True)
        .encode(
            x=alt.X("size:Q", title=UNITS[name], scale=alt.Scale(type="log", base=2, nice=False), axis=ticks),
            y=alt.Y(
                "value:Q",
                title=title,
                scale=alt.Scale(type="linear", zero=True) if flat else alt.Scale(type="log"),
                axis=alt.Axis(tickCount=4),
            ),
            color=alt.Color("line:N", title=None, legend=legend),
            strokeDash=alt.StrokeDash("line:N", legend=None),
        )
        .properties(width=200, height=130)
    )


def grown(found: dict[str, Any]) -> str:
    """What docs/scale.md shows of these numbers, beside the plot."""
    lines = [
        "![time, memory and survivors as tokens, cells and triggers are doubled](growth.svg)",
        "",
        "| doubled | tokens | cells | triggers a cell | × the bare trunk | peak memory | survivors a cell | t·ln(N/t) + t |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, points in found["sweeps"].items():
        lines += [
            f"| {name} | {point['tokens']:,.0f} | {LAYERS * point['cells']:,.0f} | {point['top']:.0f} "
            f"| {point['ratio']:.2f} | {point['memory'] / 1e6:,.0f} MB "
            f"| {point['survivors']:,.0f} | {point['expected']:,.0f} |"
            for point in points
        ]
    lines += ["", *conclusions(found), "", f"`python -m benchmarks.growth`, {found['machine']}, {found['date']}."]
    return "\n".join(lines)


def conclusions(found: dict[str, Any]) -> list[str]:
    """What the numbers say, in sentences made from them."""
    tokens = found["sweeps"]["tokens"]
    first, last = tokens[0], tokens[-1]
    times = last["tokens"] / first["tokens"]
    every = [point for points in found["sweeps"].values() for point in points]
    shares = sorted(point["survivors"] / point["expected"] for point in every)
    same = [point["ratio"] for point in every if (point["tokens"], point["cells"], point["top"]) == (TOKENS, CELLS, TOP)]
    noise = f"; the point that all three share was measured at {min(same):.2f} to {max(same):.2f}" if len(same) > 1 else ""
    lines = [
        f"- Time is linear in tokens: {times:.0f} times the text takes {last['seconds'] / first['seconds']:.1f} times the "
        f"seconds, at {first['ratio']:.2f} times the bare trunk at first and {last['ratio']:.2f} at last{noise}.",
        f"- Memory hardly grows with tokens, {first['memory'] / 1e6:,.0f} MB at first and {last['memory'] / 1e6:,.0f} MB "
        f"for {times:.0f} times the text; it is linear in cells, and what more triggers add is small beside a batch.",
        f"- Survivors are {shares[0]:.2f} to {shares[-1]:.2f} of t·ln(N/t) + t, whatever is doubled.",
    ]
    if real := found.get("order"):
        article, mixed = real["articles"], real["shuffled"]
        more = article["survivors"] / mixed["survivors"] - 1
        lines.append(
            f"- Real text, {article['sentences']:,} sentences of WikiText through wiki16 in shards of {ARTICLES:,} tokens, "
            f"two or three articles each: in the order of articles {article['survivors']:,.0f} hits a cell survive, "
            f"shuffled {mixed['survivors']:,.0f} ({more:+.1%}), and the pass takes {article['ratio']:.2f} and "
            f"{mixed['ratio']:.2f} times the bare trunk, one measurement each: no difference beyond the noise. A shard "
            "on a GPU has 8 million tokens, thousands of articles, so shards are not shuffled."
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="write the numbers here")
    parser.add_argument("--text", nargs="+", default=[], help="real text for the question of its order")
    parser.add_argument("--only-text", action="store_true", help="leave out what is doubled")
    parser.add_argument("--scale", type=int, default=1, help="divide all tokens by this")
    parser.add_argument("--repeat", type=int, default=1, help="times that every point is measured")
    parser.add_argument("--page", action="store_true", help="only draw docs/growth.svg")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.task:
        task, arguments = chosen.task
        if task == "order":
            print(json.dumps(ordered(**arguments)))
        else:
            point = Point(**arguments)
            print(json.dumps(asdict(timed(point)) if task == "time" else memory_of(point)))
        return
    if not chosen.page:
        found: dict[str, Any] = json.loads(chosen.out.read_text("utf-8")) if chosen.out and chosen.out.exists() else {}
        if not chosen.only_text:
            found["sweeps"] = sweeps(chosen.scale, chosen.repeat)
        if chosen.text:
            orders = {"articles": False, "shuffled": True}
            found["order"] = {
                name: _in_a_process("order", {"texts": chosen.text, "tokens": READ // chosen.scale, "shuffled": mixed})
                for name, mixed in orders.items()
            }
        found |= measured_here() | {"machine": f"one core of {processor()}"}
        print(json.dumps(found, indent=2))
        if chosen.out:
            chosen.out.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if chosen.page:
        (DOCS / "growth.svg").write_text(plot(json.loads((RESULTS / "growth.json").read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main()
