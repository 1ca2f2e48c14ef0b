"""Items made ahead come in order; errors and the end of interest cross the thread."""

import threading
import time

import pytest

from ffmem.corpus.ahead import ahead


def test_items_are_made_before_they_are_asked_for_but_not_too_many():
    made = []

    def make(stopped):
        for number in range(10):
            made.append(number)
            yield number

    items = ahead(make, 2)
    assert next(items) == 0
    time.sleep(0.2)
    assert len(made) <= 4, "one taken, two ready, one waiting for a place"
    assert list(items) == list(range(1, 10))


def test_an_error_is_raised_behind_the_items_before_it():
    def make(stopped):
        yield 1
        raise ValueError("no more")

    items = ahead(make, 1)
    assert next(items) == 1
    with pytest.raises(ValueError, match="no more"):
        next(items)


def test_nobody_wants_more_and_the_thread_ends():
    told = []

    def make(stopped):
        while not stopped.is_set():
            yield 0
        told.append(True)

    items = ahead(make, 1, name="ffmem-test")
    next(items)
    items.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ffmem-test"]
