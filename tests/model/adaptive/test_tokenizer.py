"""The words of raw text, of text that is already split, and the way back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ffmem.model.adaptive.tokenizer import WikiTokenizer, join_words, split_words, wiki_tokenizer
from ffmem.model.tokens import vocabulary_texts

MARKERS = {"@-@": "-", "@,@": ",", "@.@": "."}

# Single characters that some rule looks at, from several scripts, and pieces of text in which rules meet.
CHARACTERS = "aBé ßЖж中अ्ʼ’‘'\"“”`.,;:!?…-–—‑_/\\()[]<>@#$%&=+*°½²٣07́‿\t\n\r\u00a0\u2009\u200b\u3000\x1c\ufeff😀"
PIECES = [
    *["Mr.", "No.", "U.S.", "e.g.", "vol", "St", "A.", "'s", " 't", "s'", "O'Brien", "1,500", "0.7", "1,000th", "T2.5"],
    *["...", "..", "--", " @-@ ", " @,@ ", " @.@ ", "@-@", "<unk>", " <unk> ", "</s>", "<s>", "<pad>", "<formula>"],
    *[" ", " ' ", ' " ', " . ", " .", "5–6", ".38", "-3", "18- to", " a", " A"],
]
texts = st.lists(
    st.one_of(st.sampled_from(CHARACTERS), st.sampled_from(PIECES), st.characters(codec="utf-8")), max_size=14
).map("".join)


def split(text: str) -> list[str]:
    return split_words([text])[0]


def is_space(character: str) -> bool:
    """Unicode's white space; Python adds four control characters to it."""
    return character.isspace() and character not in "\x1c\x1d\x1e\x1f"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("A red-hot, two-faced liar.", "A red @-@ hot , two @-@ faced liar ."),
        ("It cost $1,250,000.75 (or 7%).", "It cost $ 1 @,@ 250 @,@ 000 @.@ 75 ( or 7 % ) ."),
        ("the 1,000th T2.5 of a .38", "the 1,000th T2.5 of a .38"),
        ("18- to 49-year-olds at -3", "18- to 49 @-@ year @-@ olds at -3"),
        ('He said: "No!"', 'He said : " No ! "'),
        ("pages 5–6—or so", "pages 5 – 6 — or so"),
        ("wait... what....", "wait ... what ...."),
        ("and/or a_b [c]; x@y", "and / or a _ b [ c ] ; x @ y"),
        ("odd\u00a0spaces\t here\u3000 too\n", "odd spaces here too"),
        ("", ""),
    ],
)
def test_punctuation_stands_alone_and_marks_inside_words_and_numbers_become_markers(raw: str, words: str) -> None:
    assert split(raw) == words.split()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("Mr. Smith met Dr. Who in St. Ives.", "Mr. Smith met Dr. Who in St. Ives ."),
        ("In the U.S. Senate, e.g. J. R. Doe", "In the U.S. Senate , e.g. J. R. Doe"),
        ("It ended. Then came rain.", "It ended . Then came rain ."),
        ("He left Acme Ltd. in May", "He left Acme Ltd. in May"),
        ("It is No. 5 of 7. No. Really.", "It is No. 5 of 7 . No . Really ."),
        ("(It ended.) Rain.", "( It ended . ) Rain ."),
        ("at example.org. See", "at example.org. See"),
        ("a U.S.-led plan", "a U.S.-led plan"),
        ("in the U.S..", "in the U.S .."),
    ],
)
def test_a_point_stays_with_an_abbreviation_and_leaves_the_last_word_of_a_sentence(raw: str, words: str) -> None:
    assert split(raw) == words.split()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("She didn't, O'Brien's did", "She didn 't , O 'Brien 's did"),
        ("the 1990's players' club", "the 1990 's players ' club"),
        ("a 'red' and 'blue-ish.' flag", "a ' red ' and ' blue @-@ ish . ' flag"),
        ("'I'm here,' he said", "' I 'm here , ' he said"),
        ("the '90s and rock 'n' roll", "the ' 90s and rock ' n ' roll"),
        ("in 'Mr. Doe's' house", "in ' Mr. Doe 's ' house"),
    ],
)
def test_an_apostrophe_starts_a_clitic_after_a_letter_and_is_a_quote_elsewhere(raw: str, words: str) -> None:
    assert split(raw) == words.split()


@pytest.mark.parametrize(
    "line",
    [
        " = = Early life = = ",
        "O 'Neil did n 't see 2 @,@ 500 <unk> @-@ like men 's hats , 3 @.@ 5 m wide .",
        "The <unk> 's var. <unk> and No. 7 in St. <unk> of Acme Inc . ' s list",
        "where <formula> is vitamin C . So",
        'a " late- \' 90s " sound .. and ...',
    ],
)
def test_text_that_is_already_split_stays_as_it_is(line: str) -> None:
    assert split(line) == line.split()


@given(texts)
@settings(max_examples=500)
@example("1,2,a 1.5,b a,1.5")
@example("a 'b c' 'd")
def test_splitting_twice_is_splitting_once(text: str) -> None:
    words = split(text)
    assert split(" ".join(words)) == words


@given(texts)
@settings(max_examples=500)
@example('vitamin C . So it ended . lower <unk>-<unk> "x" @-@ y \'z')
def test_joined_words_split_into_the_same_words(text: str) -> None:
    words = split(text)
    assert split(join_words(words)) == words


