"""Spearman: known values, ties, and a slow reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.experiments.numbers import average_ranks, spearman


def test_known_values_come_out():
    # The textbook example of IQ and hours of television: rho = -29/165.
    iq = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110]
    hours = [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    assert spearman(iq, hours) == pytest.approx(-29 / 165)
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert spearman([1, 2, 3, 4], [9, 7, 5, 3]) == -1


def test_equal_values_share_their_mean_rank():
    assert average_ranks([3, 1, 3, 2, 3]).tolist() == [4, 1, 4, 2, 4]
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4, by hand: 4.5 / sqrt(4.5 * 5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_no_spread_has_no_correlation():
    assert spearman([1, 2, 3], [5, 5, 5]) is None
    assert spearman([1], [2]) is None
    assert spearman([], []) is None
    with pytest.raises(ValueError, match="one length, found 1 and 2"):
        spearman([1], [1, 2])


@given(st.lists(st.integers(0, 5), max_size=12))
def test_a_rank_is_one_more_than_those_below_and_half_the_others_equal(values):
    slow = [1 + sum(y < x for y in values) + (values.count(x) - 1) / 2 for x in values]
    assert average_ranks(values).tolist() == slow


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 4)), max_size=8))
def test_a_weight_is_how_often_a_pair_is_written_down(pairs):
    first, second, weights = zip(*pairs, strict=True) if pairs else ((), (), ())
    often = [(x, y) for x, y, weight in pairs for _ in range(weight)]
    assert spearman(first, second, weights) == pytest.approx(spearman([x for x, _ in often], [y for _, y in often]))
