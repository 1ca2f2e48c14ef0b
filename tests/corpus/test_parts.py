"""Parts: every record is in exactly one, in order, however sources are cut; what must not depend on the cut does not."""

import bz2
import gzip
import json
import lzma
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffmem.corpus import parts, record
from ffmem.corpus.parts import Part, Range, cut_parts
from ffmem.corpus.sample import Sample
from ffmem.corpus.shards import Progress
from ffmem.corpus.sources import Texts, chunks_of, open_source, open_sources
from ffmem.errors import CorpusError

LINE = st.text("aé\U0001f600 =\r", max_size=12) | st.sampled_from(["", " = One = ", " = = Two = = ", "river river"])
LINES = st.lists(LINE, max_size=12)
ENDS = st.sampled_from(["\n", "\r\n"])
SIZES = st.integers(1, 60)


def read_whole(sources):
    skipped = Counter()
    return [text for source in sources for text in source.records(skipped)], dict(skipped)


def read_in_parts(sources, size, chunk=1 << 17):
    """All records, part by part, and what was left out."""
    skipped, found = Counter(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "CHUNK", chunk)
        for part in cut_parts(sources, size):
            for here in part.ranges:
                for piece in chunks_of(sources[here.source], here.begin, here.end):
                    found += [text for _, text in piece.records(skipped) if text is not None]
    return found, dict(skipped)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


@given(lines=LINES, end=ENDS, closed=st.booleans(), bom=st.booleans(), headings=st.booleans(), size=SIZES, chunk=SIZES)
def test_every_line_of_a_text_file_is_in_one_part(folder, lines, end, closed, bom, headings, size, chunk):
    path = folder / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" * bom + (end.join(lines) + end * closed).encode())
    sources = [open_source(path, headings=headings)]
    assert read_in_parts(sources, size, chunk) == read_whole(sources)


def test_a_line_belongs_to_the_part_in_which_it_begins(file):
    source = open_source(file("a.txt", b"one\ntwo\nthree\n"))

    def lines(begin, end):
        return [text for chunk in source.chunks(begin, end) for _, text in chunk.texts()]

    assert [lines(0, end) for end in (1, 4, 5, 8, 9)] == [["one"], ["one"], *[["one", "two"]] * 2, ["one", "two", "three"]]
    assert [lines(begin, 14) for begin in (1, 4, 5, 8, 9)] == [["two", "three"], ["two", "three"], ["three"], ["three"], []]


@given(texts=st.lists(st.none() | st.text("aé \n", max_size=12), max_size=12), size=SIZES, chunk=SIZES)
def test_every_record_of_json_and_lists_is_in_one_part(folder, texts, size, chunk):
    path = folder / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), "utf-8")
    for sources in ([open_source(path)], [Texts(texts)], [Texts([{"text": text} for text in texts])]):
        assert read_in_parts(sources, size, chunk) == read_whole(sources)


@given(
    texts=st.lists(st.none() | st.text("aé ", max_size=12), max_size=30), rows=st.integers(1, 9), size=st.integers(1, 2000)
)
@settings(max_examples=30)
def test_every_row_of_a_table_is_in_one_part(folder, texts, rows, size):
    path = folder / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=rows)
    sources = [open_source(path)]
    assert read_in_parts(sources, size) == read_whole(sources)


def test_the_rows_of_a_table_keep_their_numbers_in_every_part(folder):
    path = folder / "numbers.parquet"
    pq.write_table(pa.table({"text": ["a" * 10] * 9 + ["a" * 200]}), path, row_group_size=3)
    source = open_source(path, max_record=100)
    with pytest.raises(CorpusError, match="row 10: expected a record of at most 100 bytes"):
        list(source.chunks(3, 4))


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@given(files=st.lists(st.tuples(LINES, st.sampled_from(list(PACKERS))), max_size=5), size=SIZES, chunk=SIZES)
@settings(max_examples=50)
def test_parts_of_several_files_hold_them_all(folder, files, size, chunk):
    paths = []
    for number, (lines, ending) in enumerate(files):
        paths.append(folder / f"{number}.txt{ending}")
        paths[-1].write_bytes(PACKERS[ending]("\n".join(lines).encode()))
    sources = open_sources(paths) if paths else []
    assert read_in_parts(sources, size, chunk) == read_whole(sources)


