"""The steps of a training: their schedule, their log, their checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffmem.atomic import refused
from ffmem.errors import RunError
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.progress import reporting
from ffmem.run.folder import RunFolder
from ffmem.training.batches import Reader, Windows
from ffmem.training.perplexity import window_perplexity
from ffmem.training.recipe import Recipe
from ffmem.training.state import Counters, load_state, save_state, uninterrupted
from ffmem.training.stream import Ids

STATE, LOG = "work/state.safetensors", "log.jsonl"
GLANCE = 64
"""Number of windows that a validation in the midst of a training reads."""


class Trainer:
    """Runs the steps of one training with their schedule, and writes its log and checkpoints."""

    def __init__(
        self,
        model: AdaptiveLM,
        recipe: Recipe,
        folder: RunFolder,
        *,
        minutes: int | float | None,
        steps: int | None,
        compiled: bool | None,
    ) -> None:
        self.model, self.recipe, self.folder = model, recipe, folder
        self.minutes, self.total = minutes, steps
        self.device = model.device
        on_gpu = self.device.type == "cuda"
        self.optimiser = _optimiser(model, recipe, fused=on_gpu)
        self.counters = Counters()
        self.since = time.monotonic()
        """The time (monotonic) up to which the counters hold the seconds spent."""
        self.losses: list[Tensor] = []
        """The mean loss of every step since the last line of the log."""
        self.autocast: Callable[[], Any] = (lambda: torch.autocast("cuda", torch.bfloat16)) if on_gpu else nullcontext
        self.loss: Callable[[Windows], Tensor] = self._loss
        if on_gpu if compiled is None else compiled:
            # All blocks in one graph: a minute to compile, and then a seventh faster than a compiled block for all.
            self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, windows: Windows) -> Tensor:
        """Summed -log p of a batch's targets."""
        with self.autocast():
            h = self.model.model(input_ids=windows.ids, use_cache=False).last_hidden_state
            return self.model.nll(h.flatten(0, 1), windows.targets, windows.tails)

    @property
    def seconds(self) -> float:
        """Time spent on steps until now."""
        return self.counters.seconds + time.monotonic() - self.since

    def fraction(self) -> float:
        """The share of the budget that is spent."""
        if self.total is not None:
            return self.counters.step / self.total
        assert self.minutes is not None
        return self.seconds / (60 * self.minutes)

    def rate(self, fraction: float) -> float:
        """The learning rate of the next step: it climbs over the first steps, then falls in a straight line to zero."""
        climb = min(1.0, (self.counters.step + 1) / max(1, self.recipe.warmup))
        return self.recipe.rate * climb * max(0.0, 1.0 - fraction)

    def step(self, batches: list[Windows], rate: float) -> Tensor:
        """One step; returns the mean loss, still on the device."""
        total = sum(len(windows.targets) for windows in batches)
        mean = torch.zeros((), device=self.device)
        for windows in batches:
            loss = self.loss(_any_tails(windows.to(self.device))) / total
            loss.backward()
            mean += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        with uninterrupted():
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self.counters.step += 1
            self.counters.tokens += total
            self.losses.append(mean)
        return mean

    def run(self, reader: Reader, held: Ids, checkpoint_minutes: int | float, log_every: int, quiet: bool) -> None:
        """All steps that are left; the state is kept behind the last, and when the user stops before it."""
        if (self.folder / STATE).exists():
            self.counters = load_state(self.folder / STATE, self.model, self.optimiser)
        self._cut_log()
        self.since = saved = time.monotonic()
        note = ""
        glance = held[: GLANCE * 256]
        with reporting("training", quiet=quiet) as reporter, self._kept_on_interrupt():
            for batches in reader.steps(self.counters.step, self.recipe.windows):
                fraction = self.fraction()
                if fraction >= 1:
                    break
                self.step(batches, self.rate(fraction))
                if self.counters.step % log_every == 0:
                    note = self._log(glance if self.counters.step % (10 * log_every) == 0 else None)
                reporter.update(min(1.0, fraction), note)
                if time.monotonic() - saved >= 60 * checkpoint_minutes:
                    self._keep()
                    saved = time.monotonic()
            if self.losses:
                self._log()
            self._keep()

    def _mean_loss(self) -> float:
        """The mean loss of the steps since the last line of the log; an error where it is not finite."""
        loss = float(torch.stack(self.losses).mean()) if self.losses else 0.0
        if not np.isfinite(loss):
            raise RunError(
                f"the loss at step {self.counters.step} is {loss}; continue from the last checkpoint or start over"
            )
        return loss

    def _log(self, glance: Ids | None = None) -> str:
        """Add a line to the log, with a validation on these tokens if any are given, and return it as a note."""
        loss, rate, seconds = self._mean_loss(), self.optimiser.param_groups[0]["lr"], self.seconds
        line = {"step": self.counters.step, "tokens": self.counters.tokens, "seconds": round(seconds, 1)}
        line |= {"loss": round(loss, 4), "rate": round(rate, 7)}
        note = f"step {self.counters.step:,}, loss {loss:.3f}, {self.counters.tokens / seconds:,.0f} tokens/s"
        if glance is not None:
            with self.autocast():
                line["valid_perplexity"] = round(window_perplexity(self.model, glance), 2)
            note += f", valid perplexity {line['valid_perplexity']:.1f}"
        # Stopped between the two, a step would have a second line.
        with uninterrupted(), refused(self.folder / LOG):
            with (self.folder / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.losses = []
        return note

    def _cut_log(self) -> None:
        """Drop the lines of steps that a kill has undone: they will come again."""
        if (self.folder / LOG).exists():
            lines = (self.folder / LOG).read_text("utf-8").splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("}\n") and json.loads(line)["step"] <= self.counters.step]
            with self.folder.writing(LOG) as path:
                path.write_text("".join(whole), "utf-8")

    def _keep(self) -> None:
        """Save the state, unless it has come to no numbers."""
        self._mean_loss()
        now = time.monotonic()
        self.counters.seconds, self.since = self.counters.seconds + now - self.since, now
        with self.folder.writing(STATE) as path:
            save_state(path, self.model, self.optimiser, self.counters)

    @contextmanager
    def _kept_on_interrupt(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if self.losses:
                self._log()
            self._keep()
            raise


def _any_tails(windows: Windows) -> Windows:
    """Tell the compiler that the number of rare words changes from batch to batch: one compilation for all."""
    for tail in windows.tails:
        for tensor in tail:
            if len(tensor) > 1:
                torch._dynamo.mark_dynamic(tensor, 0)
    return windows


def _optimiser(model: AdaptiveLM, recipe: Recipe, *, fused: bool) -> torch.optim.AdamW:
    matrices = {name for name, parameter in model.named_parameters() if "layers." in name and parameter.dim() == 2}
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for name, parameter in model.named_parameters() if (name in matrices) == decayed],
            "weight_decay": recipe.decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, fused=fused)
