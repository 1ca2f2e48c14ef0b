"""The network: words in frequency bands on both ends, and between them pre-norm blocks with ReLU memories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import log, sqrt
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ffmem.model.adaptive import rows
from ffmem.model.adaptive.config import AdaptiveConfig, BandShape

FIRST_POSITION = 2
"""Positions are counted behind the padding id, 1, as the original model does."""
IGNORED = -100
"""A target that counts for nothing, as everywhere in torch."""

_OF_FILES = {
    "revision",
    "subfolder",
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "_commit_hash",
    "adapter_kwargs",
}
"""Arguments of `from_pretrained` that say where files are."""

Tail = tuple[Int[Tensor, " _rows"], Int[Tensor, " _rows"]]
"""Which rows of a batch have their target in a tail band, and the target's place in that band."""


class Band(nn.Module):
    """Words of about equal frequency: vectors of the band's width and their projection to the stream."""

    def __init__(self, shape: BandShape, d: int) -> None:
        super().__init__()
        self.low, self.high = shape.low, shape.high
        self.words = nn.Embedding(shape.size, shape.width)
        self.project = nn.Linear(shape.width, d, bias=False)


class AdaptiveInput(nn.Module):
    """From token ids to the stream."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.bands = nn.ModuleList(Band(shape, config.hidden_size) for shape in config.bands)
        self.scale = sqrt(config.hidden_size)

    def __iter__(self) -> Iterator[Band]:
        return cast("Iterator[Band]", iter(self.bands))

    def forward(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d"]:
        total = None
        for band in self:
            inside = (ids >= band.low) & (ids < band.high)
            # Ids of other bands are spread over all rows and then masked: one row for all of them would be a hot spot
            # of the gradient's atomic additions.
            found = band.project(band.words((ids - band.low) % band.words.num_embeddings))
            found = found.masked_fill(~inside[..., None], 0)
            total = found if total is None else total + found
        assert total is not None
        return total * self.scale


class AdaptiveSoftmax(nn.Module):
    """From the stream to words. The head holds the most frequent words and a score for each tail band.

    log p(word) = log p(band | h) + log p(word | band, h). Its tables are the input's; only `bands` is its own.
    """

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__()
        self.bands = nn.Linear(config.hidden_size, len(config.bands) - 1, bias=False)

    def head(self, h: Float[Tensor, "*batch d"], tables: AdaptiveInput) -> Float[Tensor, "*batch head"]:
        """Unnormalised scores: the first band's words, then the tail bands."""
        return functional.linear(h, torch.cat([next(iter(tables)).words.weight, self.bands.weight]))

    @staticmethod
    def tail(h: Float[Tensor, "*batch d"], band: Band) -> Float[Tensor, "*batch words"]:
        """Unnormalised scores of a tail band's words."""
        return functional.linear(h @ band.project.weight, band.words.weight)

    def forward(self, h: Float[Tensor, "*batch d"], tables: AdaptiveInput) -> Float[Tensor, "*batch vocab"]:
        """Log-probabilities of all words, in float32."""
        head = torch.log_softmax(self.head(h, tables).float(), dim=-1)
        first, *rest = tables
        parts = [head[..., : first.high]]
        for number, band in enumerate(rest, first.high):
            inside = torch.log_softmax(self.tail(h, band).float(), dim=-1)
            parts.append(inside + head[..., number, None])
        return torch.cat(parts, dim=-1)

    def nll(
        self,
        h: Float[Tensor, "n d"],
        targets: Int[Tensor, " n"],
        tables: AdaptiveInput,
        tails: Sequence[Tail] | None = None,
    ) -> Float[Tensor, ""]:
        """Summed -log p(target); only the rows whose target is in a tail band are sent through that band.

        `tails` may be given where the targets are known on the host, so that no one waits for the device.
        """
        first, *rest = tables
        within = targets
        for number, band in enumerate(rest, first.high):
            within = torch.where((targets >= band.low) & (targets < band.high), number, within)
        total = functional.cross_entropy(self.head(h, tables).float(), within.long(), reduction="sum", ignore_index=IGNORED)
        for band, (places, inside) in zip(rest, tails if tails is not None else tails_of(targets, rest), strict=True):
            if len(places):
                scores = self.tail(h[places], band).float()
                total = total + functional.cross_entropy(scores, inside.long(), reduction="sum", ignore_index=IGNORED)
        return total


def tails_of(targets: Int[Tensor, " n"], bands: Sequence[Band | BandShape]) -> list[Tail]:
    """For each of these bands, the rows whose target it holds, and the target's place in it."""
    found = []
    for band in bands:
        places = torch.nonzero((targets >= band.low) & (targets < band.high)).flatten()
        found.append((places, targets[places] - band.low))
    return found


