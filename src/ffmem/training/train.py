"""Train a language model of the paper's kind: one GPU (or a CPU, for a try), a budget of minutes or steps."""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ffmem.corpus.sources import open_sources
from ffmem.index.folder import RunFolder
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.tokenizer import WikiTokenizer, wiki_tokenizer
from ffmem.model.loading import device_of, quiet_transformers
from ffmem.progress import reporting
from ffmem.training.batches import Reader, Windows
from ffmem.training.perplexity import Perplexity, perplexity, window_perplexity
from ffmem.training.recipe import Recipe, recipe_of
from ffmem.training.state import Counters, load_state, save_state
from ffmem.training.stream import MARK, Ids, read_stream, vocabulary, write_stream
from ffmem.words import CorpusError, FfmemError, RunError

STREAM, VOCABULARY, STATE = "work/stream.i32", "work/words.txt", "work/state.safetensors"
PLAN, LOG, CARD = "plan.json", "log.jsonl", "training.json"
HELD_OUT = 200_000
"""Tokens kept for validation where no text is given for it, but never more than a tenth of the corpus."""
GLANCE = 64
"""Windows that a validation during the training reads."""


def train(
    corpus: Any,
    *,
    out: str | Path,
    size: str | Recipe = "medium",
    minutes: int | float | None = None,
    steps: int | None = None,
    valid: Any = None,
    min_count: int = 3,
    seed: int = 0,
    device: str = "auto",
    compiled: bool | None = None,
    checkpoint_minutes: int | float = 5,
    log_every: int = 50,
    column: str = "text",
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Train on a corpus and leave a model folder at `out`; the same call continues a training that was stopped.

    The schedule ends after `steps` steps, or after `minutes` (15 unless told). By steps, a training that was stopped and
    continued on the same kind of machine ends as an uninterrupted one; by minutes, the clock decides the number of steps.
    """
    recipe = recipe_of(size)
    if (minutes is not None and minutes <= 0) or (steps is not None and steps < 1) or (minutes and steps):
        raise FfmemError(f"expected minutes or steps above 0, one of the two, found minutes {minutes} and steps {steps}")
    if minutes is None and steps is None:
        minutes = 15
    folder = RunFolder(out)
    target = device_of(device)
    sources = open_sources(corpus, column=column, headings=True)
    plan = {
        "recipe": json.loads(json.dumps(asdict(recipe))),
        "minutes": minutes,
        "steps": steps,
        "min_count": min_count,
        "seed": seed,
        "corpus": [source.name for source in sources],
    }
    with folder.locked():
        _begin(folder, plan, overwrite)
        if (folder / CARD).exists():
            return folder.path
        tokenizer = _prepare(folder, sources, min_count, recipe.context, quiet)
        stream: Ids = np.memmap(folder / STREAM, np.int32, "r")
        if valid is not None:
            held = read_stream(open_sources(valid, column=column, headings=True), tokenizer)
        else:
            held, stream = _hold_out(stream)
        if len(stream) < 3 * max(length for length, _ in recipe.windows):
            raise CorpusError(f"expected a corpus of many windows, found {len(stream):,} tokens; give more text")
        torch.manual_seed(seed)
        model = AdaptiveLM(recipe.config(len(tokenizer))).to(target)
        trainer = Trainer(model, recipe, folder, minutes=minutes, steps=steps, compiled=compiled)
        trainer.run(Reader(stream, model.config.bands, seed=seed), held, checkpoint_minutes, log_every, quiet)
        found = perplexity(model.eval(), held)
        _save(folder, model, tokenizer, plan, trainer.counters, found)
    return folder.path


class Trainer:
    """Steps, their schedule, their log and their checkpoints."""

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
        self.autocast: Callable[[], Any] = (lambda: torch.autocast("cuda", torch.bfloat16)) if on_gpu else nullcontext
        self.loss: Callable[[Windows], Tensor] = self._loss
        if on_gpu if compiled is None else compiled:
            self.loss = torch.compile(self._loss, dynamic=False)

    def _loss(self, windows: Windows) -> Tensor:
        """Summed -log p of a batch's targets."""
        with self.autocast():
            h = self.model.model(input_ids=windows.ids, use_cache=False).last_hidden_state
            return self.model.nll(h.flatten(0, 1), windows.targets, windows.tails)

    def fraction(self, since: float) -> float:
        """The share of the budget that is spent."""
        if self.total is not None:
            return self.counters.step / self.total
        assert self.minutes is not None
        return (self.counters.seconds + time.monotonic() - since) / (60 * self.minutes)

    def rate(self, fraction: float) -> float:
        """A climb over the first steps, then a straight line down to nothing."""
        climb = min(1.0, (self.counters.step + 1) / self.recipe.warmup)
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
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.counters.step += 1
        self.counters.tokens += total
        return mean

    def run(self, reader: Reader, held: Ids, checkpoint_minutes: int | float, log_every: int, quiet: bool) -> None:
        """All steps that are left."""
        if (self.folder / STATE).exists():
            self.counters = load_state(self.folder / STATE, self.model, self.optimiser)
        began = saved = time.monotonic()
        losses: list[Tensor] = []
        note = ""
        glance = held[: GLANCE * 256]
        with reporting("training", quiet=quiet) as reporter, self._kept_on_interrupt(lambda: began) as keep:
            for batches in reader.steps(self.counters.step, self.recipe.windows):
                fraction = self.fraction(began)
                if fraction >= 1:
                    break
                rate = self.rate(fraction)
                losses.append(self.step(batches, rate))
                if self.counters.step % log_every == 0 or self.counters.step == self.total:
                    note = self._log(losses, rate, began, glance if self.counters.step % (10 * log_every) == 0 else None)
                    losses = []
                reporter.update(min(1.0, fraction), note)
                if time.monotonic() - saved >= 60 * checkpoint_minutes:
                    keep()
                    began = saved = time.monotonic()
        self.counters.seconds += time.monotonic() - began

    def _log(self, losses: list[Tensor], rate: float, began: float, glance: Ids | None) -> str:
        loss = float(torch.stack(losses).mean())
        if not np.isfinite(loss):
            raise RunError(
                f"the loss at step {self.counters.step} is {loss}; continue from the last checkpoint or start over"
            )
        seconds = self.counters.seconds + time.monotonic() - began
        line = {"step": self.counters.step, "tokens": self.counters.tokens, "seconds": round(seconds, 1)}
        line |= {"loss": round(loss, 4), "rate": round(rate, 7)}
        note = f"step {self.counters.step:,}, loss {loss:.3f}, {self.counters.tokens / seconds:,.0f} tokens/s"
        if glance is not None:
            self.model.eval()
            with self.autocast():
                line["valid_perplexity"] = round(window_perplexity(self.model, glance), 2)
            self.model.train()
            note += f", valid perplexity {line['valid_perplexity']:.1f}"
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return note

    @contextmanager
    def _kept_on_interrupt(self, began: Callable[[], float]) -> Iterator[Callable[[], None]]:
        """Gives a function that saves the state; it is also called when the user stops the training."""

        def keep() -> None:
            self.counters.seconds += time.monotonic() - began()
            with self.folder.writing(STATE) as path:
                save_state(path, self.model, self.optimiser, self.counters)

        try:
            yield keep
        except KeyboardInterrupt:
            keep()
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


def _begin(folder: RunFolder, plan: dict[str, Any], overwrite: bool) -> None:
    """A fresh folder with its plan, or the same plan in the folder that is there."""
    path = folder / PLAN
    if overwrite and path.exists():
        for name in (PLAN, LOG, CARD):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder.work, ignore_errors=True)
    if path.exists():
        before = json.loads(path.read_text("utf-8"))
        for name, wanted in plan.items():
            if before.get(name) != wanted:
                raise RunError(
                    f"{folder.path}: was begun with {name} {before.get(name)}, found {wanted}; "
                    "give the same command, another folder, or --overwrite"
                )
    elif any(folder.path.iterdir()):
        raise RunError(f"{folder.path} exists and is no training: choose another folder")
    folder.work.mkdir(exist_ok=True)
    with folder.writing(PLAN) as temporary:
        temporary.write_text(json.dumps(plan, indent=2) + "\n", "utf-8")


