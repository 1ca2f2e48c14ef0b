"""Shards of one part: every sentence once, the same however they are read, left out where they are done."""

import json
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus import record
from ffmem.corpus.batches import PADDING
from ffmem.corpus.shards import Progress, Span
from ffmem.errors import CorpusError

LENGTHS = st.lists(st.integers(1, 30), max_size=40)
SHARDS = st.integers(1, 50)


def shards_of(corpus, done=None):
    """The shards of a corpus that is one part."""
    (part,) = corpus.parts()
    return corpus.shards(part, done, room=corpus.limit_tokens)


def river(words):
    """A line of so many tokens."""
    return " ".join(["river"] * words)


def rivers(lengths):
    return [river(words) for words in lengths]


def table(shards):
    """Everything a shard says, to compare."""
    return [
        (
            shard.number,
            shard.first,
            shard.last,
            shard.after,
            [(sentence.text, *sentence.ids) for sentence in shard.sentences],
        )
        for shard in shards
    ]


def thread_of_the_corpus():
    return [thread for thread in threading.enumerate() if thread.name == "ffmem-corpus"]


@given(LENGTHS, SHARDS)
def test_the_shards_hold_every_sentence_once_and_in_order(corpus_of, lengths, shard_tokens):
    shards = list(shards_of(corpus_of(rivers(lengths), shard_tokens=shard_tokens)))
    assert [len(sentence.ids) for shard in shards for sentence in shard.sentences] == lengths
    assert [shard.number for shard in shards] == list(range(len(shards)))
    assert [shard.last for shard in shards] == [False] * (len(shards) - 1) + [True]
    first = 0
    for shard in shards:
        assert shard.first == first
        first += len(shard.sentences)
        assert shard.after.sentences == first
    for shard in shards[:-1]:
        assert shard.tokens >= shard_tokens > shard.tokens - len(shard.sentences[-1].ids)
    assert shards[-1].after.tokens == sum(lengths)
    assert shards[-1].fraction == 1.0


def test_a_shard_ends_with_the_record_that_fills_it(corpus_of, monkeypatch):
    monkeypatch.setattr(record, "CHUNK", 1)
    shards = list(shards_of(corpus_of(rivers([4, 5, 1, 12, 3]), shard_tokens=10)))
    assert [shard.tokens for shard in shards] == [10, 12, 3]
    assert [shard.after.records for shard in shards] == [3, 4, 5]
    assert [shard.fraction for shard in shards] == [0.6, 0.8, 1.0]


def test_an_empty_corpus_is_one_empty_shard(corpus_of):
    (shard,) = shards_of(corpus_of([]))
    assert (shard.last, list(shard.sentences), shard.after) == (True, [], Progress())
    assert list(shard.batches(100, None)) == []


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.sampled_from([None, 0, 7]), st.integers(1, 100))
def test_the_batches_of_a_shard_hold_its_ids_padded_behind(corpus_of, lengths, bos, batch_tokens):
    shard = list(shards_of(corpus_of(rivers([3, *lengths]), shard_tokens=3)))[1]
    seen = Counter()
    start = 0 if bos is None else 1
    for batch in shard.batches(batch_tokens, bos):
        assert batch.start == start
        assert batch.ids.size <= batch_tokens or len(batch.ids) == 1
        assert batch.ids.size - batch.tokens - start * len(batch.ids) <= PADDING * batch.ids.size
        assert batch.keys.shape == (len(batch.ids), batch.ids.shape[1] - start, 2)
        for row, length, number in zip(batch.ids, batch.lengths, batch.sentences, strict=True):
            sentence = shard.sentences[int(number) - shard.first]
            assert row[start : start + length].tolist() == sentence.ids.tolist()
            assert row[:start].tolist() == [bos][:start]
            seen[int(number)] += 1
    assert seen == Counter(range(shard.first, shard.first + len(shard.sentences)))


