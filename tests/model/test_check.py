"""The self-check: what it measures, and that it refuses what is not a stack of memories."""

from dataclasses import replace

import pytest
import torch

from ffmem.errors import ModelError
from ffmem.model import loading
from ffmem.model.check import SelfCheck, check, probe_ids, refuse_unless_sound
from ffmem.model.families import FAMILIES
from ffmem.model.loading import load_model
from tests.tiny import tiny_model

SOUND = SelfCheck(value_product=0.0, residual_sum=0.0, causality=0.0, projection=0.0, logits_equal=True, tolerance=1e-5)


def looks_ahead(variant, dtype):
    model = tiny_model(variant, dtype=dtype)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    return model


def test_a_sound_check_has_no_failures():
    assert SOUND.failures() == []
    assert replace(SOUND, value_product=1e-5, residual_sum=1e-5, causality=1e-3, projection=1e-4).failures() == []


@pytest.mark.parametrize(
    ("name", "number", "line"),
    [
        ("value_product", 2e-5, "value_product 2.0e-05 > 1e-05"),
        ("residual_sum", 0.5, "residual_sum 5.0e-01 > 1e-05"),
        ("causality", 1.1e-3, "causality 1.1e-03 > 1e-03"),
        ("projection", 1.1e-4, "projection 1.1e-04 > 1e-04"),
        ("residual_sum", float("nan"), "residual_sum nan > 1e-05"),
        ("logits_equal", False, "logits differ under hooks"),
    ],
)
def test_each_number_beyond_its_limit_is_a_failure(name, number, line):
    assert replace(SOUND, **{name: number}).failures() == [line]


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"r": "block.in"}, "residual_sum"),
        ({"y": "attn.out"}, "residual_sum"),
        ({"norm": "transformer.drop"}, "projection"),
        ({"o": "ln_2.in"}, "residual_sum"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_wrong_row_is_refused_with_the_numbers(tokenizer, monkeypatch, change, number, dtype):
    monkeypatch.setitem(FAMILIES, "gpt2", replace(FAMILIES["gpt2"], **change))
    with pytest.raises(
        ModelError, match=rf"GPT2LMHeadModel, read as gpt2\) fails the self-check: .*{number} \d\.\de.\d\d > "
    ):
        load_model(tiny_model("gpt2", dtype=dtype), tokenizer=tokenizer)


def test_values_that_the_model_does_not_use_as_a_plain_product_are_refused(tokenizer):
    model = tiny_model("gpt2")
    value = model.transformer.h[1].mlp.c_proj
    value.forward = lambda x, plain=value.forward: 1.001 * plain(x)
    with pytest.raises(ModelError, match=r"fails the self-check: value_product \S+ > 1e-05$"):
        load_model(model, tokenizer=tokenizer)


def test_a_path_that_is_not_in_the_model_is_named(tokenizer, monkeypatch):
    monkeypatch.setitem(FAMILIES, "gpt2", replace(FAMILIES["gpt2"], value="mlp.nowhere"))
    with pytest.raises(ModelError, match=r"'mlp\.nowhere' in GPT2Block"):
        load_model(tiny_model("gpt2"), tokenizer=tokenizer)


def test_bloom_that_slices_its_value_matrix_is_refused(changed, tokenizer):
    with pytest.raises(ModelError, match=r"nothing flowed through 'mlp\.dense_4h_to_h\.in' in layer 1"):
        load_model(changed("bloom", pretraining_tp=2, slow_but_exact=True), tokenizer=tokenizer)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gpt_neox-parallel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_model_that_looks_ahead_is_refused_for_that_alone(tokenizer, variant, dtype):
    with pytest.raises(ModelError, match=r"fails the self-check: causality \S+ > \S+$"):
        load_model(looks_ahead(variant, dtype), tokenizer=tokenizer)


def test_a_hook_that_changes_the_logits_is_told(memories, monkeypatch):
    model = memories("gpt2")
    calls = []
    plain = model.model.forward

    def drifting(*args, **settings):
        out = plain(*args, **settings)
        calls.append(out)
        out.logits = out.logits + (len(calls) > 1)
        return out

    monkeypatch.setattr(model.model, "forward", drifting)
    result = check(model)
    assert not result.logits_equal
    assert "logits differ under hooks" in result.failures()


def test_a_forward_that_breaks_is_an_error_of_the_model(memories, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no kernel")

    model = memories("gpt2")
    monkeypatch.setattr(model.model, "forward", broken)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel: the self-check could not run \(no kernel\)"):
        refuse_unless_sound(model)


def test_a_model_shorter_than_the_check_is_checked_on_what_it_takes(changed, tokenizer):
    model = load_model(changed("gpt2", n_positions=4), tokenizer=tokenizer)
    assert model.context == 4
    assert probe_ids(model).shape == (1, 4)


def test_probe_ids_differ_and_lie_in_the_vocabulary(memories):
    ids = probe_ids(memories("gpt2"))[0].tolist()
    assert len(set(ids)) == 12
    assert all(0 <= id < 101 for id in ids)
    assert ids == probe_ids(memories("gpt2"))[0].tolist()


def test_a_family_found_by_shape_is_told_as_such(tokenizer, monkeypatch):
    wrong = replace(FAMILIES["gpt2"], r="block.in")
    monkeypatch.setattr(loading, "FAMILIES", {})
    monkeypatch.setattr(loading, "discover", lambda model: wrong)
    with pytest.raises(ModelError, match=r"\(GPT2LMHeadModel, found by shape\)"):
        load_model(tiny_model("gpt2"), tokenizer=tokenizer)
