"""The table of model families: a row says where a transformer keeps its feed-forward memories.

A *spot* is a tensor that flows through a block: `mlp.out` is what the module `mlp` returns, `ln_2.in`
what enters `ln_2`, `block.in` and `block.out` the block's own; spots can be added with ` + `.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Variant:
    """What a config switch changes in a row: the first variant whose condition holds is applied."""

    when: tuple[str, object]
    then: dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A row of the table. Paths of `blocks`, `norm` and `project` start at the model, all others at a block."""

    name: str
    blocks: str
    key: str
    """The module whose rows are the keys; in a gated layer the gate. `path[0]` is the first half of a fused one."""
    value: str
    """The module whose input is the coefficients and whose rows are the values."""
    norm: str | None
    """The final norm, in front of the unembedding; None for a model without one."""
    r: str
    """The residual stream that the feed-forward layer is added to."""
    y: str
    """What the feed-forward layer adds to the stream, after any norm that is applied to its output."""
    o: str = "block.out"
    """The stream after the addition: r + y."""
    carried: str = "block.in"
    """The stream that attention's output is added to: the block's input or, in some families, a norm's output."""
    joined: str | None = None
    """The stream after attention if a norm is applied to it before r: that norm's input. Where it is None, the sum is r."""
    up: str | None = None
    """The module of a gated layer's second factor; None for a plain layer. Gated coefficients have no lower bound."""
    project: str | None = None
    """The module of a projection between the final norm and the unembedding, if the family may have one."""
    wikitext: bool = False
    """Whether its models were trained on the words of WikiText, a sentence at a time: they read marks such as `@-@` as they
    stand in WikiText's files, and predict the token that ends a sentence."""
    own_network: bool = False
    """Whether the network is ffmem's own, which transformers cannot load by itself."""
    variants: tuple[Variant, ...] = field(default=())

    @property
    def gated(self) -> bool:
        """Whether coefficients are a product of two factors, as in Llama, so that they may be negative."""
        return self.up is not None

    def for_config(self, config: object) -> Family:
        """This row with the changes that a model's config asks for."""
        for variant in self.variants:
            name, value = variant.when
            if getattr(config, name, None) == value:
                return replace(self, **variant.then, variants=())
        return replace(self, variants=())


def _plain(name: str, **changes: Any) -> Family:
    """The layout of GPT-2: one key matrix, pre-norm, attention before the feed-forward layer."""
    row = {"blocks": "transformer.h", "key": "mlp.c_fc", "value": "mlp.c_proj", "norm": "transformer.ln_f"}
    stream = {"r": "ln_2.in", "y": "mlp.out"}
    return Family(name=name, **(row | stream | changes))


def _gated(name: str, **changes: Any) -> Family:
    """The layout of Llama: gate and up, pre-norm, attention before the feed-forward layer."""
    row = {"blocks": "model.layers", "key": "mlp.gate_proj", "up": "mlp.up_proj", "value": "mlp.down_proj"}
    stream = {"norm": "model.norm", "r": "post_attention_layernorm.in", "y": "mlp.out"}
    return Family(name=name, **(row | stream | changes))


_NORM_BEHIND = {"r": "pre_feedforward_layernorm.in", "y": "post_feedforward_layernorm.out"}
_PARALLEL = {"r": "block.in + self_attn.out"}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _plain("gpt2"),
        _plain("gpt_neo"),
        _plain("gptj", key="mlp.fc_in", value="mlp.fc_out", r="block.in + attn.out"),
        _plain(
            "gpt_neox",
            blocks="gpt_neox.layers",
            key="mlp.dense_h_to_4h",
            value="mlp.dense_4h_to_h",
            norm="gpt_neox.final_layer_norm",
            r="post_attention_layernorm.in",
            variants=(Variant(("use_parallel_residual", True), {"r": "block.in + attention.out"}),),
        ),
        _plain(
            "opt",
            blocks="model.decoder.layers",
            key="fc1",
            value="fc2",
            norm="model.decoder.final_layer_norm",
            project="model.decoder.project_out",
            r="final_layer_norm.in",
            y="fc2.out",
            variants=(
                Variant(
                    ("do_layer_norm_before", False),
                    {"r": "fc1.in", "o": "final_layer_norm.in", "joined": "self_attn_layer_norm.in"},
                ),
            ),
        ),
        # bloom's mlp.out has the residual in it already, so y is read in front of that sum.
        _plain(
            "bloom",
            key="mlp.dense_h_to_4h",
            value="mlp.dense_4h_to_h",
            r="post_attention_layernorm.in",
            y="mlp.dense_4h_to_h.out",
            variants=(
                Variant(
                    ("apply_residual_connection_post_layernorm", True),
                    {
                        "r": "post_attention_layernorm.out",
                        "carried": "input_layernorm.out",
                        "joined": "post_attention_layernorm.in",
                    },
                ),
            ),
        ),
        _plain(
            "falcon",
            key="mlp.dense_h_to_4h",
            value="mlp.dense_4h_to_h",
            r="post_attention_layernorm.in",
            variants=(
                Variant(("new_decoder_architecture", True), {"r": "block.in + self_attention.out"}),
                Variant(("parallel_attn", True), {"r": "block.in + self_attention.out"}),
            ),
        ),
        _plain(
            "adaptive_lm",
            blocks="model.layers",
            key="fc1",
            value="fc2",
            norm=None,
            r="final_layer_norm.in",
            y="fc2.out",
            wikitext=True,
            own_network=True,
        ),
        _gated("llama"),
        _gated("mistral"),
        _gated("qwen2"),
        _gated("qwen3"),
        _gated("gemma"),
        _gated("gemma2", **_NORM_BEHIND),
        _gated("gemma3_text", **_NORM_BEHIND),
        _gated("gemma3", blocks="model.language_model.layers", norm="model.language_model.norm", **_NORM_BEHIND),
        _plain("phi", blocks="model.layers", key="mlp.fc1", value="mlp.fc2", norm="model.final_layernorm", **_PARALLEL),
        _gated("phi3", key="mlp.gate_up_proj[0]", up="mlp.gate_up_proj[1]"),
        _gated("olmo2", r="mlp.in", y="post_feedforward_layernorm.out"),
        _gated("stablelm", variants=(Variant(("use_parallel_residual", True), _PARALLEL),)),
        _plain("starcoder2", blocks="model.layers", norm="model.norm", r="post_attention_layernorm.in"),
    )
}


def reads_wikitext(family: str) -> bool:
    """Whether models of the family of this name were trained on the words of WikiText; False for one found by shape."""
    return family in FAMILIES and FAMILIES[family].wikitext
