"""Batches as a function of the step, and the thread that prepares them."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.model.adaptive.config import BandShape
from ffmem.training.batches import AHEAD, Reader
from ffmem.training.stream import MARK
from tests.training.small import stream_of

BANDS = [BandShape(0, 10, 16), BandShape(10, 20, 4), BandShape(20, 30, 1)]
streams = st.lists(st.lists(st.integers(3, 29), min_size=1, max_size=12), min_size=3, max_size=30).map(
    lambda sentences: stream_of(*sentences)
)


def numbered(count, words):
    """Sentences of equal length, no word twice: a word tells where it stands."""
    return stream_of(*(range(10 + at * words, 10 + (at + 1) * words) for at in range(count)))


def same(first, second):
    """Whether two batches hold the same numbers."""
    parts = [*zip(first.tails, second.tails, strict=True)]
    return (
        torch.equal(first.ids, second.ids)
        and torch.equal(first.targets, second.targets)
        and all(torch.equal(a, b) for one, other in parts for a, b in zip(one, other, strict=True))
    )


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "ffmem-batches"]


@given(streams, st.integers(0, 5), st.data())
def test_a_step_is_a_function_of_seed_step_and_shape_alone(stream, seed, data):
    length, count = data.draw(st.integers(1, len(stream) // 3)), data.draw(st.integers(1, 5))
    expected = [Reader(stream, BANDS, seed=seed).windows(step, length, count) for step in range(8)]
    reader = Reader(stream, BANDS, seed=seed)
    for step in data.draw(st.permutations(range(8))):
        reader.windows(step, max(1, length // 2), 3)  # what else was asked for changes nothing
        assert same(reader.windows(step, length, count), expected[step])


@given(streams, st.integers(0, 40), st.data())
def test_windows_are_pieces_of_the_stream_that_begin_with_a_sentence_and_their_targets_are_the_next_words(
    stream, step, data
):
    length, count = data.draw(st.integers(1, len(stream) // 3)), data.draw(st.integers(1, 5))
    found = Reader(stream, BANDS, seed=1).windows(step, length, count)
    assert found.ids.shape == (count, length)
    assert (found.ids[:, 0] == MARK).all()
    pieces = {tuple(stream[at : at + length + 1].tolist()) for at in range(len(stream) - length)}
    for ids, targets in zip(found.ids.tolist(), found.targets.view(count, length).tolist(), strict=True):
        assert ids[1:] == targets[:-1]
        assert (*ids, targets[-1]) in pieces


@given(streams, st.integers(0, 10))
def test_tails_are_the_rows_of_rare_targets_and_their_places_in_the_band(stream, step):
    found = Reader(stream, BANDS, seed=2).windows(step, len(stream) // 3, 2)
    targets = found.targets.tolist()
    assert len(found.tails) == 2
    for band, (rows, inside) in zip(BANDS[1:], found.tails, strict=True):
        expected = [(row, target - band.low) for row, target in enumerate(targets) if band.low <= target < band.high]
        assert [*zip(rows.tolist(), inside.tolist(), strict=True)] == expected


@given(streams, st.integers(0, 50), st.integers(0, 100))
@settings(max_examples=200)
def test_a_stream_of_three_windows_is_long_enough_for_every_step(stream, step, seed):
    length = len(stream) // 3
    assert Reader(stream, BANDS, seed=seed).windows(step, length, 3).ids.shape == (3, length)


def begins(reader, length, epoch):
    """Where the windows of an epoch begin in `numbered`, in the order they are read."""
    size = reader.epoch_windows(length)
    found = reader.windows(epoch, length, size)
    places = {int(word): at for at, word in enumerate(reader.stream) if word != MARK}
    return [places[second] - 1 for second in found.ids[:, 1].tolist()]


def test_an_epoch_reads_nearly_all_of_the_stream_and_no_window_twice():
    stream, length = numbered(1000, 4), 32
    reader = Reader(stream, BANDS, seed=0)
    seen = set()
    for epoch in range(4):
        starts = begins(reader, length, epoch)
        assert len(set(starts)) == len(starts) == (5000 - 64) // 32
        covered = {at for start in starts for at in range(start, start + length + 1)}
        assert len(covered) > 0.9 * len(stream)
        seen |= covered
    assert len(seen) > 0.98 * len(stream)


def test_epochs_are_cut_and_shuffled_differently_and_so_are_seeds():
    stream = numbered(300, 4)
    orders = [begins(Reader(stream, BANDS, seed=seed), 16, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(order) for order in orders}) == 6
    assert len({tuple(sorted(order)) for order in orders}) > 3
    for order in orders:
        assert order != sorted(order)


def test_a_step_may_reach_over_the_end_of_an_epoch():
    stream, length = numbered(40, 4), 16
    reader = Reader(stream, BANDS, seed=3)
    size = reader.epoch_windows(length)
    both = [reader.windows(epoch, length, size).ids for epoch in (0, 1)]
    assert torch.equal(reader.windows(0, length, 2 * size).ids, torch.cat(both))


def test_a_stream_on_disk_is_read_as_one_in_memory(tmp_path):
    stream = numbered(30, 4)
    stream.tofile(tmp_path / "stream.i32")
    mapped = np.memmap(tmp_path / "stream.i32", np.int32, "r")
    assert same(Reader(mapped, BANDS, seed=0).windows(2, 16, 3), Reader(stream, BANDS, seed=0).windows(2, 16, 3))


def test_steps_come_in_order_from_the_first_asked_for_and_the_thread_ends_with_them():
    reader, shapes = Reader(numbered(60, 4), BANDS, seed=0), [(16, 3), (8, 2)]
    steps = reader.steps(5, shapes)
    for step in range(5, 5 + 3 * AHEAD):
        for found, (length, count) in zip(next(steps), shapes, strict=True):
            assert same(found, Reader(reader.stream, BANDS, seed=0).windows(step, length, count))
    assert threads()
    steps.close()
    assert not threads()


def test_leaving_the_loop_or_an_error_inside_it_ends_the_thread():
    reader = Reader(numbered(60, 4), BANDS, seed=0)
    for _ in reader.steps(0, [(16, 3)]):
        break
    assert not threads()

    def failing():
        for _ in reader.steps(0, [(16, 3)]):
            raise KeyError("of the loop")

    with pytest.raises(KeyError, match="of the loop"):
        failing()
    assert not threads()


class Failing(Reader):
    """Cannot read step 7."""

    def windows(self, step, length, count):
        if step == 7:
            raise OSError("the disk is gone")
        return super().windows(step, length, count)


@pytest.mark.parametrize("first", [0, 7])
def test_an_error_in_the_thread_reaches_the_reader_behind_the_steps_before_it(first):
    steps = Failing(numbered(60, 4), BANDS, seed=0).steps(first, [(16, 3)])
    for _ in range(first, 7):
        next(steps)
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    assert not threads()


def test_an_error_that_nobody_waits_for_does_not_keep_the_thread():
    steps = Failing(numbered(60, 4), BANDS, seed=0).steps(7 - AHEAD, [(16, 3)])  # the queue is full when it comes
    next(steps)
    steps.close()
    assert not threads()


def test_windows_on_the_cpu_stay_what_they_are():
    found = Reader(numbered(60, 4), BANDS, seed=0).windows(0, 16, 3)
    assert same(found.to(torch.device("cpu")), found)
