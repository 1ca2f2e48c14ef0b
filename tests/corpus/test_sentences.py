import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus.sentences import Segmenter, Unit
from ffmem.errors import CorpusError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PUNCTUATED = st.text("abAB01 \t\n\r.,!?…。\"'“”‘’()[]@-\u00a0\u2009\u3000\u200b\u2028\x1c\x85é\u0301\U0001f600")


def split(text, unit="sentence", language="en"):
    return list(Segmenter(Unit.parse(unit), language).split(text))


def solid(text):
    """The text without its white space."""
    return "".join(text.split())


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. Smith met Mr. Jones.", "They left."],
        ["J. K. Rowling wrote it.", "She did."],
        ["U.S. troops left.", "Good."],
        ["It is 2.5 km long.", "He ran."],
        ["What?", "No!", "Yes."],
        ['He said "Go away. Now."', "Then he left."],
        ["“Stop!” she said.", "“I will not.”", "He went."],
        ["He had a guest @-@ starring role .", "It cost 1 @,@ 000 yen ."],
        ["It rose 2 @.@ 5 points , then 3 @.@ 25 .", "The end ."],
        ["No end"],
    ],
    ids=" ".join,
)
def test_a_paragraph_is_split_where_a_reader_would(sentences):
    assert split(" ".join(sentences)) == sentences


def test_paragraphs_are_never_joined_and_blank_ones_give_nothing():
    assert split("no full stop\nbut a new line\r\n\n  \nthe last\u2028one") == [
        "no full stop",
        "but a new line",
        "the last",
        "one",
    ]
    assert split("") == split(" \n\t\n") == split("", "line") == []


@pytest.mark.parametrize("space", ["\u00a0", "\u2009", "\u202f", "\u3000"])
def test_wide_spaces_are_kept_inside_sentences_and_trimmed_around_them(space):
    text = f"{space}The price is 5{space}km. It was{space}good.{space}They left.{space}"
    assert split(text) == [f"The price is 5{space}km.", f"It was{space}good.", "They left."]


@given(TEXT | PUNCTUATED, st.sampled_from(["sentence", "line", "window:3"]), st.sampled_from(["en", "fr", "ja", "xx"]))
def test_nothing_but_white_space_is_lost_in_any_text(text, unit, language):
    units = split(text, unit, language)
    assert solid("".join(units)) == solid(text)
    assert all(unit == unit.strip() for unit in units)


@given(st.lists(PUNCTUATED.filter(lambda text: text.strip() and len(text.splitlines()) == 1), min_size=1))
def test_each_paragraph_is_split_as_if_it_were_alone(paragraphs):
    assert split("\n".join(paragraphs)) == [sentence for paragraph in paragraphs for sentence in split(paragraph)]


def test_the_line_unit_keeps_lines_whole_and_the_window_unit_the_record():
    assert split("One. Two.\n\n Three. \n", "line") == ["One. Two.", "Three."]
    assert split(" One.\nTwo. \n", "window:5") == ["One.\nTwo."]


@pytest.mark.parametrize("text", ["sentence", "line", "window:1", "window:256"])
def test_a_unit_is_written_as_it_is_read(text):
    assert str(Unit.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "Sentence", "window", "window:", "window:0", "window:-1", "window:1.5", "window:5 ", "paragraph"]
)
def test_an_unknown_unit_is_refused(text):
    with pytest.raises(CorpusError, match=f"expected unit sentence, line or window:N, found '{text}'"):
        Unit.parse(text)


def test_plain_text_is_made_before_it_is_split_and_unknown_words_end_no_sentence():
    text = "A well @-@ known <unk> , near <unk> <unk> , weighs 3 @.@ 5 kg . It 's near <unk> . He left ."
    assert list(Segmenter(Unit("sentence"), plain=True).split(text)) == [
        "A well-known …, near … …, weighs 3.5 kg.",
        "It's near ….",
        "He left.",
    ]
    assert list(Segmenter(Unit("line"), plain=True).split(" = A Title = \n a @-@ b ")) == ["A Title", "a-b"]
    assert list(Segmenter(Unit("window", 5), plain=True).split(" a @-@ b ")) == ["a-b"]
