"""Intervene: run a model with some coefficients edited; no weight is changed, and the hooks always come off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ffmem.errors import ModelError
from ffmem.live.edits import Change, Changes, Edit, edited, parse_edits, resolve, statistics_for
from ffmem.live.scope import Columns, Scope, following
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.model.spots import Hook, hooked
from ffmem.run.reader import Index


@contextmanager
def intervene(
    model: MemoryModel | Any,
    *edits: str | tuple[Any, str] | Edit,
    at: str | int | slice | Scope = "all",
    run: str | Path | Index | None = None,
    **load: Any,
) -> Iterator[MemoryModel]:
    """Run a model inside with edited coefficients: `with intervene(model, "L11D1203=0", "L12D7*2"): ...`.

    An edit acts on what enters the value matrix. `L3D1=0` sets, `L3D1*2` multiplies, `L3D1+1` adds, and `L3D1~q0.99*2`
    sets to twice the cell's own 0.99-quantile, from the statistics of `run`; `L3D1,L3D2=0`, `@cells.txt=0` and a pair
    `(cells, "=0")` edit sets of cells. Edits are made in the order given; those of an inner `intervene` come after those
    of an outer one. They act only on forwards of the thread that opened it.

    `at` says where: `all` positions (the beginning-of-sentence token's and generated ones too), a range of the prompt's
    tokens as in Python (`3:`, `2:5`), one of them (`4`, `-1`), or `generated` tokens only. The prompt's tokens are counted
    from 0 without a beginning-of-sentence token; padding on either side is not counted if there is an attention mask.
    A prompt is what a forward without a cache gets; what `generate` feeds behind it, with or without a cache and beams, is
    generated.

    Yields the model; `model` is one already or anything that `load_model` takes.
    """
    scope, parsed = Scope.parse(at), parse_edits(edits)
    loaded = load_model(model, **load)
    with applying(loaded, resolve(loaded, parsed, statistics_for(loaded, run)), scope):
        yield loaded


@contextmanager
def applying(model: MemoryModel, changes: Changes, scope: Scope) -> Iterator[None]:
    """Run a model inside with changes that edits were resolved to, at the positions of a scope."""
    columns = None if scope.text == "all" else Columns(scope, model.bos)
    hooks: list[Hook] = []
    if columns is not None:
        # Some models call a part of their base model rather than the whole; a reader of coefficients calls the base model.
        for module in dict.fromkeys((model.model, model.model.base_model)):
            hooks.append(Hook(module, "in", following(columns)))
    for layer, parts in changes.items():
        hooks.append(Hook(model.value_module(layer), "in", _editing(model, layer, parts, columns)))
    with hooked(*hooks):
        yield


def _editing(model: MemoryModel, layer: int, changes: list[Change], columns: Columns | None) -> Callable[..., Any]:
    """A hook for a layer's value matrix: it edits the coefficients that enter, in the columns that are meant."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        m: Tensor = args[0]
        if columns is None:
            return (edited(m, changes), *args[1:]), kwargs
        where = columns.where
        if where is None or where.numel() * m.shape[-1] != m.numel():
            raise ModelError(f"{model.name}: layer {layer} got {tuple(m.shape)} coefficients in a forward not seen to begin")
        if not where.any():
            return None
        new = edited(m.reshape(*where.shape, -1), changes, where.to(m.device))
        return (new.reshape(m.shape), *args[1:]), kwargs

    return enter
