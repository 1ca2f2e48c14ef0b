"""Models of a kind that is not read say what they are: as a folder with nothing but a config, and in memory."""

import pytest
import transformers
from transformers import AutoConfig

from ffmem.errors import ModelError
from ffmem.model.config_check import READ
from ffmem.model.loading import load_model
from tests.tiny import tiny_model

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
T5 = {"vocab_size": 101, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
ENCODER = "an encoder, which reads both ways"
KINDS = [
    ("bert", "BertForMaskedLM", SMALL | {"vocab_size": 101}, ENCODER),
    ("bert", "BertLMHeadModel", SMALL | {"vocab_size": 101}, ENCODER),
    ("distilbert", "DistilBertForMaskedLM", {"vocab_size": 101, "dim": 32, "n_layers": 1, "n_heads": 4}, ENCODER),
    ("t5", "T5ForConditionalGeneration", T5, "an encoder with a decoder"),
    ("vit", "ViTForImageClassification", SMALL | {"image_size": 8, "patch_size": 4}, "a vision model"),
    ("wav2vec2", None, {}, "a speech model"),
    ("clip", None, {}, "a model of pictures and text"),
    ("llava", None, {}, "a model of pictures and text"),
    (
        "mixtral",
        "MixtralForCausalLM",
        SMALL | {"vocab_size": 101, "num_local_experts": 4},
        "a decoder with 4 experts a layer",
    ),
    ("qwen3_moe", None, SMALL | {"num_experts": 5}, "a decoder with 5 experts a layer"),
]


def refusal(source, **settings):
    with pytest.raises(ModelError) as caught:
        load_model(source, **settings)
    return str(caught.value)


@pytest.mark.parametrize(("own", "_", "settings", "kind"), KINDS)
def test_a_folder_with_such_a_config_is_refused_by_its_kind(own, _, settings, kind, tmp_path):
    AutoConfig.for_model(own, **settings).save_pretrained(tmp_path)
    assert refusal(tmp_path) == f"{tmp_path} is a {own}, {kind}; {READ}"


@pytest.mark.parametrize(("own", "name", "settings", "kind"), [kind for kind in KINDS if kind[1]])
def test_such_a_model_in_memory_is_refused_by_its_kind(own, name, settings, kind, tokenizer):
    model = getattr(transformers, name)(AutoConfig.for_model(own, **settings)).eval()
    assert refusal(model, tokenizer=tokenizer) == f"{name} is a {own}, {kind}; {READ}"


def test_a_trunk_is_refused_as_one(save, tokenizer):
    trunk = tiny_model("llama").model
    assert refusal(trunk, tokenizer=tokenizer) == f"LlamaModel is a LlamaModel, a trunk without an unembedding; {READ}"
    folder = save(trunk)
    assert refusal(folder) == f"{folder} is a LlamaModel, a trunk without an unembedding, so it predicts no token; {READ}"
    assert "GPT2Model, a trunk" in refusal(tiny_model("gpt2").base_model, tokenizer=tokenizer)


def test_a_trunk_whose_embeddings_are_its_unembedding_is_whole(save, ids):
    model = tiny_model("gpt2")
    assert load_model(save(model.transformer)).logits(ids).equal(load_model(save(model, "whole")).logits(ids))


def test_an_encoder_that_was_made_a_decoder_is_judged_by_the_self_check(save):
    config = AutoConfig.for_model("bert", **SMALL, vocab_size=101, is_decoder=True)
    message = refusal(save(transformers.BertLMHeadModel(config)))  # its unembedding has a layer of its own in front
    assert "(BertLMHeadModel, found by shape) fails the self-check: projection " in message
