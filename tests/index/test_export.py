"""Tables for other tools."""

import csv
import json

import pyarrow.parquet as pq
import pytest

from ffmem import export, open_index
from ffmem.words import FfmemError


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_triggers_as_json_lines_are_all_triggers_in_order(built, tmp_path):
    export(built, "triggers", out=tmp_path / "t.jsonl")
    index = open_index(built)
    wanted = [trigger.as_dict() for view in index for trigger in (*view.triggers, *view.negative_triggers)]
    assert lines(tmp_path / "t.jsonl") == wanted
    assert len(wanted) == index.counts["triggers"]
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
        ("cells", {"out": "/nowhere/at/all.jsonl"}, "cannot be written"),
    ],
)
def test_bad_wishes_are_named(built, table, options, message):
    with pytest.raises(FfmemError, match=message):
        export(built, table, **options)
