"""Weights as 8-bit rows: how near they stay, and folders that hold nothing else."""

import json
import shutil

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from ffmem.errors import ModelError
from ffmem.model.adaptive import rows
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM, register
from ffmem.model.adaptive.rows import from_rows, load_rows, pack, save_rows, to_rows, unpack
from ffmem.model.loading import load_model
from tests.tiny import tiny_model

FC1 = "model.layers.1.fc1.weight"

matrices = st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 10_000), st.floats(-2, 6)).map(
    lambda shape: torch.randn(*shape[:2], generator=torch.Generator().manual_seed(shape[2])) * 10 ** shape[3]
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("adaptive_lm")


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    """A model folder whose only weights are 8-bit rows."""
    made = tmp_path / "rows"
    model.config.save_pretrained(made)
    tokenizer.save_pretrained(made)
    save_rows(made, model.state_dict())
    return made


@pytest.fixture
def changed(folder):
    """Write the folder's rows anew as `change` makes them: `changed(lambda packed: ...)`."""

    def write(change):
        packed = safetensors.torch.load_file(folder / rows.FILE)
        safetensors.torch.save_file(change(packed), folder / rows.FILE, {"format": "pt"})
        return folder

    return write


def test_numbers_and_scales_worked_out_by_hand():
    numbers, scale = to_rows(torch.tensor([[127.0, -63.4, 0.6, 0.4], [0.0, 0.0, 0.0, 0.0], [-254.0, 2.0, 1.2, -0.9]]))
    assert numbers.dtype == torch.int8
    assert numbers.tolist() == [[127, -63, 1, 0], [0, 0, 0, 0], [-127, 1, 1, 0]]
    assert scale.tolist() == [1, 0, 2]
    assert from_rows(numbers, scale).tolist() == [[127, -63, 1, 0], [0, 0, 0, 0], [-254, 2, 2, 0]]


@given(matrices)
def test_no_entry_is_further_away_than_half_a_step_of_its_row(weight):
    numbers, scale = to_rows(weight)
    step = weight.abs().amax(1, keepdim=True) / 127
    assert numbers.abs().amax() <= 127
    # The scale is rounded too, to eleven bits.
    assert ((from_rows(numbers, scale) - weight).abs() <= step * (0.5 + 1e-3)).all()


@given(matrices)
def test_rows_that_were_rows_before_come_back_bit_by_bit(weight):
    once = to_rows(weight)
    twice = to_rows(from_rows(*once))
    assert all(torch.equal(again, first) for again, first in zip(twice, once, strict=True))


@given(matrices)
def test_a_row_does_not_depend_on_the_rows_around_it(weight):
    numbers, scale = to_rows(weight)
    for row in range(len(weight)):
        alone = to_rows(weight[row : row + 1])
        assert torch.equal(alone[0][0], numbers[row])
        assert torch.equal(alone[1][0], scale[row])


@pytest.mark.parametrize("size", [2.0**-7, 1e-2, 1.0, 1e3, 8e6])
def test_a_row_of_any_usual_size_keeps_its_form(size):
    row = torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * size
    torch.testing.assert_close(from_rows(*to_rows(row)), row, rtol=0, atol=size / 127 * 0.501)


def test_a_row_of_small_numbers_is_read_with_the_scale_it_was_written_with():
    """Below 127 × 6.1e-5 the scale is subnormal in half precision."""
    row = torch.tensor([[0.005, -0.001]])
    torch.testing.assert_close(from_rows(*to_rows(row)), row, rtol=0, atol=0.005 / 127 * 0.501)


@pytest.mark.parametrize("size", [2.6e-5, 1e-6, 1e-12])
def test_a_row_of_tiny_numbers_keeps_its_form(size):
    row = torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * size
    torch.testing.assert_close(from_rows(*to_rows(row)), row, rtol=0, atol=size / 127 * 0.51)


@pytest.mark.parametrize("size", [1e7, 1e30])
def test_a_row_of_huge_numbers_keeps_its_form(size):
    row = torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * size
    torch.testing.assert_close(from_rows(*to_rows(row)), row, rtol=0, atol=size / 127 * 0.51)


def test_vectors_are_kept_as_they_are_and_matrices_take_a_byte_an_entry(model):
    weights = model.state_dict()
    packed = pack(weights)
    assert {name for name in packed if not name.endswith(rows.SCALE)} == set(weights)
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            assert torch.equal(packed[name], tensor)
            assert name + rows.SCALE not in packed
        else:
            assert (packed[name].dtype, packed[name].shape) == (torch.int8, tensor.shape)
            assert (packed[name + rows.SCALE].element_size(), len(packed[name + rows.SCALE])) == (4, len(tensor))
    found = unpack(packed)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], from_rows(*to_rows(weights[name]))) for name in weights if weights[name].dim() == 2)