def test_small_files_share_a_part_and_large_ones_are_cut(file):
    sources = open_sources(
        [file("a.txt", b"a" * 40), file("b.txt", b"b" * 50), file("c.txt", b"c" * 250), file("d.txt", b"")]
    )
    assert cut_parts(sources, 100) == [
        Part(0, (Range(0, 0, 40), Range(1, 0, 50)), (0.0, 90 / 340)),
        Part(1, (Range(2, 0, 100),), (90 / 340, 190 / 340)),
        Part(2, (Range(2, 100, 200),), (190 / 340, 290 / 340)),
        Part(3, (Range(2, 200, 250),), (290 / 340, 1.0)),
    ]
    assert cut_parts([], 100) == [Part(0, (), (0.0, 1.0))]


def test_an_iterator_is_one_part_and_beside_it_no_share_is_known():
    assert cut_parts([Texts(iter(["a"] * 1000))], 10) == [Part(0, (Range(0, 0, None),), (0.0, 1.0))]
    assert [part.share for part in cut_parts([Texts(iter("ab")), Texts(["a"])], 10)] == [None, None]


class Own:
    """A source of the caller's, which only gives its records."""

    name = "own"

    def records(self, skipped):
        for number in range(5):
            skipped["left out"] += number
            yield f"river {number}"
        skipped["left out"] += 1

    def size(self):
        return None

    def fraction(self):
        return None


@pytest.mark.parametrize("chunk", [1, 8, 1000])
def test_a_source_that_only_gives_records_is_one_part(corpus_of, monkeypatch, chunk):
    monkeypatch.setattr(record, "CHUNK", chunk)
    shards = list(corpus_of(Own(), shard_tokens=4, part_shards=1).stream())
    assert [sentence.text for shard in shards for sentence in shard.sentences] == [f"river {number}" for number in range(5)]
    assert [shard.after.skipped for shard in shards] == [{"left out": 1}, {"left out": 6}, {"left out": 11}]


def test_too_many_parts_or_sentences_are_one_line(corpus_of, monkeypatch):
    monkeypatch.setattr(parts, "MAX_PARTS", 3)
    with pytest.raises(
        CorpusError, match=r"expected at most 3 parts of a corpus, found 40 of about 8 bytes: .*--shard-tokens"
    ):
        corpus_of(["a" * 8] * 40, shard_tokens=2, part_shards=1).parts()
    monkeypatch.setattr("ffmem.corpus.shards.SENTENCE_BITS", 3)
    corpus = corpus_of(["river"] * 8)
    with pytest.raises(CorpusError, match="expected fewer than 8 sentences in part 0 of the corpus"):
        list(corpus.stream())
    assert len(list(corpus_of(["river"] * 7).stream())) == 1


ARTICLES = "river\nriver river\n = One = \nriver\n\n = = Part = = \nriver sea\n" + " = Two = \n" + "sea\nriver\n" * 3


def by_sentence(shards):
    """Every sentence and its document."""
    pairs = (zip(shard.sentences, shard.documents.tolist(), strict=True) for shard in shards)
    return [(sentence.text, document) for shard in pairs for sentence, document in shard]