def sinusoids(positions: Int[Tensor, "*batch pos"], d: int) -> Float[Tensor, "*batch pos d"]:
    """Sines in the first half, cosines in the second, computed anew: nothing is stored, so no length is a limit."""
    half = d // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32, device=positions.device) * (-log(10000) / (half - 1)))
    angles = (positions + FIRST_POSITION)[..., None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with biases, all heads in one call."""

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.layer, self.heads = layer, config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Float[Tensor, "batch pos d"], mask: Tensor | None, cache: Any) -> Float[Tensor, "batch pos d"]:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        causal = mask is None and q.shape[2] > 1
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then the memories: y = ReLU(norm(r)·K + b)·V + c, added to r. Names are the original model's."""

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, h: Float[Tensor, "batch pos d"], mask: Tensor | None, cache: Any) -> Float[Tensor, "batch pos d"]:
        r = h + self.self_attn(self.self_attn_layer_norm(h), mask, cache)
        return r + self.fc2(functional.relu(self.fc1(self.final_layer_norm(r))))


class AdaptivePreTrained(PreTrainedModel):  # type: ignore[misc]
    """What the trunk and the language model share with every Hugging Face model."""

    config_class = AdaptiveConfig
    base_model_prefix = "model"
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            # With the scale of sqrt(d) behind it, a word enters the stream with about unit variance.
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, Attention):
            for part in (module.q_proj, module.k_proj, module.v_proj, module.out_proj):
                self._init_linear(part)
        elif isinstance(module, nn.Linear):
            self._init_linear(module)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def _init_linear(self, module: nn.Linear) -> None:
        init.xavier_uniform_(module.weight)
        if module.bias is not None:
            init.zeros_(module.bias)


class AdaptiveTrunk(AdaptivePreTrained):
    """The model without its softmax: ids to the stream behind the last block, which has no final norm."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.embed = AdaptiveInput(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "batch pos"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch pos d"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected input_ids or inputs_embeds, found both or neither")
        h = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        keep = self.config.use_cache if use_cache is None else use_cache
        if keep and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        cache = past_key_values if keep else None
        seen = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(seen, seen + h.shape[1], device=h.device)
        mask = None
        if attention_mask is not None or seen:
            mask = create_causal_mask(
                config=self.config, inputs_embeds=h, attention_mask=attention_mask, past_key_values=cache
            )
        # The stream has the weights' dtype: under autocast it stays in float32.
        h = h + sinusoids(position_ids, h.shape[-1]).to(self.dtype)
        stream = [h]
        for block in self.layers:
            h = block(h, mask, cache)
            stream.append(h)
        return BaseModelOutputWithPast(
            last_hidden_state=h, past_key_values=cache, hidden_states=tuple(stream) if output_hidden_states else None
        )


class AdaptiveLM(AdaptivePreTrained, GenerationMixin):  # type: ignore[misc]
    """The paper's language model. Its logits are log-probabilities, as an adaptive softmax gives them."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.model = AdaptiveTrunk(config)
        self.softmax = AdaptiveSoftmax(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """As for every model; a folder may also hold its weights as 8-bit rows."""
        if source is None or not (Path(source) / rows.FILE).is_file():
            return super().from_pretrained(source, *args, **kwargs)
        config = kwargs.pop("config", None) or cls.config_class.from_pretrained(source)
        kwargs = {"dtype": torch.float32} | {name: value for name, value in kwargs.items() if name not in _OF_FILES}
        if kwargs["dtype"] == "auto":
            kwargs["dtype"] = torch.float32
        model = super().from_pretrained(None, *args, config=config, state_dict=rows.load_rows(Path(source)), **kwargs)
        (model[0] if isinstance(model, tuple) else model).config._name_or_path = str(source)
        return model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.softmax

    def log_probs(self, h: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch vocab"]:
        """What a vector of the stream says about the next word."""
        return self.softmax(h, self.model.embed)

    def nll(
        self, h: Float[Tensor, "n d"], targets: Int[Tensor, " n"], tails: Sequence[Tail] | None = None
    ) -> Float[Tensor, ""]:
        """Summed -log p of the targets, without the vocabulary's full width for any row but those that need it."""
        return self.softmax.nll(h, targets, self.model.embed, tails)

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        labels: Int[Tensor, "batch pos"] | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        kwargs.pop("return_dict", None)
        outputs = self.model(input_ids=input_ids, **kwargs)
        h = outputs.last_hidden_state
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = self.nll(h[:, :-1].flatten(0, 1), targets) / (targets != IGNORED).sum()
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutputWithPast(
            loss=loss,
            logits=self.log_probs(h[:, kept]),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )


@cache
def register() -> None:
    """Let transformers' Auto classes know the model. Called where models are loaded: nothing happens at import."""
    from ffmem.model.adaptive.tokenizer import WikiTokenizer

    AutoConfig.register(AdaptiveConfig.model_type, AdaptiveConfig, exist_ok=True)
    AutoModel.register(AdaptiveConfig, AdaptiveTrunk, exist_ok=True)
    AutoModelForCausalLM.register(AdaptiveConfig, AdaptiveLM, exist_ok=True)
    AutoTokenizer.register(AdaptiveConfig, fast_tokenizer_class=WikiTokenizer, exist_ok=True)
