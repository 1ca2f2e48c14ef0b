"""What looking costs: an index pass as a ratio to the bare trunk forward, on the same batches in the same run.

    python -m benchmarks.index                 GPT-2-small shape, 100k tokens, all ways
    python -m benchmarks.index --long          four layers of that width, 1M tokens, ffmem only
    python -m benchmarks.index --loop          the released code's loop, on a small sample, scaled
    python -m benchmarks.index --memory        peak memory of a corpus and of ten times it

Every batch goes through each way in turn, so that a noisy machine slows all of them alike. The corpus is made on the
spot: sentences of corpus-like lengths (log-normal, mean about 24 tokens), words by Zipf's law. Weights are random.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import ffmem
from benchmarks.shared import add_result, bare, measured_here, to_the_last_coefficients
from ffmem.corpus.files import TextFile
from ffmem.corpus.sentences import Unit
from ffmem.corpus.tokens import Encoder
from ffmem.indexing.collect import LayerCollector, read_batch
from ffmem.model.memories import MemoryModel

VOCABULARY = 50_257
T = 50
EVERY = 4
"""One batch in so many also goes through a trunk that ends where ffmem does."""
RELEASED_CELLS = 64
"""Cells of the sample on which the released code's loop is timed."""


def write_corpus(path: Path, tokens: int, seed: int = 0) -> None:
    """A sentence a line until there are this many words."""
    chooser = random.Random(seed)
    written = 0
    with path.open("w") as handle:
        while written < tokens:
            length = max(3, min(120, round(chooser.lognormvariate(3.0, 0.55))))
            words = (f"w{min(VOCABULARY - 2, int(chooser.paretovariate(0.8)))}" for _ in range(length))
            handle.write(" ".join(words) + "\n")
            written += length


def make_model(layers: int, d: int = 768, *, cells: int | None = None, vocabulary: int = VOCABULARY) -> MemoryModel:
    """A GPT-2 with random weights and 4·d cells a layer unless `cells` are given; its words are w1, w2 and so on."""
    names = {"</s>": 0} | {f"w{number}": number for number in range(1, vocabulary)}
    words = Tokenizer(models.WordLevel(names, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="</s>", eos_token="</s>")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_layer=layers, n_embd=d, n_head=d // 64, n_inner=cells, bos_token_id=0, eos_token_id=0
    )
    return ffmem.load_model(transformers.GPT2LMHeadModel(config), tokenizer=tokenizer)


class UsualWay:
    """In each layer: the running top-t and the batch's coefficients together through torch.topk."""

    def __init__(self, model: MemoryModel) -> None:
        self.best = {layer: torch.full((T, cells), -torch.inf) for layer, cells in enumerate(model.cells, 1)}
        self.where = {layer: torch.zeros(T, cells, dtype=torch.int64) for layer, cells in enumerate(model.cells, 1)}
        self.model = model
        self.seen = 0

    def run(self, batch: Batch) -> None:
        valid = torch.arange(batch.ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None] + batch.start
        valid[:, : batch.start] = False

        def visit(layer: int, m: torch.Tensor) -> None:
            rows = m[valid]
            numbers = torch.arange(self.seen, self.seen + len(rows))[:, None].expand(-1, rows.shape[1])
            both = torch.cat([self.best[layer], rows])
            values, which = both.topk(T, dim=0)
            self.best[layer], self.where[layer] = values, torch.cat([self.where[layer], numbers]).gather(0, which)

        with self.model.reading(visit) as forward:
            forward(torch.from_numpy(batch.ids))
        self.seen += batch.tokens


