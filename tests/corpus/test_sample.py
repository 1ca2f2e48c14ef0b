"""Samples of records: exact in size, fair, and the same however they are drawn."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.corpus import record, sample
from ffmem.corpus.batches import mix
from ffmem.corpus.sample import Sample
from ffmem.errors import CorpusError
from tests.corpus.test_shards import shards_of, spans


@given(size=st.integers(1, 40), seed=st.integers(0, (1 << 63) - 1), records=st.integers(0, 60), step=st.integers(1, 70))
def test_those_with_the_smallest_hashes_are_drawn_however_many_are_compared_at_a_time(size, seed, records, step):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "STEP", step)
        found = Sample(size, seed, [records]).numbers.tolist()
    every = np.arange(1, records + 1, dtype=np.uint64)
    hashes = mix(mix(every) + mix(np.array([seed], np.uint64))).tolist()
    assert len(set(hashes)) == records
    assert found == sorted(sorted(range(1, records + 1), key=lambda number: hashes[number - 1])[:size])


def test_a_smaller_sample_is_part_of_a_larger_one_and_another_seed_draws_others():
    small, large = (set(Sample(size, 3, [1000]).numbers.tolist()) for size in (50, 200))
    assert small < large
    assert len(small & set(Sample(50, 4, [1000]).numbers.tolist())) < 15


def test_every_record_has_about_the_same_chance():
    drawn = Counter(number for seed in range(2000) for number in Sample(5, seed, [20]).numbers.tolist())
    assert set(drawn) == set(range(1, 21))
    assert all(abs(count - 500) < 100 for count in drawn.values())  # five standard deviations


TEXTS = [f"{'river ' * (number % 4 + 1)}sea" for number in range(30)]


def sampled(corpus, size, seed=1):
    return replace(corpus, sample=Sample(size, seed, corpus.count(lambda *_: None)))


def texts_of(shards):
    return [sentence.text for shard in shards for sentence in shard.sentences]


@pytest.mark.parametrize("size", [1, 7, 29, 30, 99])
def test_a_corpus_gives_the_records_that_are_drawn_and_counts_the_others(corpus_of, file, size):
    path = file("a.txt", "\n\n".join(TEXTS).encode())
    for corpus in (corpus_of(TEXTS), corpus_of(path), corpus_of([path, path])):
        corpus = sampled(corpus, size)
        every = TEXTS * len(corpus.sources)
        assert corpus.sample.total == len(every)
        shards = list(shards_of(corpus))
        assert texts_of(shards) == [every[number - 1] for number in corpus.sample.numbers]
        assert shards[-1].after.records == min(size, len(every))
        assert shards[-1].after.skipped.get("records outside the sample", 0) == max(0, len(every) - size)


@given(
    shard_tokens=st.integers(1, 40),
    limit=st.one_of(st.none(), st.integers(1, 40)),
    chunk=st.integers(1, 200),
    size=st.integers(1, 30),
    data=st.data(),
)
def test_the_sample_is_the_same_wherever_it_is_cut_or_stopped(corpus_of, shard_tokens, limit, chunk, size, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "CHUNK", chunk)
        corpus = sampled(corpus_of(TEXTS, shard_tokens=shard_tokens, limit_tokens=limit), size)
        shards = list(shards_of(corpus))
        whole = [TEXTS[number - 1] for number in corpus.sample.numbers]
        found = texts_of(shards)
        assert found == whole[: len(found)]
        assert limit is not None or found == whole
        done = data.draw(st.sets(st.sampled_from(range(len(shards)))))
        left = list(shards_of(corpus, spans(shards[n] for n in done)))
    assert {shard.number: texts_of([shard]) for shard in left} == {
        shard.number: texts_of([shard]) for shard in shards if shard.number not in done
    }
    assert [shard.after for shard in left] == [shard.after for shard in shards if shard.number not in done]


def test_documents_of_a_sample_are_those_of_the_whole(corpus_of, file):
    lines = [" = Title = " if number % 5 == 0 else f"river {number}" for number in range(40)]
    corpus = corpus_of(file("a.txt", "\n".join(lines).encode()))
    documents = [document for shard in shards_of(corpus) for document in shard.documents.tolist()]
    corpus = sampled(corpus, 12)
    found = [document for shard in shards_of(corpus) for document in shard.documents.tolist()]
    assert found == [documents[number - 1] for number in corpus.sample.numbers]


def test_a_corpus_of_which_there_is_more_or_less_than_was_counted_is_refused(corpus_of):
    for records in (29, 31):
        corpus = replace(corpus_of(TEXTS), sample=Sample(5, 1, [records]))
        with pytest.raises(CorpusError, match=f"had {records} records when a sample was drawn, now it has 30"):
            list(shards_of(corpus))


def test_records_that_come_once_cannot_be_counted_first(corpus_of):
    with pytest.raises(CorpusError, match="can be read twice: give a file or a list"):
        sampled(corpus_of(iter(TEXTS)), 5)


def test_counting_tells_how_far_it_is(corpus_of, monkeypatch):
    monkeypatch.setattr(record, "CHUNK", sum(map(len, TEXTS[:10])))
    told = []
    corpus_of(TEXTS).count(lambda *what: told.append(what))
    assert told == [(10 / 30, "10 records"), (20 / 30, "20 records"), (1.0, "30 records")]
