"""How far `ffmem plan` can be trusted: a plan beside what a real run took, and the rates that plans are made from.

    python -m benchmarks.plan                         a run of wiki16 over pocket here, rates measured on the spot
    python -m benchmarks.plan RUN --tflops 400 --ratio 1.06 [--memory BYTES]     any finished run
    python -m benchmarks.plan --rates docs/gpu.json   take over what benchmarks/gpu.py measured, into
                                                      src/ffmem/indexing/rates.json; a whole run is compared too
    python -m benchmarks.plan --host                  what one core does with text and with triggers, into the same file
    python -m benchmarks.plan --page                  write what docs/scale.md shows of all this

A run made here, and the rate of the machine before it, are timed in processor seconds of one thread: other work on the
machine would make anything of a clock on the wall. A plan's padding and sentence length are the run's own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.events import events
from benchmarks.table import put_between_markers
from ffmem.indexing.plan import plan
from ffmem.indexing.rates import Rate

DOCS = Path(__file__).parents[1] / "docs"
MEASURED = DOCS / "plan.json"
RATES = Path(__file__).parents[1] / "src" / "ffmem" / "index" / "rates.json"
PLANNED, CHECKED = "<!-- planned -->", "<!-- checked -->"
EXAMPLES = (("llama3-70b", 1e9, 8), ("llama3-8b", 1e9, 8), ("paper", 1e9, 8))
"""Models, tokens and GPUs of the page's table."""
TABLES = ("triggers.arrow", "cells.arrow", "sentences.arrow")


