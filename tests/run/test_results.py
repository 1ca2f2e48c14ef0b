"""Results: the same from their file, plain JSON, and part of the run they are in."""

import json
import math
import shutil
import threading
import time

import numpy as np
import pyarrow.parquet as pq
import pytest

from ffmem import build_index, open_index
from ffmem.errors import RunError
from ffmem.run.folder import RunFolder
from ffmem.run.results import Result, load_result, saved_results


@pytest.fixture
def index(gpt2, tmp_path):
    return build_index(gpt2, ["the king left ."], out=tmp_path / "run", quiet=True)


def test_a_result_comes_back_from_its_file_with_plain_numbers(index):
    rows = [{"layer": 1, "share": np.float32(0.5), "mean": math.nan}]
    result = Result("activity", 3, {"examples": np.int64(4)}, rows, {"shares": (0.25, math.inf)}).saved(index)
    found = load_result(index, "activity")
    assert found.as_dict() == result.as_dict()
    assert found.rows == [{"layer": 1, "share": 0.5, "mean": None}]
    assert (found.seed, found.settings, found.facts) == (3, {"examples": 4}, {"shares": [0.25, None]})
    assert set(json.loads((index.path / "results" / "activity.json").read_text())) == {
        "experiment",
        "seed",
        "settings",
        "rows",
        "facts",
        "resamples",
        "control",
        "run",
        "hash",
    }
    assert pq.read_table(index.path / "results" / "activity.parquet").column("share").to_pylist() == [0.5]


def test_a_result_shows_its_rows_escaped_and_prints_itself_in_a_line():
    rows = [{"layer": layer, "share": math.nan if layer else 1 / 3, "tokens": ["<b>\n"] * 99} for layer in range(50)]
    result = Result("activity", 0, {}, rows, control="random")
    assert repr(result) == "Result(activity of the control random: 50 rows of layer, share, tokens)"
    page = result._repr_html_()
    assert page.count("<tr>") == 41
    assert "and 10 more rows" in page
    assert "0.3333" in page
    assert "–" in page
    assert "nan" not in page
    assert "<b>\\n" not in page
    assert "&lt;b&gt;⏎, &lt;b&gt;" in page
    assert len(page) < 15_000
    assert "\n" not in repr(Result("a\nb", 0, {}, []))
    assert Result("empty", 0, {}, [])._repr_html_()


def test_names_of_results_are_listed_and_a_missing_one_is_an_error(index):
    assert saved_results(index) == []
    for name in ("removal", "activity"):
        Result(name, 0, {}, [{"layer": 1}]).saved(index)
    assert saved_results(index) == ["activity", "removal"]
    with pytest.raises(RunError, match="has no result agreement: make it with ffmem experiments"):
        load_result(index, "agreement")


def test_a_controls_result_lies_beside_the_models_own(index):
    Result("activity", 0, {}, [{"layer": 1}], resamples=[{"rows": [{"layer": 1}], "facts": {}}]).saved(index)
    Result("activity", 0, {}, [{"layer": 2}], control="random").saved(index)
    assert saved_results(index) == saved_results(index, "random") == ["activity"]
    assert load_result(index, "activity").resamples == [{"rows": [{"layer": 1}], "facts": {}}]
    assert load_result(index, "activity", "random").rows == [{"layer": 2}]


def test_a_result_of_another_run_and_changed_digits_are_refused(index, gpt2, tmp_path):
    other = build_index(gpt2, ["the queen left ."], out=tmp_path / "other", quiet=True)
    Result("activity", 0, {}, [{"layer": 1, "share": 0.25}]).saved(other)
    (index.path / "results").mkdir()
    theirs, ours = (run.path / "results" / "activity.json" for run in (other, index))
    shutil.copy(theirs, ours)
    with pytest.raises(RunError, match=r"activity\.json: the result of another run; make it with ffmem experiments"):
        load_result(index, "activity")
    theirs.write_text(theirs.read_text().replace("0.25", "0.75"))
    with pytest.raises(RunError, match=r"activity\.json: altered since it was written"):
        load_result(other, "activity")


def test_a_result_under_the_name_of_another_is_refused(index):
    Result("activity", 0, {}, [{"layer": 1}]).saved(index)
    results = index.path / "results"
    shutil.copy(results / "activity.json", results / "removal.json")
    (results / "random").mkdir()
    shutil.copy(results / "activity.json", results / "random" / "activity.json")
    for name, control in (("removal", None), ("activity", "random")):
        with pytest.raises(RunError, match="the result activity under the name of another"):
            load_result(index, name, control)


def test_a_run_that_was_made_anew_meanwhile_gets_no_result_of_the_old_one(index, gpt2):
    build_index(gpt2, ["the queen left ."], out=index.path, overwrite=True, quiet=True)
    with pytest.raises(RunError, match="made anew since it was opened"):
        Result("activity", 0, {}, [{"layer": 1}]).saved(index)
    assert saved_results(index) == []


def test_a_result_waits_for_another_writer(index, monkeypatch):
    result = Result("activity", 0, {}, [{"layer": 1}])
    other = RunFolder(index.path)
    with other.locked():
        saving = threading.Thread(target=result.saved, args=[index])
        saving.start()
        time.sleep(0.3)
        assert saved_results(index) == []
    saving.join(30)
    assert saved_results(index) == ["activity"]
    monkeypatch.setattr("ffmem.run.results.WAIT", 0.0)
    with other.locked(), pytest.raises(RunError, match="another process is writing this run"):
        result.saved(index)


def test_a_damaged_file_is_named(index):
    Result("activity", 0, {}, [{"layer": 1}]).saved(index)
    (index.path / "results" / "activity.json").write_text("{")
    with pytest.raises(RunError, match=r"activity\.json: damaged; make it"):
        load_result(index, "activity")


def test_a_result_draws_itself(index):
    rows = [
        {"layer": layer} | {f"{name}_{q}": 0.1 * layer for name in ("active", "mass") for q in ("q1", "median", "q3")}
        for layer in (1, 2, 3)
    ]
    chart = Result("activity", 0, {}, rows).plot()
    assert "0.1" in chart.to_json()


def test_a_run_that_is_built_anew_loses_the_results_of_the_old_one(index, gpt2):
    Result("activity", 0, {}, [{"layer": 1}]).saved(index)
    (index.path / "report.html").write_text("old")
    assert open_index(index.path).counts == index.counts  # a run with results opens as before
    again = build_index(gpt2, ["the queen left ."], out=index.path, overwrite=True, quiet=True)
    assert saved_results(again) == []
    assert not (index.path / "report.html").exists()
