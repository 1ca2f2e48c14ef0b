"""The kernels that find both ends of all scores, against a full stable sort: on a GPU, or else in Triton's interpreter."""

import pytest
import torch
from torch import nn

from ffmem.model import vocabulary as module
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.vocabulary import AdaptiveVocabulary
from ffmem.model.vocabulary import Extremes, Product, SoftmaxVocabulary

tiles = pytest.importorskip("ffmem.model.tiles")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""Of which the interpreter knows only the second one."""
K = 7


@pytest.fixture
def everywhere(monkeypatch):
    """The kernels are taken, whatever the device and however few the scores."""
    monkeypatch.setattr(module, "can_tile", lambda *_: True)


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
    """Bands of 300 words of width 64, 600 of 16 and 600 of 4: of the last, the scores are kept."""
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


@pytest.mark.parametrize("size", [5000, 8192, 40], ids=["ragged", "even", "fewer-tiles-than-k"])
@pytest.mark.slow
def test_kept_scores_give_both_ends_of_a_full_sort_ties_included(size, everywhere):
    vocabulary, h = softmax(size), coarse(5, 6, seed=1)
    scores = vocabulary.products(h, norm=False)[0][0].scores()
    found = vocabulary.extremes(h, K)
    assert_sorted(found, scores - scores.double().logsumexp(1, keepdim=True).float())
    ordered = found.promoted_log_prob
    assert (ordered[:, 1:] == ordered[:, :-1]).any()  # there are ties
    if size > 4096:
        ends = tiles.ends(*vocabulary.products(h, norm=False)[:1], K, None)
        assert ends.sure.all()  # nothing was left to the plain way
        torch.testing.assert_close(ends.normalisers[:, 0], scores.logsumexp(1))


def test_a_bias_a_scale_and_a_cap_are_part_of_the_scores(everywhere):
    vocabulary, h = softmax(5000, scale=0.5, softcap=3.0), coarse(4, 6, seed=1)
    vocabulary.unembedding.bias = nn.Parameter(coarse(5000, seed=3))
    logits = torch.tanh(vocabulary.unembedding(h).double() * 0.5 / 3) * 3
    found = vocabulary.extremes(h, K)
    expected = logits.log_softmax(1).detach()
    close(found.promoted_log_prob.double(), in_order(expected, K, True)[1])
    close(found.suppressed_log_prob.double(), expected.gather(1, found.suppressed))
    close(found.suppressed_log_prob.double(), in_order(expected, K, False)[1])


@pytest.mark.slow
def test_bands_that_are_narrow_are_never_written_and_give_the_same(everywhere):
    vocabulary, h = adaptive(), few_entries(6, 64)
    products, offsets = vocabulary.products(h, norm=False)
    assert [tiles.is_kept(product) for product in products] == [False, False, True]
    assert tiles.ends(products, K, offsets).sure.sum() > 3  # most were not left to the plain way
    log_probs = vocabulary.log_probs(h)
    found = vocabulary.extremes(h, K)
    assert_sorted(found, log_probs)
    for ids in (found.promoted, found.suppressed):
        assert (ids[:, 1:] < ids[:, :-1]).any()
    bands = {
        int(band) for band in torch.bucketize(found.promoted.flatten(), torch.tensor([300, 900], device=DEVICE), right=True)
    }
    assert bands == {0, 1, 2}


@pytest.mark.slow
def test_many_rows_share_the_second_product_of_a_tile(everywhere):
    vocabulary, h = adaptive(), few_entries(70, 64, seed=5)
    assert_sorted(vocabulary.extremes(h, 3), vocabulary.log_probs(h), k=3)


def test_a_row_of_equals_is_told_and_left_to_the_plain_way(everywhere):
    vocabulary, h = softmax(5000), coarse(3, 6, seed=1)
    h[1] = 0
    ends = tiles.ends(vocabulary.products(h, norm=False)[0], K, None)
    assert ends.sure.tolist() == [True, False, True]
    found = vocabulary.extremes(h, K)
    assert found.promoted[1].tolist() == found.suppressed[1].tolist() == list(range(K))
    assert_sorted(found, vocabulary.log_probs(h))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_what_is_no_number_is_told():
    vocabulary, h = softmax(5000), coarse(3, 6, seed=1)
    h[2, 0] = torch.nan
    assert tiles.ends(vocabulary.products(h, norm=False)[0], K, None).sure.tolist() == [True, True, False]


def test_top_is_the_better_end_and_rows_come_in_chunks(everywhere, monkeypatch):
    vocabulary, h = softmax(5000), coarse(4, 6, seed=1)
    monkeypatch.setattr(module, "TILED_BYTES", 3 * tiles.room(vocabulary.products(h, norm=False)[0], 2))
    log_prob, ids = vocabulary.top(h, 2)
    expected, values = in_order(vocabulary.log_probs(h), 2, True)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(log_prob, values)


def assert_judged(vocabulary, h, token):
    """As a full stable sort has it."""
    found = vocabulary.judge(h, token)
    log_probs = vocabulary.log_probs(h)
    order = log_probs.sort(stable=True, dim=1, descending=True).indices
    assert torch.equal(found.rank, (order == token[:, None]).nonzero()[:, 1] + 1)
    assert torch.equal(found.top, order[:, 0])
    close(found.top_log_prob, log_probs.amax(1))
    close(found.log_prob, log_probs.gather(1, token[:, None])[:, 0])
    return found


@pytest.mark.parametrize("make", [lambda: softmax(5000, d=64), adaptive], ids=["softmax", "adaptive"])
@pytest.mark.parametrize("steps", [32, 3], ids=["one-program-a-row", "some-programs-a-row"])
@pytest.mark.slow
def test_a_words_rank_is_that_of_a_full_sort_ties_and_both_ends_of_every_band_included(make, steps, everywhere, monkeypatch):
    monkeypatch.setattr(tiles, "STEPS", steps)
    vocabulary = make()
    ends = [0, 127, 128, 255, 256, 299, 300, 301, 811, 812, 899, 900, 901, vocabulary.size - 1]
    token = torch.tensor([*ends, *range(7, vocabulary.size, vocabulary.size // 26)], device=DEVICE)
    h = few_entries(len(token), 64, seed=4)
    products, offsets = vocabulary.products(h, norm=False)
    assert tiles.standing(products, token, offsets if len(products) > 1 else None).sure.sum() > len(token) - 4
    found = assert_judged(vocabulary, h, token)
    assert found.rank.unique().numel() > 20
    assert torch.equal(vocabulary.rank(h, token), found.rank)


def test_a_row_of_equals_is_judged_the_plain_way_and_rows_come_in_chunks(everywhere, monkeypatch):
    vocabulary, h = softmax(5000), coarse(5, 6, seed=1)
    h[3] = 0
    monkeypatch.setattr(module, "TILED_BYTES", 2 * tiles.room(vocabulary.products(h, norm=False)[0], 1))
    token = torch.tensor([4999, 0, 17, 1234, 4], device=DEVICE)
    assert tiles.standing(vocabulary.products(h, norm=False)[0], token, None).sure.tolist() == [
        True,
        True,
        True,
        False,
        True,
    ]
    assert assert_judged(vocabulary, h, token).rank[3] == 1235


def test_a_span_of_words_that_cannot_be_adds_nothing_to_a_normaliser():
    scores = coarse(2, 9000, seed=1)
    scores[1, :4096] = -torch.inf
    torch.testing.assert_close(tiles.logsumexp(scores), scores.logsumexp(1))


def test_zeros_of_both_signs_are_equal():
    scores = torch.zeros(1, 5000, device=DEVICE)
    scores[0, ::2] *= -1
    scores[0, 4000:4100] = 1 + torch.arange(100, device=DEVICE)
    scores[0, :K] = torch.tensor([-1.0, 101, -0.0, 102, -2, 103, -3])
    product = Product(0, torch.zeros(1, 1, device=DEVICE), torch.zeros(5000, 1, device=DEVICE), lambda _: scores)
    ends = tiles.ends([product], 4, None)
    assert ends.ids[0, 0].tolist() == [5, 3, 1, 4099]
    assert not ends.sure[0]  # too many zeros in front of the fourth smallest


def test_the_plain_way_breaks_ties_by_id_at_the_edge_too():
    values, places = module._first(torch.tensor([[1.0, 3, 2, 3, 2, 2], [0, 0, 0, 0, 0, 1]]), 3, True)
    assert places.tolist() == [[1, 3, 2], [5, 0, 1]]
    assert values.tolist() == [[3, 3, 2], [1, 0, 0]]
    assert module._first(torch.tensor([[1.0, 3, 1, 3]]), 9, False)[1].tolist() == [[0, 2, 1, 3]]


def test_the_kernels_are_for_gpus_and_many_scores():
    assert not module.can_tile(torch.device("cpu"), 1 << 30, 50)
    assert not module.can_tile(torch.device("cuda"), 1000, 50)
    assert not module.can_tile(torch.device("cuda"), 1 << 30, 1000)
    assert module.can_tile(torch.device("cuda"), 1 << 30, 50)