def compare(
    run: Path,
    *,
    tflops: float,
    ratio: float,
    memory: int | None,
    baseline: int = 0,
    work: int | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """What the plan says of a finished run and what the run says of itself.

    `memory` is its peak, `baseline` what the process had without model and run, `work` the largest size of its work
    folder, `seconds` the time of it all; without them, only what the run itself knows is compared.
    """
    from ffmem.run.reader import open_index

    index = open_index(run)
    manifest, counts = index.manifest, index.counts
    settings, model = manifest.settings, manifest.model
    device = manifest.environment["device_name"]
    said = plan(
        model.name,
        tokens=counts["tokens"],
        top=settings.top,
        stats=settings.stats != "off",
        length=counts["tokens"] / counts["sentences"],
        padding=counts["padding_share"],
        rate=Rate("its own", model.d, model.layers, tflops, ratio, ratio, device, ""),
        device=model.device,
        dtype=model.dtype,
    )
    rows: dict[str, tuple[float, float]] = {}
    if seconds is None:
        finished = events(index, "finished")
        if (read := sum(line["tokens"] for line in finished)) != counts["tokens"]:
            raise SystemExit(f"{run} was killed on its way: {read:,} of {counts['tokens']:,} tokens have times")
        rows["time to read, s"] = (said.time.reading, sum(line["seconds"] for line in finished))
    else:
        rows["time to read and to finish, s"] = (said.time.reading + said.time.finishing, seconds)
    if memory is not None:
        # On a CPU the state that is being written is in the same memory.
        held = said.memory.whole + (said.network.checkpoint if model.device == "cpu" else 0)
        rows["memory, MB"] = ((baseline + held) / 1e6, memory / 1e6)
    rows["disk, the run at most, MB"] = (
        said.disk.run_bytes / 1e6,
        sum((run / name).stat().st_size for name in TABLES) / 1e6,
    )
    if work is not None:
        rows["disk, while it is built, MB"] = (said.disk.work_bytes / 1e6, work / 1e6)
    return {
        "model": model.name,
        "tokens": counts["tokens"],
        "cells": counts["cells"],
        "tflops": round(tflops, 4),
        "ratio": round(ratio, 3),
        "rows": {name: [round(one, 1) for one in pair] for name, pair in rows.items()},
    }


def here(model: str, corpus: str) -> dict[str, Any]:
    """Make a run in a process of its own and compare."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plan", "--child", str(run), "--model", model, "--corpus", corpus],
            stdout=subprocess.PIPE,
            text=True,
        )
        work = 0
        while child.poll() is None:
            work = max(work, _size_of(run / "work"))
            time.sleep(0.05)
        assert child.stdout is not None
        facts = json.loads(child.stdout.read())
        return {
            **compare(run, work=work, **facts),
            "machine": f"one core of {_machine()}",
            "date": datetime.now(UTC).date().isoformat(),
        }


def _child(run: Path, model: str, corpus: str) -> dict[str, Any]:
    """Measure this machine's rate, then make the run."""
    import torch

    import ffmem
    from ffmem.corpus.sources import open_source
    from ffmem.indexing.build import build_index

    torch.set_num_threads(1)
    loaded = ffmem.load_model(model)
    baseline = _resident() - sum(one.numel() * one.element_size() for one in loaded.model.parameters())
    tflops, ratio = _rate(loaded, corpus, 2)
    began = time.process_time()
    build_index(loaded, open_source(corpus), out=run, quiet=True)
    seconds = time.process_time() - began
    return {"tflops": tflops, "ratio": ratio, "memory": _peak(), "baseline": baseline, "seconds": seconds}


def _rate(model: Any, corpus: str, every: int) -> tuple[float, float]:
    """TFLOP/s of the bare trunk and the time of a pass over it, on one batch in so many of the corpus."""
    import torch

    from benchmarks.index import bare, to_the_last_coefficients
    from ffmem.corpus.corpus import Corpus
    from ffmem.corpus.sentences import Unit
    from ffmem.corpus.sources import open_source
    from ffmem.corpus.tokens import Encoder
    from ffmem.indexing.collect import LayerCollector, read_batch

    text = Corpus([open_source(corpus)], Encoder(model.tokenizer, model.context - 1), Unit("sentence"), "en", 1 << 18)
    collectors = {
        layer: LayerCollector(
            layer, cells, t=50, distinct="text", negative=model.family.gated, every=16, device=torch.device("cpu")
        )
        for layer, cells in enumerate(model.cells, 1)
    }
    seconds: dict[str, float] = {}
    positions = 0
    for number, batch in enumerate(next(text.stream()).batches(4096, model.bos)):
        if number % every:
            continue
        if not positions:
            bare(model, batch)
        _clock(seconds, "bare", lambda batch=batch: bare(model, batch))
        _clock(seconds, "shorter", lambda batch=batch: to_the_last_coefficients(model, batch))
        _clock(seconds, "pass", lambda batch=batch: read_batch(model, batch, collectors))
        positions += batch.ids.size
    _clock(seconds, "pass", lambda: [collector.end_shard() for collector in collectors.values()])
    weights = sum(one.numel() for block in model.blocks for one in block.parameters())
    return 2 * weights * positions / seconds["bare"] / 1e12, seconds["pass"] / seconds["shorter"]


def _clock(seconds: dict[str, float], name: str, work: Callable[[], object]) -> None:
    began = time.process_time()
    work()
    seconds[name] = seconds.get(name, 0.0) + time.process_time() - began


def host() -> dict[str, Any]:
    """What one core reads of WikiText-like text, and how fast triggers of two workers become one table."""
    import torch

    import ffmem
    from ffmem.corpus.corpus import Corpus
    from ffmem.corpus.sentences import Unit
    from ffmem.corpus.sources import open_source
    from ffmem.corpus.tokens import Encoder
    from ffmem.indexing.collect import LayerCollector
    from ffmem.indexing.tables import TRIGGER_SCHEMA, referenced_sentences, trigger_batches, write_table

    torch.set_num_threads(1)
    tokenizer = ffmem.load_model("wiki16").tokenizer
    spent = []
    for _ in range(3):
        text = Corpus([open_source("pocket")], Encoder(tokenizer, 511), Unit("sentence"), "en", 1 << 18)
        began = time.process_time()
        tokens = sum(shard.tokens for shard in text.stream())
        spent.append((time.process_time() - began) / tokens)
    cells, t, layers = 8192, 50, 4
    parts = [[LayerCollector(layer, cells, t=t, distinct="text", negative=False, every=0, device=torch.device("cpu"))
              for layer in range(layers)] for _ in range(2)]  # fmt: skip
    for number, part in enumerate(parts):
        for collector in part:
            torch.manual_seed(2 * collector.layer + number)
            top = collector.top["+"]
            top.coefficient.copy_(torch.rand(cells, t).sort(1, descending=True).values)
            top.place.copy_(torch.randint(1 << 40, (cells, t)))
            top.key.copy_(torch.randint(1 << 62, (cells, t, 2)))
    began = time.process_time()
    for one, other in zip(*parts, strict=True):
        one.merge(other)
    merging = time.process_time() - began
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "triggers", TRIGGER_SCHEMA, trigger_batches(parts[0], referenced_sentences(parts[0])))
    writing = time.process_time() - began
    triggers = cells * t * layers
    print(f"merging {triggers / merging:,.0f} triggers/s, writing {triggers / writing:,.0f}", file=sys.stderr)
    return {
        "text_tokens_a_second": _figures(1 / min(spent)),
        "merged_triggers_a_second": _figures(triggers / max(merging, writing)),
        "machine": f"one core of {_machine()}",
        "date": datetime.now(UTC).date().isoformat(),
        "measured": True,
    }


def gpu_rates(measured: dict[str, Any]) -> dict[str, Any]:
    """Rates from what benchmarks/gpu.py wrote: both passes over the trunk that ends where they do.

    A pass that is faster than its trunk, for making an activation better, says nothing of other models.
    """
    found = {}
    for shape, result in measured.items():
        if "ways" not in result or shape == "gpt2-as-it-is":
            continue
        shorter, triggers, statistics = (
            result["ways"][name]["whole"]
            for name in ("bare trunk to the last coefficients", "ffmem, triggers", "ffmem, triggers and statistics")
        )
        found[shape] = {
            "d": result["d"],
            "layers": result["layers"],
            "tflops": result["tflops"],
            "ratio_with_index": round(triggers / shorter, 4),
            "ratio_with_statistics": round(statistics / shorter, 4),
            "machine": result["machine"],
            "date": result["date"],
            "measured": True,
        }
    return found


