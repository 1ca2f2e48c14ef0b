"""What the paper's experiments cost: each one's time as a ratio to the bare forward of its examples.

    python -m benchmarks.experiments pocket -o docs/experiments.json     wiki16 on the bundled text, the paper's samples
    python -m benchmarks.experiments paper -o docs/experiments.json      the paper's shape, random weights (for a GPU)

The examples of `removal` are its triggers, those of `agreement` every cell's top trigger, those of the others the prefixes
that are followed. Their bare forward is computed from the tokens that the model reads a second without looking.
Random weights read a text made on the spot: sentences of corpus-like lengths, words by Zipf's law.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ffmem
from benchmarks.index import processor
from ffmem.corpus.readers import cores
from ffmem.experiments.examples import EXAMPLES, Examples, sample_examples
from ffmem.experiments.run import run_experiments
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.tokenizer import wiki_tokenizer
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index
from ffmem.run.results import EXPERIMENTS

PAPER_WORDS = 267_744 - 4
"""Words of the paper's vocabulary, the marks not counted."""
INDEXED = 400_000
"""Tokens that random weights read for their triggers."""


def paper_shape(device: str) -> MemoryModel:
    tokenizer = wiki_tokenizer([f"w{number}" for number in range(PAPER_WORDS)])
    torch.manual_seed(0)
    with torch.device(device):
        model = AdaptiveLM(AdaptiveConfig(vocab_size=len(tokenizer), cutoffs=[20_000, 60_000]))
    return ffmem.load_model(model.to(torch.bfloat16 if device == "cuda" else torch.float32), tokenizer=tokenizer)


def random_text(path: Path, sentences: int, seed: int) -> Path:
    """A sentence a line."""
    chance = np.random.default_rng(seed)
    lengths = np.clip(np.rint(chance.lognormal(3.0, 0.55, sentences)), 3, 120).astype(int)
    with path.open("w") as handle:
        for length in lengths.tolist():
            words = np.minimum(PAPER_WORDS - 1, chance.pareto(0.8, length)).astype(int)
            handle.write(" ".join(f"w{number}" for number in words.tolist()) + "\n")
    return path


def synchronize(model: MemoryModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


@torch.inference_mode()
def bare_speed(model: MemoryModel, examples: Examples) -> float:
    """Tokens a second through the trunk, the best of three runs over all examples, nothing looked at."""
    batches = [ids for _, ids in examples.batches(model.bos, 16_384 if model.device.type == "cuda" else 2048)]
    tokens = sum(len(examples[number].ids) for number in range(len(examples)))
    seconds = []
    for _ in range(3):
        synchronize(model)
        began = time.perf_counter()
        for ids in batches:
            model.model.base_model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=False)
        synchronize(model)
        seconds.append(time.perf_counter() - began)
    return tokens / min(seconds)


def example_tokens(index: Index, examples: Examples, cells: int) -> dict[str, float]:
    """Tokens that each experiment's examples have."""
    position = index.table("triggers").column("position").to_numpy()
    first = index.table("cells").column("first_trigger").to_numpy()
    counts = index.table("cells").column("positive_triggers").to_numpy()
    drawn = sum(min(cells, count) for count in (index.manifest.model.cells[layer - 1] for layer in index.layers))
    followed = float(sum(len(examples[number].ids) for number in range(len(examples))))
    return {
        "removal": float(position.mean() * np.minimum(counts, 50).mean() * drawn),
        "agreement": float(position[first[counts > 0]].sum()),
        **dict.fromkeys(("activity", "composition", "refinement", "normaliser"), followed),
    }


def measure(index: Index, model: MemoryModel, eval: Any, cells: int) -> dict[str, Any]:
    """One experiment after the other, as `ffmem experiments` runs them, and all at once, which shares their work."""
    examples = sample_examples(model, index, eval, quiet=True)
    speed = bare_speed(model, examples)
    tokens = example_tokens(index, examples, cells)
    alone = {}
    for name in EXPERIMENTS:
        synchronize(model)
        began = time.perf_counter()
        run_experiments(index, [name], model=model, eval=eval, cells=cells, quiet=True)
        synchronize(model)
        seconds = time.perf_counter() - began
        alone[name] = {"seconds": round(seconds, 2), "ratio": round(seconds * speed / tokens[name], 2)}
        print(name, alone[name], flush=True)
    weights = torch.cuda.memory_allocated() if model.device.type == "cuda" else 0
    if weights:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run_experiments(index, model=model, eval=eval, cells=cells, quiet=True)
    synchronize(model)
    return {
        "layers": model.layers,
        "cells": len(index),
        "vocabulary": model.vocabulary.size,
        "indexed_tokens": index.counts["tokens"],
        "examples": len(examples),
        "examples_asked": EXAMPLES,
        "cells_removed_from": cells,
        "bare_tokens_per_second": round(speed),
        "alone": alone,
        "together_seconds": round(time.perf_counter() - began, 1),
        "memory_beyond_the_model": torch.cuda.max_memory_allocated() - weights if weights else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pocket", "paper"])
    parser.add_argument("--cells", type=int, default=100, help="cells a layer whose triggers have tokens removed")
    parser.add_argument("-o", "--out", type=Path, help="add the result to this JSON file")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        if chosen.what == "pocket":
            model, corpus, eval = ffmem.load_model("wiki16"), "pocket:9/10", "pocket:1/10"
        else:
            model = paper_shape(device)
            corpus, eval = (random_text(Path(folder) / f"{n}.txt", count, n) for n, count in ((0, 20_000), (1, 5000)))
        index = ffmem.build_index(model, corpus, out=Path(folder) / "run", limit_tokens=INDEXED, quiet=True)
        print(f"indexed {index.counts['tokens']:,} tokens", flush=True)
        result = measure(index, model, eval, chosen.cells)
    result["date"] = datetime.now(UTC).date().isoformat()
    on = torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, {cores()} cores"
    result["machine"] = f"{on}, torch {torch.__version__}, {model.dtype_name}"
    print(json.dumps(result, indent=2))
    if chosen.out:
        known = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
        chosen.out.write_text(json.dumps(known | {chosen.what: result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
