"""The small language of edits, what it refuses, and what it does to numbers."""

import os
import re
import time

import pytest
import torch

from ffmem import Cell, FfmemError, build_index, load_model
from ffmem.live.edits import Edit, Operation, edited, parse_cells, parse_edits, resolve, statistics_for
from tests.tiny import some_sentences, tiny_model


@pytest.fixture(scope="module")
def run(gpt2, tmp_path_factory):
    return build_index(gpt2, some_sentences(30), out=tmp_path_factory.mktemp("edits") / "run", top=2, quiet=True)


@pytest.mark.parametrize(
    ("text", "cells", "operation"),
    [
        ("L3D1=0", ["L3D1"], Operation("=", 0.0)),
        ("L3D1*2", ["L3D1"], Operation("*", 2.0)),
        ("L3D1+1", ["L3D1"], Operation("+", 1.0)),
        ("L3D1-1", ["L3D1"], Operation("+", -1.0)),
        ("L3D1=-1.5e-3", ["L3D1"], Operation("=", -0.0015)),
        ("L3D1~q0.99*2", ["L3D1"], Operation("=", 2.0, 0.99)),
        ("L3D1~q0.5", ["L3D1"], Operation("=", 1.0, 0.5)),
        (" l3d1 , L2D7 * -.5 ", ["L3D1", "L2D7"], Operation("*", -0.5)),
        ("blocks.2.mlp.hook_post[1]=0", ["L3D1"], Operation("=", 0.0)),
        ("transformer.h.2.mlp.c_proj:1+-1", ["L3D1"], Operation("+", -1.0)),
    ],
)
def test_every_form_is_read_and_written_so_that_it_is_read_again(text, cells, operation):
    edit = Edit.parse(text)
    assert [str(cell) for cell in edit.cells] == cells
    assert edit.operation == operation
    assert Edit.parse(str(edit)) == edit


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        ("L3D1", "expected an edit such as L3D1=0, .* found 'L3D1'"),
        ("L3D1=", "expected an edit such as"),
        ("L3D1~0.99", "expected an edit such as"),
        ("", "expected an edit such as .* found ''"),
        ("L3D1*2+1", re.escape("expected a cell such as L3D17") + ".* found 'L3D1\\*2'"),
        ("LxD1=0", "expected a cell such as L3D17 .* found 'LxD1'"),
        ("L0D1=0", "layers are counted from 1"),
        ("L3D1,=0", "expected a cell"),
        ("L3D1=nan", "expected a finite number, found '=nan'"),
        ("L3D1*-inf", "expected a finite number"),
        ("L3D1=1e999", "expected a finite number"),
        ("L3D1~q1.5*2", "expected a quantile from 0 to 1, found '~q1.5"),
        ("L3D1~q-0.1", "expected a quantile from 0 to 1, found '~q-0.1'"),
        ("L3D1~qnan", "expected a quantile from 0 to 1, found '~qnan'"),
        ("@no/such-file.txt=0", "@no/such-file.txt: expected a file with a cell a line, found: No such file"),
        (("L3D1=0", "L3D2=0"), "expected a cell .* found 'L3D1=0'"),
        ((["L3D1"], "0"), "expected an operation such as =0, .* found '0'"),
        (([], "=0"), "expected at least one cell, found none"),
        ((7, "=0"), "expected a cell .* found 7"),
        (["L3D1=0"], "or a pair"),
        (3, "found 3"),
    ],
)
def test_what_cannot_be_read_gets_one_line_that_says_what_was_expected(edit, line):
    with pytest.raises(FfmemError, match=line) as error:
        Edit.parse(edit)
    assert "\n" not in str(error.value)


def test_no_edit_at_all_is_refused():
    with pytest.raises(FfmemError, match="at least one edit"):
        parse_edits([])


def test_a_file_holds_a_cell_a_line_with_comments_and_names_the_line_that_is_wrong(tmp_path):
    path = tmp_path / "my-cells=1.txt"
    path.write_text("# suppressors\nL2D3\n\n  L1D0  # the first\nL2D3\n", "utf-8")
    assert Edit.parse(f"@{path}*2") == Edit((Cell(2, 3), Cell(1, 0)), Operation("*", 2.0))
    path.write_text("L2D3\nL2\n", "utf-8")
    with pytest.raises(FfmemError, match=r"my-cells=1.txt:2: expected a cell .* found 'L2'"):
        Edit.parse(f"@{path}=0")
    path.write_text("# nothing\n", "utf-8")
    with pytest.raises(FfmemError, match="at least one cell"):
        Edit.parse(f"@{path}=0")


