"""Both ends of all scores and the ranks of words, against a full stable sort: on a GPU where there is one."""

import pytest
import torch
from torch import nn

from ffmem.model import scores as module
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.vocabulary import AdaptiveVocabulary
from ffmem.model.scores import Scored, first
from ffmem.model.vocabulary import Extremes, SoftmaxVocabulary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
K = 7


def coarse(*shape, seed, step=4, dtype=torch.float32):
    """Multiples of 1/step, so that sums are exact in any order and many are equal."""
    return ((torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * step).round() / step).to(DEVICE, dtype)


def in_order(log_probs, k, largest):
    found = log_probs.sort(stable=True, dim=1, descending=largest)
    return found.indices[:, :k], found.values[:, :k]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)  # a GPU sums in another order


def assert_sorted(found: Extremes, log_probs, k=K):
    for ids, values, largest in (
        (found.promoted, found.promoted_log_prob, True),
        (found.suppressed, found.suppressed_log_prob, False),
    ):
        expected, expected_values = in_order(log_probs, k, largest)
        assert torch.equal(ids, expected)
        close(values, expected_values)


def softmax(size, d=6, seed=0, **settings):
    unembedding = nn.Linear(d, size, bias=False)
    unembedding.weight.data = coarse(size, d, seed=seed)
    return SoftmaxVocabulary(unembedding.to(DEVICE), **settings)


def adaptive(d=64, cutoffs=(300, 900), size=1500, dtype=HALF):
    """Bands of 300 words of width 64, 600 of 16 and 600 of 4."""
    config = AdaptiveConfig(
        vocab_size=size,
        hidden_size=d,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=4,
        cutoffs=list(cutoffs),
        factor=4,
    )
    model = AdaptiveLM(config).to(DEVICE, dtype).eval()
    with torch.no_grad():
        for number, band in enumerate(model.model.embed):
            band.words.weight.copy_(coarse(*band.words.weight.shape, seed=number, step=2))
            band.project.weight.copy_(torch.eye(d, device=DEVICE)[:, : band.project.weight.shape[1]])
        model.softmax.bands.weight.copy_(coarse(2, d, seed=9) * 4)
    return AdaptiveVocabulary(model)


def few_entries(n, d, seed=1):
    """Vectors of zeros and a few ones of either sign."""
    chance = torch.Generator().manual_seed(seed)
    return (torch.randint(-1, 2, (n, d), generator=chance) * (torch.rand(n, d, generator=chance) < 0.3)).float().to(DEVICE)


@pytest.mark.parametrize("size", [5000, 8192, 40], ids=["ragged", "even", "fewer-blocks-than-k"])
def test_both_ends_are_those_of_a_full_sort_ties_included(size):
    vocabulary, h = softmax(size), coarse(5, 6, seed=1)
    scores = vocabulary.unembedding(h).detach()
    found = vocabulary.extremes(h, K)
    assert_sorted(found, scores - scores.double().logsumexp(1, keepdim=True).float())
    ordered = found.promoted_log_prob
    assert (ordered[:, 1:] == ordered[:, :-1]).any()  # there are ties


def test_a_bias_a_scale_and_a_cap_are_part_of_the_scores():
    vocabulary, h = softmax(5000, scale=0.5, softcap=3.0), coarse(4, 6, seed=1)
    vocabulary.unembedding.bias = nn.Parameter(coarse(5000, seed=3))
    logits = torch.tanh(vocabulary.unembedding(h).double() * 0.5 / 3) * 3
    found = vocabulary.extremes(h, K)
    expected = logits.log_softmax(1).detach()
    close(found.promoted_log_prob.double(), in_order(expected, K, True)[1])
    close(found.suppressed_log_prob.double(), expected.gather(1, found.suppressed))
    close(found.suppressed_log_prob.double(), in_order(expected, K, False)[1])


def test_both_ends_are_found_among_the_words_of_all_bands():
    vocabulary, h = adaptive(), few_entries(6, 64)
    log_probs = vocabulary.log_probs(h)
    found = vocabulary.extremes(h, K)
    assert_sorted(found, log_probs)
    for ids in (found.promoted, found.suppressed):
        assert (ids[:, 1:] < ids[:, :-1]).any()
    bands = {
        int(band) for band in torch.bucketize(found.promoted.flatten(), torch.tensor([300, 900], device=DEVICE), right=True)
    }
    assert bands == {0, 1, 2}


def test_in_a_row_of_equals_the_smallest_ids_are_first_at_both_ends():
    vocabulary, h = softmax(5000), coarse(3, 6, seed=1)
    h[1] = 0
    found = vocabulary.extremes(h, K)
    assert found.promoted[1].tolist() == found.suppressed[1].tolist() == list(range(K))
    assert_sorted(found, vocabulary.log_probs(h))


def test_what_is_no_number_harms_no_other_row():
    vocabulary, h = softmax(5000), coarse(3, 6, seed=1)
    expected = vocabulary.extremes(h, K)
    h[2, 0] = torch.nan
    found = vocabulary.extremes(h, K)
    assert found.promoted_log_prob[2].isnan().all()
    assert torch.equal(found.promoted[:2], expected.promoted[:2])
    assert torch.equal(found.suppressed_z[:2], expected.suppressed_z[:2])