@given(LENGTHS, SHARDS, st.integers(1, 400), st.none() | st.integers(0, 300))
def test_the_plan_depends_neither_on_the_chunk_nor_on_the_thread(corpus_of, lengths, shard_tokens, chunk, limit_tokens):
    corpus = corpus_of([*rivers(lengths), ""], shard_tokens=shard_tokens, limit_tokens=limit_tokens, limit=12)
    expected = table(shards_of(corpus))
    assert table(corpus.stream()) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "CHUNK", chunk)
        assert table(shards_of(corpus)) == expected


@given(LENGTHS, SHARDS, st.integers(0, 300))
def test_the_limit_takes_whole_sentences_up_to_the_first_that_exceeds_it(corpus_of, lengths, shard_tokens, limit):
    *_, last = shards = list(shards_of(corpus_of(rivers(lengths), shard_tokens=shard_tokens, limit_tokens=limit)))
    fitting = int((np.cumsum(lengths) <= limit).sum())
    assert [len(sentence.ids) for shard in shards for sentence in shard.sentences] == lengths[:fitting]
    assert last.after.tokens == sum(lengths[:fitting]) <= limit
    assert last.last


def test_the_limit_may_fall_inside_a_record(corpus_of):
    (shard,) = shards_of(corpus_of(["The river left. The sea left. The king left."], limit_tokens=11, unit="sentence"))
    assert [sentence.text for sentence in shard.sentences] == ["The river left.", "The sea left."]


def test_only_what_the_limit_keeps_is_counted(corpus_of):
    (shard,) = shards_of(corpus_of([f"{river(2)}\n{river(12)}"], limit_tokens=4, limit=5))
    assert (shard.after.sentences, shard.after.tokens, shard.after.cut) == (1, 2, 0)


def spans(shards):
    """What is kept of finished shards."""
    return {
        shard.number: Span(*(Progress(**mark.as_dict()) for mark in (shard.since, shard.after)), shard.last, shard.full)
        for shard in shards
    }


@given(LENGTHS, SHARDS, st.none() | st.integers(0, 300), st.data())
@pytest.mark.slow
def test_resuming_behind_any_shards_gives_exactly_those_that_remain(corpus_of, lengths, shard_tokens, limit_tokens, data):
    corpus = corpus_of(["", *rivers(lengths), None], shard_tokens=shard_tokens, limit_tokens=limit_tokens, limit=12)
    shards = list(shards_of(corpus))
    for count in range(len(shards)):
        assert table(shards_of(corpus, spans(shards[:count]))) == table(shards[count:])
    numbers = data.draw(st.sets(st.integers(0, len(shards) - 1)))
    left = [shard for shard in shards if shard.number not in numbers]
    assert table(shards_of(corpus, spans(shards[number] for number in numbers))) == table(left)


