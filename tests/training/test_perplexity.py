"""Perplexity against a loop over single words, and against numbers worked out by hand."""

from math import exp

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.training import perplexity as room
from ffmem.training.perplexity import perplexity, sentence_perplexity, window_perplexity
from ffmem.training.stream import MARK, UNKNOWN
from tests.training.small import stream_of

CONTEXT = 8


@pytest.fixture(scope="module")
def model():
    """A random model that is sure of itself: perplexities of single words differ by far."""
    torch.manual_seed(3)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = AdaptiveConfig(vocab_size=30, cutoffs=[10, 20], max_position_embeddings=CONTEXT, **shape)
    return AdaptiveLM(config).eval()


def slow(model, parts):
    """exp of the mean of -log p over all words of (inputs, targets), one window and one word at a time."""
    losses = []
    for inputs, targets in parts:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([inputs])).logits[0]
        losses += [-float(logits[at, target]) for at, target in enumerate(targets)]
    return exp(sum(losses) / len(losses))


def slow_windows(model, stream, length=256):
    whole = [*stream.tolist(), MARK]
    return slow(
        model,
        [(whole[at : at + length][: len(stream) - at], whole[at + 1 :][:length]) for at in range(0, len(stream), length)],
    )


def slow_sentences(model, sentences):
    parts = []
    for sentence in sentences:
        inputs, targets = [MARK, *sentence], [*sentence, MARK]
        for at in range(0, len(inputs), CONTEXT):
            parts.append((inputs[at : at + CONTEXT], targets[at : at + CONTEXT]))
    return slow(model, parts)


some = st.lists(st.lists(st.integers(3, 29), min_size=1, max_size=2 * CONTEXT), min_size=1, max_size=8)


@given(some, st.integers(1, 20))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_both_perplexities_equal_a_loop_over_single_words(model, sentences, length):
    stream = stream_of(*sentences)
    assert window_perplexity(model, stream, length) == pytest.approx(slow_windows(model, stream, length), rel=1e-4)
    assert sentence_perplexity(model, stream) == pytest.approx(slow_sentences(model, sentences), rel=1e-4)


@pytest.mark.parametrize("tokens", [255, 256, 257, 512, 700])
def test_windows_hold_256_tokens_and_do_not_overlap(model, tokens):
    sentence = [3 + at * 7 % 27 for at in range(tokens - 1)]
    stream = stream_of(sentence)
    assert len(stream) == tokens
    assert window_perplexity(model, stream) == pytest.approx(slow_windows(model, stream), rel=1e-4)


def test_many_batches_and_many_pieces_of_the_head_sum_to_the_same(model, monkeypatch):
    sentences = [[3 + (at * 5 + word) % 27 for word in range(1 + at % 20)] for at in range(60)]
    stream = stream_of(*sentences)
    monkeypatch.setattr(room, "BATCH", 40)
    assert window_perplexity(model, stream, 16) == pytest.approx(slow_windows(model, stream, 16), rel=1e-4)
    assert sentence_perplexity(model, stream) == pytest.approx(slow_sentences(model, sentences), rel=1e-4)


def test_a_long_sentence_is_cut_to_the_context(model):
    for words in (CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT):
        sentence = [3 + word % 27 for word in range(words)]
        expected = slow_sentences(model, [sentence])
        assert sentence_perplexity(model, stream_of(sentence)) == pytest.approx(expected, rel=1e-4)


def test_a_model_that_knows_nothing_has_the_perplexity_that_its_bands_give():
    # A head of 6 words and 2 tails: 1/8 each. A tail's words share its eighth: 1/16 of two words, 1/32 of four.
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = AdaptiveLM(AdaptiveConfig(vocab_size=12, cutoffs=[6, 8], **shape)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = perplexity(model, stream_of([4, 6], [UNKNOWN, 9, 11]))
    # 4, 6, mark, unknown, 9, 11, mark
    expected = 2 ** ((3 + 4 + 3 + 3 + 5 + 5 + 3) / 7)
    assert found.windows == pytest.approx(expected, rel=1e-6)
    assert found.sentences == pytest.approx(expected, rel=1e-6)
    assert found.unknown == 1 / 5  # of words; marks are none
    assert found.tokens == 7


def test_what_follows_the_end_counts_for_nothing(model):
    """The last window is filled up; a fill of any length gives the same."""
    stream = stream_of([5, 6, 7])
    found = [window_perplexity(model, stream, length) for length in (4, 5, 64)]
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_measuring_needs_no_gradient_and_leaves_none(model):
    perplexity(model, stream_of([5, 6, 7]))
    assert all(parameter.grad is None for parameter in model.parameters())
