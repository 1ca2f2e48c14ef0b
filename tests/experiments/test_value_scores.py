"""What every value puts first: against the whole softmax, and turned round."""

import pytest
import torch

from ffmem import load_model
from ffmem.experiments.value_scores import top_tokens
from ffmem.model import scores as module
from tests.tiny import tiny_model


def assert_said(found, logits):
    assert found.tolist() == torch.softmax(logits.detach().float(), -1).argmax(1).tolist()


@pytest.mark.parametrize("elements", [1 << 26, 500, 1])
def test_predictions_are_the_whole_softmax_s_maximum_in_chunks_of_any_size(gpt2, monkeypatch, elements):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", elements)
    with torch.no_grad():
        assert_said(top_tokens(gpt2, 2), gpt2.model.lm_head(gpt2.model.transformer.h[1].mlp.c_proj.weight))


def test_norm_sends_a_value_through_the_final_norm_and_the_turned_value_too(gpt2):
    values, ends = gpt2.model.transformer.h[2].mlp.c_proj.weight, gpt2.model.transformer.ln_f
    with torch.no_grad():
        assert_said(top_tokens(gpt2, 3, norm=True), gpt2.model.lm_head(ends(values)))
        assert_said(top_tokens(gpt2, 3, norm=True, sign="-"), gpt2.model.lm_head(ends(-values)))
        assert not torch.allclose(ends(-values), -ends(values))


def test_without_a_bias_the_turned_value_promotes_what_the_value_suppresses(llama):
    logits = llama.model.lm_head(llama.model.model.layers[0].mlp.down_proj.weight.T)
    assert_said(top_tokens(llama, 1, sign="-"), -logits)
    assert top_tokens(llama, 1, sign="-").tolist() == logits.argmin(1).tolist()


def test_under_an_adaptive_softmax_the_turned_value_is_projected_and_not_its_ranking_turned(tokenizer):
    adaptive = load_model(tiny_model("adaptive_lm"), tokenizer=tokenizer)
    adaptive.model.model.layers[1].fc2.weight.data.mul_(30)
    values = adaptive.values(2)
    with torch.no_grad():
        ours, whole = top_tokens(adaptive, 2, sign="-"), adaptive.model.log_probs(-values)
        assert_said(ours, whole)
        assert ours.tolist() != adaptive.model.log_probs(values).argmin(1).tolist()


def test_a_zero_value_says_every_token_alike_and_the_smallest_id_stands_for_all(tokenizer):
    model = load_model(tiny_model("gpt2"), tokenizer=tokenizer)
    model.model.transformer.h[0].mlp.c_proj.weight.data[5] = 0
    assert top_tokens(model, 1)[5] == 0