@pytest.mark.parametrize(
    ("texts", "noticed"),
    [
        (["one", "two", "three"], False),
        (["one", "two", "other"], False),
        (["one", "two", "three", "four"], False),
        (["one", "", "two", "three"], False),
        (["once", "two", "three"], True),
        (["two", "one", "three"], True),
        (["on", "etwo", "three"], True),
        (["onetwo", "three"], True),
        (["one"], True),
        ([], True),
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_change_in_what_was_read_is_noticed_on_resume(corpus_of, texts, noticed, ahead):
    done = spans([next(shards_of(corpus_of(["one", "two", "three"], shard_tokens=2)))])
    corpus = corpus_of(texts, shard_tokens=2)
    part = corpus.parts()[0]
    resumed = corpus.stream([part], {0: done}) if ahead else corpus.shards(part, done)
    if noticed:
        with pytest.raises(CorpusError, match=r"the corpus has changed .*first 2 records"):
            list(resumed)
    else:
        assert next(resumed).first == 2
        resumed.close()


def documents_of(shards):
    """The document of every sentence, by the number of its first sentence, from 1."""
    found = [document for shard in shards for document in shard.documents.tolist()]
    return [found.index(document) + 1 for document in found]


ARTICLES = (
    " = One = \nriver\nriver river\n = = Part = = \nriver\n\n"
    " = Two = \nriver\n = Empty = \n = Three = \nriver river\nriver\n"
)


def test_a_document_is_an_article_and_elsewhere_a_record(corpus_of, file):
    assert documents_of(shards_of(corpus_of(file("a.txt", b"river\nriver\n\nriver")))) == [1, 2, 3]
    assert documents_of(shards_of(corpus_of(file("b.txt", ARTICLES.encode())))) == [1, 1, 1, 4, 5, 5]
    assert documents_of(shards_of(corpus_of(file("c.txt", b"river\nriver\n" + ARTICLES.encode())))) == [
        1,
        2,
        3,
        3,
        3,
        6,
        7,
        7,
    ]
    rows = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in ("river\nriver", " = One = \nriver", "river"))
    assert documents_of(shards_of(corpus_of(file("d.jsonl", rows)))) == [1, 1, 3, 3, 5]
    assert documents_of(shards_of(corpus_of(["river\nriver", "river"]))) == [1, 1, 3]
    assert documents_of(shards_of(corpus_of([]))) == []


def test_an_article_ends_with_its_file(corpus_of, file):
    first, second = file("a.txt", b" = One = \nriver\nriver"), file("b.txt", b"river\n = Two = \nriver\nriver")
    assert documents_of(shards_of(corpus_of([first, second]))) == [1, 1, 3, 4, 4]
    assert documents_of(shards_of(corpus_of([second, first]))) == [1, 2, 2, 4, 4]


@given(
    shard_tokens=st.integers(1, 12), limit=st.one_of(st.none(), st.integers(1, 12)), chunk=st.integers(1, 60), data=st.data()
)
@pytest.mark.slow
def test_documents_are_the_same_however_the_text_is_cut_and_whatever_is_done(corpus_of, tmp_path_factory, **drawn):
    path = tmp_path_factory.getbasetemp() / "articles.txt"
    path.write_text("river\n" + ARTICLES * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "CHUNK", drawn["chunk"])
        corpus = corpus_of(path, shard_tokens=drawn["shard_tokens"], limit_tokens=drawn["limit"])
        shards = list(shards_of(corpus))
        whole = documents_of(shards_of(corpus_of(path)))
        found = documents_of(shards)
        assert found == whole[: len(found)]
        assert len(found) == shards[-1].after.sentences
        done = drawn["data"].draw(st.sets(st.sampled_from(range(len(shards)))))
        left = list(shards_of(corpus, spans(shards[number] for number in done)))
    assert {shard.number: shard.documents.tolist() for shard in left} == {
        shard.number: shard.documents.tolist() for shard in shards if shard.number not in done
    }


def test_the_keys_of_a_batch_are_of_documents_where_that_is_asked(corpus_of, file):
    [shard] = shards_of(corpus_of(file("b.txt", ARTICLES.encode())))
    for bos in (None, 7):
        keys = {}
        for batch in shard.batches(4, bos, by_document=True):
            assert batch.keys.shape == (len(batch.ids), batch.ids.shape[1] - batch.start, 2)
            for sentence, rows in zip(batch.sentences.tolist(), batch.keys.tolist(), strict=True):
                keys[sentence] = {tuple(key) for key in rows}
        assert all(len(found) == 1 for found in keys.values())
        names = {sentence: found.pop() for sentence, found in keys.items()}
        documents = shard.documents.tolist()
        assert all((names[a] == names[b]) == (documents[a] == documents[b]) for a in names for b in names)


def test_a_change_between_finished_shards_is_noticed_before_any_is_read(corpus_of):
    texts = rivers([3, 4, 5, 6, 7, 8])
    shards = list(shards_of(corpus_of(texts, shard_tokens=3)))
    done = spans([shards[3]])
    changed = corpus_of([river(2) + " sea", *texts[1:]], shard_tokens=3)
    with pytest.raises(CorpusError, match="the corpus has changed"):
        next(shards_of(changed, done))
    assert [shard.number for shard in shards_of(corpus_of(texts, shard_tokens=3), done)] == [0, 1, 2, 4, 5, 6]


def test_text_behind_a_finished_last_shard_is_noticed(corpus_of):
    texts = rivers([3, 4, 5])
    shards = list(shards_of(corpus_of(texts, shard_tokens=3)))
    with pytest.raises(CorpusError, match="the corpus has changed"):
        list(shards_of(corpus_of([*texts, river(4)], shard_tokens=3), spans(shards[1:])))


def test_text_in_a_part_that_was_finished_without_any_is_noticed(corpus_of):
    (empty,) = shards_of(corpus_of([" "]))
    with pytest.raises(CorpusError, match="the corpus has changed"):
        list(shards_of(corpus_of([" ", "river"]), {0: empty.span}))


def test_an_error_in_a_source_reaches_the_reader_behind_the_shards_before_it(corpus_of, monkeypatch):
    monkeypatch.setattr(record, "CHUNK", 1)

    def texts():
        yield river(10)
        raise ValueError("the disk is gone")

    shards = corpus_of(texts()).stream()
    assert next(shards).tokens == 10
    with pytest.raises(ValueError, match="the disk is gone"):
        next(shards)
    assert not thread_of_the_corpus()


def test_reading_ahead_is_bounded_and_ends_when_it_is_abandoned(corpus_of, monkeypatch):
    monkeypatch.setattr(record, "CHUNK", len(river(10)))
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield river(10)

    shards = corpus_of(endless(), shard_tokens=10).stream()
    for taken in range(1, 6):
        next(shards)
        time.sleep(0.05)  # enough to read all it wants
        assert read <= taken + 3, "one waits, one is being handed over, one chunk"
    assert thread_of_the_corpus()
    shards.close()
    assert not thread_of_the_corpus()
    assert read <= 9


def test_what_is_left_out_or_cut_is_counted(corpus_of, file):
    path = file("a.txt", f" = T = \n\n{river(3)}\n{river(12)}\n\n\u200b\n = = S = = \n".encode())
    *_, last = shards_of(corpus_of(path, limit=5))
    assert last.after.skipped == {"blank lines": 2, "headings": 2}
    assert (last.after.records, last.after.sentences, last.after.tokens) == (3, 4 + 1, 15 + 1)
    assert last.after.cut == 1
    *_, last = shards_of(corpus_of(path, unit="window:5", limit=5))
    assert last.after.cut == 0, "windows are meant to be cut"


def test_a_text_without_tokens_is_counted(corpus_of, monkeypatch):
    corpus = corpus_of(["the river", "..."])
    two, none = ([1, 2], [(0, 3), (4, 9)]), ([], [])
    monkeypatch.setattr(corpus.encoder, "_encoded", lambda texts: [two if "river" in text else none for text in texts])
    (shard,) = shards_of(corpus)
    assert (shard.after.without_tokens, shard.after.sentences, shard.after.records) == (1, 1, 2)


def test_the_digest_stands_for_the_text_alone(corpus_of, file):
    texts = ["one", "two"]
    digest = corpus_of(texts).digest()
    assert corpus_of(file("a.txt", b" = T = \none\n\ntwo\r\n")).digest() == digest
    assert corpus_of([file("b.txt", b"one"), file("c.txt", b"two")]).digest() == digest
    for settings in ({"shard_tokens": 1}, {"unit": "window:7"}, {"limit": 1}):
        *_, last = shards_of(corpus_of(texts, **settings))
        assert last.after.digest == digest
    others = [["onetwo"], ["two", "one"], ["one"], ["one", "two", "one"], ["on", "etwo"], []]
    assert len({digest, *(corpus_of(other).digest() for other in others)}) == 7


def test_the_share_read_of_several_files_goes_by_their_size(corpus_of, file, monkeypatch):
    monkeypatch.setattr(record, "CHUNK", 1)
    paths = [file("a.txt", f"{river(10)}\n".encode()), file("b.txt", f"{river(10)}\n{river(20)}\n".encode())]
    shards = list(corpus_of(paths, shard_tokens=10, part_shards=5).stream())
    assert [shard.part for shard in shards] == [0, 0, 1, 1, 1]
    assert [shard.fraction for shard in shards] == pytest.approx([0.25, 0.25, 0.5, 1.0, 1.0], abs=0.01)
