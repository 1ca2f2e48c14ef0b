"""Text that is shown: on one line, nothing hidden in it."""

import sys
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.text import beginning, ending, padded, shown_token, visible, width


def test_no_character_that_moves_a_cursor_or_turns_a_line_is_left():
    characters = map(chr, range(sys.maxunicode + 1))
    # A few of the million that are letters of large scripts, of private use, or not assigned at all.
    shown = visible("".join(c for c in characters if category(c) not in {"Lo", "Co", "Cn"} or ord(c) % 89 == 0))
    assert shown.encode("utf-8")  # no half of a surrogate pair either
    assert not {category(char) for char in shown} & {"Cc", "Zl", "Zp", "Cs"}
    assert not set("\u200e\u200f\u061c\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff\u200b") & set(shown)


@pytest.mark.parametrize("text", ["", "plain words", "Zoë, 東京, परीक्षा", "👩\u200d🚀", "a\u0301"])
def test_what_people_write_stays_as_it_is(text):
    assert visible(text) == text


def test_a_token_keeps_its_space_and_an_end_is_a_mark():
    assert shown_token(" king\n") == "“ king⏎”"
    assert shown_token(None) == "∎"


@given(st.text(st.characters(codec="utf-8", exclude_characters="…"), max_size=30), st.integers(1, 20))
def test_a_cut_text_fits_and_is_its_beginning_or_its_end(text, columns):
    begun, ended = beginning(text, columns), ending(text, columns)
    assert max(width(begun), width(ended)) <= columns
    assert text.startswith(begun.removesuffix("…"))
    assert text.endswith(ended.removeprefix("…"))
    assert (begun == text) == (ended == text) == (width(text) <= columns)


def test_padding_counts_wide_characters_twice():
    assert padded("東", 4) == "東  "
