"""A run folder that was damaged, by hand or by accident, is noticed at open and named."""

import json
import shutil

import pytest

from ffmem import open_index
from ffmem.errors import RunError
from ffmem.reports.figures import figures
from ffmem.run.folder import RunFolder, is_part
from ffmem.run.registry import all_experiments

FILES = ["triggers.arrow", "cells.arrow", "sentences.arrow", "tokens.arrow", "values.arrow"]


@pytest.fixture
def run(built, tmp_path):
    return shutil.copytree(built, tmp_path / "copy")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named(run, name):
    path = run / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(RunError, match=f"{name}: truncated or altered"):
        open_index(run)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_noticed_even_in_a_folder_that_was_open_before(run, name):
    open_index(run)
    path = run / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(RunError, match=f"{name}: altered since it was written"):
        open_index(run)


def test_a_missing_file_is_named(run):
    (run / "triggers.arrow").unlink()
    with pytest.raises(RunError, match=r"triggers.arrow: missing from the run"):
        open_index(run)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\xff"])
def test_a_damaged_manifest_is_named(run, text):
    (run / "manifest.json").write_text(text, "latin-1")
    with pytest.raises(RunError, match=r"manifest.json: damaged"):
        open_index(run)


def test_an_edited_manifest_is_noticed(run):
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["counts"]["tokens"] += 1
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"manifest.json: altered since it was written"):
        open_index(run)


def test_another_format_is_refused(run):
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(RunError, match="expected format 3, found 99"):
        open_index(run)


def test_no_run_an_empty_folder_and_a_file_are_told_apart(tmp_path):
    with pytest.raises(RunError, match="found nothing; make one with ffmem index"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(RunError, match="found an empty folder or other files"):
        open_index(tmp_path)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(RunError, match="found a file"):
        open_index(file)


def test_whatever_an_experiment_or_a_report_writes_is_known_to_be_of_the_run():
    written = [f"figures/{name}.{ending}" for name in figures() for ending in ("svg", "png")]
    written += [
        f"results/{at}{name}.{ending}"
        for at in ("", "random/")
        for name in (*all_experiments(), "causal")
        for ending in ("json", "parquet")
    ]
    assert all(map(is_part, written))


@pytest.mark.parametrize(
    "name",
    [
        "results/activity.csv",
        "results/mine/activity.json",
        "figures/fig3.pdf",
        "work/state-0.safetensors.bak",
        "work/shard-1.arrow",
        "my/triggers.arrow",
        "triggers.arrow.tmp",
        "manifest.json",
    ],
)
def test_what_has_another_name_is_somebody_elses(tmp_path, name):
    folder = RunFolder(tmp_path)
    with folder.writing(name) as path:
        path.write_text("mine")
    folder.clear()
    assert folder.names("") == [name]


def test_a_folder_of_the_run_that_is_a_link_is_cleared_and_stays(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "work").symlink_to(disk)
    folder = RunFolder(tmp_path / "run")
    for name in ("work/state-0.safetensors", "work/notes.txt"):
        with folder.writing(name) as path:
            path.write_text("x")
    folder.clear()
    assert [path.name for path in disk.iterdir()] == ["notes.txt"]
    assert (tmp_path / "run" / "work").is_symlink()


def test_a_folder_with_the_name_of_a_file_of_ours_is_left_alone(tmp_path):
    (tmp_path / "report.html").mkdir()
    (tmp_path / "report.html" / "mine.txt").write_text("mine")
    RunFolder(tmp_path).clear()
    RunFolder(tmp_path).remove("report.html")
    assert (tmp_path / "report.html" / "mine.txt").read_text() == "mine"


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(TypeError), folder.writing("a.txt") as path:
        path.write_text(f"half{path.write_text('half')}" + 1)
    assert list(tmp_path.iterdir()) == []
    with folder.writing("a.txt") as path:
        path.write_text("whole")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "whole")]
