"""The bundled model over a whole corpus: what the index takes, and some of its cells to be looked at.

    python -m benchmarks.whole wiki.train.*.txt.xz --run runs/whole -o docs/whole.json

The result goes into docs/wiki16.md with `python -m benchmarks.card`. Cells are printed with their triggers for whoever
describes them; the text of the corpus is kept nowhere else.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ffmem
from benchmarks.events import events
from ffmem.corpus.readers import cores
from ffmem.demonstration import agreement, worth_seeing
from ffmem.experiments import run_experiments
from ffmem.run.reader import Index

SHOWN = 12
"""Cells to look at, one a layer at most."""


def measure(corpus: list[Path], run: Path) -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    model = ffmem.load_model("wiki16", dtype="bfloat16" if gpu else "auto")
    weights = torch.cuda.memory_allocated() if gpu else 0
    began = time.perf_counter()
    index = ffmem.build_index(model, corpus, out=run, top=50)
    whole = time.perf_counter() - began
    result = {
        "tokens": index.counts["tokens"],
        "sentences": index.counts["sentences"],
        "cells": index.counts["cells"],
        "triggers": index.counts["triggers"],
        "sentences_kept": index.counts["sentences_kept"],
        "measured_tokens": index.counts["measured_tokens"],
        "shards": index.counts["shards"],
        "padding_share": index.counts["padding_share"],
        "seconds": round(whole, 1),
        "reading_seconds": events(index, "finished")[-1]["seconds"],
        "writing_seconds": events(index, "written")[-1]["seconds"],
        "tokens_per_second": round(index.counts["tokens"] / whole),
        "run_folder_bytes": index.folder.disk_use(),
        "gpu_memory_beyond_the_model": torch.cuda.max_memory_allocated() - weights if gpu else None,
        "host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "dtype": model.dtype_name,
        "machine": f"{torch.cuda.get_device_name() if gpu else 'CPU'}, {cores()} cores, torch {torch.__version__}",
        "date": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(result, indent=2), flush=True)
    index = ffmem.values(index, model, top=10)
    (found,) = run_experiments(index, ["agreement"], model=model)
    shuffled = [row["shuffled"] for row in found.facts["baselines"]["by_layer"]]
    result["agreement"] = [
        {"layer": row["layer"], "share": row["share"], "shuffled": other, "rank_median": row["rank_median"]}
        for row, other in zip(found.rows, shuffled, strict=True)
    ]
    show(index)
    return result


def show(index: Index) -> None:
    for view in worth_seeing(index, SHOWN):
        print(f"\n{view.name}, agrees with {agreement(view):.0%}, fires on {view.stats.active:.3%} of tokens")
        print("  promotes", ", ".join(said.token.strip() for said in view.value.top(8)))
        for trigger in view.triggers[:8]:
            print(f"  {trigger.coefficient:6.2f} … {trigger.prefix[-70:]} | {trigger.next}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="+")
    parser.add_argument("--run", type=Path, required=True, help="the run folder to make")
    parser.add_argument("-o", "--out", type=Path, required=True)
    chosen = parser.parse_args()
    result = measure(chosen.corpus, chosen.run)
    chosen.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
