"""What a trace costs: `wiki16` and 200 tokens of the bundled text.

    python -m benchmarks.live -o docs/live.json

Each time is the best of five, interleaved; ratios are to one forward with logits in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ffmem
from benchmarks.index import processor
from ffmem.corpus.files import Pocket
from ffmem.corpus.readers import cores
from ffmem.live.capture import capture

TOKENS = 200
ROUNDS = 5


def measure() -> dict[str, Any]:
    model = ffmem.load_model("wiki16")
    text = " ".join(line for _, line in zip(range(12), (line for _, line in Pocket().lines() if line), strict=False))
    ids = model.tokenizer(text)["input_ids"][:TOKENS]
    prompt = model.tokenizer.decode(ids)
    fed = torch.tensor([[model.bos, *ids]])
    everywhere = torch.arange(1, len(ids) + 1)
    ways: dict[str, Callable[[], object]] = {
        "forward with logits": lambda: model.logits(fed),
        "capture of every position": lambda: capture(model, fed, everywhere),
        "one position": lambda: str(ffmem.trace(model, prompt, at=-1)),
        "layer × token grid": lambda: ffmem.trace(model, prompt, grid=True).grid,
    }
    best: dict[str, float] = {}
    for number in range(ROUNDS + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds = time.perf_counter() - began
            if number:  # the first round warms up
                best[name] = min(seconds, best.get(name, seconds))
    base = best["forward with logits"]
    return {
        "tokens": len(ids),
        "ways": {name: {"seconds": round(took, 2), "ratio": round(took / base, 2)} for name, took in best.items()},
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor()}, {cores()} cores, torch {torch.__version__}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="write the result to this JSON file")
    chosen = parser.parse_args()
    result = measure()
    print(json.dumps(result, indent=2, ensure_ascii=False))
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