def released_loop() -> dict[str, Any]:
    """A Python loop over sentence, layer and cell, timed on a few cells of one batch and scaled to all of them."""
    model = make_model(12)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "corpus.txt"
        write_corpus(text, 20_000)
        plan = Corpus([TextFile(text)], Encoder(model.tokenizer, 1023), Unit("line"), "en", 1 << 18)
        batches = list(next(plan.stream()).batches(1024, 0))
    batch = batches[len(batches) // 2]
    seconds: dict[str, float] = {}
    bare(model, batch.ids)
    found: dict[int, torch.Tensor] = {}
    with model.reading(lambda layer, m: found.__setitem__(layer, m.clone())) as forward:
        forward(torch.from_numpy(batch.ids))
    for _ in range(3):
        clock(seconds, "bare", lambda: bare(model, batch.ids))
        clock(seconds, "loop", lambda: _loop(found, batch))
    scale = sum(model.cells) / (RELEASED_CELLS * model.layers)
    return {
        "tokens": batch.tokens,
        "cells": RELEASED_CELLS,
        "ratio": round(1 + scale * seconds["loop"] / seconds["bare"], 1),
    }


def _loop(found: dict[int, torch.Tensor], batch: Batch) -> None:
    kept: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for row, sentence in enumerate(batch.sentences):
        for layer, m in found.items():
            for cell in range(RELEASED_CELLS):
                column = m[row, batch.start : batch.start + batch.lengths[row], cell]
                entries = kept.setdefault((layer, cell), [])
                entries.append((float(column.max()), int(sentence)))
                entries.sort(reverse=True)
                del entries[T:]


def compare(layers: int, tokens: int, *, only_ffmem: bool) -> dict[str, Any]:
    model = make_model(layers)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "corpus.txt"
        write_corpus(text, tokens)
        plan = Corpus([TextFile(text)], Encoder(model.tokenizer, 1023), Unit("line"), "en", 1 << 18, tokens)
        seconds: dict[str, float] = {"bare trunk": 0.0}
        shorter: dict[str, float] = {}
        collectors = {
            f"ffmem, stats {stats}": {
                layer: LayerCollector(layer, cells, t=T, distinct="text", negative=False, every=every, device=model.device)
                for layer, cells in enumerate(model.cells, 1)
            }
            for stats, every in ({"sample": 16} if only_ffmem else {"sample": 16, "full": 1}).items()
        }
        usual = UsualWay(model)
        done = 0
        spread: list[float] = []
        for shard in plan.stream():
            for number, batch in enumerate(shard.batches(4096, 0)):
                if not done:
                    bare(model, batch.ids)  # the first forward warms up
                if number % EVERY == 0:
                    clock(shorter, "whole", lambda batch=batch: bare(model, batch.ids))
                    clock(shorter, "shorter", lambda batch=batch: to_the_last_coefficients(model, batch.ids))
                before = dict(seconds)
                clock(seconds, "bare trunk", lambda batch=batch: bare(model, batch.ids))
                for name, found in collectors.items():
                    clock(seconds, name, lambda batch=batch, found=found: read_batch(model, batch, found))
                if not only_ffmem:
                    clock(seconds, "torch.topk in each layer", lambda batch=batch: usual.run(batch))
                done += batch.tokens
                first = next(iter(collectors))
                ratio = (seconds[first] - before.get(first, 0.0)) / (seconds["bare trunk"] - before["bare trunk"])
                spread.append(ratio)
                print(
                    f"\r{done:,} of {tokens:,} tokens, {first} {seconds[first] / seconds['bare trunk']:.3f}",
                    end="",
                    file=sys.stderr,
                )
            for name, found in collectors.items():
                clock(seconds, name, lambda found=found: [collector.end_shard() for collector in found.values()])
        print(file=sys.stderr)
        ratios = {name: spent / seconds["bare trunk"] for name, spent in seconds.items()}
        if not only_ffmem:
            began = time.perf_counter()
            ffmem.build_index(
                model, text, out=Path(folder) / "run", unit="line", limit_tokens=tokens, stats="sample", quiet=True
            )
            ratios["ffmem end to end, file to run folder"] = (time.perf_counter() - began) / seconds["bare trunk"]
    spread.sort()
    quartiles = [round(spread[len(spread) * q // 4], 3) for q in (1, 2, 3)]
    return {
        "layers": layers,
        "d": 768,
        "cells": sum(model.cells),
        "tokens": done,
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "batch_quartiles": quartiles,
        "shorter_trunk": round(shorter["shorter"] / shorter["whole"], 3),
    }


def clock(seconds: dict[str, float], name: str, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


def memory(tokens: int) -> dict[str, Any]:
    """Peak resident memory of a whole run, each in a process of its own."""
    found = {}
    for size in (tokens, 10 * tokens):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.index", "--memory-of", str(size)], capture_output=True, text=True, check=True
        )
        found[size] = int(done.stdout)
    small, large = found.values()
    return {"peak_bytes": found, "ratio": round(large / small, 4)}


def memory_of(tokens: int) -> int:
    model = make_model(layers=2, d=256)
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(Path(folder) / "corpus.txt", tokens)
        ffmem.build_index(
            model, Path(folder) / "corpus.txt", out=Path(folder) / "run", unit="line", shard_tokens=1 << 16, quiet=True
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, help="tokens of the corpus")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--out", type=Path, help="add the result to this JSON file")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.memory_of:
        print(memory_of(arguments.memory_of))
        return
    if arguments.memory:
        name, result = "memory", memory(arguments.tokens or 100_000)
    elif arguments.loop:
        name, result = "loop", released_loop()
    elif arguments.long:
        name, result = "long", compare(4, arguments.tokens or 1_000_000, only_ffmem=True)
    else:
        name, result = "short", compare(12, arguments.tokens or 100_000, only_ffmem=False)
    add_result(arguments.out, name, result | measured_here())


if __name__ == "__main__":
    main()
