"""The text of every token, for each way tokenizers have to mark a space."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ffmem.model.tokens import vocabulary_texts
from tests.tiny import WORDS

TEXT = "the river , the old city .\n the café don 't"


def byte_level(**settings):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", **settings)


def metaspace():
    names = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *(f"▁{word}" for word in WORDS),
        "river",
        "▁",
        "s",
    ]
    unigram = models.Unigram([(name, -float(at)) for at, name in enumerate(names)], 0, byte_fallback=True)
    tokenizer = Tokenizer(unigram)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_a_word_level_token_is_its_word(tokenizer):
    texts = vocabulary_texts(tokenizer, 101)
    assert texts == ["</s>", "<unk>", "<pad>", *WORDS, *[""] * (98 - len(WORDS))]


@pytest.mark.parametrize("clean", [False, True], ids=["as-is", "clean-up"])
def test_byte_level_tokens_joined_are_the_text_with_its_spaces(clean):
    tokenizer = byte_level(clean_up_tokenization_spaces=clean)
    texts = vocabulary_texts(tokenizer, len(tokenizer))
    assert "".join(texts[id] for id in tokenizer(TEXT).input_ids) == TEXT
    for token, text in [("Ġriver", " river"), ("the", "the"), ("Ġ,", " ,"), ("Ġcaf\u00c3\u00a9", " café"), ("Ċ", "\n")]:
        assert texts[tokenizer.convert_tokens_to_ids(token)] == text
    assert texts[tokenizer.eos_token_id] == "<|endoftext|>"


def test_a_byte_that_is_no_character_is_told_as_one_that_cannot_be_shown():
    tokenizer = byte_level()
    assert vocabulary_texts(tokenizer, 300)[tokenizer.convert_tokens_to_ids("\u00c3")] == "\ufffd"


def test_sentencepiece_tokens_keep_their_spaces_and_bytes():
    tokenizer = metaspace()
    texts = dict(zip(tokenizer.convert_ids_to_tokens(range(len(tokenizer))), vocabulary_texts(tokenizer, 500), strict=False))
    assert texts["▁river"] == " river"
    assert texts["river"] == "river"
    assert texts["▁"] == " "
    assert texts["</s>"] == "</s>"
    assert [texts[name] for name in ("<0x41>", "<0x0A>", "<0x7E>", "<0xC3>")] == ["A", "\n", "~", "\ufffd"]


def test_sentencepiece_tokens_joined_are_the_text():
    tokenizer = metaspace()
    texts = vocabulary_texts(tokenizer, len(tokenizer))
    ids = tokenizer("the river is great ! Hi").input_ids
    assert "".join(texts[id] for id in ids) == " the river is great ! Hi"


@pytest.mark.parametrize("size", [1, 5, 64, 200])
@pytest.mark.parametrize("build", [byte_level, metaspace])
def test_there_is_a_text_for_every_row_of_the_unembedding(build, size):
    tokenizer = build()
    texts = vocabulary_texts(tokenizer, size)
    assert len(texts) == size
    whole = vocabulary_texts(tokenizer, len(tokenizer) + 3)
    assert whole[-3:] == ["", "", ""]
    assert "" not in whole[:-3]


def test_ids_behind_a_gap_in_the_vocabulary_keep_their_text():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 5}, unk_token="a")))
    assert vocabulary_texts(tokenizer, 7) == ["a", "", "", "", "", "b", ""]