def test_half_precision_weights_are_unpacked_in_float32():
    weights = {"matrix": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16), "vector": torch.ones(3, dtype=torch.bfloat16)}
    assert {tensor.dtype for tensor in unpack(pack(weights)).values()} == {torch.float32}


def test_a_file_holds_what_was_saved_bit_by_bit(model, folder):
    expected, found = unpack(pack(model.state_dict())), load_rows(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    save_rows(folder, found)
    again = load_rows(folder)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize("load", [AdaptiveLM.from_pretrained, AutoModelForCausalLM.from_pretrained], ids=["own", "auto"])
@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
    ],
    ids=str,
)
def test_a_folder_with_rows_alone_is_a_model_folder(folder, load, asked, dtype):
    register()
    assert not list(folder.glob("model*"))
    model, report = load(folder, output_loading_info=True, **asked)
    assert type(model) is AdaptiveLM
    assert not model.training
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config._name_or_path == str(folder)
    expected = load_rows(folder)
    assert all(torch.equal(tensor, expected[name].to(dtype)) for name, tensor in model.state_dict().items())
    again = load(folder, **asked)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_rows_are_float32_whatever_the_config_says_of_the_weights_they_were_made_from(folder):
    config = AdaptiveConfig.from_pretrained(folder)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    assert AdaptiveLM.from_pretrained(folder, dtype="auto").dtype == torch.float32


def test_what_such_a_model_says_is_near_what_it_said_before(model, folder):
    ids = torch.arange(3, 27)[None]
    with torch.inference_mode():
        found, expected = AdaptiveLM.from_pretrained(folder)(ids).logits, model(ids).logits
    assert not torch.equal(found, expected)
    assert (found - expected).abs().mean() < 0.05


def test_such_a_folder_is_loaded_with_its_memories(folder):
    model = load_model(folder, device="cpu")
    expected = load_rows(folder)
    assert (model.name, model.dtype, model.cells) == (str(folder), torch.float32, [64, 64, 64])
    assert torch.equal(model.keys(2), expected[FC1])
    assert torch.equal(model.values(3), expected["model.layers.2.fc2.weight"].T)
    half = load_model(folder, device="cpu", dtype="bf16")
    assert half.dtype == torch.bfloat16
    assert half.fingerprint() == model.fingerprint()


def test_such_a_model_saved_elsewhere_is_an_ordinary_folder(folder, tmp_path):
    model = AdaptiveLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole" / rows.FILE).exists()
    again = AdaptiveLM.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_weights_saved_over_rows_are_those_that_are_loaded(folder):
    model = AdaptiveLM.from_pretrained(folder)
    with torch.no_grad():
        model.softmax.bands.weight.zero_()
    model.save_pretrained(folder)
    assert not AdaptiveLM.from_pretrained(folder).softmax.bands.weight.any()


def refusal(folder):
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("damage", ["gone", "empty", "junk", "cut short"])
def test_a_damaged_file_is_refused_by_the_folders_name(folder, damage):
    path = folder / rows.FILE
    content = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes({"empty": b"", "junk": b"junk" * 100, "cut short": content[: len(content) // 2]}[damage])
    assert refusal(folder).startswith(f"{folder}: expected a causal language model")


def test_a_matrix_that_is_missing_is_named(changed):
    folder = changed(lambda packed: {name: tensor for name, tensor in packed.items() if not name.startswith(FC1)})
    assert refusal(folder) == f"{folder}: expected weights for every part of the model, found none for {FC1}"


def test_a_matrix_of_another_shape_is_refused(changed):
    folder = changed(lambda packed: {name: part[:-1] if name.startswith(FC1) else part for name, part in packed.items()})
    assert refusal(folder).startswith(f"{folder}: expected a causal language model")


def test_numbers_without_their_scale_are_refused(changed):
    folder = changed(lambda packed: {name: part for name, part in packed.items() if name != FC1 + rows.SCALE})
    assert FC1 in refusal(folder)


@pytest.mark.parametrize("scales", [1 << 20, 1])
def test_scales_for_other_rows_than_there_are_are_refused_before_they_are_multiplied(scales):
    """One row of a million entries and a million scales would be a trillion numbers."""
    packed = {FC1: torch.zeros(2, 1 << 20, dtype=torch.int8), FC1 + rows.SCALE: torch.ones(scales)}
    with pytest.raises(
        ModelError, match=rf"expected {FC1} in .* a scale each, found torch.int8 of \[2, 1048576\] and scales"
    ):
        rows.unpack(packed)


def test_a_config_with_more_layers_than_there_are_rows_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "more")
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 1 << 24}))
    assert "expected as many weights as the config says" in refusal(copy)
