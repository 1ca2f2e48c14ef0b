"""WikiText's layout, and its text turned back to what was written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus.wikitext import LOOKED_AT, is_heading, is_title, plain, shows_marks

LINES = [
    (" The old harbour , built in 1912 , is closed . ", "The old harbour, built in 1912, is closed."),
    ("a well @-@ known mill", "a well-known mill"),
    ("a two @-@ and @-@ a @-@ half year plan", "a two-and-a-half year plan"),
    ("12 @,@ 345 @,@ 678 @.@ 9 people", "12,345,678.9 people"),
    ('She called it " the end " , and left .', 'She called it "the end", and left.'),
    ('" One . " " Two ! " Three ?', '"One." "Two!" Three?'),
    ('He wrote : " It is late', 'He wrote: "It is late'),
    ("the king 's men didn 't know ; they 've gone", "the king's men didn't know; they've gone"),
    ("O 'Connor met D 'Souza .", "O'Connor met D'Souza."),
    ("the sailors ' boats and James ' horse", "the sailors' boats and James' horse"),
    ("a ' small ' house and a ' large ' one", "a 'small' house and a 'large' one"),
    ("he said , ' the boys ' . ", "he said, 'the boys'."),
    ("rock ' n ' roll of the ' 70s and ' 90s", "rock 'n' roll of the '70s and '90s"),
    ("a word ' alone", "a word' alone"),
    ("it weighs 3 @.@ 5 kg ( 7 @.@ 7 lb ) .", "it weighs 3.5 kg (7.7 lb)."),
    ("and [ she ] left [ ... ] early", "and [she] left [...] early"),
    ("They won 3 – 1 in 1990 – 91 ( 1988 – present )", "They won 3–1 in 1990–91 (1988–present)"),
    ("the Paris – Lyon line – a long one – was closed .", "the Paris–Lyon line – a long one – was closed."),
    ("$ 5 – $ 6 , or £ 3 @.@ 20", "$5–$6, or £3.20"),
    ("the dog — a large one — barked .", "the dog—a large one—barked."),
    ("60 km / h , and / or more", "60 km/h, and/or more"),
    ("the north – south line - and more .", "the north – south line - and more."),
    ("a line without marks <unk> – or – quotes — as it was", "a line without marks … – or – quotes — as it was"),
    ("at 04 : 30 he said : 20 people", "at 04:30 he said: 20 people"),
    ("20 ° C at 51 ° 30 ′ 26 ″ N , or − 5 ° F", "20 °C at 51° 30′ 26″ N, or −5 °F"),
    ("50 % of Smith & Sons in the U.S. and so on ... and on", "50% of Smith & Sons in the U.S. and so on ... and on"),
    ('the town of <unk> , called " <unk> \'s "', 'the town of …, called "…\'s"'),
    (" = = The North – South divide = = ", "The North – South divide"),
    (" = Norway = \n It is large . \n\n It is cold . ", "Norway\nIt is large.\n\nIt is cold."),
    ("", ""),
    (" . ", "."),
    ("@-@", "-"),
    ("'", "'"),
]


@pytest.mark.parametrize(("line", "written"), LINES)
def test_a_line_is_turned_back_to_what_was_written(line, written):
    assert plain(line) == written


@pytest.mark.parametrize("written", [written for _, written in LINES if written not in (".", "'")])
def test_text_that_was_never_set_apart_stays_as_it_is(written):
    assert plain(written) == written
    assert plain(f"  {written}\t") == f"  {written}\t"


@given(st.text(alphabet="ab1 '\",.-–:°/@()<unk>\n", max_size=60))
def test_nothing_is_added_or_lost_but_spaces_and_marks(text):
    def bare(text):
        return text.translate({ord(char): None for char in " @=…"}).replace("<unk>", "")

    assert bare(plain(text)) == bare(text)
    assert plain(text).count("\n") == text.count("\n")


def test_marks_are_looked_for_at_the_beginning_alone():
    marked, other = "a well @-@ known mill", "a well-known mill, @-@mills and me@home"
    assert shows_marks([marked])
    assert not shows_marks([])
    assert not shows_marks([other] * 100)
    assert shows_marks([other] * 30 + [marked])
    assert not shows_marks([other] * 99 + [marked])  # a text that is about them
    assert not shows_marks([other] * LOOKED_AT + [marked] * LOOKED_AT)


def test_titles_are_headings_of_the_first_level():
    lines = [" = One = ", "= One =", " = = Two = = ", "x = y", " = One = = "]
    assert [is_title(line) for line in lines] == [True, True, False, False, False]
    assert [is_heading(line) for line in lines] == [True, True, True, False, False]
