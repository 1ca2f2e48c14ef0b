"""The network: words in, pre-norm blocks with ReLU memories, words out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import Any

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
from ffmem.model.adaptive.bands import IGNORED, AdaptiveInput, AdaptiveSoftmax, Tail
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.vocabulary import Vocabulary

FIRST_POSITION = 2
"""The number of the first position: the original model counts positions from behind the padding id, 1."""

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
"""Arguments of `from_pretrained` that say where files are, which a model does not take."""


def sinusoids(positions: Int[Tensor, "*batch pos"], d: int) -> Float[Tensor, "*batch pos d"]:
    """Sinusoidal position vectors, sines first, then cosines. They are computed at every call, so no length is a limit."""
    half = d // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32, device=positions.device) * (-log(10000) / (half - 1)))
    angles = (positions + FIRST_POSITION)[..., None].float() * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class IntoStream(nn.Linear):
    """A linear map whose output is added to the stream; it is a class of its own because its initial weights are smaller."""


class Attention(nn.Module):
    """Causal self-attention with biases, all heads in one call."""

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        d = config.hidden_size
        self.layer, self.heads = layer, config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(d, d) for _ in range(3))
        self.out_proj = IntoStream(d, d)

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
    """A pre-norm block: attention, then the memories, y = ReLU(norm(r)·K + b)·V + c, added to r. Names are fairseq's."""

    def __init__(self, config: AdaptiveConfig, layer: int) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size)
        self.self_attn = Attention(config, layer)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = nn.ReLU()
        self.fc2 = IntoStream(config.intermediate_size, config.hidden_size)

    def forward(self, h: Float[Tensor, "batch pos d"], mask: Tensor | None, cache: Any) -> Float[Tensor, "batch pos d"]:
        r = h + self.self_attn(self.self_attn_layer_norm(h), mask, cache)
        return r + self.fc2(self.activation(self.fc1(self.final_layer_norm(r))))


class AdaptivePreTrained(PreTrainedModel):  # type: ignore[misc]
    """The base of the trunk and of the language model: how they are loaded and initialised."""

    config_class = AdaptiveConfig
    base_model_prefix = "model"
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as every Hugging Face model, or from 8-bit rows in a folder that holds no other weights."""
        if source is None or not rows.in_folder(Path(source)):
            return super().from_pretrained(source, *args, **kwargs)
        config = kwargs.pop("config", None) or cls.config_class.from_pretrained(source)
        dtype = kwargs.pop("dtype", kwargs.pop("torch_dtype", None))
        kwargs = {name: value for name, value in kwargs.items() if name not in _OF_FILES}
        kwargs["dtype"] = torch.float32 if dtype in (None, "auto") else dtype
        loaded = super().from_pretrained(None, *args, config=config, state_dict=rows.load_rows(Path(source)), **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).config._name_or_path = str(source)
        return loaded

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            # With the scale of sqrt(d) behind it, a word enters the stream with about unit variance.
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, nn.Linear):
            # All that is added to the stream adds up to about what it began with: there is no norm behind the last block.
            added = isinstance(module, IntoStream)
            init.xavier_uniform_(module.weight, gain=(2 * self.config.num_hidden_layers) ** -0.5 if added else 1.0)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)


class AdaptiveTrunk(AdaptivePreTrained):
    """The network without its softmax: maps token ids to the stream behind the last block; there is no final norm."""

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
        cache = past_key_values
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
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
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        stream = [h] if wanted else []  # kept only on request: an index pass needs one layer at a time
        for block in self.layers:
            h = block(h, mask, cache)
            if wanted:
                stream.append(h)
        return BaseModelOutputWithPast(
            last_hidden_state=h, past_key_values=cache, hidden_states=tuple(stream) if wanted else None
        )


class AdaptiveLM(AdaptivePreTrained, GenerationMixin):  # type: ignore[misc]
    """The paper's language model. Its logits are log-probabilities, as an adaptive softmax gives them."""

    def __init__(self, config: AdaptiveConfig) -> None:
        super().__init__(config)
        self.model = AdaptiveTrunk(config)
        self.softmax = AdaptiveSoftmax(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.softmax

    def vocabulary_projection(self) -> Vocabulary:
        """The adaptive softmax as a projection of any vectors onto words; ffmem asks every model for it by this name."""
        from ffmem.model.adaptive.vocabulary import AdaptiveVocabulary

        return AdaptiveVocabulary(self)

    def log_probs(self, h: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch vocab"]:
        """Log-probabilities of the next word, in float32, for vectors of the stream."""
        return self.softmax(h, self.model.embed)

    def nll(
        self, h: Float[Tensor, "n d"], targets: Int[Tensor, " n"], tails: Sequence[Tail] | None = None
    ) -> Float[Tensor, ""]:
        """The sum of -log p(target) in float32; each row is projected only onto the head and the band of its target."""
        return self.softmax.nll(h, targets, self.model.embed, tails)

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "batch pos"] | None = None,
        past_key_values: Any = None,
        inputs_embeds: Float[Tensor, "batch pos d"] | None = None,
        labels: Int[Tensor, "batch pos"] | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        # `generate` passes only arguments that a forward names, so positions and the mask have to be named.
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
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
    """Register the model with transformers' Auto classes. It is called where models are loaded: imports have no effects."""
    from ffmem.model.adaptive.tokenizer import WikiTokenizer

    AutoConfig.register(AdaptiveConfig.model_type, AdaptiveConfig, exist_ok=True)
    AutoModel.register(AdaptiveConfig, AdaptiveTrunk, exist_ok=True)
    AutoModelForCausalLM.register(AdaptiveConfig, AdaptiveLM, exist_ok=True)
    AutoTokenizer.register(AdaptiveConfig, fast_tokenizer_class=WikiTokenizer, exist_ok=True)
