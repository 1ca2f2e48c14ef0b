"""A text as a stream: marks, sentences, the vocabulary and its order."""

import gzip
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus.sentences import Segmenter, Unit
from ffmem.corpus.sources import open_sources
from ffmem.errors import CorpusError, RunError
from ffmem.model.adaptive.tokenizer import wiki_tokenizer
from ffmem.progress import Reporter
from ffmem.training.stream import MARK, UNKNOWN, encoded, read_stream, sentences, vocabulary, write_stream

names = st.sampled_from(["a", "b", "c", "cat", "Cat", "é", "zoo", "Ж", "<unk>"])
records = st.lists(st.lists(names, min_size=1, max_size=8), min_size=1, max_size=10)


def texts(*lines):
    return open_sources(list(lines), headings=True)


def words_of(stream, tokenizer):
    return " ".join(tokenizer.convert_ids_to_tokens(stream.tolist()))


@pytest.fixture
def file(tmp_path):
    """Writes a text file and opens it as a training does."""

    def write(text, name="text.txt"):
        path = tmp_path / name
        path.write_text(text, "utf-8")
        return open_sources(path, headings=True)

    return write


def test_a_mark_stands_before_every_sentence_and_nowhere_else(file):
    tokenizer = wiki_tokenizer(["The", "cat", "ran", "sat", "."])
    found = read_stream(file("The cat sat. The cat ran.\n\nThe cat\n"), tokenizer)
    assert words_of(found, tokenizer) == "</s> The cat sat . </s> The cat ran . </s> The cat"
    assert found.dtype == np.int32


def test_a_heading_is_one_sentence_though_it_holds_a_full_stop():
    line = " = = The end . And after = = "
    assert list(sentences(Segmenter(Unit("sentence")), [line, "One . Two ."])) == [line.strip(), "One .", "Two ."]


def test_words_are_ordered_by_count_then_by_name_and_rare_ones_left_out():
    sources = texts("dog dog dog", "cat ant bee", "bee cat", "once")
    assert vocabulary(sources, min_count=2) == ["dog", "bee", "cat"]
    assert vocabulary(sources, min_count=1) == ["dog", "bee", "cat", "ant", "once"]


@given(records, st.integers(1, 4))
def test_the_vocabulary_is_a_count_and_a_sort(lines, min_count):
    counts = Counter(word for line in lines for word in line if word != "<unk>")
    expected = sorted((word for word in counts if counts[word] >= min_count), key=lambda word: (-counts[word], word))
    sources = texts(*(" ".join(line) for line in lines))
    if expected:
        assert vocabulary(sources, min_count=min_count) == expected
    else:
        with pytest.raises(CorpusError, match=f"expected words that occur {min_count} times or more, found none"):
            vocabulary(sources, min_count=min_count)


@given(records, st.integers(1, 3))
def test_the_stream_is_each_sentence_behind_a_mark_with_a_number_for_each_word(lines, min_count):
    known = ["cat", "b", "é", "a"][min_count:]
    numbers = {word: id for id, word in enumerate(known, 4)}
    expected = [id for line in lines for id in (MARK, *(numbers.get(word, UNKNOWN) for word in line))]
    assert read_stream(texts(*(" ".join(line) for line in lines)), wiki_tokenizer(known)).tolist() == expected


def test_a_word_outside_the_vocabulary_and_a_written_unk_are_the_unknown_word():
    sources = texts("the <unk> sat", "the <unk> ran", "the <unk> slept")
    words = vocabulary(sources, min_count=2)
    assert words == ["the"]
    assert read_stream(sources, wiki_tokenizer(words)).tolist() == [MARK, 4, UNKNOWN, UNKNOWN] * 3


def test_a_written_mark_is_words_and_no_mark():
    found = read_stream(texts("a </s> b"), wiki_tokenizer(["a", "b"]))
    assert (found == MARK).sum() == 1


