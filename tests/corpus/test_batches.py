"""Batches: every sentence once, within the tokens and the padding that are allowed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus.batches import PADDING, plan_batches


@given(st.lists(st.integers(1, 200), max_size=60), st.integers(1, 500))
def test_batches_hold_every_sentence_once_within_tokens_and_padding(lengths, batch_tokens):
    groups = plan_batches(np.array(lengths, np.int64), batch_tokens)
    assert sorted(row for rows in groups for row in rows.tolist()) == list(range(len(lengths)))
    for rows in groups:
        inside = [lengths[row] for row in rows]
        area = len(inside) * max(inside)
        assert inside == sorted(inside)
        assert area <= batch_tokens or len(inside) == 1
        assert area - sum(inside) <= PADDING * area
