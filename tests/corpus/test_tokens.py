import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ffmem.corpus.batches import prefix_keys
from ffmem.corpus.tokens import Encoder, Sentence, Sentences
from tests.tiny import WORDS, word_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.text("aé \U0001f600ñ日 river")
IDS = st.integers(0, 3) | st.integers(0, 2**31 - 1)


class SlowTokenizer:
    """A character a token, no offsets; it decodes to capitals, so its text is not the one it was given."""

    is_fast = False

    def __call__(self, texts, **_):
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    def decode(self, ids):
        return "".join(map(chr, ids)).upper()


def byte_level_bpe():
    """About the bytes alone: accents take two tokens, emoji four."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=sorted(alphabet), show_progress=False, special_tokens=["<s>"]
    )
    tokenizer.train_from_iterator(["the river and the city " * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


WORD, BPE, SLOW = word_tokenizer(), byte_level_bpe(), SlowTokenizer()
every_tokenizer = pytest.mark.parametrize("tokenizer", [WORD, BPE, SLOW], ids=["word", "bpe", "slow"])


def encode(tokenizer, text, limit=1_000):
    """The sentences of one text, with their ends."""
    encoder = Encoder(tokenizer, limit)
    (sentences,) = encoder.encode([text])
    return encoder.with_ends(sentences)


@given(st.lists(IDS, min_size=1, max_size=6), st.lists(IDS, min_size=1, max_size=6))
def test_prefix_keys_are_equal_exactly_where_the_prefixes_are(a, b):
    keys_a, keys_b = prefix_keys(np.array([a]))[0].tolist(), prefix_keys(np.array([b]))[0].tolist()
    for i, key_a in enumerate(keys_a):
        for j, key_b in enumerate(keys_b):
            assert (key_a == key_b) == (a[: i + 1] == b[: j + 1])


def test_prefix_keys_tell_order_and_length_and_ignore_what_follows():
    rows = np.array([[5, 6, 0, 0], [6, 5, 0, 0], [5, 6, 7, 8]])
    keys = prefix_keys(rows)
    assert (keys[0, 1] != keys[1, 1]).all(), "order"
    assert len({tuple(key) for key in keys[0].tolist()}) == 4, "length, zeros too"
    assert (keys[0, :2] == keys[2, :2]).all(), "what follows"
    assert (prefix_keys(rows[:1, :2]) == keys[:1, :2]).all(), "padding"
    assert (prefix_keys(rows.astype(np.int32)) == keys).all(), "dtype"


def test_each_word_of_the_keys_tells_many_prefixes_apart_alone():
    ids = np.stack(np.meshgrid(np.arange(256), np.arange(256)), axis=-1).reshape(-1, 2)
    keys = prefix_keys(ids)[:, 1]
    for lane in range(2):
        assert len(np.unique(keys[:, lane])) == len(ids)


@pytest.mark.parametrize("tokenizer", [WORD, BPE], ids=["word", "bpe"])
def test_the_ids_are_the_tokenizers_own_without_special_tokens(tokenizer):
    texts = ["the river and Paris", "the", "the unheard-of city ."]
    encoded = list(Encoder(tokenizer, 1_000).encode(texts))
    assert [sentence.text for (sentence,) in encoded] == texts
    for text, (sentence,) in zip(texts, encoded, strict=True):
        assert sentence.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
        assert sentence.ids.dtype == np.int32
        assert sentence.ends[-1] == len(text)


def test_special_tokens_that_a_tokenizer_adds_are_left_out():
    adding = word_tokenizer()
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    assert adding("the river")["input_ids"] == [0, 3, WORDS.index("river") + 3]
    (sentence,) = encode(adding, "the river")
    assert sentence.ids.tolist() == [3, WORDS.index("river") + 3]
    assert sentence.ends.tolist() == [3, 9]


def test_a_text_without_tokens_gives_no_sentence():
    assert list(Encoder(WORD, 5).encode(["", "the", " "]))[::2] == [[], []]


def test_a_text_of_exactly_the_limit_is_not_cut():
    assert [len(sentence.ids) for sentence in encode(WORD, "the river and the city", 5)] == [5]
    assert [len(sentence.ids) for sentence in encode(WORD, "the river and the city", 4)] == [4, 1]


@every_tokenizer
@given(text=TEXT, limit=st.integers(1, 5))
def test_the_windows_of_a_long_text_are_all_of_it(tokenizer, text, limit):
    text = text.strip()
    (whole,) = encode(tokenizer, text) or [Sentence("", np.zeros(0, np.int32))]
    windows = encode(tokenizer, text, limit)
    assert [id for window in windows for id in window.ids.tolist()] == whole.ids.tolist()
    assert all(len(window.ids) == limit for window in windows[:-1])
    assert all(1 <= len(window.ids) <= limit for window in windows)
    assert "".join(window.text for window in windows) == whole.text
    assert whole.text == (text.upper() if tokenizer is SLOW else text)


@every_tokenizer
@given(text=TEXT, limit=st.integers(1, 5))
def test_ends_never_fall_and_end_at_the_end(tokenizer, text, limit):
    for sentence in encode(tokenizer, text.strip(), limit):
        ends = sentence.ends.tolist()
        assert len(ends) == len(sentence.ids)
        assert ends == sorted(ends)
        assert ends[-1] == len(sentence.text)


def test_ends_of_a_word_tokenizer_are_where_its_words_end():
    (sentence,) = encode(WORD, "the river,  Oslo .")
    assert [sentence.text[:end] for end in sentence.ends] == [
        "the",
        "the river",
        "the river,",
        "the river,  Oslo",
        "the river,  Oslo .",
    ]


def test_a_character_split_into_bytes_belongs_to_all_of_its_tokens():
    (sentence,) = encode(BPE, "é\U0001f600x")
    assert sentence.ends.tolist() == [1, 1, 2, 2, 2, 2, 3]
    first, second = encode(BPE, "é\U0001f600x", 4)
    assert (first.text, first.ends.tolist()) == ("é\U0001f600", [1, 1, 2, 2])
    assert (second.text, second.ends.tolist()) == ("x", [0, 0, 1])


def test_a_tokenizer_without_offsets_gives_the_text_it_decodes_to():
    (sentence,) = encode(SLOW, "straße")
    assert sentence.text == "STRASSE"
    assert sentence.ends.tolist() == [1, 2, 3, 4, 6, 7]


def test_ends_that_are_there_stay_and_order_is_kept():
    encoder = Encoder(WORD, 3)
    (cut, rest), (short,) = encoder.encode(["the river and Oslo", "a sea"])
    with_ends = encoder.with_ends([short, cut, short, rest])
    assert [sentence.text for sentence in with_ends] == ["a sea", "the river and", "a sea", " Oslo"]
    assert [sentence.ends.tolist() for sentence in with_ends] == [[1, 5], [3, 9, 13], [1, 5], [5]]
    assert with_ends[1] is cut
    assert encoder.with_ends([]) == []


def test_offsets_that_go_back_are_held_at_the_furthest_end():
    def tokenizer(texts, **_):
        return {"input_ids": [[1, 2, 3] for _ in texts], "offset_mapping": [[(0, 2), (0, 0), (2, 3)] for _ in texts]}

    tokenizer.is_fast = True
    (sentence,) = encode(tokenizer, "abc")
    assert sentence.ends.tolist() == [2, 2, 3]


def test_flat_sentences_give_back_what_was_put_in_whole_in_part_and_padded():
    kept = [
        Sentence("the river", np.array([3, 4], np.int32), np.array([3, 9], np.int32)),
        Sentence("STRASSE", np.array([7], np.int32)),
        Sentence("a", np.array([5], np.int32), np.array([1], np.int32)),
    ]

    def plain(sentences):
        return [(s.text, s.ids.tolist(), None if s.ends is None else s.ends.tolist()) for s in sentences]

    flat = Sentences.of(kept)
    assert plain(flat) == plain(kept)
    assert plain(flat.between(1, 3)) == plain(kept[1:])
    assert plain(flat.take(np.array([2, 0]))) == plain([kept[2], kept[0]])
    assert plain(Sentences.join([flat, Sentences.of([]), flat.between(1, 2)])) == plain([*kept, kept[1]])
    assert flat.padded(np.array([0, 2]), 9).tolist() == [[9, 3, 4], [9, 5, 9]]
    assert flat.padded(np.array([1, 0]), None).tolist() == [[7, 0], [3, 4]]
    assert plain([flat[-1]]) == plain([kept[-1]])
    with pytest.raises(IndexError):
        flat[3]


def test_a_tokenizer_without_offsets_is_not_called_for_nothing():
    assert list(Encoder(SLOW, 5).encode([])) == []
