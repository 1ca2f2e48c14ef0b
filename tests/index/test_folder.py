"""A run folder that was damaged, by hand or by accident, is noticed at open and named."""

import json
import shutil

import pytest

from ffmem import open_index
from ffmem.index.folder import RunFolder
from ffmem.words import RunError

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
    with pytest.raises(RunError, match="expected format 2, found 99"):
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


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    folder = RunFolder(tmp_path)
    with pytest.raises(TypeError), folder.writing("a.txt") as path:
        path.write_text(f"half{path.write_text('half')}" + 1)
    assert list(tmp_path.iterdir()) == []
    with folder.writing("a.txt") as path:
        path.write_text("whole")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "whole")]
