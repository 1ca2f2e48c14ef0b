"""The rates that `ffmem plan` reads, src/ffmem/indexing/rates.json, from measurements.

    python -m benchmarks.plan --gpu      speeds and ratios from benchmarks/results/gpu.json, which `benchmarks.gpu` wrote
    python -m benchmarks.plan --host     what one core does with text and with triggers, measured here

`python -m benchmarks.pages` then writes plans, and the plan of a real run beside what it took, into docs/scale.md. Times are
processor seconds of one thread: other work on the machine would make anything of a clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import ffmem
from benchmarks.shared import RESULTS, measured_here
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_source
from ffmem.corpus.tokens import Encoder
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.tables import TRIGGER_SCHEMA, referenced_sentences, trigger_batches
from ffmem.run.folder import write_table

RATES = Path(__file__).parents[1] / "src" / "ffmem" / "indexing" / "rates.json"
ROUNDS = 3
LAYERS, CELLS, T = 4, 8192, 50
"""Of the two states that are merged and written."""


def gpu_rates(measured: dict[str, Any]) -> dict[str, Any]:
    """Speed of the bare trunk and times of both passes over the trunk that ends where they do, by shape.

    A pass that is faster than its trunk, for making an activation better, says nothing of other models.
    """
    found = {}
    for shape, result in measured.items():
        if "ways" not in result or shape == "gpt2-as-it-is":
            continue
        times = {name: way["whole"] for name, way in result["ways"].items() if "whole" in way}
        shorter = times["bare trunk to the last coefficients"]
        found[shape] = {
            "d": result["d"],
            "tflops": result["tflops"],
            "ratio_with_index": round(times["ffmem, triggers"] / shorter, 4),
            "ratio_with_statistics": round(times["ffmem, triggers and statistics"] / shorter, 4),
            "machine": result["machine"],
            "date": result["date"],
        }
    return found


def host_rates() -> dict[str, Any]:
    """What one core reads of WikiText-like text, and how fast triggers of two workers become one table."""
    torch.set_num_threads(1)
    tokenizer = ffmem.load_model("wiki16").tokenizer
    reading = min(_reading(tokenizer) for _ in range(ROUNDS))
    merging, writing = _merging()
    print(f"merging {1 / merging:,.0f} triggers/s, writing {1 / writing:,.0f}", file=sys.stderr)
    return {
        "text_tokens_a_second": int(float(f"{1 / reading:.2g}")),
        "merged_triggers_a_second": int(float(f"{1 / max(merging, writing):.2g}")),
        **measured_here(),
    }


def _reading(tokenizer: Any) -> float:
    """Seconds a token, from text to ids."""
    text = Corpus([open_source("pocket")], Encoder(tokenizer, 511), Unit("sentence"), "en", 1 << 18)
    began = time.process_time()
    tokens = sum(shard.tokens for shard in text.stream())
    return (time.process_time() - began) / tokens


def _merging() -> tuple[float, float]:
    """Seconds a trigger, to merge it and to write it."""
    states = [[_state(layer, seed=2 * layer + number) for layer in range(LAYERS)] for number in range(2)]
    began = time.process_time()
    for one, other in zip(*states, strict=True):
        one.merge(other)
    merged = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        write_table(Path(folder) / "triggers", TRIGGER_SCHEMA, trigger_batches(states[0], referenced_sentences(states[0])))
    triggers = LAYERS * CELLS * T
    return (merged - began) / triggers, (time.process_time() - merged) / triggers


def _state(layer: int, *, seed: int) -> LayerCollector:
    """A layer's collector whose triggers are drawn at random."""
    state = LayerCollector(layer, CELLS, t=T, distinct="text", negative=False, every=0, device=torch.device("cpu"))
    torch.manual_seed(seed)
    top = state.top["+"]
    top.coefficient.copy_(torch.rand(CELLS, T).sort(1, descending=True).values)
    top.place.copy_(torch.randint(1 << 40, (CELLS, T)))
    top.key.copy_(torch.randint(1 << 62, (CELLS, T, 2)))
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="take over what was measured on a GPU")
    parser.add_argument("--host", action="store_true", help="measure one core of this machine")
    chosen = parser.parse_args()
    rates = json.loads(RATES.read_text("utf-8"))
    if chosen.gpu:
        rates["gpus"] |= gpu_rates(json.loads((RESULTS / "gpu.json").read_text("utf-8")))
    if chosen.host:
        rates["host"] |= host_rates()
    RATES.write_text(json.dumps(rates, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
