"""Weights, moments and counters go to disk and come back the same."""

import pytest
import safetensors.torch
import torch
from torch import nn

from ffmem.errors import RunError
from ffmem.training.state import Counters, load_state, save_state


def fresh(seed=0, width=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def steps(model, optimiser, count):
    """Steps on data of their own number."""
    for number in range(count):
        model(torch.arange(4.0) + number).square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.fixture
def saved(tmp_path):
    model, optimiser = fresh()
    steps(model, optimiser, 3)
    save_state(tmp_path / "state.safetensors", model, optimiser, Counters(step=3, seconds=1.5, tokens=77))
    return tmp_path / "state.safetensors", model, optimiser


def test_weights_moments_and_counters_come_back_as_they_were(saved):
    path, model, optimiser = saved
    other, its = fresh(seed=1)
    assert load_state(path, other, its) == Counters(step=3, seconds=1.5, tokens=77)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(before, after)
        assert its.state[after].keys() == optimiser.state[before].keys()
        for name, value in optimiser.state[before].items():
            assert torch.equal(value, its.state[after][name])
            assert value.dtype == its.state[after][name].dtype


def test_steps_behind_a_load_are_the_steps_that_would_have_come(saved):
    path, model, optimiser = saved
    other, its = fresh(seed=1)
    load_state(path, other, its)
    for pair in ((model, optimiser), (other, its)):
        steps(*pair, 4)
    assert all(torch.equal(before, after) for before, after in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_from_before_the_first_step_has_no_moments(tmp_path):
    model, optimiser = fresh()
    save_state(tmp_path / "state.safetensors", model, optimiser, Counters())
    other, its = fresh(seed=1)
    assert load_state(tmp_path / "state.safetensors", other, its) == Counters()
    assert not its.state
    assert all(torch.equal(before, after) for before, after in zip(model.parameters(), other.parameters(), strict=True))


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def emptied(path):
    path.write_bytes(b"")


def without_a_moment(path):
    with safetensors.safe_open(path, "pt") as file:
        facts = file.metadata()
    tensors = safetensors.torch.load_file(path)
    del tensors["exp_avg.0.weight"]
    safetensors.torch.save_file(tensors, path, facts)


def without_counters(path):
    safetensors.torch.save_file(safetensors.torch.load_file(path), path)


def with_other_counters(path):
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, {"counters": '{"stairs": 3}'})


def of_another_shape(path):
    model, optimiser = fresh(width=5)
    steps(model, optimiser, 1)
    save_state(path, model, optimiser, Counters(step=1))


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm", [cut, emptied, flipped, without_a_moment, without_counters, with_other_counters, of_another_shape]
)
def test_a_damaged_state_is_named_with_what_to_do(saved, harm):
    path, _, _ = saved
    harm(path)
    with pytest.raises(RunError, match=r"state\.safetensors: damaged.*start over with --overwrite"):
        load_state(path, *fresh())
