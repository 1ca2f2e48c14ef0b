"""What every cell's value says, projected onto the whole vocabulary: how near that comes to a bare matrix product.

    python -m benchmarks.values --shape paper -o FILE       65,536 cells Ã 267,744 words, adaptive softmax
    python -m benchmarks.values --shape llama8b -o FILE     458,752 cells Ã 128,256 tokens
    python -m benchmarks.values --shape gpt2 -o FILE        36,864 cells Ã 50,257 tokens
    python -m benchmarks.values --shape paper --profile                 which kernels take the time

Weights are random, bf16 on a GPU. The ceiling is the best of several large square bf16 products in the same run. TFLOP/s
counts the products that the vocabulary really needs: an adaptive softmax multiplies rare words in fewer dimensions, so
the time is also put beside that of one product of all cells and all words in full width, at the ceiling.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared import add_result, measured_here
from ffmem.corpus.ahead import ahead
from ffmem.indexing.values import together
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.vocabulary import AdaptiveVocabulary
from ffmem.model.vocabulary import SoftmaxVocabulary, Vocabulary
from ffmem.run.model import project

TOP = 50


@dataclass(frozen=True)
class Shape:
    layers: int
    cells: int
    d: int
    words: int
    cutoffs: tuple[int, ...] = ()


SHAPES = {
    "paper": Shape(16, 4096, 1024, 267_744, (20_000, 60_000)),
    "llama8b": Shape(32, 14_336, 4096, 128_256),
    "gpt2": Shape(12, 3072, 768, 50_257),
    "tiny": Shape(2, 64, 32, 500),
    "tiny-adaptive": Shape(2, 64, 32, 500, (100, 200)),
}


def make(shape: Shape, device: str) -> tuple[Vocabulary, list[Tensor]]:
    """A vocabulary and every layer's values."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        vocabulary: Vocabulary
        if shape.cutoffs:
            config = AdaptiveConfig(
                vocab_size=shape.words,
                hidden_size=shape.d,
                num_hidden_layers=1,
                num_attention_heads=8,
                intermediate_size=8,
                cutoffs=list(shape.cutoffs),
            )
            vocabulary = AdaptiveVocabulary(AdaptiveLM(config).to(dtype).requires_grad_(False))
        else:
            vocabulary = SoftmaxVocabulary(nn.Linear(shape.d, shape.words, bias=False, dtype=dtype).requires_grad_(False))
        values = [torch.randn(shape.cells, shape.d, dtype=dtype) for _ in range(shape.layers)]
    return vocabulary, values


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, what: Callable[[], Any]) -> float:
    wait(device)
    began = time.perf_counter()
    what()
    wait(device)
    return time.perf_counter() - began


def ceiling(device: str) -> float:
    """FLOP a second of the best large square product."""
    best = 0.0
    for size in (8192, 16_384) if device == "cuda" else (512,):
        a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
        best = max(best, *(2 * size**3 / seconds(device, lambda a=a, b=b: a @ b) for _ in range(8)))
    return best


def flops(vocabulary: Vocabulary, shape: Shape) -> float:
    """Of the products that all cells' scores need."""
    tables = [(shape.words, shape.d)]
    if isinstance(vocabulary, AdaptiveVocabulary):
        tables = [(band.high - band.low, band.words.embedding_dim) for band in vocabulary.model.model.embed]
    into = sum(2 * shape.d * width for _, width in tables if width != shape.d)
    return shape.layers * shape.cells * (into + sum(2.0 * words * width for words, width in tables))


@torch.inference_mode()
def measure(shape: Shape, device: str, repeats: int) -> dict[str, Any]:
    most = ceiling(device)
    print(f"ceiling {most / 1e12:.1f} TFLOP/s", flush=True)
    vocabulary, values = make(shape, device)
    tokens = [torch.randint(shape.words, (shape.cells,), device=device) for _ in values]
    model: Any = SimpleNamespace(vocabulary=vocabulary)

    def extremes() -> None:
        for _, part in together(enumerate(values)):
            vocabulary.extremes(part, TOP)

    def tables() -> None:
        for _ in ahead(lambda _: (project(model, part, k=TOP) for _, part in together(enumerate(values))), 1):
            pass

    def rank() -> None:
        for layer, token in zip(values, tokens, strict=True):
            vocabulary.score_token(layer, token)

    cells = shape.layers * shape.cells
    work = flops(vocabulary, shape)
    full = 2.0 * cells * shape.words * shape.d / most
    weights = torch.cuda.memory_allocated() if device == "cuda" else 0
    found: dict[str, Any] = {}
    for name, way in (("extremes", extremes), ("extremes as a table", tables), ("rank", rank)):
        way()  # what happens only once is not counted
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        spent = sorted(seconds(device, way) for _ in range(repeats))
        best = spent[len(spent) // 2]
        found[name] = {
            "seconds": round(best, 4),
            "spread": [round(spent[0], 4), round(spent[-1], 4)],
            "tflops": round(work / best / 1e12, 1),
            "share_of_ceiling": round(work / best / most, 3),
            "times_a_full_width_product_at_the_ceiling": round(best / full, 3),
            "memory_beyond_the_weights": torch.cuda.max_memory_allocated() - weights if device == "cuda" else None,
        }
        print(name, found[name], flush=True)
    return {
        "cells": cells,
        "vocabulary": shape.words,
        "d": shape.d,
        "top": TOP,
        "teraflop": round(work / 1e12, 3),
        "ceiling_tflops": round(most / 1e12, 1),
        "ways": found,
    }


@torch.inference_mode()
def profile(shape: Shape, device: str) -> None:
    vocabulary, values = make(shape, device)
    vocabulary.extremes(values[0], TOP)
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as found:
        vocabulary.extremes(torch.cat(values[:4]), TOP)
        wait(device)
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="paper")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="only show which kernels take the time")
    parser.add_argument("-o", "--out", type=Path, help="add the result to this JSON file")
    chosen = parser.parse_args()
    shape = SHAPES[chosen.shape]
    if chosen.profile:
        profile(shape, chosen.device)
        return
    result = measure(shape, chosen.device, chosen.repeats)
    add_result(chosen.out, chosen.shape, result | measured_here(chosen.device))


if __name__ == "__main__":
    main()