def a_few_rows_at_a_time(monkeypatch, rows, size=5000):
    for name in ("CHUNK_ELEMENTS", "GPU_CHUNK_ELEMENTS"):
        monkeypatch.setattr(module, name, rows * size)


def test_top_is_the_better_end_and_rows_come_in_chunks(monkeypatch):
    vocabulary, h = softmax(5000), coarse(4, 6, seed=1)
    a_few_rows_at_a_time(monkeypatch, 3)
    log_prob, ids = vocabulary.top(h, 2)
    expected, values = in_order(vocabulary.log_probs(h), 2, True)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(log_prob, values)


def assert_scored(vocabulary, h, token):
    """As a full stable sort has it."""
    found = vocabulary.score_token(h, token)
    log_probs = vocabulary.log_probs(h)
    order = log_probs.sort(stable=True, dim=1, descending=True).indices
    assert torch.equal(found.rank, (order == token[:, None]).nonzero()[:, 1] + 1)
    assert torch.equal(found.top, order[:, 0])
    close(found.top_log_prob, log_probs.amax(1))
    close(found.log_prob, log_probs.gather(1, token[:, None])[:, 0])
    return found


@pytest.mark.parametrize("make", [lambda: softmax(5000, d=64), adaptive], ids=["softmax", "adaptive"])
def test_a_words_rank_is_that_of_a_full_sort_ties_and_both_ends_of_every_band_included(make):
    vocabulary = make()
    ends = [0, 127, 128, 255, 256, 299, 300, 301, 811, 812, 899, 900, 901, vocabulary.size - 1]
    token = torch.tensor([*ends, *range(7, vocabulary.size, vocabulary.size // 26)], device=DEVICE)
    h = few_entries(len(token), 64, seed=4)
    found = assert_scored(vocabulary, h, token)
    assert found.rank.unique().numel() > 20


def test_in_a_row_of_equals_a_rank_is_the_id_and_rows_come_in_chunks(monkeypatch):
    vocabulary, h = softmax(5000), coarse(5, 6, seed=1)
    h[3] = 0
    a_few_rows_at_a_time(monkeypatch, 2)
    token = torch.tensor([4999, 0, 17, 1234, 4], device=DEVICE)
    assert assert_scored(vocabulary, h, token).rank[3] == 1235


@pytest.mark.parametrize("size", [5000, 8192, 449, 448])
@pytest.mark.parametrize("step", [1, 1000], ids=["many-equal", "few-equal"])
@pytest.mark.parametrize("largest", [True, False])
def test_the_first_are_those_of_a_full_stable_sort(size, step, largest):
    x = coarse(20, size, seed=3, step=step)
    x[0] = x[0].sort().values  # neighbours are best: blocks of them, or one of each block
    x[1] = x[0].flip(0)
    x[2, :K] = x[2, -K:] = 99.0 if largest else -99.0
    expected = x.sort(stable=True, dim=1, descending=largest)
    values, places = first(x, K, largest)
    assert torch.equal(values, expected.values[:, :K])
    assert torch.equal(places, expected.indices[:, :K])


def test_most_words_are_looked_at_in_blocks_alone(monkeypatch):
    """A GPU's topk reads a row many times: it is given the best of each block, then k + 1 blocks and what is left over."""
    topk, widths = torch.Tensor.topk, []
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, *args, **kw: widths.append(x.shape[1]) or topk(x, *args, **kw))
    first(coarse(3, 32_007, seed=1), K, True)
    assert widths == [1000, 32 * (K + 1) + 7]


def test_zeros_of_both_signs_are_equal():
    scores = torch.zeros(1, 5000, device=DEVICE)
    scores[0, ::2] *= -1
    scores[0, 4000:4100] = 1 + torch.arange(100, device=DEVICE)
    scores[0, :K] = torch.tensor([-1.0, 101, -0.0, 102, -2, 103, -3])
    assert first(scores, 4, True)[1].tolist() == [[5, 3, 1, 4099]]
    assert first(scores, 4, False)[1].tolist() == [[6, 4, 0, 2]]


def test_equals_behind_a_piece_s_end_come_after_and_those_of_an_earlier_piece_before():
    scores = torch.tensor([[1.0, 2, 2, 3]] * 5, device=DEVICE)
    piece = Scored(10, scores, torch.zeros(5, device=DEVICE))
    ids, log_prob = torch.tensor([9, 12, 14, 9, 14], device=DEVICE), torch.tensor([2.0, 2, 2, 3, 3], device=DEVICE)
    assert piece.before(log_prob, ids).tolist() == [1, 2, 3, 0, 1]


def test_ties_are_broken_by_place_at_the_edge_too():
    values, places = first(torch.tensor([[1.0, 3, 2, 3, 2, 2], [0, 0, 0, 0, 0, 1]]), 3, True)
    assert places.tolist() == [[1, 3, 2], [5, 0, 1]]
    assert values.tolist() == [[3, 3, 2], [1, 0, 0]]
    assert first(torch.tensor([[1.0, 3, 1, 3]]), 9, False)[1].tolist() == [[0, 2, 1, 3]]
