"""The vocabulary projection against plain formulas in float64."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ffmem.model import scores as module
from ffmem.model.loading import load_model
from ffmem.model.vocabulary import SoftmaxVocabulary
from tests.tiny import VOCABULARY, tiny_model

CAP = 0.5


def layer_norm(h, norm):
    centred = h - h.mean(-1, keepdim=True)
    bias = 0 if getattr(norm, "bias", None) is None else norm.bias.double()
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double() + bias


def rms_norm(h, norm, plus=0):
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    return h / (h.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (norm.weight.double() + plus)


REFERENCES = {
    "gpt2": lambda model, h, norm: (layer_norm(h, model.transformer.ln_f) if norm else h) @ model.lm_head.weight.double().T,
    "llama": lambda model, h, norm: (rms_norm(h, model.model.norm) if norm else h) @ model.lm_head.weight.double().T,
    "gemma2": lambda model, h, norm: (
        CAP * torch.tanh((rms_norm(h, model.model.norm, plus=1) if norm else h) @ model.lm_head.weight.double().T / CAP)
    ),
    "phi": lambda model, h, norm: (
        (layer_norm(h, model.model.final_layernorm) if norm else h) @ model.lm_head.weight.double().T
        + model.lm_head.bias.double()
    ),
    "gptj": lambda model, h, norm: (
        (layer_norm(h, model.transformer.ln_f) if norm else h) @ model.lm_head.weight.double().T
        + model.lm_head.bias.double()
    ),
    "cohere": lambda model, h, norm: (
        0.0625 * (layer_norm(h, model.model.norm) if norm else h) @ model.lm_head.weight.double().T
    ),
    "opt-post-norm-projected": lambda model, h, norm: (
        h @ model.model.decoder.project_out.weight.double().T @ model.lm_head.weight.double().T
    ),
}


@pytest.fixture(scope="module", params=REFERENCES)
def case(request, tokenizer):
    """A vocabulary, seven vectors, and the reference's log-probabilities of them without and with the norm."""
    model = tiny_model(request.param)
    if request.param == "gemma2":
        model.config.final_logit_softcapping = CAP  # small enough to bite
    h = 3 * torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = {norm: REFERENCES[request.param](model, h.double(), norm).log_softmax(-1) for norm in (False, True)}
    return load_model(model, tokenizer=tokenizer).vocabulary, h, expected


@pytest.fixture(params=[False, True], ids=["bare", "normed"])
def norm(request):
    return request.param


@pytest.fixture(params=[None, 3 * VOCABULARY, 1], ids=["whole", "three-rows", "row-by-row"])
def rows(request, monkeypatch):
    """Chunks of any size change nothing; the most rows one may hold."""
    if request.param is None:
        return 7
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)
    return max(1, request.param // VOCABULARY)


def close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def by_sorting(log_probs, k, largest):
    ids = log_probs.argsort(-1, descending=largest)[:, :k]
    return ids, log_probs.gather(1, ids)


def test_log_probs_are_those_of_the_formula(case, norm):
    vocabulary, h, expected = case
    assert vocabulary.size == VOCABULARY
    found = vocabulary.log_probs(h, norm=norm)
    assert found.dtype == torch.float32
    close(found, expected[norm])


def test_top_is_the_head_of_a_full_sort(case, norm, rows):
    vocabulary, h, expected = case
    log_prob, ids = vocabulary.top(h, 5, norm=norm)
    best, best_log_prob = by_sorting(expected[norm], 5, True)
    assert torch.equal(ids, best)
    close(log_prob, best_log_prob)


def test_extremes_are_both_ends_of_a_full_sort(case, norm, rows):
    vocabulary, h, expected = case
    found = vocabulary.extremes(h, 4, norm=norm)
    for name, largest in (("promoted", True), ("suppressed", False)):
        ids, log_prob = by_sorting(expected[norm], 4, largest)
        assert torch.equal(getattr(found, name), ids)
        close(getattr(found, f"{name}_log_prob"), log_prob)


@pytest.fixture(params=["whole", "chunks"])
def spread(request, monkeypatch):
    """Mean and deviation read off the scores, of all rows at a time or of a few."""
    if request.param == "chunks":
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 3 * VOCABULARY)


def test_how_far_tokens_stand_out_is_told_by_all_log_probabilities(case, norm, spread):
    vocabulary, h, expected = case
    found = vocabulary.extremes(h, 4, norm=norm)
    z = (expected[norm] - expected[norm].mean(1, keepdim=True)) / expected[norm].std(1, correction=0, keepdim=True)
    assert z.max() > 1
    for of_ids, ids in ((found.promoted_z, found.promoted), (found.suppressed_z, found.suppressed)):
        torch.testing.assert_close(of_ids.double(), z.gather(1, ids), rtol=1e-4, atol=1e-4)


def test_a_rank_is_the_place_in_a_full_sort(case, norm, rows):
    vocabulary, h, expected = case
    order, _ = by_sorting(expected[norm], VOCABULARY, True)
    for place in (0, 1, 50, VOCABULARY - 1):
        assert vocabulary.score_token(h, order[:, place], norm=norm).rank.tolist() == [place + 1] * 7