def test_the_written_file_holds_what_reading_gives(file, tmp_path):
    sources = file("".join(f"The cat number {number} sat. It ran.\n" for number in range(50)))
    tokenizer = wiki_tokenizer(vocabulary(sources, min_count=2))
    write_stream(sources, tokenizer, tmp_path / "stream.i32")
    assert np.fromfile(tmp_path / "stream.i32", np.int32).tolist() == read_stream(sources, tokenizer).tolist()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"full: cannot be written: No space left on device; make room there"):
        write_stream(sources, tokenizer, tmp_path / "full")
    assert (tmp_path / "full").is_char_device()


@pytest.mark.parametrize("workers", [1, 2])
def test_more_text_than_a_chunk_comes_in_pieces_that_join_whoever_made_them(monkeypatch, workers):
    lines = [f"w{number % 7} x" for number in range(95)]
    words = [f"w{number}" for number in range(7)]
    tokenizer = wiki_tokenizer(words)
    at_once = read_stream(texts(*lines), tokenizer)
    monkeypatch.setattr("ffmem.training.stream.CHUNK", 20)  # characters: five lines
    pieces = list(encoded(texts(*lines), tokenizer, workers=workers))
    assert [int((piece == MARK).sum()) for piece in pieces] == [5] * 19
    assert vocabulary(texts(*lines), min_count=2, workers=workers) == ["x", *words]
    assert np.concatenate(pieces).tolist() == at_once.tolist()


def test_a_file_that_is_cut_short_by_an_error_never_takes_the_name(tmp_path):
    def failing():
        yield "a b"
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_stream(open_sources(failing()), wiki_tokenizer(["a"]), tmp_path / "stream.i32")
    assert not (tmp_path / "stream.i32").exists()


@pytest.mark.parametrize("text", ["", "\n \n\n"])
def test_a_text_without_words_is_an_error_that_names_the_file(file, text):
    with pytest.raises(CorpusError, match=r"expected text, found none in .*text\.txt"):
        read_stream(file(text), wiki_tokenizer(["a"]))
    with pytest.raises(CorpusError, match="expected words that occur 1 times or more, found none; give more text"):
        vocabulary(file(text), min_count=1)


def test_a_stream_without_words_is_not_written(file, tmp_path):
    with pytest.raises(CorpusError, match=r"expected text, found none in .*text\.txt"):
        write_stream(file("\n"), wiki_tokenizer(["a"]), tmp_path / "stream.i32")
    assert not (tmp_path / "stream.i32").exists()


def test_every_kind_of_source_gives_the_same_stream(tmp_path):
    lines = ["The cat sat. It ran.", "The end"]
    plain, packed, table, objects = (tmp_path / name for name in ("a.txt", "a.txt.gz", "a.parquet", "a.jsonl"))
    plain.write_text("\n".join(lines), "utf-8")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    pq.write_table(pa.table({"body": lines}), table)
    objects.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines), "utf-8")
    tokenizer = wiki_tokenizer(["The", "cat", "sat", ".", "It", "ran", "end"])
    expected = read_stream(open_sources(lines), tokenizer).tolist()
    assert expected == [MARK, 4, 5, 6, 7, MARK, 8, 9, 7, MARK, 4, 10]
    for path in (plain, packed, table, objects):
        sources = open_sources(path, column="body", headings=True)
        assert read_stream(sources, tokenizer).tolist() == expected
        assert vocabulary(sources, min_count=2) == [".", "The"]


def test_several_files_follow_each_other_in_the_order_given(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n", "utf-8")
    tokenizer = wiki_tokenizer(["one", "two"])
    for order in (["one", "two"], ["two", "one"]):
        found = read_stream(open_sources([tmp_path / f"{name}.txt" for name in order]), tokenizer)
        assert words_of(found, tokenizer) == f"</s> {order[0]} </s> {order[1]}"


def test_the_share_that_is_read_is_reported_and_reaches_the_end(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("a\nb\n", "utf-8")

    shares = []

    class Listening(Reporter):
        def update(self, fraction, note=""):
            shares.append((fraction, note))

    monkeypatch.setattr("ffmem.training.stream.CHUNK", 1)
    vocabulary(
        open_sources([tmp_path / "one.txt", tmp_path / "two.txt"]), min_count=1, reporter=Listening("reading"), workers=1
    )
    fractions = [fraction for fraction, _ in shares]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert {note for _, note in shares} == {"counting words"}
