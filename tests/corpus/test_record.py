from collections import Counter

import pytest

from ffmem.corpus.record import listed, parse_size, text_of
from ffmem.errors import CorpusError


@pytest.mark.parametrize(
    ("size", "found"), [("16MB", 16_000_000), ("1 kb", 1000), ("2KiB", 2048), ("1.5GB", 1_500_000_000), (300, 300)]
)
def test_sizes_are_read_with_their_units(size, found):
    assert parse_size(size) == found


@pytest.mark.parametrize(
    "size", ["", "MB", "16 TB", "-1MB", "1e6", 99, "0", "1,5MB", "٣٣٣", "1\x1b[31mMB", 1 << 64, "9" * 5000]
)
def test_what_is_no_size_too_small_or_too_large_is_refused_on_one_line(size):
    with pytest.raises(CorpusError, match="expected max-record from 100 bytes to 1 TB, such as 16MB, found") as caught:
        parse_size(size)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("text", "fits"), [("a" * 100, True), ("a" * 101, False), ("é" * 50, True), ("é" * 51, False)])
def test_a_text_is_measured_in_bytes(text, fits):
    if fits:
        assert text_of(text, Counter(), 100) == text
    else:
        with pytest.raises(CorpusError, match=r"expected a record of at most 100 bytes, found 10[12] bytes: .*--max-rec"):
            text_of(text, Counter(), 100)


def test_many_long_or_strange_names_are_shown_on_one_short_line():
    assert listed(["a", "b\nc"]) == "a, b⏎c"
    assert len(listed(f"name {number}" for number in range(10**9))) <= 300