def test_a_token_s_own_log_probability_is_that_of_the_formula(case, norm, rows):
    vocabulary, h, expected = case
    token = torch.arange(0, 98, 14)
    found = vocabulary.log_prob(h, token, norm=norm)
    torch.testing.assert_close(found.double(), expected[norm].gather(1, token[:, None])[:, 0], rtol=1e-4, atol=1e-5)


def test_no_more_rows_are_projected_at_a_time_than_a_chunk_holds(case, rows, monkeypatch):
    vocabulary, h, _ = case
    seen = []
    pieces = SoftmaxVocabulary.pieces
    monkeypatch.setattr(SoftmaxVocabulary, "pieces", lambda self, h, **kw: seen.append(len(h)) or pieces(self, h, **kw))
    vocabulary.top(h, 1)
    assert max(seen) == rows
    assert sum(seen) == 7


def test_a_readout_is_the_logit_as_a_linear_map_of_the_normed_vector(case):
    vocabulary, h, expected = case
    token = torch.arange(7) * 14
    (readout,) = vocabulary.readouts(token)
    (other,) = vocabulary.readouts(token + 1)
    assert readout.name == "logit"
    h = h if vocabulary.norm is None else vocabulary.norm(h).detach()
    first, second = ((h * one.vectors).sum(1) + one.bias for one in (readout, other))
    if vocabulary.softcap is not None:
        first, second = (vocabulary.softcap * torch.tanh(one / vocabulary.softcap) for one in (first, second))
    found = expected[True].gather(1, token[:, None]) - expected[True].gather(1, token[:, None] + 1)
    close(first - second, found[:, 0])


def one_feature(*weights, **settings):
    """A vocabulary of one feature: the logit of token i is h times weight i."""
    unembedding = nn.Linear(1, len(weights), bias=False)
    unembedding.weight.data = torch.tensor(weights, dtype=torch.float32)[:, None]
    return SoftmaxVocabulary(unembedding, **settings)


def test_equal_tokens_are_ranked_by_their_ids():
    vocabulary = one_feature(1, 3, 3, 2, 1)
    ranks = vocabulary.score_token(torch.ones(5, 1), torch.arange(5)).rank
    assert ranks.tolist() == [4, 1, 2, 3, 5]
    assert vocabulary.score_token(torch.zeros(5, 1), torch.arange(5)).rank.tolist() == [1, 2, 3, 4, 5]
    assert vocabulary.score_token(-torch.ones(5, 1), torch.arange(5)).rank.tolist() == [1, 4, 5, 3, 2]


def test_where_words_lie_far_from_nothing_nothing_cancels(spread):
    """Scores around 4,096, a quarter apart: their squares' mean less their mean's square would be lost in float32."""
    weights = 4096 + torch.arange(1000) % 5 / 4
    found = one_feature(*weights.tolist()).extremes(torch.ones(2, 1), 3)
    assert found.promoted_z[0].tolist() == pytest.approx([2**0.5] * 3, rel=1e-2)


def test_a_vector_that_tells_no_token_from_another_has_none_that_stands_out(spread):
    found = one_feature(*[0.1] * 999).extremes(torch.tensor([[0.0], [1.0]]), 3)
    assert found.promoted_z.tolist() == found.suppressed_z.tolist() == [[0] * 3] * 2


def test_more_tokens_than_there_are_gives_all_of_them():
    vocabulary = one_feature(1, 3, 2)
    assert vocabulary.top(torch.ones(1, 1), 10)[1].tolist() == [[1, 2, 0]]
    assert vocabulary.extremes(torch.ones(1, 1), 10).suppressed.tolist() == [[0, 2, 1]]


def test_no_vectors_have_no_words():
    vocabulary = one_feature(1, 3, 2)
    none = torch.zeros(0, 1)
    assert vocabulary.log_probs(none).shape == (0, 3)
    assert vocabulary.score_token(none, torch.zeros(0, dtype=torch.long)).rank.shape == (0,)
    assert vocabulary.top(none, 2)[1].shape == (0, 2)
    assert vocabulary.extremes(none, 2).promoted.shape == (0, 2)


def test_a_softcap_bounds_the_logits():
    capped = one_feature(1, 2, softcap=2.0).log_probs(torch.full((1, 1), 1e6))
    assert capped.exp().tolist() == [[0.5, 0.5]]  # both logits are at the cap
    h = torch.tensor([[1.0]])
    expected = torch.tensor([[2 * torch.tanh(torch.tensor(0.5)), 2 * torch.tanh(torch.tensor(1.0))]]).log_softmax(-1)
    torch.testing.assert_close(one_feature(1, 2, softcap=2.0).log_probs(h), expected)


def test_a_vector_is_cast_to_the_dtype_of_the_unembedding_and_told_in_float32():
    vocabulary = one_feature(1, 2, 4)
    half = replace(vocabulary, unembedding=one_feature(1, 2, 4).unembedding.to(torch.bfloat16))
    log_probs = half.log_probs(torch.tensor([[2.0]]))
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, torch.tensor([[2.0, 4.0, 8.0]]).log_softmax(-1))
