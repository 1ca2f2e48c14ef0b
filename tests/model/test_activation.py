"""The activation: found where it stands alone in front of the values, known on every 16-bit number, and put back."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from ffmem.live.intervene import intervene
from ffmem.model.activation import Activation, ActivationFinder
from ffmem.model.spots import hooked
from tests.tiny import UNKNOWN, VARIANTS


def watched(model, ids):
    """The module that was found in each layer."""
    finders = [ActivationFinder(block, value) for block, value in zip(model.blocks, model.value_modules, strict=True)]
    with torch.inference_mode(), hooked(*(install for finder in finders for install in finder.hooks())):
        model.model(ids)
    return [finder.found for finder in finders]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_without_a_gate_has_one_and_no_layer_with_a_gate(memories, ids, variant):
    model = memories(variant)
    found = watched(model, ids)
    assert [module is None for module in found] == [model.family.gated] * model.layers
    assert len(set(found)) == (1 if model.family.gated else model.layers)


@pytest.mark.parametrize("variant", ["gpt2", "gpt2-relu", "opt", "adaptive_lm", "bloom", "phi"])
def test_coefficients_that_are_made_from_what_enters_it_are_the_models_own(memories, ids, variant):
    model = memories(variant, torch.bfloat16)
    own = []
    with model.reading(lambda _, m: own.append(m.clone())) as forward:
        forward(ids)
    made = []

    def make(activation, x):
        m = x.relu() if activation.kind == "relu" else activation.table[x.view(torch.int16).long() & 0xFFFF]
        made.append(m)
        return m

    activating = {
        layer: (activation, partial(make, activation)) for layer, activation in enumerate(model.find_activations(), 1)
    }
    with model.reading(lambda *_: pytest.fail("no layer is left to visit"), activating=activating) as forward:
        forward(ids)
    assert len(made) == model.layers
    assert all(torch.equal(a, b) for a, b in zip(made, own, strict=True))


def test_in_float32_only_relu_can_be_known(memories):
    assert memories("gpt2").find_activations() == [None] * memories("gpt2").layers
    assert [activation.kind for activation in memories("opt").find_activations()] == ["relu"] * memories("opt").layers


@pytest.mark.parametrize("variant", UNKNOWN)
def test_a_model_found_by_shape_has_one_or_none_in_all_layers(memories, variant):
    model = memories(variant, torch.bfloat16)
    assert len({None if activation is None else activation.kind for activation in model.find_activations()}) == 1


def test_it_is_put_back_even_after_an_error(memories, ids):
    model = memories("opt")
    activation = model.find_activations()[0]

    def broken(_):
        raise RuntimeError("on purpose")

    with (
        pytest.raises(RuntimeError, match="on purpose"),
        model.reading(lambda *_: None, activating={1: (activation, broken)}) as forward,
    ):
        forward(ids)
    assert "forward" not in vars(activation.module)


def test_where_others_change_coefficients_or_look_at_the_activation_it_is_left_alone(memories):
    model = memories("opt")
    with intervene(model, "L1D0=5", at="3:"):
        assert model.find_activations() == [None] * model.layers
    first, *others = model.find_activations()
    handle = first.module.register_forward_hook(lambda *_: None)
    try:
        assert model.find_activations() == [None, *others]
    finally:
        handle.remove()
    assert model.find_activations() == [first, *others]


@pytest.mark.parametrize("name", ["gelu_new", "quick_gelu", "silu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_table_holds_what_a_module_makes_of_every_number(name, dtype):
    module = ACT2FN[name]
    table = Activation.of(module, torch.zeros(1, dtype=dtype)).table
    x = torch.randn(40, 30, dtype=dtype) * 3
    assert torch.equal(table[x.view(torch.int16).long() & 0xFFFF], module(x))


class ByPlace(nn.Module):
    """Rounds otherwise behind the last full vector of eight."""

    def forward(self, x):
        last = x.numel() // 8 * 8
        flat = x.flatten()
        return torch.cat([flat[:last].float().exp().to(x.dtype), flat[last:].exp() * 1.01]).view(x.shape)


def test_a_module_whose_answers_depend_on_the_place_in_a_tensor_has_none():
    assert Activation.of(ByPlace(), torch.zeros(1, dtype=torch.bfloat16)) is None


MIXING = [nn.Softmax(-1), nn.Flatten(0), nn.GLU(), nn.LayerNorm(256, dtype=torch.bfloat16)]


@pytest.mark.parametrize("module", MIXING, ids=str)
def test_a_module_that_mixes_or_moves_numbers_has_none(module):
    assert Activation.of(module, torch.zeros(1, dtype=torch.bfloat16)) is None


class Block(nn.Module):
    """A feed-forward layer in which something may happen behind the activation."""

    def __init__(self, behind, calls=1):
        super().__init__()
        self.act, self.value, self.behind, self.calls = nn.ReLU(), nn.Linear(4, 4), behind, calls

    def forward(self, x):
        for _ in range(self.calls):
            m = self.act(x)
        return self.value(self.behind(m))


@pytest.mark.parametrize(
    ("behind", "calls", "found"),
    [
        (lambda m: m, 1, True),
        (lambda m: m.view(-1, 4), 1, True),
        (lambda m: m.mul_(2), 1, False),
        (lambda m: m * 2, 1, False),
        (lambda m: m, 2, False),
    ],
    ids=["alone", "reshaped", "changed in place", "changed", "called twice"],
)
def test_it_is_found_only_where_its_output_enters_the_value_matrix_untouched(behind, calls, found):
    block = Block(behind, calls)
    finder = ActivationFinder(block, block.value)
    with torch.inference_mode(), hooked(*finder.hooks()):
        block(torch.randn(2, 3, 4))
    assert (finder.activation() is not None) == found


def test_one_that_works_in_place_or_stands_behind_another_is_not_taken_for_it():
    assert Activation.of(nn.ReLU(inplace=True), torch.zeros(1)) is None
    block = Block(nn.Dropout(0.5).eval())
    finder = ActivationFinder(block, block.value)
    with torch.inference_mode(), hooked(*finder.hooks()):
        block(torch.randn(2, 3, 4))
    assert finder.found is block.act


def test_a_module_whose_forward_is_not_its_own_is_left_alone():
    block = Block(lambda m: m)
    block.act.forward = lambda x: x.relu()
    finder = ActivationFinder(block, block.value)
    with torch.inference_mode(), hooked(*finder.hooks()):
        block(torch.randn(2, 3, 4))
    assert finder.activation() is None
