"""A transformer as a stack of key-value memories: its keys, values and coefficients, read without changing it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ffmem.cells import check_layer, parse_layers
from ffmem.errors import ModelError
from ffmem.model.activation import Activation, ActivationFinder
from ffmem.model.families import Family
from ffmem.model.process import alone
from ffmem.model.spots import Hook, LayerTensors, Recording, hooked, module_at, record_spot, spots_of, touched
from ffmem.model.vocabulary import SoftmaxVocabulary, Vocabulary
from ffmem.text import quoted

Visit = Callable[[int, Tensor], None]
NO_LIMIT = 1 << 20
"""How many tokens are fed at most to a model whose config states no limit."""
SHORT_ROWS, NARROW_HEADS = 64, 64
"""Up to so many tokens and such a width of a head torch's memory-efficient attention is faster than its flash attention."""


class _Stop(BaseException):
    """Raised inside a forward to end it once the last wanted layer has been read.

    It is no `Exception`: on those torch walks the hooks of all modules around, which other threads may be changing.
    """


class _UnderWay(threading.local):
    """The forward of a reader that this thread is in: the shape of its token ids, or None outside such a forward."""

    shape: tuple[int, ...] | None = None


@dataclass(repr=False)
class MemoryModel:
    """A Hugging Face model with its tokenizer and its family, which says where its keys, values and coefficients are."""

    model: Any
    tokenizer: Any
    family: Family
    name: str
    revision: str | None = None
    found_by_shape: bool = False
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may be run."""
    in_memory: bool = False
    """Whether a caller brought the model, so that it cannot be loaded again by its name."""
    fingerprint: Callable[[], str] = field(default=lambda: "", repr=False)
    """The hash of the weights as they were loaded, before any cast."""

    def __repr__(self) -> str:
        return (
            f"MemoryModel({self.name!r}: {sum(self.cells):,} cells in {self.layers} layers, {self.dtype} on {self.device})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "model": self.name,
            "architecture": type(self.model).__name__,
            "family": f"{self.family.name}{', found by shape' if self.found_by_shape else ''}",
            "cells": f"{sum(self.cells):,} in {self.layers} layers, values of {self.d}",
            "dtype": f"{self.dtype} on {self.device}",
        }
        rows = "".join(f"<tr><td><b>{escape(name)}</b></td><td>{escape(text)}</td></tr>" for name, text in facts.items())
        return f'<table style="text-align:left">{rows}</table>'

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The transformer's blocks, first layer first."""
        return list(module_at(self.model, self.family.blocks, "the blocks").children())

    @cached_property
    def value_modules(self) -> list[nn.Module]:
        """The value matrix of each layer: the module whose input is the layer's coefficients."""
        return [module_at(block, self.family.value, "the value matrix") for block in self.blocks]

    @property
    def config(self) -> Any:
        """The config of the language model, which in a model of pictures and text is a part of the whole."""
        return getattr(self.model.config, "text_config", None) or self.model.config

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.blocks)

    @cached_property
    def cells(self) -> list[int]:
        """The number of cells of each layer."""
        return [_rows(module).shape[0] for module in self.value_modules]

    @cached_property
    def d(self) -> int:
        """The width of the stream, which every value has."""
        return _rows(self.value_modules[0]).shape[1]

    @property
    def device(self) -> torch.device:
        """The device that token ids have to be on."""
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.value_modules[0].weight.dtype  # type: ignore[return-value]

    @property
    def dtype_name(self) -> str:
        """The dtype of the values as manifests hold it, such as `float32`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def context(self) -> int:
        """The number of tokens of the longest sequence that the model takes."""
        for name in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
            limit = getattr(self.config, name, None)
            if isinstance(limit, int) and limit > 0:
                return limit
        return NO_LIMIT

    @cached_property
    def bos(self) -> int | None:
        """The id of the token put before a sentence: the tokenizer's bos, else its eos, else None."""
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(self.tokenizer, name, None)
            if token is not None:
                return int(token)
        return None

    def block(self, layer: Any) -> nn.Module:
        """The block of a layer (from 1); an error with the layers there are for any other number."""
        return self.blocks[check_layer(layer, self.layers) - 1]

    def value_module(self, layer: Any) -> nn.Module:
        """The value matrix of a layer (from 1)."""
        return self.value_modules[check_layer(layer, self.layers) - 1]

    def keys(self, layer: int) -> Float[Tensor, "cells d"]:
        """The keys of a layer (from 1); in a gated layer, the gate's."""
        path, _, half = self.family.key.partition("[")
        rows = _rows(module_at(self.block(layer), path, "the keys")).T
        if half:
            rows = rows.chunk(2)[int(half.rstrip("]"))]
        return rows

    def values(self, layer: int) -> Float[Tensor, "cells d"]:
        """The values of a layer (from 1), without the value bias."""
        return _rows(self.value_module(layer))

    def value_bias(self, layer: int) -> Float[Tensor, " d"] | None:
        """The bias of a layer's value matrix (layers from 1), None if it has none."""
        return getattr(self.value_module(layer), "bias", None)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The projection of vectors onto the vocabulary: the network's own if it has one, else its unembedding's softmax."""
        if own := getattr(self.model, "vocabulary_projection", None):
            return own()  # type: ignore[no-any-return]
        unembedding = self.model.get_output_embeddings()
        if not isinstance(unembedding, nn.Linear):
            raise ModelError(f"{self.name}: expected a linear unembedding, found {type(unembedding).__name__}")
        divisor = getattr(self.config, "logits_scaling", None)
        return SoftmaxVocabulary(
            unembedding=unembedding,
            norm=_optional(self.model, self.family.norm),
            project=_optional(self.model, self.family.project),
            softcap=getattr(self.config, "final_logit_softcapping", None),
            scale=1 / divisor if divisor else getattr(self.config, "logit_scale", None) or 1.0,
        )

    @torch.inference_mode()
    def find_activations(self) -> list[Activation | None]:
        """Each layer's activation function, None where a pass must not compute it in the model's place.

        The answer is that of the moment: while an `intervene` changes coefficients, it is None for every layer.
        """
        from ffmem.model.check import probe_ids

        if any(touched(value, before_only=True) for value in self.value_modules):
            return [None] * self.layers
        finders = [ActivationFinder(block, value) for block, value in zip(self.blocks, self.value_modules, strict=True)]
        with hooked(*(hook for finder in finders for hook in finder.hooks())):
            self.model.base_model(input_ids=probe_ids(self), use_cache=False)
        return [finder.activation() for finder in finders]

    @contextmanager
    def reading(
        self,
        visit: Visit,
        layers: str | int | Iterable[int] | None = None,
        activating: Mapping[int, tuple[Activation, Callable[[Tensor], Tensor]]] | None = None,
    ) -> Iterator[Callable[[Tensor], None]]:
        """Yield a forward that calls `visit(layer, coefficients)` for every wanted layer, in order.

        The forward takes token ids, padded on the right, and ends as soon as the last wanted layer has been read, so
        neither that layer's values nor the logits are computed. Padding needs no mask: a causal model never looks right.
        Only this forward is read, in whatever thread it is called; any other forward made meanwhile, by another thread
        or by `visit`, runs as if nobody read.

        For a layer in `activating`, the function there is called in place of the activation: it gets the activation's
        input and returns the coefficients, and `visit` is not called.
        """
        wanted = parse_layers(layers, self.layers)
        activating = activating or {}
        under_way = _UnderWay()

        def aside(call: Callable[..., Any], *args: Any) -> Any:
            """Call `call`, so that a forward made inside it is not taken for the one that is read."""
            shape, under_way.shape = under_way.shape, None
            try:
                return call(*args)
            finally:
                under_way.shape = shape

        def look(layer: int) -> Hook:
            def enter(_: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> None:
                assert under_way.shape is not None
                if layer not in activating:
                    aside(visit, layer, args[0].reshape(*under_way.shape, -1))
                if layer == wanted[-1]:
                    raise _Stop

            return Hook(self.value_module(layer), "in", enter)

        def replace(activation: Activation, make: Callable[[Tensor], Tensor]) -> Hook:
            def forward(x: Tensor) -> Tensor:
                assert under_way.shape is not None
                return aside(make, x.reshape(*under_way.shape, -1)).view(x.shape)

            return Hook(activation.module, "instead", forward)

        def forward(ids: Int[Tensor, "batch pos"]) -> None:
            fed = self.fed(ids)
            before, under_way.shape = under_way.shape, tuple(fed.shape)
            try:
                with torch.inference_mode(), self.attending(fed.shape[1]):
                    self.model.base_model(input_ids=fed, use_cache=False)
            except _Stop:
                return
            finally:
                under_way.shape = before
            raise ModelError(f"{self.name}: layer {wanted[-1]}'s value matrix was never called in a forward")

        hooks = [*map(look, wanted), *(replace(*pair) for pair in activating.values())]
        with hooked(*hooks, acting=lambda: under_way.shape is not None):
            yield forward

    def attending(self, columns: int) -> AbstractContextManager[None]:
        """A setting under which attention is computed without cuDNN on a GPU, for rows of this many tokens.

        cuDNN plans for tens of milliseconds at every new shape of a batch. The setting is one of the whole process, so
        that threads that hold it take turns.
        """
        if self.device.type != "cuda":
            return nullcontext()
        heads = getattr(self.config, "num_attention_heads", None)
        width = getattr(self.config, "head_dim", None) or (self.d // heads if isinstance(heads, int) else self.d)
        order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        if columns <= SHORT_ROWS and width <= NARROW_HEADS:
            order.reverse()
        return alone(sdpa_kernel([*order, SDPBackend.MATH], set_priority=True))

    def fed(self, ids: Any) -> Int[Tensor, "batch pos"]:
        """Token ids moved to the model's device; anything else, or an id without a token, is an error of one line.

        Torch would only say that an index is out of range, and on a GPU nothing could be computed any more.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
            found = f"a tensor of {ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else quoted(ids)
            raise ModelError(f"expected token ids as a tensor of rows and columns, found {found}; see model.tokenizer")
        if ids.shape[1] > self.context:
            raise ModelError(f"{self.name} takes at most {self.context:,} tokens at a time, found {ids.shape[1]:,}")
        if not ids.is_cuda:  # a look at what is there already would make the host wait for the GPU
            low, high = (int(end) for end in ids.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                outside = low if low < 0 else high
                raise ModelError(f"expected token ids from 0 to {self.config.vocab_size - 1:,}, found {outside:,}")
        return ids.to(self.device)

    @torch.inference_mode()
    def logits(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos vocab"]:
        """The logits of the model's own forward."""
        return self.model(input_ids=self.fed(ids), use_cache=False).logits

    @torch.inference_mode()
    def record(self, ids: Int[Tensor, "batch pos"]) -> Recording:
        """Everything that flows through every layer in one forward (see `Recording`)."""
        kept, logits = self.record_spots(self.fed(ids), self._layer_spots, lambda tensor: tensor, self.logits)
        return Recording(**kept, logits=logits)

    @torch.inference_mode()
    def record_at(self, ids: Int[Tensor, "batch pos"], at: Int[Tensor, " batch"]) -> LayerTensors:
        """What flows through every layer at column `at` of each row; logits are not computed."""
        ids = self.fed(ids)
        if not isinstance(at, Tensor) or at.shape != ids.shape[:1]:
            raise ModelError(f"expected a column for each of {len(ids)} rows, as a tensor, found {quoted(at)}")
        rows, columns = torch.arange(len(ids), device=self.device), at.to(self.device)

        def pick(tensor: Tensor) -> Tensor:
            return tensor[rows.to(tensor.device), columns.to(tensor.device)]

        def forward(ids: Tensor) -> None:
            self.model.base_model(input_ids=ids, use_cache=False)

        kept, _ = self.record_spots(ids, self._layer_spots, pick, forward)
        return LayerTensors(**kept)

    @property
    def _layer_spots(self) -> dict[str, str]:
        """Where each tensor of `LayerTensors` flows through a block of this family."""
        row = self.family
        return {"m": f"{row.value}.in", "product": f"{row.value}.out", "r": row.r, "y": row.y, "o": row.o}

    def record_spots(
        self, ids: Tensor, spots: dict[str, str], pick: Callable[[Tensor], Tensor], forward: Callable[[Tensor], Any]
    ) -> tuple[dict[str, list[Any]], Any]:
        """Run `forward` and keep what `pick` takes at named spots of every block, such as {"r": "mlp.in"}.

        Returns a list for each name, an entry a layer, and what the forward returned.
        """
        shape = tuple(ids.shape)
        kept: dict[tuple[int, str], Tensor] = {}
        hooks = []
        for layer, block in enumerate(self.blocks):
            for expression in dict.fromkeys(spots.values()):  # a tensor that has several names is taken once
                for path, side in spots_of(expression):

                    def keep(tensor: Tensor, key: tuple[int, str] = (layer, expression)) -> None:
                        tensor = pick(tensor.reshape(*shape, -1))
                        kept[key] = kept[key] + tensor if key in kept else tensor

                    hooks.append(record_spot(block, path, side, keep))
        with hooked(*hooks):
            returned = forward(ids)
        for expression in spots.values():
            for layer in range(self.layers):
                if (layer, expression) not in kept:
                    raise ModelError(f"{self.name}: nothing flowed through {expression!r} in layer {layer + 1}")
        found = {name: [kept[layer, spot] for layer in range(self.layers)] for name, spot in spots.items()}
        return found, returned

    @property
    def has_norm(self) -> bool:
        """Whether a norm is applied to the last layer's stream before it is projected onto the vocabulary."""
        return self.family.o != "block.out" or _optional(self.model, self.family.norm) is not None

    @torch.inference_mode()
    def after_post_norm(self, h: Float[Tensor, "*batch d"], layer: int) -> Float[Tensor, "*batch d"]:
        """A vector of a layer's stream (r, y or o) as the next layer gets it: a post-norm block applies its norm to it."""
        block = self.block(layer)
        if self.family.o == "block.out":
            return h
        path, _ = self.family.o.rsplit(".", 1)
        return block.get_submodule(path)(h)

    def generate(self, prompt: str, tokens: int = 20, *, bos: str = "auto") -> str:
        """The text that the model adds to a prompt: the most likely token, `tokens` times or up to the end of the text."""
        from ffmem.model.tokens import greedy, prompt_ids

        first = [self.bos] if self.check_bos(bos) and self.bos is not None else []
        written = greedy(self, [*first, *prompt_ids(self, prompt, bos=bool(first), room=tokens)], tokens)
        return str(self.tokenizer.decode(written, skip_special_tokens=True))

    def check_bos(self, bos: str) -> bool:
        """Whether sentences start with the beginning-of-sentence token, for `auto`, `on` or `off`."""
        from ffmem.model.tokens import check_bos

        return check_bos(bos, self.bos, self.name)


def _rows(module: nn.Module) -> Float[Tensor, "inputs outputs"]:
    """A linear map's weight with a row for each input: that of nn.Linear transposed, that of GPT-2's Conv1D as it is."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    return weight if type(module).__name__ == "Conv1D" else weight.T


def _optional(root: nn.Module, path: str | None) -> nn.Module | None:
    """The module at a dotted path of `root`, or None where the model was built without it."""
    if path is None:
        return None
    parent, _, name = path.rpartition(".")
    return getattr(root.get_submodule(parent), name, None)
