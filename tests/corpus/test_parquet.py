"""Parquet files that hold little and unpack to much."""

from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ffmem.corpus import parquet
from ffmem.errors import CorpusError

KB = 1000


def written(path, texts, **options):
    pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, compression="zstd", **options)
    return path


@pytest.mark.parametrize("words", [True, False], ids=["dictionary", "plain"])
def test_a_row_that_is_too_large_is_named(tmp_path, read, words):
    texts = [f"text {number % 7}" for number in range(300)]
    texts[210] = "a" * 2 * KB
    path = written(tmp_path / "a.parquet", texts, use_dictionary=words, row_group_size=100)
    assert read(path, max_record=2 * KB)[0] == texts
    with pytest.raises(
        CorpusError, match=r"a.parquet: row 211: expected a record of at most 1 kB, found 2 kB: .*--max-record"
    ):
        read(path, max_record=1 * KB)


@pytest.mark.parametrize("words", [True, False], ids=["dictionary", "plain"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_rows_that_would_not_fit_together_are_refused_before_it_is_unpacked(tmp_path, read, words, version):
    texts = [f"text {number}" for number in range(300)]
    texts[210] = "a" * 1000 * KB
    path = written(tmp_path / "a.parquet", texts, use_dictionary=words, row_group_size=100, data_page_version=version)
    before, most = pa.total_allocated_bytes(), pa.default_memory_pool().max_memory()
    with pytest.raises(CorpusError, match=r"a.parquet: rows 201 to 300: expected a record of at most 1 kB, found 1 MB that"):
        read(path, max_record=1 * KB)
    assert pa.total_allocated_bytes() <= before + 100 * KB
    assert pa.default_memory_pool().max_memory() <= max(most, before + 100 * KB)


def test_a_large_word_that_many_rows_share_is_held_once(tmp_path):
    path = written(tmp_path / "a.parquet", ["a" * 1000 * KB] * 64)
    before = pa.total_allocated_bytes()
    records = parquet.ParquetFile(path).records(Counter())
    assert len(next(records)) == 1000 * KB
    assert pa.total_allocated_bytes() - before < 5000 * KB
    assert len(list(records)) == 63