@given(texts)
@settings(max_examples=500)
def test_offsets_are_in_order_and_cover_every_character_that_is_not_space(text: str) -> None:
    words = split(text)
    tokenizer = wiki_tokenizer(sorted(set(words)))
    found = tokenizer(text, return_offsets_mapping=True)
    assert tokenizer.convert_ids_to_tokens(found["input_ids"]) == words
    end = 0
    for word, (start, stop) in zip(words, found["offset_mapping"], strict=True):
        assert end <= start < stop
        assert all(map(is_space, text[end:start]))
        assert text[start:stop] in (word, MARKERS.get(word, word))
        end = stop
    assert all(map(is_space, text[end:]))


@given(texts)
def test_no_word_is_empty_or_holds_a_space(text: str) -> None:
    assert all(word and not any(map(is_space, word)) for word in split(text))


@pytest.mark.parametrize(
    "text",
    [
        "The well-known 23,000 men (\"our\" men; others' too) didn't earn $0.7, i.e. 5–6% less.",
        "She said 'yes' — and/or “no” — to O'Brien's U.S.-led plan!",
        'In "Up" and "Down"... [it] ended at 21:30: why?',
        "It’s the <unk>'s “own” – or <unk>-like",
    ],
)
def test_readable_text_comes_back_as_it_was(text: str) -> None:
    shown = text.replace(" — ", "—")
    assert join_words(split(text)) == shown


def test_spaces_stay_where_the_words_would_be_read_otherwise() -> None:
    assert join_words(["of", "vitamin", "C", ".", "So"]) == "of vitamin C . So"
    assert join_words(["it", "ended", ".", "lower"]) == "it ended . lower"
    assert join_words(['"', "x", '"', "@-@", "y"]) == '"x" @-@ y'


def test_words_in_an_order_that_no_text_has_are_still_joined() -> None:
    assert join_words(["(", "ended.", "The", "end", ")"]) == "( ended. The end)"
    assert join_words(["'s", "@-@"]) == "'s @-@"


def test_time_grows_with_the_length_of_a_text_and_not_with_its_square() -> None:
    piece = "It's 1.5 or 2,000 a1.5 O 'Neil Mr. X. "
    assert split(piece * 20_000) == split(piece) * 20_000  # minutes, were it the square


@pytest.fixture
def tokenizer() -> WikiTokenizer:
    return wiki_tokenizer(["the", ",", "@-@", "well", "known", "'s", "cat", "."], context=9)


def test_ids_follow_the_order_of_fairseqs_dictionaries(tokenizer: WikiTokenizer) -> None:
    assert tokenizer.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "the", ","]) == [0, 1, 2, 3, 4, 5]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 2, 1, 3)
    assert (len(tokenizer), tokenizer.model_max_length) == (12, 9)
    assert tokenizer("the well-known cat's dog.")["input_ids"] == [4, 7, 6, 8, 10, 9, 3, 11]


def test_a_word_given_twice_is_refused_and_a_special_one_keeps_its_id() -> None:
    with pytest.raises(ValueError, match="'cat' twice"):
        wiki_tokenizer(["cat", "dog", "cat"])
    assert wiki_tokenizer(["cat", "<unk>", "</s>", "dog"]).convert_tokens_to_ids(["cat", "dog", "<unk>"]) == [4, 5, 3]


def test_text_that_looks_like_a_special_token_is_words(tokenizer: WikiTokenizer) -> None:
    assert split("a</s>b <s> <pad>") == ["a", "<", "/", "s", ">", "b", "<", "s", ">", "<", "pad", ">"]
    assert tokenizer("cat</s>the")["input_ids"] == [10, 3, 3, 3, 3, 4]
    assert tokenizer("the <unk> 's cat")["input_ids"] == [4, 3, 9, 10]


def test_decoding_joins_words_and_skips_special_tokens_if_asked(tokenizer: WikiTokenizer) -> None:
    ids = [2, 4, 7, 6, 8, 10, 9, 3, 11, 2]
    assert tokenizer.decode(ids) == "</s> the well-known cat's <unk>. </s>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the well-known cat's."
    assert tokenizer.batch_decode([[4, 10], [10, 5]]) == ["the cat", "cat,"]
    assert tokenizer.decode(6) == "@-@"
    assert tokenizer.decode([]) == ""
    assert tokenizer.convert_tokens_to_string(["cat", "'s"]) == "cat's"


def test_each_token_alone_shows_as_itself(tokenizer: WikiTokenizer) -> None:
    expected = ["<s>", "<pad>", "</s>", "<unk>", "the", ",", "@-@", "well", "known", "'s", "cat", ".", ""]
    assert vocabulary_texts(tokenizer, 13) == expected


def test_a_saved_tokenizer_comes_back_the_same(tokenizer: WikiTokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = WikiTokenizer.from_pretrained(tmp_path)
    text = "the well-known cat</s> 's <unk> 's."
    found = loaded(text, return_offsets_mapping=True)
    assert found["input_ids"] == tokenizer(text)["input_ids"]
    assert [text[start:stop] for start, stop in found["offset_mapping"]][:4] == ["the", "well", "-", "known"]
    assert loaded.decode([4, 7, 6, 8]) == "the well-known"
    assert (loaded.eos_token, loaded.bos_token, loaded.model_max_length) == ("</s>", "</s>", 9)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.all_special_ids == tokenizer.all_special_ids
