import gzip
import json
import lzma
import time
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ffmem.corpus.sources import Dataset, Texts, open_source, open_sources
from ffmem.errors import CorpusError


def zst(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}
packed = pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])


def parquet(path, table, **options):
    pq.write_table(pa.table(table), path, **options)
    return path


@pytest.mark.parametrize("ending", PACKERS)
def test_a_text_file_gives_its_lines_however_it_is_packed(file, read, ending):
    path = file(f"a.txt{ending}", PACKERS[ending]("één\ntwo \U0001f600\nno newline".encode()))
    assert read(path) == (["één", "two \U0001f600", "no newline"], {})
    assert read(str(path)) == read(path)


@packed
def test_packed_files_glued_together_are_read_to_the_end(file, read, ending):
    path = file(f"a.txt{ending}", PACKERS[ending](b"one\ntw") + PACKERS[ending](b"o\nthree\n"))
    assert read(path) == (["one", "two", "three"], {})


@pytest.mark.slow
def test_a_packed_file_longer_than_every_buffer_is_read_whole(file, read):
    lines = [f"line {number} {number * number}" for number in range(40_000)]
    for ending, pack in PACKERS.items():
        assert read(file(f"long.txt{ending}", pack("\n".join(lines).encode())))[0] == lines


def test_headings_of_every_level_and_blank_lines_are_dropped_and_counted(file, read):
    lines = [" = Title = ", " = = Section = = ", " = = = Part of it = = = ", "= = = = Deep = = = =", "", "  ", " text . "]
    assert read(file("wiki.txt", "\n".join(lines).encode())) == ([" text . "], {"headings": 4, "blank lines": 2})


@pytest.mark.parametrize("line", ["x = y", "= y", "a = b = c", "E=mc2", "= a = b", "==", "=", "y ="])
def test_a_line_that_merely_contains_an_equals_sign_is_kept(file, read, line):
    assert read(file("a.txt", line.encode())) == ([line], {})


def test_a_long_line_of_equals_signs_takes_no_time(file, read):
    line = "= " * 3000 + "x"
    begin = time.perf_counter()
    assert read(file("a.txt", line.encode())) == ([line], {})
    assert time.perf_counter() - begin < 0.5


def test_carriage_returns_and_a_byte_order_mark_are_not_text(file, read):
    assert read(file("a.txt", b"\xef\xbb\xbf = T = \r\none\r\n\r\ntwo\r\n")) == (
        ["one", "two"],
        {"headings": 1, "blank lines": 1},
    )
    assert read(file("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n')) == (["one"], {})


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz", "a.txt.zst", "a.jsonl", "a.jsonl.gz"])
def test_an_empty_file_has_no_records(file, read, name):
    pack = PACKERS.get("." + name.rsplit(".", 1)[1], bytes)
    assert read(file(name, pack(b""))) == ([], {})


@pytest.mark.parametrize("ending", PACKERS)
def test_jsonl_gives_its_text_fields_and_counts_the_rest(file, read, ending):
    lines = b'{"text": "one", "id": 1}\n\n{"text": null}\n{"text": " "}\n{"id": 2, "text": "a\\nb"}\n'
    expected = (["one", "a\nb"], {"blank lines": 1, "empty records": 2})
    assert read(file(f"a.jsonl{ending}", PACKERS[ending](lines))) == expected
    assert read(file(f"a.ndjson{ending}", PACKERS[ending](lines))) == expected


def test_another_column_can_be_named(file, read, tmp_path):
    assert read(file("a.jsonl", b'{"body": "one", "text": "two"}'), column="body") == (["one"], {})
    assert read(parquet(tmp_path / "a.parquet", {"body": ["one"], "text": ["two"]}), column="body") == (["one"], {})
    assert read([{"body": "one"}], column="body") == (["one"], {})


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"body": "x", "id": 1}', "expected a field 'text', found body, id"),
        (b"{}", "found none"),
        (b"{oops", r"expected a JSON object, found '{oops'"),
        (b"[1]", "found list"),
        (b'"text"', "found str"),
        (b'{"text": 5}', "expected text, found int"),
        (b'{"text": ["a"]}', "expected text, found list"),
        (b"[" * 100_000, "expected a JSON object"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "expected a JSON object"),
        (b'{"text": "\\ud800"}', ""),
    ],
    ids=["field", "empty", "invalid", "list", "string", "number", "texts", "deep", "digits", "surrogate"],
)
def test_a_bad_line_of_jsonl_is_named(file, read, line, found):
    path = file("a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorpusError, match=f"a.jsonl:2: .*{found}"):
        read(path)


@pytest.mark.parametrize("type", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_gives_its_text_column_and_counts_nulls(read, tmp_path, type):
    column = pa.array(["one", None, " ", "two"], pa.string()).cast(type)
    path = parquet(tmp_path / "a.parquet", {"id": [1, 2, 3, 4], "text": column}, row_group_size=3)
    assert read(path) == (["one", "two"], {"empty records": 2})


def test_a_missing_parquet_column_is_answered_with_the_columns_there_are(read, tmp_path):
    with pytest.raises(CorpusError, match=r"a.parquet: expected a column 'text', found id, body; .*--column"):
        read(parquet(tmp_path / "a.parquet", {"id": [1], "body": ["x"]}))


@pytest.mark.parametrize(
    ("values", "found"), [([1, 2], "int64"), ([b"x"], "binary"), ([["x"]], "list<"), ([{"x": "y"}], "struct<")]
)
def test_a_parquet_column_of_another_type_is_refused(read, tmp_path, values, found):
    with pytest.raises(CorpusError, match=f"a.parquet: expected text in the column 'text', found {found}"):
        read(parquet(tmp_path / "a.parquet", {"text": values}))


def test_a_parquet_column_that_is_not_utf_8_is_refused(read, tmp_path):
    raw = pa.array([b"ok", b"\xff"], pa.binary())
    table = {"text": pa.Array.from_buffers(pa.string(), 2, raw.buffers())}
    with pytest.raises(CorpusError, match=r"a.parquet"):
        read(parquet(tmp_path / "a.parquet", table))


def test_what_is_no_parquet_file_is_refused(file, read, tmp_path):
    whole = parquet(tmp_path / "whole.parquet", {"text": ["one"]}).read_bytes()
    for content in (b"", b"text", b"text" * 100, whole[:-9]):
        with pytest.raises(CorpusError, match=r"a.parquet: expected a Parquet file"):
            read(file("a.parquet", content))


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """A folder that the datasets library reads."""
    pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("dataset")
    rows = [{"text": "one", "body": "1"}, {"text": None, "body": "2"}, {"text": "two", "body": "3"}]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[: len(split) - 2]))
    return folder