def end_to_end(measured: dict[str, Any]) -> dict[str, Any]:
    """The plan beside the whole run that benchmarks/gpu.py made of the paper's shape, with the rate that it measured."""
    run, rates = measured["end to end"], gpu_rates(measured)
    rate = Rate("paper", **rates["paper"])
    said = plan("paper", tokens=run["tokens"], rate=rate)
    rows = {
        "time to read and to finish, s": (said.time.reading + said.time.finishing, run["seconds"]),
        "GPU memory, MB": (said.memory.whole / 1e6, run["peak_memory"] / 1e6),
        "disk, the run at most, MB": (said.disk.run_bytes / 1e6, run["run_folder_bytes"] / 1e6),
    }
    return {
        "model": "the paper's shape",
        "tokens": run["tokens"],
        "cells": sum(said.shape.cells),
        "tflops": rate.tflops,
        "ratio": rate.ratio_with_statistics,
        "rows": {name: [round(one, 1) for one in pair] for name, pair in rows.items()},
        "machine": run["machine"],
        "date": run["date"],
    }


def planned() -> str:
    """The page's plans side by side, and what they rest on: Markdown, made by the command's own code."""
    plans = [plan(model, tokens=tokens, gpus=gpus) for model, tokens, gpus in EXAMPLES]
    names = list(dict.fromkeys(name for one in plans for name, _ in one.rows()))
    cells = [dict(one.rows()) for one in plans]
    commands = " | ".join(f"`{one.shape.name} --tokens {one.tokens:.0e} --gpus {one.gpus}`" for one in plans)
    assumed = list(dict.fromkeys(text for one in plans for text in one.assumptions))
    return "\n".join(
        [
            f"| `ffmem plan` | {commands} |".replace("e+09", "e9"),
            "|---|" + "---|" * len(plans),
            *(f"| {name} | " + " | ".join(row.get(name, "") for row in cells) + " |" for name in names),
            "",
            "Assumed:",
            "",
            *(f"- {text}" for text in assumed),
        ]
    )


def checked() -> str:
    """Plans beside runs: Markdown, from docs/plan.json."""
    found: dict[str, Any] = json.loads(MEASURED.read_text("utf-8"))
    lines = []
    for one in found.values():
        lines += [
            f"{one['model']}, {one['cells']:,} cells, {one['tokens']:,} tokens ({one['machine']}, {one['date']}); the bare "
            f"trunk ran at {1000 * one['tflops']:,.0f} GFLOP/s, a pass took {one['ratio']} times as long:",
            "",
            "| | planned | measured |",
            "|---|---|---|",
            *(f"| {name} | {expected:,} | {measured:,} |" for name, (expected, measured) in one["rows"].items()),
            "",
        ]
    return "\n".join(lines).rstrip()


def _size_of(folder: Path) -> int:
    size = 0
    for path in list(folder.glob("*")) if folder.exists() else []:
        try:
            size += path.stat().st_size
        except OSError:
            continue  # written and renamed meanwhile
    return size


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _machine() -> str:
    from benchmarks.index import processor

    return processor()


def _figures(value: float) -> int:
    return int(float(f"{value:.2g}"))


def _add(path: Path, name: str, result: dict[str, Any]) -> None:
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(known | {name: result}, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, help="a finished run")
    parser.add_argument("--tflops", type=float, help="of the bare trunk on the machine that made it")
    parser.add_argument("--ratio", type=float, help="a pass over the bare trunk")
    parser.add_argument("--memory", type=int, help="its peak, in bytes")
    parser.add_argument("--model", default="wiki16")
    parser.add_argument("--corpus", default="pocket")
    parser.add_argument("--rates", type=Path, help="what benchmarks/gpu.py wrote")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--name", default="cpu", help="of the result in the JSON file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--out", type=Path, help="add the comparison to this JSON file")
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(_child(chosen.child, chosen.model, chosen.corpus)))
        return
    if chosen.page:
        page = DOCS / "scale.md"
        put_between_markers(page, planned(), PLANNED)
        put_between_markers(page, checked(), CHECKED)
        return
    if chosen.rates or chosen.host:
        rates = json.loads(RATES.read_text("utf-8"))
        if chosen.rates:
            measured = json.loads(chosen.rates.read_text("utf-8"))
            rates["gpus"] |= gpu_rates(measured)
            if "end to end" in measured:
                _add(MEASURED, "gpu", end_to_end(measured))
        if chosen.host:
            rates["host"] = host()
        RATES.write_text(json.dumps(rates, indent=2) + "\n", "utf-8")
        return
    if chosen.run:
        if chosen.tflops is None or chosen.ratio is None:
            parser.error("a run needs the rate of its machine: --tflops and --ratio")
        result = compare(chosen.run, tflops=chosen.tflops, ratio=chosen.ratio, memory=chosen.memory)
    else:
        result = here(chosen.model, chosen.corpus)
    print(json.dumps(result, indent=2))
    if chosen.out:
        _add(chosen.out, chosen.name, result)


if __name__ == "__main__":
    main()
