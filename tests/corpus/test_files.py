"""Files whose lines are larger than memory should be, and files that somebody writes while they are read."""

import gzip
import json
import lzma
import os
import socket
import tracemalloc
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ffmem.corpus import files
from ffmem.corpus.sources import open_source, open_sources
from ffmem.errors import CorpusError


def zst(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def xz(content: bytes) -> bytes:
    return lzma.compress(content, preset=0)  # with a window of a quarter of a megabyte, which takes memory


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": xz, ".zst": zst}


def on_one_line(caught):
    return str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_line_that_unpacks_to_megabytes_takes_no_more_memory_than_a_record_may(file, read, name, ending):
    line = b'{"text": "' + b"a" * 6_000_000 + b'"}'
    path = file(name + ending, PACKERS[ending](b'{"text": "short"}\n' + line))
    tracemalloc.start()
    try:
        with pytest.raises(
            CorpusError, match=rf"{name}.*:2: expected a record of at most 1 kB, found a longer line"
        ) as caught:
            read(path, max_record=1000)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert "--max-record" in str(caught.value)
    assert on_one_line(caught)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("ending", PACKERS)
def test_the_largest_line_that_is_allowed_is_read_and_the_next_larger_is_not(file, read, ending, end):
    first = b"b" * 100 + b"\r\n"
    path = file(f"a.txt{ending}", PACKERS[ending](first + b"a" * 100 + end))
    assert read(path, max_record=100)[0] == ["b" * 100, "a" * 100]
    path = file(f"a.txt{ending}", PACKERS[ending](first + b"a" * 101 + end))
    with pytest.raises(CorpusError, match=r":2: expected a record of at most 100 bytes"):
        read(path, max_record=100)


def test_texts_and_rows_that_are_too_long_are_named_by_their_number(read):
    with pytest.raises(CorpusError, match="item 1 of the corpus: expected a record of at most 100 bytes, found 101 bytes"):
        read(["a" * 100, "a" * 101], max_record=100)
    with pytest.raises(CorpusError, match=r"item 0 of the corpus: .* found 101 bytes"):
        read([{"text": "a" * 101}], max_record=100)


def test_the_limit_is_generous_unless_it_is_told(file, read):
    assert [len(text) for text in read(file("a.txt", b"a" * 9_999_999))[0]] == [9_999_999]
    with pytest.raises(CorpusError, match="at most 10 MB"):
        read(file("a.txt", b"a" * 10_000_001))


def append(path):
    with path.open("ab") as handle:
        handle.write(b"more\n")


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))  # of the same size and time
    other.replace(path)


def rewrite(path):
    content, when = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(content[::-1])
    os.utime(path, ns=(when, when + 1))  # the clock of a file system may be coarse


CHANGES = [append, replace, rewrite, os.remove, lambda path: path.write_bytes(b"")]


def written(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(pa.table({"text": ["text"] * 1000}), path, row_group_size=100)
    else:
        line = json.dumps({"text": "text"}) + "\n"
        path.write_bytes(PACKERS["." + name.split(".")[2] if name.count(".") > 1 else ""]((line * 20_000).encode()))
    return path


@pytest.mark.parametrize("change", CHANGES, ids=["append", "replace", "rewrite", "remove", "truncate"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz", "a.txt.zst", "a.jsonl", "a.parquet"])
@pytest.mark.slow
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path, name, change):
    path = written(tmp_path, name)
    source = open_source(path)
    records = source.records(Counter())
    next(records)
    change(path)

    def rest():
        for number, _ in enumerate(records):
            assert number % 1000 or source.fraction() is not None

    with pytest.raises(CorpusError, match=f"{name}: expected a file that stays as it is, but while it was read") as caught:
        rest()
    assert on_one_line(caught)


def test_a_file_that_changed_before_it_is_read_or_after_is_read(tmp_path):
    path = written(tmp_path, "a.txt")
    source = open_source(path)
    append(path)
    assert len(list(source.records(Counter()))) == 20_001
    append(path)
    assert len(list(source.records(Counter()))) == 20_002


def test_whoever_stops_early_is_told_nothing(tmp_path):
    path = written(tmp_path, "a.txt")
    records = open_source(path).records(Counter())
    next(records)
    append(path)
    records.close()


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "jsonl", "parquet"])
def test_pipes_sockets_and_devices_are_refused_and_not_waited_for(tmp_path, monkeypatch, ending):
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    os.mkfifo(pipe := tmp_path / f"pipe.{ending}")
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"socket.{ending}")
    (tmp_path / f"null.{ending}").symlink_to("/dev/null")
    for name, what in [
        (pipe, "a pipe"),
        (tmp_path / f"socket.{ending}", "a socket"),
        (tmp_path / f"null.{ending}", "a dev"),
    ]:
        with pytest.raises(CorpusError, match=f"{name.name} is {what}.*: .* write the text to a file first"):
            open_sources(name)
    server.close()


def test_a_file_that_has_become_a_pipe_is_not_waited_for(tmp_path):
    path = written(tmp_path, "a.txt")
    source = open_source(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CorpusError, match=r"a.txt is a pipe"):
        list(source.records(Counter()))


def test_names_that_are_no_utf_8_or_no_names_are_refused_on_one_line(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    with open(name, "w") as handle:
        handle.write("text\n")
    strange = tmp_path / "new\nline.txt"
    strange.write_bytes(b"\xff\n")
    for make, error in [
        (lambda: open_sources(name), r"the name of a file in UTF-8, found .*caf\\udce9.txt: rename it"),
        (lambda: open_sources([files.TextFile(files.Path(name))]), r"the name of a source in UTF-8, found .*caf\\udce9"),
        (lambda: open_sources("pocket", column="\udce9"), r"the name of a column in UTF-8, found \\udce9"),
        (lambda: open_sources(["text"], column="\udce9"), r"the name of a column in UTF-8, found \\udce9"),
        (lambda: open_sources("hf:a,column=\udce9"), r"in UTF-8, found hf:a,column=\\udce9"),
        (lambda: open_sources("a\0b"), "a␀b: expected a file, found embedded null byte|a␀b: no such file"),
        (lambda: open_sources("a" * 5000), "expected a file, found File name too long"),
        (lambda: list(open_source(strange).records(Counter())), "new⏎line.txt:1: expected UTF-8"),
    ]:
        with pytest.raises(CorpusError, match=error) as caught:
            make()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "value", ["1" * 5000, "[" * 100_000, "NaN", "-Infinity", '{"a": NaN}', "1e999"], ids=lambda value: value[:9]
)
def test_strange_numbers_and_nests_of_json_are_one_line(file, read, value):
    with pytest.raises(CorpusError, match=r"a.jsonl:1: expected (a JSON object|text), found") as caught:
        read(file("a.jsonl", b'{"text": ' + value.encode() + b"}\n"))
    assert on_one_line(caught)
    with pytest.raises(CorpusError, match=r"a.jsonl:1: expected a field 'text', found n\\x85") as caught:
        read(file("a.jsonl", '{"n\x85": 1}\n'.encode()))
    assert on_one_line(caught)
