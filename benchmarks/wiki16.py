"""The numbers of a model card: perplexity, unknown words, and the paper's curves of a model like the paper's.

    python benchmarks/wiki16.py MODEL --valid wikitext-103.valid.tokens --test wikitext-103.test.tokens \
        --corpus wiki.train.01of12.txt.xz -o docs/wiki16.json

Curves: every cell's top trigger over the first tokens of the corpus (Figs 4 and 5), and one random prefix from each of
many validation sentences (Figs 7 and 9).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ffmem
from ffmem.corpus.sources import open_sources
from ffmem.index.reader import Index
from ffmem.model.memories import MemoryModel
from ffmem.training.perplexity import perplexity
from ffmem.training.stream import MARK, read_stream

PREFIXES = 2000
LONGEST = 128
"""Validation sentences longer than this are passed over."""


def perplexities(model: MemoryModel, files: dict[str, Path]) -> dict[str, Any]:
    """Of the whole file, headings included, and of its sentences alone, as an index reads it."""
    found = {}
    for name, path in files.items():
        for headings in (True, False):
            stream = read_stream(open_sources(path, headings=headings), model.tokenizer)
            key = name if headings else f"{name}, no headings"
            found[key] = asdict(perplexity(model.model, stream))
            print(key, found[key], flush=True)
    return found


def top_triggers(index: Index, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Cells of a layer with a trigger, and the token behind each one's first trigger (the mark at a sentence's end)."""
    cells, triggers, sentences = (index.table(name) for name in ("cells", "triggers", "sentences"))
    rows = np.flatnonzero((cells.column("layer").to_numpy() == layer) & (cells.column("positive_triggers").to_numpy() > 0))
    first = cells.column("first_trigger").to_numpy()[rows]
    at, position = (triggers.column(name).to_numpy()[first] for name in ("row", "position"))
    tokens = sentences.column("tokens").combine_chunks()
    starts, flat = tokens.offsets.to_numpy(), tokens.values.to_numpy()
    ends = starts[at] + position >= starts[at + 1]
    following = np.where(ends, MARK, flat[np.minimum(starts[at] + position, len(flat) - 1)])
    return cells.column("index").to_numpy()[rows], following


@torch.inference_mode()
def values_against_triggers(model: MemoryModel, index: Index, seed: int = 0) -> list[dict[str, float]]:
    """Agreement of a value's top word with what follows the key's top trigger, its shuffled control, and the rank."""
    chance = np.random.default_rng(seed)
    found = []
    for layer in index.layers:
        cells, following = top_triggers(index, layer)
        values = model.values(layer)[torch.from_numpy(cells).to(model.device)]
        said = model.vocabulary.top(values, 1)[1][:, 0].cpu().numpy()
        rank = model.vocabulary.rank(values, torch.from_numpy(following).long().to(model.device))
        found.append(
            {
                "agreement": float((said == following).mean()),
                "shuffled": float(np.mean([(said == chance.permutation(following)).mean() for _ in range(20)])),
                "median_rank": float(rank.float().median()),
            }
        )
    return found


@torch.inference_mode()
def residuals(model: MemoryModel, path: Path, seed: int = 0) -> list[dict[str, float]]:
    """For random validation prefixes: does the residual already say what the output will, and how many cells are active."""
    stream = read_stream(open_sources(path), model.tokenizer)
    marks = np.flatnonzero(stream == MARK)
    ends = np.append(marks[1:], len(stream))
    chance = np.random.default_rng(seed)
    wanted = [number for number in chance.permutation(len(marks)) if ends[number] - marks[number] <= LONGEST][:PREFIXES]
    same = np.zeros((model.layers, len(wanted)))
    active = np.zeros((model.layers, len(wanted)))
    for number, sentence in enumerate(wanted):
        words = ends[sentence] - marks[sentence] - 1
        stop = marks[sentence] + 1 + chance.integers(1, words + 1)
        recording = model.record(torch.from_numpy(stream[marks[sentence] : stop].astype(np.int64))[None])
        output = recording.logits[0, -1].argmax()
        stack = torch.stack([r[0, -1] for r in recording.r])
        same[:, number] = (model.vocabulary.top(stack, 1)[1][:, 0] == output).cpu().numpy()
        active[:, number] = [(m[0, -1] > 0).float().mean().item() for m in recording.m]
    return [
        {"residual_is_output": float(same[layer].mean()), "active": float(np.median(active[layer]))}
        for layer in range(model.layers)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--test", type=Path)
    parser.add_argument("--corpus", type=Path, nargs="+", help="text for the triggers; without it, no curves")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="tokens of it to read")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    chosen = parser.parse_args()
    model = ffmem.load_model(chosen.model, device=chosen.device)
    files = {"valid": chosen.valid} | ({"test": chosen.test} if chosen.test else {})
    result: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": torch.cuda.get_device_name() if model.device.type == "cuda" else "CPU",
        "perplexity": perplexities(model, files),
    }
    if chosen.corpus:
        with tempfile.TemporaryDirectory() as folder:
            index = ffmem.build_index(
                model, chosen.corpus, out=Path(folder) / "run", top=1, stats="off", limit_tokens=chosen.tokens
            )
            result["trigger_tokens"] = index.counts["tokens"]
            curves = zip(values_against_triggers(model, index), residuals(model, chosen.valid), strict=True)
            result["layers"] = [first | second for first, second in curves]
        for layer, row in enumerate(result["layers"], 1):
            print(layer, row, flush=True)
    chosen.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
