"""The numbers of a model card: perplexity, unknown words, and the paper's curves of a model like the paper's.

    python benchmarks/wiki16.py MODEL --valid wikitext-103.valid.tokens --test wikitext-103.test.tokens \
        --corpus wiki.train.01of12.txt.xz -o FILE

Curves: every cell's top trigger over the first tokens of the corpus (Figs 4 and 5), and one random prefix from each of
many validation sentences (Figs 7 and 9).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import ChainMap
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ffmem
from ffmem.corpus.sources import open_sources
from ffmem.experiments import run_experiments
from ffmem.model.memories import MemoryModel
from ffmem.training.perplexity import perplexity
from ffmem.training.stream import read_stream

EXAMPLES = 2000


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


def curves(model: MemoryModel, corpus: list[Path], tokens: int, valid: Path) -> tuple[int, list[dict[str, Any]]]:
    """Tokens read for the triggers, and a row a layer: agreement, rank, activity and refinement."""
    with tempfile.TemporaryDirectory() as folder:
        index = ffmem.build_index(model, corpus, out=Path(folder) / "run", top=1, stats="off", limit_tokens=tokens)
        names = ["agreement", "activity", "refinement"]
        results = list(run_experiments(index, names, model=model, eval=valid, examples=EXAMPLES))
    shuffled = [{"shuffled": row["shuffled"]} for row in results[0].facts["baselines"]["by_layer"]]
    rows = [dict(ChainMap(*parts)) for parts in zip(shuffled, *(result.rows for result in results), strict=True)]
    return index.counts.tokens, rows


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
        result["trigger_tokens"], result["layers"] = curves(model, chosen.corpus, chosen.tokens, chosen.valid)
        for row in result["layers"]:
            print(row, flush=True)
    chosen.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
