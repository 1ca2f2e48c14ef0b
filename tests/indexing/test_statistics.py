"""Statistics and histogram against numpy on the same coefficients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.corpus.batches import Batch, prefix_keys
from ffmem.errors import FfmemError
from ffmem.indexing.coefficients import Coefficients, DeviceBatch
from ffmem.indexing.layer_statistics import LayerStatistics
from ffmem.indexing.statistics import BUILT_IN, Histogram
from ffmem.indexing.tables import cell_schema
from ffmem.run.histogram import BINS, ZERO, middle, quantile
from ffmem.run.reader import CELL_COLUMNS

CELLS = 5


def batch(rows, width, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    m = torch.nn.functional.gelu(torch.randn(rows, width, CELLS, generator=generator) * scale)
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    lengths[0] = width
    return m, lengths


def tokens_of(m, lengths):
    return np.concatenate([m[row, : lengths[row]].numpy() for row in range(len(m))])


def every_statistic() -> LayerStatistics:
    return LayerStatistics(BUILT_IN, CELLS, torch.device("cpu"))


def add(statistics, m, lengths, every=1):
    ids = np.zeros(m.shape[:2], np.int64)
    batch = Batch(ids, lengths.numpy(), np.arange(len(lengths)), prefix_keys(ids), 0)
    statistics.add(Coefficients(m, DeviceBatch(batch, m.device)), every=every, fused=False)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 6), width=st.integers(1, 600))
def test_full_statistics_are_those_of_every_token_and_of_no_padding(seed, rows, width):
    statistics = every_statistic()
    found = []
    for part in range(2):
        m, lengths = batch(rows, width, seed + part)
        add(statistics, m, lengths)
        found.append(tokens_of(m, lengths))
    x = np.concatenate(found).astype(np.float64)
    firings, extremes, moments, histogram = statistics.each.values()
    assert statistics.measured == len(x)
    assert firings.active.tolist() == (x > 0).sum(0).tolist()
    np.testing.assert_array_equal(extremes.maximum.numpy(), x.max(0).astype(np.float32))
    np.testing.assert_array_equal(extremes.minimum.numpy(), x.min(0).astype(np.float32))
    np.testing.assert_allclose(moments.sum.numpy(), x.sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moments.squares.numpy(), (x**2).sum(0), rtol=1e-4)
    assert histogram.histogram.sum(1).tolist() == [len(x)] * CELLS


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-4, 0.1, 1.0, 300.0]),
    q=st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0]),
)
def test_quantiles_are_within_five_percent(seed, scale, q):
    x = torch.randn(997, 1, generator=torch.Generator().manual_seed(seed)) * scale
    statistics = Histogram(1, "cpu")
    statistics.measure(x)
    bins = statistics.histogram[0].nonzero().squeeze(1).numpy()
    found = quantile(bins, statistics.histogram[0].numpy()[bins], q)
    exact = np.quantile(x.numpy().astype(np.float64), q, method="lower")
    assert found == pytest.approx(exact, rel=0.05, abs=2**-24)


def test_zero_and_tiny_values_share_the_middle_bin_and_huge_ones_the_last():
    statistics = Histogram(1, "cpu")
    statistics.measure(torch.tensor([[0.0], [-0.0], [1e-9], [-1e-9], [1e9], [-1e9], [1.0], [-1.0]]))
    counts = statistics.histogram[0]
    assert int(counts[ZERO]) == 4
    assert int(counts[-1]) == int(counts[0]) == 1
    one = ZERO + 1 + 24 * 8
    assert int(counts[one]) == int(counts[2 * ZERO - one]) == 1
    assert middle(np.arange(BINS)).tolist() == sorted(middle(np.arange(BINS)).tolist())


def test_a_sample_measures_only_the_chosen_tokens_but_counts_all():
    m, lengths = batch(4, 9, 3)
    statistics = every_statistic()
    add(statistics, m, lengths, every=4)
    chosen = [m[row, at] for row in range(4) for at in range(int(lengths[row])) if (row + at + 1) % 4 == 0]
    x = tokens_of(m, lengths)
    firings, extremes, moments, _ = statistics.each.values()
    assert 0 < statistics.measured == len(chosen) < len(x)
    torch.testing.assert_close(moments.sum, torch.stack(chosen).double().sum(0))
    assert firings.active.tolist() == (x > 0).sum(0).tolist()
    np.testing.assert_array_equal(extremes.maximum.numpy(), x.max(0))


def test_parts_merge_in_any_order_and_a_saved_state_goes_on():
    (a, la), (b, lb), (c, lc) = batch(3, 7, 1), batch(5, 4, 2), batch(2, 9, 3)
    whole, first, second = every_statistic(), every_statistic(), every_statistic()
    add(first, a, la)
    again = every_statistic()
    again.load({name: tensor.clone() for name, tensor in first.state().items()})
    add(again, c, lc)
    add(second, b, lb)
    second.merge(again)
    for m, lengths in ((a, la), (b, lb), (c, lc)):
        add(whole, m, lengths)
    assert second.measured == whole.measured
    left, right = second.state(), whole.state()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_sums_of_floats_are_kept_for_each_shard_and_added_in_the_order_that_is_asked_for():
    (a, la), (b, lb) = batch(3, 7, 1), batch(5, 4, 2)
    read, found = every_statistic(), every_statistic()
    shards = []
    for m, lengths in ((a, la), (b, lb)):
        add(read, m, lengths)
        read.end_shard()
        shards.append({name: tensor.clone() for name, tensor in read.sums().items()})
        np.testing.assert_allclose(shards[-1]["moments/sum"].numpy(), tokens_of(m, lengths).sum(0), rtol=1e-5)
    assert shards[0].keys() == {"moments/sum", "moments/squares"}
    assert not shards[0].keys() & read.state().keys()
    for sums in shards:
        found.add_sums(sums)
    torch.testing.assert_close(found.each["moments"].sum, shards[0]["moments/sum"] + shards[1]["moments/sum"])


def test_more_tokens_than_a_bin_can_count_are_an_error():
    statistics = every_statistic()
    add(statistics, *batch(3, 7, 1))
    statistics.measured = 1 << 31
    with pytest.raises(FfmemError, match="use --stats sample"):
        statistics.end_shard()
    with pytest.raises(FfmemError, match="use --stats sample"):
        every_statistic().merge(statistics)


def test_the_columns_of_the_table_of_cells_are_those_that_a_reader_knows():
    assert tuple(cell_schema(every_statistic()).names) == CELL_COLUMNS
    assert tuple(cell_schema(None).names) == CELL_COLUMNS[:5]


def test_the_quantile_of_nothing_is_not_a_number():
    assert np.isnan(quantile(np.array([], int), np.array([], int), 0.5))
