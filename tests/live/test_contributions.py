"""A token's logit as a sum of parts: against the model's own logits, and against formulas written by hand."""

from functools import cache

import pytest
import torch
from torch import nn
from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

from ffmem import Cell, load_model
from ffmem.errors import FfmemError, ModelError
from ffmem.live.contributions import FrozenNorm, capture, contributions, frozen_norms
from tests.tiny import UNKNOWN, VARIANTS, VOCABULARY, tiny_model, word_tokenizer

IDS = torch.arange(3, 15)[None] * 5 % VOCABULARY
EVERY = pytest.mark.parametrize("variant", [*VARIANTS, *UNKNOWN])


@cache
def seen(variant):
    """A tiny model and what flows through it at every position of a text. Shared: change nothing."""
    model = load_model(tiny_model(variant), tokenizer=word_tokenizer())
    return model, capture(model, IDS, torch.arange(IDS.shape[1]))


def tokens_of(logits):
    """For every position the likeliest token, the unlikeliest, and any."""
    return logits.argmax(-1), logits.argmin(-1), torch.arange(len(logits)) * 8


def before_cap(model, logits):
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.atanh(logits.double() / cap)


@EVERY
def test_the_parts_add_up_to_the_models_own_logit(variant):
    model, flows = seen(variant)
    logits = before_cap(model, model.logits(IDS)[0])
    for token in tokens_of(logits):
        found = contributions(model, flows, token)
        expected = logits.gather(1, token[:, None])[:, 0]
        if variant == "adaptive_lm":  # its logits are log-probabilities: less what the two softmaxes normalise by
            expected = expected + normaliser(model, token)
        torch.testing.assert_close(found.total.sum(0), expected.float(), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(found.total, found.score, rtol=1e-3, atol=1e-5)


@torch.inference_mode()
def normaliser(model, token):
    h, softmax, tables = model.record(IDS).o[-1][0], model.model.softmax, model.model.model.embed
    total = softmax.head(h, tables).logsumexp(1)
    for band in list(tables)[1:]:
        inside = (token >= band.low) & (token < band.high)
        total = total + inside * softmax.tail(h, band).logsumexp(1)
    return total


@EVERY
def test_of_a_layer_the_parts_add_up_to_what_its_own_output_gives(variant):
    model, flows = seen(variant)
    token = torch.arange(IDS.shape[1]) * 7
    found = contributions(model, flows, token, of="layer")
    recording = model.record(IDS)
    for layer, parts in enumerate(found.layers, 1):
        total = parts.before + parts.added + parts.norm_bias + found.unembedding_bias
        torch.testing.assert_close(total, parts.score, rtol=1e-3, atol=1e-5)
        if variant == "adaptive_lm":
            continue
        log_probs = model.vocabulary.log_probs(model.after_post_norm(recording.o[layer - 1][0], layer), norm=True)
        if getattr(model.config, "final_logit_softcapping", None) is None:
            # A logit is a log-probability but for one number a position: two tokens' difference is the same in both.
            other = contributions(model, flows, token + 1, of="layer").layers[layer - 1].score
            expected = log_probs.gather(1, token[:, None]) - log_probs.gather(1, token[:, None] + 1)
            torch.testing.assert_close((parts.score - other)[0], expected[:, 0], rtol=1e-3, atol=1e-4)


@EVERY
def test_what_enters_a_layer_is_all_that_came_before_it(variant):
    model, flows = seen(variant)
    found = contributions(model, flows, torch.arange(IDS.shape[1]))
    for below, above in zip(found.layers, found.layers[1:], strict=False):
        total = below.before + below.added + below.norm_bias
        torch.testing.assert_close(above.before, total, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("of", ["output", "layer"])
def test_the_largest_cells_are_the_head_of_a_full_sort(of):
    model, flows = seen("llama")
    found = contributions(model, flows, torch.arange(12), of=of)
    for layer, parts in enumerate(found.layers, 1):
        for row in range(12):
            cells = parts.cells[0, row]
            for sign, order in ((1, cells.argsort(descending=True)), (-1, cells.argsort())):
                largest = found.largest(layer, row, 4, sign=sign)
                assert [one.cell for one in largest] == [Cell(layer, index) for index in order[:4].tolist()]
                assert [one.total for one in largest] == cells[order[:4]].tolist()
                assert [one.coefficient for one in largest] == flows[layer - 1].m[row, order[:4]].tolist()
            assert [one.cell.index for one in found.largest(layer, row, 1000, sign=1)] == [
                index for index in cells.argsort(descending=True).tolist() if cells[index] > 0
            ]


@torch.inference_mode()
def test_without_a_norm_a_cells_part_is_its_coefficient_times_its_values_score():
    model, flows = seen("adaptive_lm")
    assert frozen_norms(model) == ()
    first, second, _ = model.model.model.embed
    for word in (5, 33):  # one of the head, one of a tail
        found = contributions(model, flows, torch.full((12,), word))
        for layer in (1, 2, 3):
            m, values = flows[layer - 1].m, model.values(layer)
            if word == 5:
                head, tail = first.words.weight[5], torch.zeros(32)
            else:
                head, tail = model.model.softmax.bands.weight[0], second.project.weight @ second.words.weight[33 - 20]
            torch.testing.assert_close(found.layers[layer - 1].cells[0], m * (values @ head))
            torch.testing.assert_close(found.layers[layer - 1].cells[1], m * (values @ tail))


def rms(x, norm):
    return (x.double().square().mean(-1, keepdim=True) + norm.eps).sqrt()


def test_a_norm_behind_the_ffn_and_the_final_norm_scale_a_cells_part():
    """gemma2: v goes through (1 + w)/rms of the norm behind the FFN, then through that of the final norm."""
    model, flows = seen("gemma2")
    assert frozen_norms(model) == ("the final norm", "the norms behind the FFN")
    token = torch.arange(12) + 20
    found = contributions(model, flows, token)
    last, norm = flows[-1], model.model.model.norm
    behind = model.blocks[-1].post_feedforward_layernorm
    # n positions, cells, d
    vectors = last.m.double()[..., None] * model.values(model.layers).double()
    vectors = vectors / rms(last.product, behind)[:, None] * (1 + behind.weight.double())
    vectors = vectors / rms(last.after, norm)[:, None] * (1 + norm.weight.double())
    expected = torch.einsum("ncd,nd->nc", vectors, model.model.lm_head.weight.double()[token])
    torch.testing.assert_close(found.layers[-1].cells[0].double(), expected, rtol=1e-3, atol=1e-6)


def frozen_layer_norm(vectors, x, norm):
    """Vectors through a LayerNorm whose mean is taken off each of them, and whose scale is that of x."""
    deviation = (x.double().var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    centred = vectors - vectors.mean(-1, keepdim=True)
    return centred / deviation[:, None] * norm.weight.double()


def test_in_a_post_norm_block_a_value_goes_through_every_norm_that_the_stream_goes_through():
    model, flows = seen("opt-post-norm-projected")
    assert frozen_norms(model) == ("the norms on the stream inside the blocks",)
    token = torch.arange(12) + 20
    found = contributions(model, flows, token)
    vectors = flows[0].m.double()[..., None] * model.values(1).double()
    vectors = frozen_layer_norm(vectors, flows[0].o, model.blocks[0].final_layer_norm)
    for block, flow in zip(model.blocks[1:], flows[1:], strict=True):
        vectors = frozen_layer_norm(vectors, flow.joined, block.self_attn_layer_norm)
        vectors = frozen_layer_norm(vectors, flow.o, block.final_layer_norm)
    readout = model.model.lm_head.weight.double()[token] @ model.model.model.decoder.project_out.weight.double()
    torch.testing.assert_close(
        found.layers[0].cells[0].double(), torch.einsum("ncd,nd->nc", vectors, readout), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("variant", ["gpt2", "gptj", "olmo2", "opt-post-norm-projected"])
def test_attentions_part_is_that_of_what_attention_itself_gives(variant):
    model, flows = seen(variant)
    names = {"gpt2": "attn", "gptj": "attn", "olmo2": "post_attention_layernorm", "opt-post-norm-projected": "self_attn"}
    kept = []
    handles = [
        getattr(block, names[variant]).register_forward_hook(
            lambda _, args, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        for block in model.blocks
    ]
    model.logits(IDS)
    for handle in handles:
        handle.remove()
    for flow, given in zip(flows, kept, strict=True):
        torch.testing.assert_close(flow.joined - flow.carried, given.reshape(12, -1), rtol=1e-4, atol=1e-5)


def test_a_post_norm_model_that_was_found_by_shape_has_its_norms_frozen_too():
    torch.manual_seed(0)
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = load_model(model.eval(), tokenizer=word_tokenizer())
    assert (model.found_by_shape, model.family.joined, model.family.o) == (True, "ln_1.in", "ln_2.in")
    assert frozen_norms(model) == ("the norms on the stream inside the blocks",)
    logits, flows, token = model.logits(IDS)[0], capture(model, IDS, torch.arange(12)), torch.arange(12)
    found = contributions(model, flows, token)
    torch.testing.assert_close(found.total[0], logits.gather(1, token[:, None])[:, 0], rtol=1e-3, atol=1e-5)


def test_in_half_precision_the_parts_still_add_up_to_about_the_logit():
    model = load_model(tiny_model("gemma2", dtype=torch.bfloat16), tokenizer=word_tokenizer())
    flows = capture(model, IDS, torch.arange(12))
    token = model.logits(IDS)[0].argmax(-1)
    found = contributions(model, flows, token)
    torch.testing.assert_close(found.total, found.score, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("d", [8, 7])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_frozen_norm_is_the_norm_where_it_was_frozen_and_linear_elsewhere(kind, d):
    torch.manual_seed(0)
    norm = kind(d)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = 3 + torch.randn(4, d)
    with torch.no_grad():
        frozen = FrozenNorm.of(norm, x, norm(x), "here")
        g = torch.randn(2, 4, d)
        assert frozen.centred == (kind is nn.LayerNorm)
        total = (frozen.pulled(g) * x).sum(-1) + frozen.constant(g)
        torch.testing.assert_close(total, (g * norm(x)).sum(-1))


def test_a_module_that_is_no_norm_is_refused_by_its_place():
    torch.manual_seed(0)
    wrong, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.no_grad(), pytest.raises(ModelError, match=r"expected a norm .* at ln_2\.in of layer 3"):
        FrozenNorm.of(wrong, x, wrong(x), "ln_2.in of layer 3")
    twice = FrozenNorm.of(None, x, 2 * x, "y")  # a factor needs no norm
    torch.testing.assert_close(twice.scale, torch.full((4, 8), 2.0))


def test_an_unknown_of_is_one_clear_line():
    model, flows = seen("gpt2")
    with pytest.raises(FfmemError, match="expected of output or layer, found 'everything'"):
        contributions(model, flows, torch.arange(12), of="everything")
