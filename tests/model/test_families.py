"""Every row of the table against tensors caught by hand-written hooks."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3Config

from ffmem.model.check import check
from ffmem.model.config_check import experts_of
from ffmem.model.families import FAMILIES, Family, Variant
from ffmem.model.loading import load_model
from tests.tiny import UNKNOWN, VARIANTS, VOCABULARY, tiny_model

both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTIVATIONS = {
    torch.relu: ["gpt2-relu", "opt", "opt-post-norm-projected", "adaptive_lm"],
    lambda x: torch.relu(x) ** 2: ["nemotron"],
    lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2: [
        *(name for name in VARIANTS if name.startswith(("gpt_neox", "falcon"))),
        "xglm",
    ],
    tanh_gelu: [
        *("gpt2", "gpt_neo", "gptj", "bloom", "bloom-residual-post-layernorm", "phi", "starcoder2"),
        *("gemma", "gemma2", "gemma3", "gpt_bigcode", "codegen"),
    ],
    lambda x: x / (1 + torch.exp(-x)): [
        *("llama", "llama-mlp-bias", "llama-tied", "mistral-window", "qwen2", "qwen3", "phi3"),
        *("olmo2", "stablelm-sequential", "stablelm-parallel", "cohere", "olmo", "exaone4"),
    ],
}
ACTIVATION = {variant: activation for activation, variants in ACTIVATIONS.items() for variant in variants}
GATED = {name for name in ACTIVATION if name.startswith(("llama", "mistral", "qwen", "gemma", "phi3", "olmo", "stablelm"))}
GATED |= {"cohere", "exaone4"}


def caught_inputs(model, modules, ids):
    """What enters each module in one forward, by plain hooks."""
    found = {}
    handles = [
        module.register_forward_pre_hook(lambda _, args, at=at: found.update({at: args[0].clone()}))
        for at, module in enumerate(modules)
    ]
    with torch.inference_mode():
        model(ids)
    for handle in handles:
        handle.remove()
    return [found[at].reshape(*ids.shape, -1) for at in range(len(modules))]


@every_variant
@both_dtypes
def test_every_variant_passes_its_self_check(memories, variant, dtype):
    result = check(memories(variant, dtype))
    assert result.failures() == []
    assert result.logits_equal
    assert result.tolerance == (1e-5 if dtype == torch.float32 else 2e-2)


@every_variant
@both_dtypes
def test_residual_and_output_of_the_layer_add_up_to_the_output_of_the_block(recorded, variant, dtype):
    recording = recorded(variant, dtype)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for r, y, o in zip(recording.r, recording.y, recording.o, strict=True):
        assert r.shape == y.shape == o.shape == (2, 12, 32)
        torch.testing.assert_close(r + y, o, **close)
        assert not torch.allclose(r, o, **close)  # y is not nothing


@every_variant
@both_dtypes
def test_coefficients_times_values_are_what_the_value_matrix_returns(memories, recorded, ids, variant, dtype):
    model, recording = memories(variant, dtype), recorded(variant, dtype)
    caught = caught_inputs(model.model, model.value_modules, ids)
    for layer, m in enumerate(recording.m, 1):
        values = model.values(layer)
        assert values.shape == (model.cells[layer - 1], model.d) == (m.shape[-1], 32)
        assert torch.equal(m, caught[layer - 1])
        product = m.double() @ values.double()
        if (bias := model.value_bias(layer)) is not None:
            product = product + bias.double()
        close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(recording.product[layer - 1].double(), product, **close)


@pytest.mark.parametrize("variant", VARIANTS | UNKNOWN)
@torch.inference_mode()
def test_activated_products_with_the_keys_are_the_coefficients(memories, recorded, ids, variant):
    model, recording = memories(variant), recorded(variant)
    path = model.family.key.partition("[")[0]
    key_modules = [block.get_submodule(path) for block in model.blocks]
    inputs = caught_inputs(model.model, key_modules, ids)
    assert model.family.gated == (variant in GATED)
    for layer, (x, module) in enumerate(zip(inputs, key_modules, strict=True), 1):
        keys = model.keys(layer)
        assert keys.shape == (model.cells[layer - 1], model.d)
        fused = variant == "phi3"
        bias = module.bias if module.bias is not None else torch.zeros(())
        m = ACTIVATION[variant](x @ keys.T + bias)
        if variant in GATED:
            mlp = model.blocks[layer - 1].mlp
            m = m * (x @ mlp.gate_up_proj.weight[len(keys) :].T if fused else mlp.up_proj(x))
        torch.testing.assert_close(recording.m[layer - 1], m, rtol=1e-4, atol=1e-5)


@every_variant
@both_dtypes
def test_loading_and_reading_leave_weights_and_logits_bit_identical(memories, ids, variant, dtype):
    untouched = tiny_model(variant, dtype=dtype)
    model = memories(variant, dtype)
    with model.reading(lambda _, m: None, [1]) as forward:
        forward(ids)
    model.record(ids)
    before, after = untouched.state_dict(), model.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    with torch.inference_mode():
        assert torch.equal(model.logits(ids), untouched(ids).logits)


@every_variant
@torch.inference_mode()
def test_the_last_output_behind_the_final_norm_gives_the_models_own_probabilities(memories, recorded, ids, variant):
    model, o = memories(variant), recorded(variant).o[-1]
    if variant == "opt-post-norm-projected":  # o is in front of the block's own norm, and there is no final one
        o = model.blocks[-1].final_layer_norm(o)
    ours = model.vocabulary.log_probs(o.reshape(24, 32), norm=True)
    theirs = torch.log_softmax(model.model(ids).logits, -1)
    torch.testing.assert_close(ours, theirs.reshape(24, VOCABULARY), rtol=1e-4, atol=1e-4)


def test_gemma3_with_its_vision_tower_is_read_in_its_language_model(tokenizer, ids):
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=VARIANTS["gemma3"][1],
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY - 1,
        boi_token_index=VOCABULARY - 2,
        eoi_token_index=VOCABULARY - 3,
    )
    torch.manual_seed(0)
    model = load_model(AutoModelForCausalLM.from_config(config).eval(), tokenizer=tokenizer)
    assert (model.family.name, model.layers, model.cells, model.context) == ("gemma3", 3, [64, 64, 64], 64)


def test_every_row_of_the_table_has_a_tiny_model():
    assert set(FAMILIES) - {"gemma3"} == {model_type for model_type, _ in VARIANTS.values()}
    assert not set(FAMILIES) & {model_type for model_type, _ in UNKNOWN.values()}


def test_the_first_variant_whose_condition_holds_is_applied():
    row = Family(
        name="x",
        blocks="h",
        key="k",
        value="v",
        norm=None,
        r="r.in",
        y="y.out",
        variants=(Variant(("a", True), {"r": "first.in"}), Variant(("b", 2), {"r": "second.in", "o": "o.in"})),
    )

    def spots(**settings):
        made = row.for_config(type("Config", (), settings))
        assert made.variants == ()
        return made.r, made.o

    assert spots() == ("r.in", "block.out")
    assert spots(a=False, b=1) == ("r.in", "block.out")
    assert spots(a=True, b=2) == ("first.in", "block.out")
    assert spots(a=False, b=2) == ("second.in", "o.in")


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"num_local_experts": 8}, 8),
        ({"num_experts": 4}, 4),
        ({"n_routed_experts": 64}, 64),
        ({"moe_num_experts": 2}, 2),
        ({"num_experts": 1}, 0),
        ({"num_experts": None}, 0),
        ({}, 0),
        ({"text_config": type("Text", (), {"num_local_experts": 16})}, 16),
    ],
)
def test_experts_are_counted_under_every_name_that_configs_use(settings, count):
    assert experts_of(type("Config", (), settings)) == count
