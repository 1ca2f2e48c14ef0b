"""Statistics and histogram against numpy on the same coefficients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.indexing.statistics import Statistics, extreme
from ffmem.run.histogram import BINS, ZERO, middle, quantile

CELLS = 5


def batch(rows, width, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    m = torch.nn.functional.gelu(torch.randn(rows, width, CELLS, generator=generator) * scale)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    return m, lengths


def tokens_of(m, lengths):
    return np.concatenate([m[row, : lengths[row]].numpy() for row in range(len(m))])


def add(statistics, m, lengths, chosen=None):
    shortest = int(lengths.min())
    high = extreme(m, lengths, shortest, largest=True)
    low = extreme(m, lengths, shortest, largest=False)
    statistics.count(m, high=high, low=low, lengths=lengths, shortest=shortest)
    statistics.measure(m, lengths, shortest, chosen)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 6), width=st.integers(1, 600))
def test_full_statistics_are_those_of_every_token_and_of_no_padding(seed, rows, width):
    statistics = Statistics(CELLS)
    found = []
    for part in range(2):
        m, lengths = batch(rows, width, seed + part)
        add(statistics, m, lengths)
        found.append(tokens_of(m, lengths))
    x = np.concatenate(found).astype(np.float64)
    assert int(statistics.measured) == len(x)
    assert statistics.active.tolist() == (x > 0).sum(0).tolist()
    np.testing.assert_array_equal(statistics.maximum.numpy(), x.max(0).astype(np.float32))
    np.testing.assert_array_equal(statistics.minimum.numpy(), x.min(0).astype(np.float32))
    np.testing.assert_allclose(statistics.sum.numpy(), x.sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(statistics.squares.numpy(), (x**2).sum(0), rtol=1e-4)
    assert statistics.histogram.sum(1).tolist() == [len(x)] * CELLS


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-4, 0.1, 1.0, 300.0]),
    q=st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0]),
)
def test_quantiles_are_within_five_percent(seed, scale, q):
    x = torch.randn(997, 1, generator=torch.Generator().manual_seed(seed)) * scale
    statistics = Statistics(1)
    statistics._measure(x)
    bins = statistics.histogram[0].nonzero().squeeze(1).numpy()
    found = quantile(bins, statistics.histogram[0].numpy()[bins], q)
    exact = np.quantile(x.numpy().astype(np.float64), q, method="lower")
    assert found == pytest.approx(exact, rel=0.05, abs=2**-24)


def test_zero_and_tiny_values_share_the_middle_bin_and_huge_ones_the_last():
    statistics = Statistics(1)
    statistics._measure(torch.tensor([[0.0], [-0.0], [1e-9], [-1e-9], [1e9], [-1e9], [1.0], [-1.0]]))
    counts = statistics.histogram[0]
    assert int(counts[ZERO]) == 4
    assert int(counts[-1]) == int(counts[0]) == 1
    one = ZERO + 1 + 24 * 8
    assert int(counts[one]) == int(counts[2 * ZERO - one]) == 1
    assert middle(np.arange(BINS)).tolist() == sorted(middle(np.arange(BINS)).tolist())


def test_a_sample_measures_only_the_chosen_tokens_but_counts_all():
    m, lengths = batch(4, 9, 3)
    chosen = torch.tensor([[0, 2], [1, 0]])
    statistics = Statistics(CELLS)
    add(statistics, m, lengths, chosen)
    x = tokens_of(m, lengths)
    assert int(statistics.measured) == 2
    torch.testing.assert_close(statistics.sum, (m[0, 1] + m[2, 0]).double())
    assert statistics.active.tolist() == (x > 0).sum(0).tolist()
    np.testing.assert_array_equal(statistics.maximum.numpy(), x.max(0))


def test_merging_shards_adds_up_and_a_saved_state_is_the_same():
    (a, la), (b, lb) = batch(3, 7, 1), batch(5, 4, 2)
    whole, first, second = Statistics(CELLS), Statistics(CELLS), Statistics(CELLS)
    add(first, a, la)
    add(second, b, lb)
    add(whole, a, la)
    add(whole, b, lb)
    first.merge(second)
    loaded = Statistics(CELLS)
    loaded.load({name: tensor.clone() for name, tensor in first.state().items()})
    for name, tensor in whole.state().items():
        torch.testing.assert_close(getattr(loaded, name), tensor)


def test_the_quantile_of_nothing_is_not_a_number():
    assert np.isnan(quantile(np.array([], int), np.array([], int), 0.5))
