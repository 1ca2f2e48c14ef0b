"""Cells of a run and what it was made from, by one call each."""

import pytest

import ffmem
from ffmem.cells import Cell


def test_cells_are_shown_as_the_index_gives_them(built):
    index = ffmem.open_index(built)
    one, other = ffmem.show(built, ["L2D7", Cell(1, 0)])
    assert str(one) == str(index["L2D7"])
    assert other.triggers == index["L1D0"].triggers
    assert [view.name for view in ffmem.show(index, "L2D7")] == ["L2D7"]


def test_what_a_run_was_made_from_is_its_manifest(built):
    assert ffmem.info(built) == ffmem.open_index(built).manifest


def test_values_that_a_run_lacks_are_computed_by_the_model_that_is_given(gpt2, tmp_path):
    ffmem.index(gpt2, ["the king left ."], out=tmp_path / "run", unit="line", quiet=True)
    (without,) = ffmem.show(tmp_path / "run", "L1D0")
    with pytest.raises(ffmem.FfmemError):
        without.value.top(1)
    (found,) = ffmem.show(tmp_path / "run", "L1D0", model=gpt2)
    expected = ffmem.values(tmp_path / "run", gpt2, quiet=True)["L1D0"].value.top(3)
    assert [one.token for one in found.value.top(3)] == [one.token for one in expected]
