"""What looking costs on a GPU: an index pass as a ratio to the bare trunk, on the same batches in the same run.

    python -m benchmarks.gpu gpt2 paper gated -o FILE
    python -m benchmarks.gpu gpt2 --kernels -o FILE           what a layer's activation and read take
    python -m benchmarks.gpu gpt2 --profile                            where the time goes in the first part and the second
    python -m benchmarks.gpu paper --corpus wiki.*.xz -o FILE   end to end, from files to a finished run folder

Batches are made on the spot: sentences of corpus-like lengths (log-normal, mean about 24 tokens), words by Zipf's law,
planned as the pass plans them, in shards of `--shard` tokens. Weights are random, bf16. Every part of the corpus goes
through each way in turn. Bare trunk: the same batches through the last block with the same attention, nothing looked at,
nothing compiled. End to end, the model is of the paper's shape with the words of `wiki16`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models
from transformers.activations import ACT2FN

import ffmem
from benchmarks.shared import add_result, bare, events, measured_here, to_the_last_coefficients
from ffmem.corpus.batches import Batch, plan_batches, prefix_keys
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder
from ffmem.indexing.coefficients import DeviceBatch, to_device
from ffmem.indexing.collect import GROUP, LayerCollector, raised_flags, read_again, read_batch
from ffmem.indexing.layer_statistics import GPU_EVERY
from ffmem.indexing.provenance import ModelInfo
from ffmem.indexing.request import SHARD_TOKENS, auto_batch_tokens
from ffmem.indexing.worker import take_over_activations
from ffmem.model.activation import Activation
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.loading import stored_model
from ffmem.model.memories import MemoryModel

T = 50
USUAL = "torch.topk in each layer"
QUARTER = 4
PARTS = 8
"""Parts of the corpus that each way reads in turn; the first is left out of the median, not of the whole."""


def gpt2() -> Any:
    """GELU in one kernel: transformers' own for GPT-2 takes eight, which would hide what looking costs."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50_257, activation_function="gelu_pytorch_tanh"))


def gpt2_as_it_is() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50_257))


def paper() -> Any:
    return AdaptiveLM(AdaptiveConfig(vocab_size=267_744, cutoffs=[20_000, 60_000]))


def gated() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32_000,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=8,
            num_attention_heads=32,
            num_key_value_heads=8,
        )
    )


SHAPES: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "gpt2-as-it-is": gpt2_as_it_is, "paper": paper, "gated": gated}
"""How each is made."""


