"""The adaptive softmax as a vocabulary projection: against full log-probabilities, and where it is not a plain softmax."""

from math import log

import pytest
import torch

from ffmem import build_index, values
from ffmem.model import scores as module
from ffmem.model.adaptive import vocabulary as adaptive
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.vocabulary import AdaptiveVocabulary
from ffmem.model.vocabulary import Vocabulary
from tests.tiny import VOCABULARY, some_sentences, tiny_model

N = 9


@pytest.fixture(scope="module")
def case():
    """A vocabulary, nine vectors, and their log-probabilities in one piece."""
    model = tiny_model("adaptive_lm")
    h = 5 * torch.randn(N, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return AdaptiveVocabulary(model), h, model.log_probs(h)


@pytest.fixture(params=[None, 2 * VOCABULARY + 50, VOCABULARY, 1], ids=["whole", "two-rows", "one-row", "too-small"])
def rows(request, monkeypatch):
    """Chunks of any size change nothing; the most rows one may hold."""
    if request.param is None:
        return N
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", request.param)
    return max(1, request.param // VOCABULARY)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def in_order(log_probs):
    """Ids by falling log-probability, the smaller first among equals."""
    return log_probs.sort(dim=-1, descending=True, stable=True).indices


def test_it_is_a_vocabulary_with_every_word_of_every_band(case):
    vocabulary, h, expected = case
    assert isinstance(vocabulary, Vocabulary)
    assert vocabulary.size == VOCABULARY
    assert vocabulary.log_probs(h).shape == (N, VOCABULARY)
    close(vocabulary.log_probs(h), expected)
    bands = (in_order(expected)[:, :5, None] >= torch.tensor([20, 60])).sum(-1)
    assert bands.unique().tolist() == [0, 1, 2]  # the tests below see words of each


def test_there_is_no_final_norm_to_send_a_vector_through(case):
    vocabulary, h, expected = case
    close(vocabulary.log_probs(h, norm=True), expected)
    assert torch.equal(vocabulary.top(h, 3, norm=True)[1], vocabulary.top(h, 3)[1])


def test_top_is_the_head_of_a_full_sort(case, rows):
    vocabulary, h, expected = case
    log_prob, ids = vocabulary.top(h, 7)
    assert torch.equal(ids, in_order(expected)[:, :7])
    close(log_prob, expected.gather(1, ids))


def test_extremes_are_both_ends_of_a_full_sort(case, rows):
    vocabulary, h, expected = case
    found = vocabulary.extremes(h, 4)
    assert torch.equal(found.promoted, in_order(expected)[:, :4])
    assert torch.equal(found.suppressed, in_order(expected).flip(1)[:, :4])
    close(found.promoted_log_prob, expected.gather(1, found.promoted))
    close(found.suppressed_log_prob, expected.gather(1, found.suppressed))


@pytest.mark.parametrize("how", ["whole", "chunks"])
def test_how_far_a_word_stands_out_is_told_by_the_log_probabilities_of_its_band(case, how, monkeypatch):
    vocabulary, h, expected = case
    if how == "chunks":
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 2 * VOCABULARY)
    found = vocabulary.extremes(h, 25)
    bands = [part.double() for part in expected.split([20, 40, 41], 1)]
    z = torch.cat([(part - part.mean(1, keepdim=True)) / part.std(1, correction=0, keepdim=True) for part in bands], 1)
    for of_ids, ids in ((found.promoted_z, found.promoted), (found.suppressed_z, found.suppressed)):
        torch.testing.assert_close(of_ids.double(), z.gather(1, ids), rtol=1e-3, atol=1e-4)
    assert torch.equal(torch.bucketize(found.promoted, torch.tensor([20, 60]), right=True).unique(), torch.arange(3))


def test_a_vector_of_nothing_has_no_word_that_stands_out_though_bands_differ(case):
    found = case[0].extremes(torch.zeros(1, 32), VOCABULARY)
    assert found.promoted_log_prob[0, 0] > found.promoted_log_prob[0, -1] + 0.5
    assert found.promoted_z.tolist() == [[0] * VOCABULARY]


def test_a_rank_is_the_place_in_a_full_sort(case, rows):
    vocabulary, h, expected = case
    order = in_order(expected)
    for place in (0, 1, 30, 77, VOCABULARY - 1):
        assert vocabulary.score_token(h, order[:, place]).rank.tolist() == [place + 1] * N
    mixed = torch.arange(N) * 11
    places = [order[row].tolist().index(token) + 1 for row, token in enumerate(mixed.tolist())]
    assert vocabulary.score_token(h, mixed).rank.tolist() == places


@pytest.mark.parametrize("call", ["top", "extremes", "score_token"])
def test_the_width_of_the_vocabulary_is_never_held_for_more_rows_than_a_chunk(case, rows, call, monkeypatch):
    vocabulary, h, _ = case
    seen = []
    pieces = AdaptiveVocabulary.pieces
    monkeypatch.setattr(AdaptiveVocabulary, "pieces", lambda self, h, **kw: seen.append(len(h)) or pieces(self, h, **kw))
    getattr(vocabulary, call)(h, torch.arange(N) if call == "score_token" else 2)
    assert max(seen) == rows
    assert sum(seen) == N


def test_no_vectors_have_no_words(case):
    vocabulary, h, _ = case
    assert vocabulary.top(h[:0], 2)[1].shape == (0, 2)
    assert vocabulary.extremes(h[:0], 2).promoted.shape == (0, 2)
    assert vocabulary.score_token(h[:0], torch.zeros(0, dtype=torch.long)).rank.shape == (0,)


def test_more_words_than_there_are_gives_all_of_them(case):
    vocabulary, h, expected = case
    assert torch.equal(vocabulary.top(h, 1000)[1], in_order(expected))


def test_best_and_judge_are_those_of_a_full_sort_whether_tails_are_looked_into_or_not(case, rows):
    """From short vectors, where every word is about as likely, to long ones, where one is."""
    vocabulary, _, _ = case
    generator = torch.Generator().manual_seed(2)
    h = torch.randn(300, 32, generator=generator) * torch.logspace(-2, 1.5, 300)[:, None]
    token = torch.randint(VOCABULARY, (300,), generator=generator)
    expected = vocabulary.log_probs(h)
    log_prob, ids = vocabulary.best(h)
    assert torch.equal(ids, in_order(expected)[:, 0])
    close(log_prob, expected.max(1).values)
    scored = vocabulary.score_token(h, token)
    assert torch.equal(scored.top, ids)
    close(scored.log_prob, expected.gather(1, token[:, None])[:, 0])
    assert torch.equal(scored.rank, (in_order(expected) == token[:, None]).nonzero()[:, 1] + 1)
    assert {int((id >= torch.tensor([20, 60])).sum()) for id in ids} == {0, 1, 2}  # some are in each band


def test_a_tail_is_scored_only_for_rows_in_which_its_band_is_likely_enough(case, monkeypatch):
    vocabulary, h, expected = case
    softmax, tables = vocabulary.model.softmax, vocabulary.model.model.embed
    with torch.no_grad():
        head = softmax.head(h, tables).log_softmax(1)
    scored = []
    lows = {band.words.weight.shape: band.low for band in list(tables)[1:]}
    multiply = adaptive.multiply

    def counting(h, words):
        if words.shape in lows:
            scored.append((lows[words.shape], len(h)))
        return multiply(h, words)

    monkeypatch.setattr(adaptive, "multiply", counting)
    vocabulary.best(h)
    # What the head gives, then what the first tail has lifted it to.
    first = head[:, 20] >= head[:, :20].max(1).values
    second = head[:, 21] >= torch.maximum(head[:, :20].max(1).values, expected[:, 20:60].max(1).values)
    assert scored == [(low, int(rows.sum())) for low, rows in ((20, first), (60, second)) if rows.any()]
    assert sum(rows for _, rows in scored) < 2 * N


def test_readouts_are_the_scores_whose_normalised_sum_is_the_log_probability(case):
    vocabulary, h, expected = case
    softmax, (first, *rest) = vocabulary.model.softmax, vocabulary.model.model.embed
    token = torch.tensor([0, 19, 20, 33, 59, 60, 77, 99, 100])
    head, tail = vocabulary.readouts(token)
    assert (head.name, tail.name) == ("head", "tail")
    with torch.no_grad():
        log_prob = (h * head.vectors).sum(1) - softmax.head(h, vocabulary.model.model.embed).logsumexp(1)
        for band in rest:
            inside = (token >= band.low) & (token < band.high)
            log_prob = log_prob + inside * ((h * tail.vectors).sum(1) - softmax.tail(h, band).logsumexp(1))
    close(log_prob, expected.gather(1, token[:, None])[:, 0])
    assert (tail.vectors[token < first.high] == 0).all()


@pytest.fixture
def planted():
    """Words 0 and 1 score x and -x, x being the first entry; words 2 and 3 are equal in a band that scores 1.1 x.

    So log p is, up to one number for all: x, -x, 1.1 x - log 2, 1.1 x - log 2.
    """
    config = AdaptiveConfig(
        vocab_size=4, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4, cutoffs=[2], factor=4
    )
    model = AdaptiveLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        first, second = model.model.embed
        first.words.weight[:, 0] = torch.tensor([1.0, -1.0])
        model.softmax.bands.weight[0, 0] = 1.1
        second.project.weight[0, 0] = 1.0
        second.words.weight[:, 0] = 1.0
    return AdaptiveVocabulary(model)


def along(x):
    return torch.tensor([[x, 7.0, -7.0, 0.5]])


def test_log_probs_worked_out_by_hand(planted):
    scores = torch.tensor([2.0, -2.0, 2.2])
    head = scores - scores.exp().sum().log()
    close(planted.log_probs(along(2.0)), torch.tensor([[head[0], head[1], head[2] - log(2), head[2] - log(2)]]))
    # A vector of nothing: three equal chances in the head, one of them shared by two words.
    close(planted.log_probs(along(0.0)).exp(), torch.tensor([[1 / 3, 1 / 3, 1 / 6, 1 / 6]]))


def test_equal_words_are_ranked_by_their_ids(planted):
    each = torch.arange(4)
    assert planted.score_token(along(0.0).expand(4, 4), each).rank.tolist() == [1, 2, 3, 4]
    assert planted.score_token(along(1.0).expand(4, 4), each).rank.tolist() == [1, 4, 2, 3]
    assert planted.score_token(along(-20.0).expand(4, 4), each).rank.tolist() == [2, 1, 3, 4]


def test_a_longer_vector_has_another_top_word(planted):
    """1.1 x - log 2 is above x from x = 6.93 on: the ranking is not that of a direction."""
    assert planted.top(along(6.5), 1)[1].tolist() == [[0]]
    assert planted.top(along(7.5), 1)[1].item() in (2, 3)
    assert planted.score_token(along(6.5), torch.tensor([0])).rank.tolist() == [1]
    assert planted.score_token(along(7.5), torch.tensor([0])).rank.tolist() == [3]


def test_a_vector_is_cast_to_the_weights_dtype_and_told_in_float32(case):
    _, h, expected = case
    half = AdaptiveVocabulary(tiny_model("adaptive_lm", dtype=torch.bfloat16))
    found = half.log_probs(h)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.2)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(N))


def test_the_values_of_an_index_are_this_projection_of_every_value(memories, tmp_path):
    model = memories("adaptive_lm")
    assert isinstance(model.vocabulary, AdaptiveVocabulary)
    index = build_index(model, some_sentences(10), out=tmp_path / "run", top=3, unit="line", quiet=True)
    assert len(index) == 3 * 64
    index = values(index, model, top=5, quiet=True)
    for layer, cell in ((1, 0), (2, 40), (3, 63)):
        view = index[f"L{layer}D{cell}"]
        with torch.no_grad():
            expected = model.model.log_probs(model.model.model.layers[layer - 1].fc2.weight[:, cell])
        assert [word.id for word in view.value.top(5)] == expected.topk(5).indices.tolist()
        assert view.value.max_probability == pytest.approx(float(expected.exp().max()), rel=1e-4)
        assert len(view.triggers) <= 3
        assert all(trigger.coefficient > 0 for trigger in view.triggers)