def _prepare(folder: RunFolder, sources: Any, min_count: int, context: int, quiet: bool) -> WikiTokenizer:
    """The tokenizer, from the corpus's own words; the stream is written beside them, once."""
    path = folder / VOCABULARY
    with reporting("reading the corpus", quiet=quiet) as reporter:
        if not path.exists():
            with folder.writing(VOCABULARY) as temporary:
                temporary.write_text("\n".join(vocabulary(sources, min_count=min_count, reporter=reporter)), "utf-8")
        tokenizer = wiki_tokenizer(path.read_text("utf-8").split("\n"), context=context)
        if not (folder / STREAM).exists():
            write_stream(sources, tokenizer, folder / STREAM, reporter)
    return tokenizer


def _hold_out(stream: Ids) -> tuple[Ids, Ids]:
    """The end of the stream for validation, from a sentence on, and what is before it."""
    wanted = len(stream) - min(HELD_OUT, len(stream) // 10)
    starts = np.flatnonzero(stream[:wanted] == MARK)
    at = int(starts[-1]) if len(starts) else 0
    return np.asarray(stream[at:]), stream[:at]


def _save(
    folder: RunFolder,
    model: AdaptiveLM,
    tokenizer: WikiTokenizer,
    plan: dict[str, Any],
    counters: Counters,
    found: Perplexity,
) -> None:
    """The model folder, then its card; the card's name makes it count, and the work is cleared."""
    with quiet_transformers():
        model.save_pretrained(folder.path)
    tokenizer.save_pretrained(folder.path)
    card = plan | asdict(counters) | {"perplexity": asdict(found), "vocabulary": len(tokenizer)}
    card["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    card["machine"] = torch.cuda.get_device_name() if model.device.type == "cuda" else platform.processor() or "cpu"
    with folder.writing(CARD) as path:
        path.write_text(json.dumps(card, indent=2) + "\n", "utf-8")
    shutil.rmtree(folder.work, ignore_errors=True)
