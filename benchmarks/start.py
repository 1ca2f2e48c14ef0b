"""What the start of a run costs: short runs over real text, the whole of `index` as a ratio to the bare forward.

    python -m benchmarks.start pythia-410m --text wiki.*.xz --tokens 14e6 -o FILE
    python -m benchmarks.start opt-1.3b --text wiki.*.xz --tokens 8e6 -o FILE
    python -m benchmarks.start qwen2-1.5b --text wiki.*.xz --tokens 5e6 -o FILE
    python -m benchmarks.start tiny --text notes.txt --tokens 2e4 --device cpu

Weights are random, in bfloat16 on a GPU, and lie there before the clock starts. Without `--tokenizer FOLDER` a byte-level
BPE is trained on the beginning of the text, so nothing is loaded from a network. The first run is cold: nothing has been
compiled, no text has been read. A second run of the same is timed too, and its batches are what the bare trunk then reads,
in the same order: through the last block with the same attention, no hooks, no vocabulary projection.
"""

from __future__ import annotations

import argparse
import lzma
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import ffmem
from benchmarks.shared import add_result, bare, events, measured_here
from ffmem.model.memories import MemoryModel

SHAPES: dict[str, Callable[[], Any]] = {
    "tiny": lambda: transformers.GPTNeoXConfig(
        vocab_size=2000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    ),
    "pythia-410m": lambda: transformers.GPTNeoXConfig(
        vocab_size=50_304, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    ),
    "opt-1.3b": lambda: transformers.OPTConfig(
        vocab_size=50_272,
        hidden_size=2048,
        ffn_dim=8192,
        num_hidden_layers=24,
        num_attention_heads=32,
        word_embed_proj_dim=2048,
    ),
    "qwen2-1.5b": lambda: transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}
TRAINED_ON = 4 << 20
"""Characters of the text that a tokenizer is trained on."""
WARM = 8
"""Batches that the bare trunk reads before its clock starts."""


def make_model(shape: str, tokenizer: Any, device: str) -> MemoryModel:
    """A model of this shape with random weights, whose memories have been found and checked."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(SHAPES[shape]())
    return ffmem.load_model(model.to(torch.float32 if device == "cpu" else torch.bfloat16), tokenizer=tokenizer)


def make_tokenizer(text: Path, words: int) -> Any:
    """A byte-level BPE of at most so many words, trained on the beginning of a text."""
    opened = lzma.open if text.suffix == ".xz" else open
    with opened(text, "rt", encoding="utf-8") as file:
        lines = file.read(TRAINED_ON).splitlines()
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="</s>", eos_token="</s>")


@contextmanager
def watched(model: MemoryModel, *, keep: bool) -> Iterator[tuple[list[float], list[Tensor]]]:
    """The moments at which the model is called, and what it is given where that is kept."""
    moments: list[float] = []
    batches: list[Tensor] = []

    def note(_: Any, given: tuple[Tensor, ...]) -> None:
        moments.append(time.perf_counter())
        if keep:
            batches.append(given[0].clone())

    hook = model.model.get_input_embeddings().register_forward_pre_hook(note)
    try:
        yield moments, batches
    finally:
        hook.remove()


def bare_seconds(model: MemoryModel, batches: list[Tensor]) -> float:
    """Seconds that the trunk takes for these batches, once it has read a few of them to get warm."""
    for ids in batches[:: max(1, len(batches) // WARM)]:
        bare(model, ids)
    _wait(model)
    began = time.perf_counter()
    for ids in batches:
        bare(model, ids)
    _wait(model)
    return time.perf_counter() - began


def measure(model: MemoryModel, text: list[Path], tokens: int) -> dict[str, Any]:
    """Two runs and the bare trunk on the batches of the second."""
    found: dict[str, Any] = {}
    batches: list[Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            _wait(model)
            with watched(model, keep=name == "warm") as (moments, batches):
                began = time.perf_counter()
                index = ffmem.build_index(model, text, out=Path(folder) / name, limit_tokens=tokens, quiet=True)
                seconds = time.perf_counter() - began
            found[name] = {
                "seconds": round(seconds, 2),
                "to_the_first_forward": round(moments[0] - began, 2),
                "to_the_last_forward": round(moments[-1] - began, 2),
                "steps": [{k: v for k, v in line.items() if k != "event"} for line in events(index, "timing")],
            }
    spent = bare_seconds(model, batches)
    for name in ("cold", "warm"):
        found[name]["ratio"] = round(found[name]["seconds"] / spent, 3)
    return {
        "layers": model.layers,
        "d": model.d,
        "cells": sum(model.cells),
        "tokens": index.counts.tokens,
        "batches": len(batches),
        "bare_seconds": round(spent, 2),
        **found,
    }


def _wait(model: MemoryModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files, plain or packed by xz")
    parser.add_argument("--tokens", type=float, default=1e7, help="to read of them")
    parser.add_argument("--tokenizer", help="the folder of a tokenizer; without it one is trained on the text")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--out", type=Path, help="add the result to this JSON file")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    words = SHAPES[chosen.shape]().vocab_size
    if chosen.tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(chosen.tokenizer, local_files_only=True)
    else:
        tokenizer = make_tokenizer(chosen.text[0], words)
    model = make_model(chosen.shape, tokenizer, chosen.device)
    add_result(chosen.out, chosen.shape, measure(model, chosen.text, int(chosen.tokens)) | measured_here(chosen.device))


if __name__ == "__main__":
    main()