def test_a_hugging_face_dataset_is_read_by_name_and_as_an_object(read, dataset):
    assert read(f"hf:{dataset}") == (["one", "two"], {"empty records": 1})
    assert read(Dataset(str(dataset))) == read(f"hf:{dataset}")
    assert read(f"hf:{dataset},split=test,column=body") == (["1", "2"], {})
    assert read(f"hf:{dataset},split=test", column="body") == (["1", "2"], {})
    assert read([Dataset(str(dataset), split="test", column="body")]) == (["1", "2"], {})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (",column=title", "row 0: expected a column 'title', found text, body"),
        (",split=dev", "cannot be loaded: .*dev"),
        ("/nowhere", "cannot be loaded"),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused(read, dataset, options, error):
    with pytest.raises(CorpusError, match=error):
        read(f"hf:{dataset}{options}")


@pytest.mark.parametrize("option", ["colour=red", "train", "", "split"])
def test_an_unknown_dataset_option_is_refused(option):
    with pytest.raises(CorpusError, match=rf"expected hf:ID,config=.*found '{option}' in 'hf:x,{option}'"):
        open_sources(f"hf:x,{option}")


def test_a_dataset_is_named_as_it_is_written():
    name = "hf:a/b,config=c,split=d,column=e"
    assert Dataset.parse(name).name == name


def test_iterables_of_strings_and_of_dicts_are_corpora(read):
    texts = ["one", "", None, "two"]
    expected = (["one", "two"], {"empty records": 2})
    for corpus in (texts, tuple(texts), (text for text in texts), iter(texts), [{"text": text} for text in texts]):
        assert read(corpus) == expected
    assert read([]) == ([], {})


def test_strings_in_a_list_are_texts_but_names_of_files_there_are_taken_for_a_mistake(read, file):
    assert read(["a.txt", "some text"])[0] == ["a.txt", "some text"]
    with pytest.raises(CorpusError, match=r"a.txt is a file: give files as Path"):
        read([str(file("a.txt", b"inside"))])


@pytest.mark.parametrize(
    ("item", "found"), [(5, "expected text, found int"), (b"x", "found bytes"), ({"body": ""}, "'text', found body")]
)
def test_an_item_that_is_no_text_is_named_by_its_number(read, item, found):
    with pytest.raises(CorpusError, match=f"item 2 of the corpus: .*{found}"):
        read(["one", "two", item])


@pytest.mark.parametrize("corpus", [5, None, object()])
def test_what_is_no_corpus_is_refused(corpus):
    with pytest.raises(CorpusError, match=f"found {type(corpus).__name__}"):
        open_sources(corpus)


