"""Hashes that change with what they name and with nothing else."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from ffmem.model import identity
from ffmem.model.identity import model_hash, tokenizer_hash, weights_hash
from tests.tiny import tiny_model, word_tokenizer


def test_equal_models_have_equal_hashes_and_other_weights_another():
    assert model_hash(tiny_model("gpt2")) == model_hash(tiny_model("gpt2"))
    assert model_hash(tiny_model("gpt2")) != model_hash(tiny_model("gpt2", seed=1))


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.2.mlp.c_proj.bias", "transformer.ln_f.weight"])
def test_the_last_element_of_any_weight_changes_the_hash(name):
    model = tiny_model("gpt2")
    before = model_hash(model)
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] += 1e-3
    assert model_hash(model) != before


def test_swapped_layers_dtypes_and_shapes_change_the_hash():
    plain = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(plain.weight)
    wide = nn.Linear(8, 2, bias=False)
    nn.init.zeros_(wide.weight)
    halves = [copy.deepcopy(plain).to(dtype) for dtype in (torch.bfloat16, torch.float16)]  # the same bytes
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    others = [plain, wide, *halves, nn.Sequential(plain), nn.Sequential(a, b), nn.Sequential(b, a)]
    assert len({weights_hash(other) for other in others}) == len(others)


def test_tied_weights_count_once():
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    alone = nn.Sequential(tied[0])
    tied[1].weight = tied[0].weight
    assert weights_hash(tied) == weights_hash(alone)


def test_buffers_that_are_stored_count_and_others_do_not():
    def build(value, persistent):
        module = nn.Module()
        module.register_buffer("table", torch.full((3,), value), persistent=persistent)
        return module

    assert weights_hash(build(1.0, True)) != weights_hash(build(2.0, True))
    assert weights_hash(build(1.0, False)) == weights_hash(build(2.0, False))


@pytest.mark.parametrize(
    "change", [{"activation_function": "relu"}, {"layer_norm_epsilon": 1e-3}, {"scale_attn_weights": False}]
)
def test_a_config_that_computes_something_else_changes_the_hash(change):
    model = tiny_model("gpt2")
    before = model_hash(model)
    model.config.update(change)
    assert model_hash(model) != before


def test_where_a_model_lies_and_what_saved_it_do_not_change_its_hash(tmp_path):
    model = tiny_model("gpt2")
    model.save_pretrained(tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    loaded.config.transformers_version = "9.9"
    assert model_hash(loaded) == model_hash(model)


def test_chunks_of_any_size_give_the_same_hash(monkeypatch):
    expected = model_hash(tiny_model("gpt2"))
    monkeypatch.setattr(identity, "HASHED_BYTES", 1000)
    assert model_hash(tiny_model("gpt2")) == expected


def words(*names, **special):
    tokenizer = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_a_tokenizers_hash_changes_with_its_vocabulary_order_special_tokens_and_rules():
    split = words("a", "b", "c")
    split.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    others = [words("a", "b", "c"), words("a", "b"), words("a", "c", "b"), words("a", "b", "c", eos_token="b"), split]
    others += [words("a", "b", "c", eos_token="c"), words("a", "b", "c", bos_token="b")]
    assert len({tokenizer_hash(other) for other in others}) == len(others)
    assert tokenizer_hash(words("a", "b", "c")) == tokenizer_hash(words("a", "b", "c"))


def test_a_tokenizers_hash_survives_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == tokenizer_hash(word_tokenizer())


def test_a_tokenizers_hash_does_not_change_with_its_use():
    tokenizer = word_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer(["the river", "a"], padding=True, truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == before


def test_a_tokenizer_that_is_changed_in_its_place_has_another_hash():
    tokenizer = word_tokenizer()
    before = tokenizer_hash(tokenizer)
    tokenizer.add_tokens(["another"])
    assert tokenizer_hash(tokenizer) != before
    vocabulary = {"a": 0}
    slow = type("Slow", (), {"get_vocab": lambda self: vocabulary, "special_tokens_map": {}})()
    before = tokenizer_hash(slow)
    vocabulary["b"] = 1
    assert tokenizer_hash(slow) != before


def test_a_tokenizer_without_a_backend_is_hashed_by_its_vocabulary():
    def slow(vocabulary):
        return type("Slow", (), {"get_vocab": lambda self: vocabulary, "special_tokens_map": {"eos_token": "a"}})()

    assert tokenizer_hash(slow({"a": 0, "b": 1})) == tokenizer_hash(slow({"b": 1, "a": 0}))
    assert tokenizer_hash(slow({"a": 0, "b": 1})) != tokenizer_hash(slow({"a": 1, "b": 0}))
