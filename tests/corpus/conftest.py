"""Files of every kind to read, and corpora whose tokens can be counted by hand."""

from collections import Counter

import pytest

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder


@pytest.fixture
def file(tmp_path):
    """Writes bytes under a name and gives the path."""

    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(scope="session")
def read():
    """All records of a corpus, and what was left out."""

    def records(corpus, **options):
        skipped = Counter()
        return [text for source in open_sources(corpus, **options) for text in source.records(skipped)], dict(skipped)

    return records


@pytest.fixture(scope="session")
def corpus_of(tokenizer):
    """A corpus of anything that can be read, a token a word."""

    def make(source, *, shard_tokens=10, limit_tokens=None, unit="line", limit=64, **options):
        encoder = Encoder(tokenizer, limit)
        options = {"part_shards": 10**9} | options  # one part
        return Corpus(open_sources(source), encoder, Unit.parse(unit), "en", shard_tokens, limit_tokens, **options)

    return make