def test_what_is_no_small_file_of_text_is_not_read_as_cells(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin.txt").write_bytes(b"L1D0 # \xe9t\xe9\n")
    with (tmp_path / "huge.txt").open("wb") as file:
        file.truncate(1 << 40)
    for name, line in (
        (tmp_path / "pipe", "pipe: expected a file with a cell a line, found none that lies on a disk"),
        ("/dev/zero", "found none that lies on a disk"),
        (tmp_path, "found none that lies on a disk"),
        (tmp_path / "huge.txt", "expected a file of at most 16,777,216 bytes, found 1,099,511,627,776"),
        (tmp_path / "latin.txt", "found: 'utf-8' codec can't decode"),
        ("a\0b", "found: .*null"),
        ("a\nb", "@a⏎b: expected a file"),
        ("~nobody-of-this-name/x", "@~nobody-of-this-name/x: expected a file"),
    ):
        with pytest.raises(FfmemError, match=line) as error:
            parse_cells(f"@{name}")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "edit", ["L1D1=" + "1" * 50_000 + "x", "L1D1" + " " * 50_000 + "x", "L1D1=" + "9" * 50_000, "L1D1~q" + "9" * 50_000]
)
def test_what_is_far_too_long_is_told_at_once_and_shortly(edit):
    began = time.monotonic()
    with pytest.raises(FfmemError) as error:
        Edit.parse(edit)
    assert len(str(error.value)) < 300
    assert time.monotonic() - began < 5


def test_cells_of_an_index_and_triggers_are_cells_and_each_is_kept_once(run):
    found = [run["L2D3"], run["L1D0"].triggers[0], "L2D3", Cell(3, 1)]
    assert parse_cells(iter(found)) == (Cell(2, 3), Cell(1, 0), Cell(3, 1))
    assert Edit.parse((found, "=0")).operation == Operation("=", 0.0)


def test_a_large_set_is_shown_by_its_first_cells_and_their_number():
    edit = Edit.parse(([Cell(1, index) for index in range(1200)], "=0"))
    assert edit.shown == "L1D0,L1D1,L1D2,L1D3,…(1,200 cells)=0"


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        ("L4D0=0", "has layers 1 to 3, found layer 4"),
        ("L3D128=0", "layer 3 of .* has cells 0 to 127, found 128"),
        ((Cell(3, -1), "=0"), "layer 3 of .* has cells 0 to 127, found -1"),
        ("L1D0=1e39", r"expected a number up to 3.4e\+38, as float32 holds"),
        ("L1D0~q0.9", r"~q0.9\*1 needs a run"),
    ],
)
def test_an_edit_outside_the_model_gets_a_line_with_the_valid_range(gpt2, edit, line):
    with pytest.raises(FfmemError, match=line):
        resolve(gpt2, [Edit.parse(edit)])


def test_a_quantile_is_in_the_units_of_each_cell_from_the_runs_statistics(gpt2, run):
    edits = parse_edits(["L1D0,L2D5,L1D3~q0.9*2"])
    changes = resolve(gpt2, edits, statistics_for(gpt2, run.path))
    assert changes[1][0].cells == [0, 3]
    assert changes[1][0].amounts == [2 * run[name].stats.quantile(0.9) for name in ("L1D0", "L1D3")]
    assert changes[2][0].amounts == [2 * run["L2D5"].stats.quantile(0.9)]


def test_a_run_of_another_model_or_without_statistics_is_refused(gpt2, llama, run, tmp_path):
    edits = parse_edits(["L1D0~q0.9"])
    with pytest.raises(FfmemError, match="was made with model"):
        statistics_for(llama, run)
    bare = build_index(gpt2, ["the king left ."], out=tmp_path / "bare", stats="off", quiet=True)
    with pytest.raises(FfmemError, match="built with stats off"):
        resolve(gpt2, edits, statistics_for(gpt2, bare))


def test_a_run_that_no_edit_needs_is_checked_too_and_none_is_none(gpt2):
    assert statistics_for(gpt2, None) is None
    with pytest.raises(FfmemError, match="expected a run folder"):
        statistics_for(gpt2, "no/such/run")


def test_changes_are_made_one_behind_the_other_where_they_are_wanted_on_a_copy(tokenizer):
    model = load_model(tiny_model("gpt2"), tokenizer=tokenizer)
    changes = resolve(model, parse_edits(["L1D0,L1D2+1", "L1D2*10", "L1D1=-3", "L1D1-1"]))[1]
    m = torch.arange(6.0).reshape(2, 3)
    assert edited(m, changes).tolist() == [[1, -4, 30], [4, -4, 60]]
    assert edited(m, changes, torch.tensor([False, True])).tolist() == [[0, 1, 2], [4, -4, 60]]
    assert m.tolist() == [[0, 1, 2], [3, 4, 5]]