def test_several_files_are_read_in_the_order_given(file, read):
    paths = [file("b.txt", b"one\n"), file("a.jsonl", b'{"text": "two"}'), file("c.txt.gz", gzip.compress(b"three"))]
    assert read(paths) == (["one", "two", "three"], {})
    assert read([open_source(path) for path in paths]) == read(paths)


def test_missing_files_folders_and_json_are_refused_by_name(file, tmp_path):
    for path, error in [
        (tmp_path / "none.txt", "none.txt: no such file"),
        (tmp_path, "is a folder: give its files"),
        (file("a.json", b"[]"), "a.json: expected text, .jsonl"),
        (file("b.json.gz", b""), "b.json.gz: expected text, .jsonl"),
    ]:
        with pytest.raises(CorpusError, match=error):
            open_sources(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_invalid_utf_8_is_named_by_file_line_and_byte(file, read, name):
    with pytest.raises(CorpusError, match=rf"{name}:2: expected UTF-8, found byte 0xe9 at byte 4 of the line"):
        read(file(name, b"\ncaf\xe9 au lait\n"))


def test_the_byte_is_counted_from_behind_a_byte_order_mark(file, read):
    with pytest.raises(CorpusError, match=r"a.txt:1: expected UTF-8, found byte 0xff at byte 3"):
        read(file("a.txt", b"\xef\xbb\xbfab\xff"))


def test_a_binary_file_is_refused(file, read):
    with pytest.raises(CorpusError, match=r"a.txt:2: expected text, found a binary file \(a NUL byte\)"):
        read(file("a.txt", b"fine\n\x00\x01"))
    with pytest.raises(CorpusError, match=r"a.txt:1: .*binary"):
        read(file("a.txt", "in UTF-16\n".encode("utf-16-be")))


@packed
@pytest.mark.parametrize("missing", [1, 9, "half"])
def test_a_packed_file_cut_short_is_refused_by_name(file, read, ending, missing):
    whole = PACKERS[ending]("".join(f"{number * 7919 % 10007}\n" for number in range(5000)).encode())
    path = file(f"a.txt{ending}", whole[: len(whole) // 2 if missing == "half" else -missing])
    with pytest.raises(CorpusError, match=f"a.txt{ending}: "):
        read(path)


@packed
def test_what_is_not_packed_or_damaged_inside_is_refused_by_name(file, read, ending):
    whole = PACKERS[ending](b"one\ntwo\n" * 100)
    for content in (b"plain text\n", whole[:10] + b"\xff" * 40):
        with pytest.raises(CorpusError, match=f"a.txt{ending}: "):
            read(file(f"a.txt{ending}", content))


def test_the_ending_may_be_written_in_capitals(file, read):
    assert read(file("A.JSONL", b'{"text": "one"}')) == (["one"], {})
    assert read(file("A.TXT.GZ", gzip.compress(b"one"))) == (["one"], {})


def test_the_share_that_was_read_grows_to_one(file, tmp_path):
    for path in (
        file("a.txt", b"one\n" * 1000),
        file("a.txt.gz", gzip.compress(b"one\n" * 1000)),
        parquet(tmp_path / "a.parquet", {"text": ["one"] * 1000}, row_group_size=100),
    ):
        source = open_source(path)
        shares = [source.fraction() for _ in source.records(Counter())] + [source.fraction()]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        assert source.size() == path.stat().st_size
        assert source.name == str(path)
    texts = Texts(["a"] * 4)
    assert [texts.fraction() for _ in texts.records(Counter())] == [0.25, 0.5, 0.75, 1.0]
    assert Texts(iter("ab")).fraction() is None


def test_a_source_can_be_read_twice(file, read):
    source = open_source(file("a.txt.zst", zst(b"one\ntwo\n")))
    assert read(source) == read(source) == (["one", "two"], {})


def test_the_pocket_text_comes_with_the_package_under_its_name(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [source] = open_sources("pocket")
    assert source.name == "pocket"
    records, skipped = read("pocket")
    assert skipped["headings"] == 559
    assert sum(len(record.split()) for record in records) > 60_000


def test_its_parts_are_every_tenth_article_and_the_others(read):
    whole, _ = read("pocket")
    most, skipped = read("pocket:9/10")
    rest, skipped_too = read("pocket:1/10")
    assert (skipped["headings"], skipped_too["headings"]) == (504, 55)
    assert sorted(most + rest) == sorted(whole)
    assert rest[0] == whole[whole.index(rest[0])] != most[0] == whole[0]


def test_a_file_called_pocket_is_named_by_its_path(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").write_text("mine\n")
    assert read("./pocket")[0] == ["mine"]
    assert len(read("pocket")[0]) > 1