@pytest.mark.slow
@given(shard_tokens=st.integers(1, 30), part_shards=st.integers(1, 3), chunk=st.integers(1, 60), records=st.integers(0, 60))
@settings(max_examples=25)
def test_what_must_not_depend_on_the_cut_does_not(corpus_of, folder, shard_tokens, part_shards, chunk, records):
    paths = [folder / name for name in ("one.txt", "two.txt", "three.txt.gz")]
    for path in paths:
        path.write_bytes((gzip.compress if path.suffix == ".gz" else bytes)((ARTICLES * 2).encode()))
    sources = [open_source(path) for path in paths]
    whole = corpus_of(sources, shard_tokens=10**6, by_document=True)
    (one,) = whole.stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "CHUNK", chunk)
        corpus = corpus_of(sources, shard_tokens=shard_tokens, part_shards=part_shards, by_document=True)
        shards = list(corpus.stream())
        assert by_sentence(shards) == by_sentence([one]), "sentences and documents"
        assert sum((shard.after for shard in shards if shard.last), Progress()) == one.after, "counts and the hash"
        assert corpus.digest() == whole.digest() == one.after.digest
        records = min(records, one.after.records)
        assert corpus.digest(records) == whole.digest(records)
        numbers = [shard.first + row for shard in shards for row in range(len(shard.sentences))]
        assert numbers == sorted(set(numbers)), "sentences are numbered in the order of the corpus"
        assert [shard.part for shard in shards if shard.last] == [part.number for part in corpus.parts()]
        counts = corpus.count(lambda *_: None)
        assert sum(counts) == one.after.records
        corpus.sample, whole.sample = Sample(9, 4, counts), Sample(9, 4, [sum(counts)])
        assert by_sentence(corpus.stream()) == by_sentence(whole.stream()), "the sample"


def test_without_by_document_nobody_looks_for_articles(corpus_of, file, monkeypatch):
    monkeypatch.setattr("ffmem.corpus.files.TextFile.last_title", None)
    corpus = corpus_of(file("a.txt", ARTICLES.encode()), shard_tokens=2, part_shards=1)
    assert len(corpus.parts()) > 5
    assert all(part.article is None for part in corpus.parts())


@given(limit=st.integers(0, 60), shard_tokens=st.integers(1, 12), stop=st.integers(0, 8))
@settings(max_examples=25)
def test_a_limit_on_tokens_goes_over_parts_and_holds_when_going_on(corpus_of, limit, shard_tokens, stop):
    texts = ["river " * (number % 5 + 1) for number in range(20)]
    (one,) = corpus_of(texts, limit_tokens=limit, shard_tokens=10**6).stream()
    corpus = corpus_of(texts, limit_tokens=limit, shard_tokens=shard_tokens, part_shards=2)
    shards = list(corpus.stream())
    assert [text for text, _ in by_sentence(shards)] == [text for text, _ in by_sentence([one])]
    done: dict = {}
    for shard in shards[:stop]:
        done.setdefault(shard.part, {})[shard.number] = shard.span
    rest = list(corpus.stream(done=done))
    assert [(shard.part, shard.number, shard.after, shard.full) for shard in rest] == [
        (shard.part, shard.number, shard.after, shard.full) for shard in shards[stop:]
    ]


@given(cut=st.integers(1, 40), data=st.data())
@settings(max_examples=25)
def test_a_change_in_a_finished_part_is_noticed_before_others_are_read(corpus_of, folder, cut, data):
    path = folder / "changed.txt"
    lines = [f"river {'sea ' * (number % 3)}" for number in range(12)]
    path.write_text("\n".join(lines))
    corpus = corpus_of(path, shard_tokens=cut, part_shards=1)
    shards = [shard for shard in corpus.stream() if shard.after.records]
    done = data.draw(st.sampled_from(shards))
    if done.since.records == done.after.records:
        return
    changed = lines.copy()
    before = sum(shard.after.records for shard in shards if shard.part < done.part and shard.last)
    changed[before + done.after.records - 1] = changed[before + done.after.records - 1].replace("river", "raver")
    path.write_text("\n".join(changed))
    parts = [part for part in corpus.parts() if part.number >= done.part]
    with pytest.raises(CorpusError, match="the corpus has changed"):
        next(corpus.stream(parts, {done.part: {done.number: done.span}}))
