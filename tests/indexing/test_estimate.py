import gzip
import lzma

import pyarrow as pa
import pytest

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder
from ffmem.indexing.estimate import estimate, estimate_tokens
from ffmem.run.histogram import BINS
from tests.tiny import some_text

PACKERS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}
every_ending = pytest.mark.parametrize("ending", PACKERS)


@pytest.fixture(scope="module")
def corpus_of(tokenizer):
    def make(source, limit_tokens=None, limit=64):
        return Corpus(open_sources(source), Encoder(tokenizer, limit), Unit("sentence"), "en", 1000, limit_tokens)

    return make


@pytest.fixture
def text(tmp_path):
    """Writes a text of so many sentences."""

    def write(sentences, ending="", seed=0):
        path = tmp_path / f"text-{sentences}-{seed}.txt{ending}"
        path.write_bytes(PACKERS[ending](some_text(sentences, seed=seed).encode()))
        return path

    return write


def count(corpus):
    return sum(shard.tokens for shard in corpus.stream())


@every_ending
def test_the_tokens_of_a_short_file_are_counted(corpus_of, text, ending):
    corpus = corpus_of(text(60, ending))
    assert estimate_tokens(corpus) == count(corpus) > 300


@every_ending
@pytest.mark.slow
def test_the_tokens_of_a_longer_file_are_estimated_within_15_percent(corpus_of, text, ending):
    corpus = corpus_of(text(20_000, ending))
    assert estimate_tokens(corpus) == pytest.approx(count(corpus), rel=0.15)


def test_the_tokens_of_several_files_are_summed(corpus_of, text):
    paths = [text(3_000, seed=seed) for seed in range(5)]
    assert estimate_tokens(corpus_of(paths)) == pytest.approx(count(corpus_of(paths)), rel=0.15)


def test_an_empty_file_before_others_does_not_count(corpus_of, text, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert estimate_tokens(corpus_of(empty)) == 0
    assert estimate_tokens(corpus_of([empty, text(60)])) == count(corpus_of(text(60)))


def test_the_tokens_of_a_list_are_counted_or_estimated(corpus_of):
    assert estimate_tokens(corpus_of([])) == 0
    assert estimate_tokens(corpus_of(["the river left ."] * 300)) == 1_200
    assert estimate_tokens(corpus_of(["the river left ."] * 3_000)) == pytest.approx(12_000, rel=0.01)


def test_the_tokens_of_a_stream_are_unknown_and_it_is_not_touched(corpus_of):
    stream = iter(["the river"])
    assert estimate_tokens(corpus_of(stream)) is None
    assert next(stream) == "the river"
    assert estimate_tokens(corpus_of("hf:some/dataset")) is None


@pytest.mark.parametrize(("limit", "expected"), [(100, 100), (1_199, 1_199), (5_000, 1_200), (0, 0)])
def test_the_limit_on_tokens_is_respected(corpus_of, limit, expected):
    assert estimate_tokens(corpus_of(["the river left ."] * 300, limit)) == expected


def test_an_estimate_leaves_the_corpus_as_it_was(corpus_of, text):
    corpus = corpus_of(text(3_000))
    before = count(corpus)
    estimate_tokens(corpus)
    assert count(corpus) == before


def test_the_disk_that_a_run_takes_is_counted_a_trigger_a_cell_and_a_sentence():
    assert estimate(10_000, cells=10, t=5, signs=2, stats=False).run_bytes == 20 * 100 + 20 * 10 + 300 * 100
    assert estimate(400, cells=10, t=5, signs=2, stats=True).run_bytes == 20 * 100 + 1400 * 10 + 300 * 20
    assert estimate(None, cells=10, t=5, signs=2, stats=False).work_bytes == 28 * 100 + 300 * 100


def test_every_worker_keeps_a_state_and_every_shard_its_sums_and_sentences():
    found = estimate(10**6, cells=10, t=5, signs=1, stats=True, workers=3, shards=7)
    assert found.work_bytes == 3 * 10 * (28 * 5 + 16 + 4 * BINS) + 7 * 16 * 10 + 300 * 7 * 50
    assert found.run_bytes == estimate(10**6, cells=10, t=5, signs=1, stats=True).run_bytes
