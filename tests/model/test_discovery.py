"""Memories found by shape, against the table's own rows where there is one."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ffmem.errors import ModelError
from ffmem.model import loading
from ffmem.model.discovery import discover
from ffmem.model.loading import load_model
from tests.tiny import UNKNOWN, VARIANTS, tiny_model

both_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
FOUND = {
    "cohere": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "olmo": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "exaone4": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "nemotron": ("mlp.up_proj", None, "mlp.down_proj"),
    "gpt_bigcode": ("mlp.c_fc", None, "mlp.c_proj"),
    "codegen": ("mlp.fc_in", None, "mlp.fc_out"),
    "xglm": ("fc1", None, "fc2"),
}
PROJECTED = "opt-post-norm-projected"
BANDED = "adaptive_lm"  # words in several tables: there is no one embedding whose width is the stream's


@pytest.mark.parametrize("variant", UNKNOWN)
@both_dtypes
def test_an_unknown_architecture_is_found_by_shape(memories, recorded, variant, dtype):
    model, recording = memories(variant, dtype), recorded(variant, dtype)
    assert model.found_by_shape
    assert (model.family.key, model.family.up, model.family.value) == FOUND[variant]
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for layer in range(model.layers):
        torch.testing.assert_close(recording.r[layer] + recording.y[layer], recording.o[layer], **close)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, torch.float32) for variant in VARIANTS if variant not in (PROJECTED, BANDED)),
        # In half precision, one of each way to add up a block.
        *(
            pytest.param(variant, torch.bfloat16, marks=pytest.mark.slow)
            for variant in ("gpt2", "gptj", "bloom", "falcon-new", "gemma2", "phi3", "olmo2")
        ),
    ],
)
def test_a_known_variant_is_found_as_its_row_says(memories, recorded, ids, variant, dtype):
    known = memories(variant, dtype)
    family = discover(known.model)
    for name in ("blocks", "key", "up", "value", "norm"):
        assert getattr(family, name) == getattr(known.family, name), name
    expected, recording = recorded(variant, dtype), replace(known, family=family).record(ids)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for layer in range(known.layers):
        assert torch.equal(recording.m[layer], expected.m[layer])
        for name in ("r", "y", "o"):
            torch.testing.assert_close(getattr(recording, name)[layer], getattr(expected, name)[layer], **close)


@pytest.mark.parametrize("variant", ["gpt2", "opt", "falcon-new", "gemma2", "phi3"])
def test_a_known_variant_is_loaded_without_its_row_and_reads_the_same(recorded, tokenizer, ids, monkeypatch, variant):
    monkeypatch.setattr(loading, "FAMILIES", {})
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    assert model.found_by_shape
    assert all(torch.equal(m, known) for m, known in zip(model.record(ids).m, recorded(variant).m, strict=True))


def test_a_projection_behind_the_blocks_cannot_be_found_and_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(loading, "FAMILIES", {})
    with pytest.raises(ModelError, match=r"^OPTForCausalLM: the self-check could not run"):
        load_model(tiny_model(PROJECTED), tokenizer=tokenizer)


def test_a_multiplier_behind_the_layer_has_no_spot_and_is_refused(changed, tokenizer):
    with pytest.raises(ModelError, match=r"^GraniteForCausalLM: no tensors of a block .* r \+ y = o .*mlp\.down_proj"):
        load_model(changed("llama", "granite", residual_multiplier=0.22), tokenizer=tokenizer)


def test_logits_that_the_config_divides_are_projected_alike(changed, tokenizer, ids):
    model = load_model(changed("llama", "granite", logits_scaling=8.0), tokenizer=tokenizer)
    assert model.vocabulary.scale == 1 / 8
    o = model.record(ids).o[-1]
    ours = model.vocabulary.log_probs(o[0], norm=True)
    torch.testing.assert_close(ours, model.logits(ids)[0].log_softmax(-1), rtol=1e-4, atol=1e-5)


def test_a_model_without_a_list_of_blocks_is_refused():
    with pytest.raises(ModelError, match="Bilinear: expected a list of equal blocks, found none"):
        discover(nn.Bilinear(2, 2, 2))


def test_a_block_without_a_value_matrix_is_refused_with_its_shapes():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5, 4)
            self.blocks = nn.ModuleList(
                nn.ModuleDict({"attention": nn.Linear(4, 4), "wide": nn.Linear(4, 6), "other": nn.Linear(8, 4)})
                for _ in range(2)
            )
            self.config = None

        def get_input_embeddings(self):
            return self.words

    with pytest.raises(ModelError, match=r"^Flat: .*stream \(4 wide\).*: wide 4x6, other 8x4$"):
        discover(Flat())


def test_blocks_without_attention_are_no_transformer():
    config = AutoConfig.for_model("mamba", vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ModelError, match="expected a transformer, found blocks without attention"):
        discover(AutoModelForCausalLM.from_config(config))
