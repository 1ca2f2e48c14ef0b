"""The streaming top-t against a full sort of the same coefficients, ties and all."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.corpus.batches import Batch, document_keys, prefix_keys
from ffmem.indexing import top as top_module
from ffmem.indexing.coefficients import Coefficients, DeviceBatch
from ffmem.indexing.top import EMPTY, TopTriggers, best_of_rows, every_prefix, place_of, position_of, sentence_of
from tests.indexing.reference import Offer, best_offers

CELLS = 3
DOCUMENTS = 4


@st.composite
def corpora(draw):
    """Sentences over two tokens, so that prefixes repeat, and a small integer a cell and prefix, so that values tie.

    Sentence n is in document n % DOCUMENTS: far apart, so that a document's best come in any order.
    """
    sentences = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=14))
    values = st.integers(-3, 3)
    m = [[[float(draw(values)) for _ in range(CELLS)] for _ in sentence] for sentence in sentences]
    return sentences, m


def feed(top, sentences, m, rows, *, negative=False):
    """Offer some sentences as one padded batch; what stands in the padding would win if it were read."""
    lengths = np.array([len(sentences[row]) for row in rows])
    width = int(lengths.max())
    ids = np.zeros((len(rows), width), np.int64)
    values = torch.full((len(rows), width, CELLS), -99.0 if negative else 99.0)
    for at, row in enumerate(rows):
        ids[at, : lengths[at]] = sentences[row]
        values[at, : lengths[at]] = torch.tensor(m[row])
    numbers = np.array(rows)
    keys = document_keys(numbers % DOCUMENTS, width) if top.distinct == "document" else prefix_keys(ids)
    offer(top, values, ids, lengths, numbers, negative=negative, keys=keys)


def offer(top, m, ids, lengths, numbers, *, negative=False, keys=None):
    """Offer a batch, given by its arrays, as a collector does."""
    keys = prefix_keys(np.array(ids)) if keys is None else keys
    batch = DeviceBatch(Batch(np.array(ids), np.array(lengths), np.array(numbers), keys, 0), torch.device("cpu"))
    (every_prefix if top.distinct == "none" else best_of_rows)(top, Coefficients(m, batch), negative=negative)


def listed(top, cell):
    top.flush()
    used = top.coefficient[cell] > 0
    places = top.place[cell][used]
    return list(
        zip(top.coefficient[cell][used].tolist(), sentence_of(places).tolist(), position_of(places).tolist(), strict=True)
    )


def expected(sentences, m, cell, t, distinct, sign=1):
    offers = [
        Offer(sign * m[row][at][cell], row, at + 1, tuple(sentence[: at + 1]), tuple(sentence), row % DOCUMENTS)
        for row, sentence in enumerate(sentences)
        for at in range(len(sentence))
    ]
    return [(o.coefficient, o.sentence, o.position) for o in best_offers(offers, t, distinct)]


def batches_of(count, chooser):
    rows = list(range(count))
    chooser.shuffle(rows)
    while rows:
        size = chooser.randint(1, len(rows))
        yield rows[:size]
        rows = rows[size:]


@settings(max_examples=300, deadline=None)
@given(
    corpus=corpora(),
    t=st.integers(1, 6),
    distinct=st.sampled_from(["text", "sentence", "document", "none"]),
    negative=st.booleans(),
    seed=st.integers(0, 1 << 16),
    dense=st.sampled_from([0, 12, 10**9]),
)
@pytest.mark.slow
def test_any_batching_in_any_order_equals_a_full_sort(corpus, t, distinct, negative, seed, dense):
    sentences, m = corpus
    chooser = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_module, "DENSE", dense)  # both ways to find where in its row a survivor stands
        top = TopTriggers(CELLS, t, distinct)
        for rows in batches_of(len(sentences), chooser):
            feed(top, sentences, m, rows, negative=negative)
            if chooser.random() < 0.3:
                top.flush()
    for cell in range(CELLS):
        assert listed(top, cell) == expected(sentences, m, cell, t, distinct, -1 if negative else 1)


@settings(max_examples=200, deadline=None)
@given(
    corpus=corpora(),
    t=st.integers(1, 6),
    distinct=st.sampled_from(["text", "sentence", "document", "none"]),
    seed=st.integers(0, 1 << 16),
)
@pytest.mark.slow
def test_parts_merged_in_any_order_equal_a_full_sort(corpus, t, distinct, seed):
    sentences, m = corpus
    chooser = random.Random(seed)
    parts = []
    for rows in batches_of(len(sentences), chooser):
        parts.append(TopTriggers(CELLS, t, distinct))
        feed(parts[-1], sentences, m, rows)
    while len(parts) > 1:
        chooser.shuffle(parts)
        parts[0].merge(parts.pop())
    for cell in range(CELLS):
        assert listed(parts[0], cell) == expected(sentences, m, cell, t, distinct)


@settings(max_examples=100, deadline=None)
@given(corpus=corpora(), t=st.integers(1, 4), distinct=st.sampled_from(["text", "document"]), seed=st.integers(0, 1 << 16))
def test_a_saved_state_goes_on_as_if_nothing_had_happened(corpus, t, distinct, seed):
    sentences, m = corpus
    top = TopTriggers(CELLS, t, distinct)
    for rows in batches_of(len(sentences), random.Random(seed)):
        feed(top, sentences, m, rows)
        again = TopTriggers(CELLS, t, distinct)
        again.load({name: tensor.clone() for name, tensor in top.state().items()})
        top = again
    for cell in range(CELLS):
        assert listed(top, cell) == expected(sentences, m, cell, t, distinct)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_coefficients_tie_exactly_and_keep_their_value(dtype):
    m = torch.tensor([1.0, 1.0009765625, 1.01, 0.3333]).to(dtype)  # the first two are equal in bfloat16
    top = TopTriggers(1, 4, "none")
    offer(top, m.view(1, 4, 1), [[1, 2, 3, 4]], [4], [7])
    order = sorted(range(4), key=lambda at: (-float(m[at]), at))
    assert listed(top, 0) == [(float(m[at]), 7, at + 1) for at in order]


def test_a_cell_that_never_fires_has_no_triggers_and_no_filler():
    top = TopTriggers(2, 3, "text")
    offer(top, torch.tensor([[[0.0, -1.0], [2.0, -5.0]]]), [[1, 2]], [2], [4])
    assert listed(top, 0) == [(2.0, 4, 2)]
    assert listed(top, 1) == []
    assert bool((top.place[1] == EMPTY).all())


def test_a_tie_with_the_threshold_enters_only_if_it_comes_earlier():
    top = TopTriggers(1, 1, "none")
    for sentence in (5, 9, 3):
        offer(top, torch.ones(1, 1, 1), [[1]], [1], [sentence])
        top.flush()
    assert listed(top, 0) == [(1.0, 3, 1)]


def test_a_dead_cell_does_not_open_the_gate_for_the_others(monkeypatch):
    offered = []
    add = TopTriggers.add
    monkeypatch.setattr(TopTriggers, "add", lambda self, hits: offered.append(len(hits)) or add(self, hits))
    top = TopTriggers(64, 10, "none")
    generator = torch.Generator().manual_seed(0)
    for sentence in range(30):
        m = torch.randn(1, 200, 64, generator=generator)
        m[:, :, 5] = 0.0
        offer(top, m, [[1] * 200], [200], [sentence])
    assert listed(top, 5) == []
    assert offered[0] >= 63 * 10
    assert sum(offered[-5:]) < offered[0]


def test_a_prefix_that_is_held_is_not_pending_again(monkeypatch):
    top = TopTriggers(1, 5, "text")
    for sentence in range(10):
        offer(top, torch.ones(1, 1, 1), [[7]], [1], [sentence])
        pending = sum(map(len, top._pending))
        top.flush()
        assert pending == (1 if sentence == 0 else 0)
    assert listed(top, 0) == [(1.0, 0, 1)]


def test_a_place_holds_sentence_and_position():
    last = (((1 << 16) - 1) << 27) | ((1 << 27) - 1)  # 16 bits of a part, 27 of a sentence in it
    sentence, position = torch.tensor([0, 123_456_789, last]), torch.tensor([1, (1 << 20) - 1, (1 << 20) - 2])
    place = place_of(sentence, position)
    assert 0 < int(place.min()) <= int(place.max()) < EMPTY
    assert sentence_of(place).tolist() == sentence.tolist()
    assert position_of(place).tolist() == position.tolist()