def make_model(shape: str, device: str) -> MemoryModel:
    torch.manual_seed(0)
    with torch.device(device):
        model = SHAPES[shape]().to(torch.bfloat16)
    words = Tokenizer(models.WordLevel({"</s>": 0} | {f"w{number}": number for number in range(1, 1000)}, unk_token="</s>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="</s>", eos_token="</s>")
    return ffmem.load_model(model, tokenizer=tokenizer)


def make_batches(tokens: int, words: int, *, batch_tokens: int, shard: int, seed: int = 0) -> Iterator[Batch]:
    """Batches of one shard after another, longest sentences first in each."""
    chance = np.random.default_rng(seed)
    first = 0
    for begin in range(0, tokens, shard):
        lengths = np.clip(np.rint(chance.lognormal(3.0, 0.55, shard // 23)), 3, 120).astype(np.int64)
        lengths = lengths[: int(np.searchsorted(lengths.cumsum(), min(shard, tokens - begin)))]
        for rows in reversed(plan_batches(lengths + 1, batch_tokens)):
            width = int(lengths[rows[-1]])
            ids = np.minimum(words - 1, chance.pareto(0.8, (len(rows), width + 1)) + 1).astype(np.int64)
            ids[:, 0] = 0
            ids[:, 1:][np.arange(width) >= lengths[rows][:, None]] = 0
            yield Batch(ids, lengths[rows], rows + first, prefix_keys(ids[:, 1:]), 1)
        first += len(lengths)


class Pass:
    """ffmem's own pass, with or without statistics."""

    def __init__(self, model: MemoryModel, every: int) -> None:
        self.model = model
        self.again = self.groups = 0
        self.collectors = {
            layer: LayerCollector(
                layer, cells, t=T, distinct="text", negative=model.family.gated, every=every, device=model.device
            )
            for layer, cells in enumerate(model.cells, 1)
        }
        take_over_activations(model, self.collectors)

    def __call__(self, batches: list[Batch]) -> None:
        for group in self._groups(batches):
            for batch in group:
                read_batch(self.model, batch, self.collectors)
            self.again += read_again(self.model, group, self.collectors)
            self.groups += len(self.collectors)

    def _groups(self, batches: list[Batch]) -> Iterator[list[Batch]]:
        """As `read_shard` looks for raised flags: more often in the beginning."""
        begin, size = 0, GROUP if self.groups else 1
        while begin < len(batches):
            yield batches[begin : begin + size]
            begin, size = begin + size, min(GROUP, 2 * size)


class UsualWay:
    """In each layer: the running top-t and the batch's coefficients together through torch.topk."""

    def __init__(self, model: MemoryModel) -> None:
        self.model = model
        self.best = {
            layer: torch.full((T, cells), -torch.inf, dtype=model.dtype, device=model.device)
            for layer, cells in enumerate(model.cells, 1)
        }
        self.where = {
            layer: torch.zeros(best.shape, dtype=torch.int64, device=best.device) for layer, best in self.best.items()
        }
        self.seen = 0

    def __call__(self, batches: list[Batch]) -> None:
        for batch in batches:
            on = DeviceBatch(batch, self.model.device)
            columns = torch.arange(batch.ids.shape[1], device=self.model.device)
            valid = (columns <= on.lengths[:, None]) & (columns > 0)

            def visit(layer: int, m: torch.Tensor, valid: torch.Tensor = valid) -> None:
                rows = m.masked_fill(~valid[:, :, None], -torch.inf).flatten(0, 1)
                numbers = torch.arange(self.seen, self.seen + len(rows), device=m.device)[:, None].expand(-1, rows.shape[1])
                values, which = torch.cat([self.best[layer], rows]).topk(T, dim=0)
                self.best[layer], self.where[layer] = values, torch.cat([self.where[layer], numbers]).gather(0, which)

            with self.model.reading(visit) as forward:
                forward(to_device(batch.ids, self.model.device))
            self.seen += batch.ids.size


def each(read: Callable[[MemoryModel, np.ndarray], None], model: MemoryModel) -> Callable[[list[Batch]], None]:
    """What reads batches by a function of one."""

    def run(batches: list[Batch]) -> None:
        for batch in batches:
            read(model, batch.ids)

    return run


def compare(shape: str, tokens: int, shard: int, device: str, *, usual: bool) -> Iterator[dict[str, Any]]:
    """What all ways took, once more after each part: of a run that is cut short something is known."""
    model = make_model(shape, device)
    subject = ModelInfo.of(model)
    size = auto_batch_tokens(subject.facts.cells, subject.facts.dtype, subject.facts.device, subject.layer_bytes)
    batches = list(make_batches(tokens, model.config.vocab_size, batch_tokens=size, shard=shard))
    ways: dict[str, Callable[[list[Batch]], None]] = {
        "bare trunk": each(bare, model),
        "bare trunk to the last coefficients": each(to_the_last_coefficients, model),
        "ffmem, triggers": Pass(model, 0),
        "ffmem, triggers and statistics": Pass(model, GPU_EVERY),
    }
    if usual:
        ways[USUAL] = UsualWay(model)
    for name, way in ways.items():
        way(batches[:: max(1, len(batches) // 3)])
        print(f"{shape}: {name} is warm", file=sys.stderr, flush=True)
    # The warm-up's triggers must not count.
    ways |= {name: Pass(model, way.collectors[1].every) for name, way in ways.items() if isinstance(way, Pass)}
    step = -(-len(batches) // PARTS)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    torch.cuda.reset_peak_memory_stats()
    for begin in range(0, len(batches), step):
        for name, way in ways.items():
            if name != USUAL or begin == step:  # slow and always the same: one part tells
                seconds[name].append(_timed(partial(way, batches[begin : begin + step])))
        print({name: round(spent[-1], 3) for name, spent in seconds.items() if spent}, file=sys.stderr, flush=True)
        passes = [way for way in ways.values() if isinstance(way, Pass)]
        yield summary(model, batches[: begin + step], size, seconds) | {
            "parts": f"{len(seconds['bare trunk'])} of {-(-len(batches) // step)}",
            "read_again": f"{passes[0].again} of {passes[0].groups} groups of {GROUP} batches and a layer",
            "peak_memory": torch.cuda.max_memory_allocated(),
        }


def summary(model: MemoryModel, batches: list[Batch], size: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What reading these batches, of up to `size` tokens, took by every way, part by part."""
    real = sum(batch.tokens for batch in batches)
    base = seconds["bare trunk"]
    found: dict[str, dict[str, Any]] = {}
    for name, spent in seconds.items():
        if name == USUAL:
            if spent:
                found[name] = {"part": round(spent[0] / base[1], 3)}
            continue
        ratios = [a / b for a, b in zip(spent, base, strict=True)][1:] or [spent[0] / base[0]]
        found[name] = {
            "whole": round(sum(spent) / sum(base), 4),
            "median": round(median(ratios), 4),
            "spread": [round(min(ratios), 4), round(max(ratios), 4)],
            "tokens_per_second": round(real / sum(spent)),
        }
    blocks = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    return {
        "layers": model.layers,
        "d": model.d,
        "cells": sum(model.cells),
        "tokens": real,
        "batch_tokens": size,
        "padding": round(1 - real / sum(batch.ids.size - len(batch.ids) for batch in batches), 4),
        "tflops": round(2 * blocks * sum(batch.ids.size for batch in batches) / sum(base) / 1e12, 1),
        "ways": found,
    }


def kernels(shape: str, device: str) -> dict[str, Any]:
    """What the activation and the read of one layer take, apart and together, in microseconds a batch.

    The same few batches are read again and again, so that every trigger passes each time: more than in a real text.
    """
    cells = make_model(shape, device).cells[0]
    made = make_batches(4_000_000, 1000, batch_tokens=1 << 17, shard=1 << 22)
    batches = [batch for batch in made if batch.ids.size > 120_000][::8][:4]
    ready = [
        (torch.randn(*b.ids.shape, cells, device=device, dtype=torch.bfloat16), DeviceBatch(b, torch.device(device)))
        for b in batches
    ]
    collector = LayerCollector(1, cells, t=T, distinct="text", negative=False, every=0, device=torch.device(device))

    def timed(work: Callable[[torch.Tensor, DeviceBatch], Any]) -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        for mark in marks[:2]:  # the first time is for getting warm
            mark.record()
            for x, on in ready:
                work(x, on)
        marks[2].record()
        torch.cuda.synchronize()
        return round(1000 * marks[1].elapsed_time(marks[2]) / len(ready), 1)

    for x, on in ready * 2:
        collector.add(x, on)
    raised_flags({1: collector})
    gigabytes = sum(x.numel() * 2 for x, _ in ready) / 1e9 / len(ready)
    found: dict[str, Any] = {"shape": shape, "gigabytes": round(gigabytes, 3), "read": timed(collector.add)}
    for name in ("relu", "gelu_pytorch_tanh", "gelu_new"):
        module = ACT2FN[name]
        collector.activation = Activation.of(module, ready[0][0])
        assert collector.activation is not None
        found[name] = {"alone": timed(lambda x, on, module=module: module(x)), "with the read": timed(collector.activate)}
    return found


def profile(shape: str, tokens: int, shard: int, device: str) -> None:
    """Show what the bare trunk's and the pass's kernels take in the first part, in which nearly everything passes, and
    in the second."""
    model = make_model(shape, device)
    subject = ModelInfo.of(model)
    size = auto_batch_tokens(subject.facts.cells, subject.facts.dtype, subject.facts.device, subject.layer_bytes)
    batches = list(make_batches(tokens, model.config.vocab_size, batch_tokens=size, shard=shard))
    step = -(-len(batches) // PARTS)
    Pass(model, 0)(batches[:: max(1, len(batches) // 3)])
    ways: dict[str, Callable[[list[Batch]], None]] = {"bare trunk": each(bare, model), "ffmem, triggers": Pass(model, 0)}
    for part in range(2):
        for name, way in ways.items():
            with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as found:
                seconds = _timed(partial(way, batches[part * step : (part + 1) * step]))
            print(f"{shape}, {name}, part {part + 1}: {seconds:.3f} s")
            print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=20, max_name_column_width=50))


def end_to_end(corpus: list[Path], tokens: int, device: str) -> dict[str, Any]:
    """From files on disk to a finished run folder, against the bare trunk on the same batches, ready in memory.

    A first run, over the text that comes with ffmem, has compiled the kernels; nothing of the corpus has been read before.
    The trunk reads the batches of the first quarter of the text; its time is scaled up.
    """
    _, tokenizer = stored_model("wiki16", None, None)
    torch.manual_seed(0)
    with torch.device(device):
        network = AdaptiveLM(AdaptiveConfig(vocab_size=len(tokenizer), cutoffs=[20_000, 60_000])).to(torch.bfloat16)
    model = ffmem.load_model(network, tokenizer=tokenizer)
    files = [Path(file) for file in corpus]
    with tempfile.TemporaryDirectory() as folder:
        ffmem.build_index(model, "pocket", out=Path(folder) / "first", quiet=True)
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        index = ffmem.build_index(model, files, out=Path(folder) / "run", limit_tokens=tokens)
        whole = time.perf_counter() - began
        result = {
            "tokens": index.counts.tokens,
            "shards": index.counts.shards,
            "seconds": round(whole, 2),
            "reading_seconds": events(index, "finished")[-1]["seconds"],
            "writing_seconds": events(index, "written")[-1]["seconds"],
            "read_again": events(index, "written")[-1]["read_again"],
            "tokens_per_second": round(index.counts.tokens / whole),
            "run_folder_bytes": index.folder.disk_use(),
            "peak_memory": torch.cuda.max_memory_allocated(),
        }
        print(json.dumps(result), file=sys.stderr, flush=True)
    encoder = Encoder(tokenizer, model.context - 1)
    share = index.counts.tokens // QUARTER
    plan = Corpus(open_sources(files), encoder, Unit("sentence"), "en", SHARD_TOKENS["cuda"], share, max(1, cores() - 2))
    subject = ModelInfo.of(model)
    size = auto_batch_tokens(subject.facts.cells, subject.facts.dtype, subject.facts.device, subject.layer_bytes)
    began = time.perf_counter()
    shards = list(plan.stream())
    feeding = time.perf_counter() - began
    batches = [batch for shard in shards for batch in shard.batches(size, model.bos)]
    run = each(bare, model)
    run(batches[::8])
    bare_seconds = _timed(partial(run, batches)) * index.counts.tokens / sum(batch.tokens for batch in batches)
    return result | {
        "bare_seconds": round(bare_seconds, 2),
        "ratio": round(whole / bare_seconds, 3),
        "reading_ratio": round(result["reading_seconds"] / bare_seconds, 3),
        "fed_tokens_per_second": round(share / feeding),
    }


def _timed(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of text, for each shape")
    parser.add_argument("--shard", type=int, default=SHARD_TOKENS["cuda"], help="tokens that are sorted by length together")
    parser.add_argument("--kernels", action="store_true", help="time the kernels of one layer alone")
    parser.add_argument("--profile", action="store_true", help="only show which kernels take the time")
    parser.add_argument("--corpus", nargs="+", type=Path, help="text files: end to end, with the paper's shape")
    parser.add_argument("--no-usual", action="store_true", help="leave out torch.topk in each layer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--out", type=Path, help="add the result to this JSON file")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for shape in chosen.shapes:
        if chosen.profile:
            profile(shape, chosen.tokens, chosen.shard, chosen.device)
            continue
        if chosen.kernels:
            shape, results = "kernels", iter([kernels(shape, chosen.device)])
        elif chosen.corpus:
            shape, results = "end to end", iter([end_to_end(chosen.corpus, chosen.tokens, chosen.device)])
        else:
            results = compare(shape, chosen.tokens, chosen.shard, chosen.device, usual=not chosen.no_usual)
        for result in results:
            add_result(chosen.out, shape, result | measured_here(chosen.device))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
