"""Mixed work on one model by many threads at once, every answer compared with the one that was computed alone."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ffmem import build_index, compare, intervene, load_model, trace
from ffmem.experiments.substitution import recorded, replayed, substituted
from ffmem.model.memories import MemoryModel
from tests.tiny import some_sentences, tiny_model, word_tokenizer

VARIANT = "opt"
"""A ReLU model: a pass may compute its activations in its own way, in place of the modules' forwards."""
IDS = torch.tensor([[0, 11, 25, 7, 40, 33], [0, 9, 8, 61, 12, 30]])
PROMPT = "the king of France left"
SWITCH = 1e-5
"""Seconds after which another thread has its turn: far fewer than usual, so that turns fall into the midst of things."""
RARE = 25
"""How many times as often as a whole pass over a text everything else is done."""


@dataclass
class Found:
    """What threads found: how often each kind of work was done, and every answer that was not the one computed alone."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def tiny(variant: str = VARIANT) -> MemoryModel:
    return load_model(tiny_model(variant), tokenizer=word_tokenizer())


@torch.inference_mode()
def plain(model: MemoryModel) -> Any:
    """A forward as a user makes it, who knows nothing of hooks."""
    return model.model(input_ids=IDS, use_cache=False).logits


def read(model: MemoryModel, layers: list[int] | None) -> Any:
    seen: list[Any] = []
    with model.reading(lambda layer, m: seen.append((layer, m.clone())), layers) as forward:
        forward(IDS)
        forward(IDS[:1, :3])
    return seen


def make_activations(model: MemoryModel) -> Any:
    """Coefficients that the reader makes itself."""
    made: list[Any] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        made.append(x.relu())
        return made[-1]

    found = model.find_activations()
    activating = {layer: (activation, make) for layer, activation in enumerate(found, 1) if activation}
    with model.reading(lambda layer, m: made.append(layer), activating=activating) as forward:
        forward(IDS)
    return made


def edit(model: MemoryModel, at: str) -> Any:
    with intervene(model, "L1D3=2", "L2D5*-4", at=at):
        return model.logits(IDS), read(model, [2]) if at != "all" else read(model, [3])


def substitute(model: MemoryModel) -> Any:
    """Every layer's coefficients halved, one after the other, on what the blocks below gave."""
    with recorded(model) as outputs:
        model.logits(IDS)
    found = []
    for layer in range(1, model.layers + 1):
        with replayed(model, outputs[: layer - 1]), substituted(model, [layer], lambda factors: factors.m / 2):
            found.append(model.logits(IDS))
    return found


def index(model: MemoryModel) -> Any:
    with TemporaryDirectory() as folder:
        run = build_index(model, some_sentences(12), out=Path(folder) / "run", unit="line", top=3, quiet=True)
        return [run.table(name).to_pylist() for name in ("triggers", "cells")]


def work(model: MemoryModel) -> dict[str, Callable[[], Any]]:
    """Kinds of work by name; each gives its answer."""
    return {
        "forward": partial(plain, model),
        "reading": partial(read, model, None),
        "reading 1": partial(read, model, [1]),
        "reading 2, 3": partial(read, model, [2, 3]),
        "activating": partial(make_activations, model),
        "record": lambda: vars(model.record(IDS)),
        "record_at": lambda: vars(model.record_at(IDS, torch.tensor([2, 5]))),
        "trace": lambda: trace(model, PROMPT, grid=True).as_dict(),
        "compare": lambda: compare(model, PROMPT, "L1D3=2", generate=2, control=1).as_dict(),
        "intervene": partial(edit, model, "all"),
        "intervene at": partial(edit, model, "1:"),
        "generate": lambda: model.generate(PROMPT, 3),
        "substitute": partial(substitute, model),
        "load": lambda: load_model(model.model, tokenizer=model.tokenizer).cells,
        "index": partial(index, model),
    }


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def together(seconds: float, *, count: int = 8, seed: int = 0, variant: str = VARIANT) -> Found:
    """`count` threads at work on one model for so long; every kind of work is done at least once."""
    model = tiny(variant)
    kinds = work(model)
    alone = {name: kind() for name, kind in kinds.items()}
    found, noting, start = Found(), threading.Lock(), threading.Barrier(count)
    end = time.monotonic() + seconds

    def one(number: int) -> None:
        chooser = random.Random(f"{seed} {number}")
        names = list(kinds)
        ahead = names[number::count]  # these for certain, then any
        start.wait()
        while ahead or time.monotonic() < end:
            weights = [1 if name == "index" else RARE for name in names]
            name = ahead.pop() if ahead else chooser.choices(names, weights)[0]
            try:
                wrong = "" if same(alone[name], kinds[name]()) else "another answer"
            except BaseException as error:  # whatever it is, it is a finding
                wrong = f"{type(error).__name__}: {error}"
            with noting:
                found.done[name] += 1
                if wrong:
                    found.wrong.append(f"{name}: {wrong}")

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    left = [hook for module in model.model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]
    left += [module for module in model.model.modules() if "forward" in vars(module)]
    if left:
        found.wrong.append(f"{len(left)} hooks left behind")
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    length, *more = sys.argv[1:]  # seconds, and the variants of a tiny model that are wanted, in turn
    for name in more or [VARIANT]:
        result = together(float(length), variant=name)
        print(f"{name}: {len(result.wrong)} of {sum(result.done.values())} answers wrong", dict(result.done))
        for line, times in Counter(result.wrong).most_common(12):
            print(f"  {times} × {line[:150]}")
