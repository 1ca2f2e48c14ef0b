"""The state of a training between two steps: weights, moments and counters, in one file without pickle."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ffmem.errors import RunError
from ffmem.indexing.sealed import SealError, load_sealed, save_sealed

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Counters:
    """How far a training has come."""

    step: int = 0
    seconds: float = 0.0
    """Time spent on steps, added up over all calls that continued the training."""
    tokens: int = 0


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block: a state is never kept when some of its weights have moved and others
    not."""
    if threading.current_thread() is not threading.main_thread():
        yield  # no signal is handled here
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    came: list[tuple[Any, Any]] = []
    for number in before:
        signal.signal(number, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number, frame in came[:1]:
        before[number](number, frame)


def save_state(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, counters: Counters) -> None:
    """Write weights, the optimiser's moments and the counters to one sealed file."""
    tensors = {f"weights.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for moment in MOMENTS:
            if parameter in optimiser.state:
                tensors[f"{moment}.{name}"] = optimiser.state[parameter][moment]
    save_sealed(path, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, asdict(counters))


@torch.no_grad()
def load_state(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> Counters:
    """Fill model and optimiser from a saved state and return its counters."""
    try:
        tensors, facts = load_sealed(path)
        counters = Counters(**facts)
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"weights.{name}"])
            if counters.step:
                step = torch.tensor(float(counters.step))
                fused = bool(optimiser.defaults.get("fused"))
                optimiser.state[parameter] = {"step": step.to(parameter.device) if fused else step} | {
                    moment: tensors[f"{moment}.{name}"].to(parameter.device) for moment in MOMENTS
                }
    except (SealError, KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"{path}: damaged ({error}), so this cannot be continued; start over with --overwrite") from error
    return counters
