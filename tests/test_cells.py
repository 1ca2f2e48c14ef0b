"""Cell names, layer ranges, triggers and the errors' text."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffmem.cells import Cell, Trigger, check_layer, parse_layers
from ffmem.errors import CellError, CorpusError, FfmemError, ModelError, RunError


@pytest.mark.parametrize(
    ("name", "layer", "index"),
    [
        ("L16D1935", 16, 1935),
        ("l3d17", 3, 17),
        ("  L1D0\n", 1, 0),
        ("L01D007", 1, 7),
        ("blocks.15.mlp.hook_post[1935]", 16, 1935),
        ("blocks.0.mlp.hook_post[0]", 1, 0),
        ("transformer.h.2.mlp.c_proj:17", 3, 17),
        ("model.layers.2.mlp.down_proj.17", 3, 17),
        ("model.layers.2.mlp.down_proj/17", 3, 17),
        ("model.decoder.layers.11.fc2[5]", 12, 5),
        ("transformer.h.2:17", 3, 17),
        ("model.language_model.layers.2.mlp.down_proj:17", 3, 17),
    ],
)
def test_a_cell_is_read_in_every_form(name, layer, index):
    assert Cell.parse(name) == Cell(layer, index)


@given(st.integers(1, 10**6), st.integers(0, 10**9))
def test_a_cell_is_written_as_it_is_read(layer, index):
    cell = Cell(layer, index)
    assert Cell.parse(str(cell)) == cell
    assert Cell.parse(f"blocks.{layer - 1}.mlp.hook_post[{index}]") == cell
    assert Cell.parse(cell) is cell


@pytest.mark.parametrize(
    "name",
    [
        *("", "L3", "D17", "3D17", "L3D", "L3D-1", "L3 D17", "L3D17x", "xL3D17", "L-1D3", "L1.5D2", "16,1935", "2.mlp:17"),
        *("blocks.x.mlp[3]", "blocks.2.mlp.hook_post[17", "blocks.2.mlp.hook_post17]", "blocks.2.mlp.hook_post:17]"),
        *("L1D" + "9" * 5000, "L" + "9" * 5000 + "D1", "blocks.2.mlp[" + "9" * 5000 + "]", "L1D٣"),
    ],
)
def test_a_name_of_no_form_is_an_error_that_shows_two(name):
    with pytest.raises(CellError) as caught:
        Cell.parse(name)
    example = "L3D17 (layer from 1, cell from 0) or blocks.2.mlp.hook_post[17]"
    found = str(caught.value).removeprefix(f"expected a cell such as {example}, found ")
    assert found == repr(name) if len(name) < 50 else found.startswith(repr(name)[:20]) and len(found) < 100


def test_layer_zero_is_an_error_that_says_how_layers_are_counted():
    with pytest.raises(CellError, match="layers are counted from 1, found 'L0D3'; the first layer's cells are L1D0, L1D1"):
        Cell.parse("L0D3")


def test_a_cell_of_an_expert_is_an_error_of_its_own():
    with pytest.raises(
        CellError, match="'L3E2D17' names a cell of an expert layer, and models with experts are not supported"
    ):
        Cell.parse("L3E2D17")


def test_cells_sort_by_layer_then_index_as_numbers():
    names = ["L10D1", "L2D10", "L2D9", "L1D100"]
    assert [str(cell) for cell in sorted(map(Cell.parse, names))] == ["L1D100", "L2D9", "L2D10", "L10D1"]
    assert len({Cell(1, 2), Cell(1, 2), Cell(2, 1)}) == 2


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        (None, [1, 2, 3, 4, 5, 6]),
        ("3", [3]),
        ("1-3,5", [1, 2, 3, 5]),
        (" 6 , 1 - 2 ", [1, 2, 6]),
        ("2,2,1-2", [1, 2]),
        ("6,1", [1, 6]),
        ([5, 1, 5], [1, 5]),
        (range(2, 5), [2, 3, 4]),
        ((layer for layer in (4, 2)), [2, 4]),
    ],
)
def test_layers_are_read_sorted_and_once(text, layers):
    assert parse_layers(text, 6) == layers
    assert parse_layers("8,1", 16) == [1, 8]  # a set of these two is not in order


@pytest.mark.parametrize("text", ["", "x", "1,", "1-", "-3", "1--2", "1.5", "1;2", "1-2-3"])
def test_layers_of_no_form_are_an_error_that_shows_one(text):
    with pytest.raises(FfmemError) as caught:
        parse_layers(text, 6)
    assert str(caught.value) == f"expected layers such as 1-4,16, found {text!r}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *(("0", "layer 0"), ("7", "layer 7"), ("5-9", "layer 7"), ([0, 9], "layer 0"), ([-1], "layer -1")),
        *(("4-2", "'4-2', which runs backwards"), ([], r"none in \[\]")),
    ],
)
def test_layers_that_are_not_there_are_an_error_with_the_range(text, found):
    with pytest.raises(FfmemError, match=rf"^expected layers from 1 to 6, found {found}$"):
        parse_layers(text, 6)


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        *((0, "layer 0"), (-1, "layer -1"), (7, "layer 7"), (True, "True"), (2.0, "2.0"), ("2", "'2'"), (None, "None")),
        *(([1], r"\[1\]"), (10**5000, "a far larger number"), (-(10**5000), "a far smaller number")),
    ],
    ids=lambda value: "" if isinstance(value, int) else None,
)
def test_anything_that_is_no_layer_is_an_error_with_the_range(layer, found):
    message = rf"^expected layers from 1 to 6, found {found}$"
    with pytest.raises(CellError, match=message):
        check_layer(layer, 6)
    if layer is not None:
        with pytest.raises(FfmemError, match=message):
            parse_layers([layer], 6)
        if not isinstance(layer, (str, list)):
            with pytest.raises(FfmemError, match=message):
                parse_layers(layer, 6)


def test_a_layer_may_be_any_kind_of_whole_number():
    assert [check_layer(one, 6) for one in (1, np.int64(6))] == [1, 6]
    assert parse_layers(np.arange(2, 4), 6) == parse_layers({2, 3}, 6) == [2, 3]
    assert parse_layers(np.int8(5), 6) == parse_layers(5, 6) == [5]


@pytest.mark.parametrize("text", ["1-99999999999", "1-999999999999999999", "7-99999999999,1"])
def test_a_huge_range_is_refused_before_it_is_made(text):
    begin = time.monotonic()
    with pytest.raises(FfmemError, match=r"^expected layers from 1 to 6, found layer 7$"):
        parse_layers(text, 6)
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("digits", [19, 5000])
def test_a_number_that_is_far_too_long_is_one_short_line(digits):
    number = "9" * digits
    for text in (number, f"1-{number}", f"{number}-{number}x"):
        with pytest.raises(FfmemError, match=r"^expected layers such as 1-4,16, found .*9") as caught:
            parse_layers(text, 6)
        assert len(str(caught.value)) < 120
    for name in (f"L1D{number}", f"L{number}D1", f"blocks.{number}.mlp[1]", f"blocks.1.mlp[{number}]", f"L{number}E1D1"):
        with pytest.raises(CellError) as caught:
            Cell.parse(name)
        assert len(str(caught.value)) < 200


def test_a_reversed_range_beside_a_good_one_is_not_dropped_silently():
    with pytest.raises(FfmemError, match="4-2"):
        parse_layers("1,4-2", 6)


@pytest.mark.parametrize("kind", [ModelError, CorpusError, RunError, CellError])
def test_every_error_is_one_a_caller_can_catch_and_shows_its_message_plainly(kind):
    assert issubclass(kind, FfmemError)
    assert str(kind("it's here")) == "it's here"
    assert str(kind()) == ""


def test_a_missing_cell_can_be_caught_as_a_key_error():
    with pytest.raises(KeyError):
        Cell.parse("nothing")


def test_a_trigger_is_told_as_a_row():
    trigger = Trigger(Cell(3, 17), "-", 2, -1.5, 40, 6, "the river", None)
    row = {"cell": "L3D17", "layer": 3, "index": 17, "sign": "-", "rank": 2, "coefficient": -1.5}
    assert trigger.as_dict() == row | {"sentence": 40, "position": 6, "prefix": "the river", "next": None}
