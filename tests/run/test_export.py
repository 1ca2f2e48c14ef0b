"""Tables for other tools."""

import csv
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ffmem import export, open_index
from ffmem.cli.app import main
from ffmem.errors import FfmemError, RunError
from ffmem.run import export as room


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_triggers_as_json_lines_are_all_triggers_in_order(built, tmp_path):
    export(built, "triggers", out=tmp_path / "t.jsonl")
    index = open_index(built)
    wanted = [trigger.as_dict() for view in index for trigger in (*view.triggers, *view.negative_triggers)]
    assert lines(tmp_path / "t.jsonl") == wanted
    assert len(wanted) == index.counts.triggers
    assert set(wanted[0]) == {
        "cell", "layer", "index", "sign", "rank", "coefficient", "sentence", "position", "prefix", "next",
    }  # fmt: skip
    assert {row["sign"] for row in wanted} == {"+", "-"}
    assert any(row["next"] is None for row in wanted)


@pytest.mark.parametrize("table", ["triggers", "cells", "sentences"])
def test_all_formats_say_the_same(built, tmp_path, table):
    for format in ("jsonl", "csv", "parquet"):
        export(built, table, format=format, out=tmp_path / f"t.{format}")
    rows = lines(tmp_path / "t.jsonl")
    parquet = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [set(row) for row in parquet] == [set(row) for row in rows]
    if table != "cells":
        assert parquet == rows
    with (tmp_path / "t.csv").open(encoding="utf-8", newline="") as handle:
        read = list(csv.DictReader(handle))
    key = {"triggers": "prefix", "cells": "cell", "sentences": "text"}[table]
    assert [row[key] for row in read] == [row[key] for row in rows]


def test_cells_carry_statistics_and_values(built, tmp_path):
    export(built, "cells", out=tmp_path / "c.jsonl")
    rows = lines(tmp_path / "c.jsonl")
    view = open_index(built)["L2D5"]
    row = next(row for row in rows if row["cell"] == "L2D5")
    assert len(rows) == 3 * 64
    assert row["triggers"] == len(view.triggers)
    assert row["mean"] == view.stats.mean
    assert row["value_top"] == view.value.top(1)[0].token


def test_sentences_are_those_that_triggers_point_to(built, tmp_path):
    export(built, "sentences", out=tmp_path / "s.jsonl")
    numbers = [row["sentence"] for row in lines(tmp_path / "s.jsonl")]
    index = open_index(built)
    assert numbers == sorted({t.sentence for view in index for t in (*view.triggers, *view.negative_triggers)})


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ("cats", {}, "expected triggers, cells, sentences, found 'cats'"),
        ("cells", {"format": "xml"}, "expected format jsonl, csv, parquet"),
        ("cells", {"format": "parquet"}, "give a file with -o"),
        (
            "cells",
            {"out": "/nowhere/at/all.jsonl"},
            "all.jsonl: cannot be written: No such file or directory; make its folder",
        ),
        ("cells", {"out": "/"}, "expected a file, found a folder at /"),
        ("cells", {"out": ""}, "expected a folder, a file or a URL, found an empty name"),
    ],
)
def test_bad_wishes_are_named(built, table, options, message):
    with pytest.raises(FfmemError, match=message):
        export(built, table, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="pipes and devices as on Linux")
@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
def test_a_pipe_gets_the_bytes_and_a_full_device_one_line(built, tmp_path, capsys, format):
    export(built, "cells", format=format, out=tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    export(built, "cells", format=format, out=tmp_path / "pipe")
    reader.join(5)
    assert read == [(tmp_path / "file").read_bytes()]
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(SystemExit) as told:
        main(["export", str(built), "cells", "--format", format, "-o", "/dev/full"])
    assert told.value.code == 1
    advice = "make room there and give the same command again"
    assert capsys.readouterr().err == f"ffmem: error: /dev/full: cannot be written: No space left on device; {advice}\n"
    assert os.path.exists("/dev/full")
    assert not os.path.isfile("/dev/full")


def test_a_link_and_a_mode_stay_and_what_others_write_beside_it(built, tmp_path):
    target = tmp_path / "disk" / "s.jsonl"
    target.parent.mkdir()
    target.write_text("before")
    target.chmod(0o600)
    (tmp_path / "s.jsonl").symlink_to(target)
    (tmp_path / "s.jsonl.tmp").write_text("somebody's")
    left = tmp_path / ".s.jsonl.0123456789abcdef.ffmem-tmp"
    left.mkdir()
    (left / "s.jsonl").write_text("half, of a process that was killed")
    export(built, "sentences", out=tmp_path / "s.jsonl")
    assert (tmp_path / "s.jsonl").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert len(lines(target)) == open_index(built).table("sentences").num_rows
    assert (tmp_path / "s.jsonl.tmp").read_text() == "somebody's"
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "s.jsonl", "s.jsonl.tmp"}


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


def test_text_that_a_spreadsheet_would_compute_is_quoted_unless_it_is_to_be_raw(built, tmp_path, monkeypatch):
    texts = ["=1+2", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "'=1", "a=b", "", " =1"]
    made = [{"cell": "L1D0", "sign": "-", "coefficient": -2.5, "tokens": [-1, 2], "text": text} for text in texts]
    monkeypatch.setitem(room.TABLES, "sentences", lambda _: iter(made))
    export(built, "sentences", format="csv", out=tmp_path / "s.csv")
    assert [row["text"] for row in rows_of(tmp_path / "s.csv")] == [*(f"'{text}" for text in texts[:6]), *texts[6:]]
    export(built, "sentences", format="csv", out=tmp_path / "raw.csv", raw=True)
    assert [row["text"] for row in rows_of(tmp_path / "raw.csv")] == texts
    for name in ("s.csv", "raw.csv"):
        others = [
            {name: row[name] for name in ("cell", "sign", "coefficient", "tokens")} for row in rows_of(tmp_path / name)
        ]
        assert others == [{"cell": "L1D0", "sign": "-", "coefficient": "-2.5", "tokens": "[-1, 2]"}] * len(texts)
    export(built, "sentences", out=tmp_path / "s.jsonl")
    assert [row["text"] for row in lines(tmp_path / "s.jsonl")] == texts


@pytest.mark.parametrize("name", ["manifest.json", "cells.arrow", "log.jsonl", "results/activity.json"])
def test_a_file_of_a_run_is_never_written_over(built, tmp_path, name):
    run = Path(shutil.copytree(built, tmp_path / "run"))
    (tmp_path / "link.jsonl").symlink_to(run / name)
    before = (run / "manifest.json").read_bytes()
    for out in (run / name, tmp_path / "link.jsonl"):
        with pytest.raises(RunError, match="this file is part of the run"):
            export(run, "cells", out=out)
    assert (run / "manifest.json").read_bytes() == before
    export(run, "cells", out=run / "mine.jsonl")
    assert (run / "mine.jsonl").exists()
