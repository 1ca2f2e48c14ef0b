"""A model as a stack of memories: reading coefficients, and what it says about itself."""

from functools import partial

import pytest
import torch

from ffmem.errors import CellError, FfmemError, ModelError
from ffmem.model.families import FAMILIES
from ffmem.model.memories import NO_LIMIT, MemoryModel
from tests.tiny import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def hooks(model):
    return [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), len(module._forward_hooks_with_kwargs))
        for name, module in model.named_modules()
    ]


def read(model, ids, layers=None):
    seen = []
    with model.reading(lambda layer, m: seen.append((layer, m.clone())), layers) as forward:
        forward(ids)
    return seen


@every_variant
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
def test_reading_hands_over_what_enters_each_value_matrix(memories, ids, variant, dtype):
    model = memories(variant, dtype)
    caught = []
    handles = [
        module.register_forward_pre_hook(lambda _, args: caught.append(args[0].clone().reshape(2, 12, -1)))
        for module in model.value_modules
    ]
    with torch.inference_mode():
        model.model(ids)
    for handle in handles:
        handle.remove()
    last = model.layers
    for layers in (None, [1], [last], [last, 1, last], range(2, last + 1)):
        wanted = sorted(set(layers or range(1, last + 1)))
        seen = read(model, ids, layers)
        assert [layer for layer, _ in seen] == wanted
        assert all(m.dtype == dtype and torch.equal(m, caught[layer - 1]) for layer, m in seen)


@every_variant
def test_a_forward_ends_in_front_of_the_last_wanted_value_matrix(memories, ids, variant):
    model = memories(variant)
    ran = []
    watched = {f"value {layer}": module for layer, module in enumerate(model.value_modules, 1)}
    watched["unembedding"] = model.model.get_output_embeddings()
    handles = [module.register_forward_hook(lambda *_, name=name: ran.append(name)) for name, module in watched.items()]
    read(model, ids, [1, 2])
    for handle in handles:
        handle.remove()
    assert ran == ["value 1"]


@every_variant
def test_all_hooks_are_gone_after_reading_and_recording(memories, ids, variant):
    model = memories(variant)
    before = hooks(model.model)
    with model.reading(lambda layer, m: None, [1, 2]) as forward:
        assert hooks(model.model) != before
        forward(ids)
        forward(ids[:1, :3])
    model.record(ids)
    assert hooks(model.model) == before


def test_all_hooks_are_gone_when_the_visitor_raises(memories, ids):
    model = memories("gpt2")
    before = hooks(model.model)
    expected = model.logits(ids)

    def visit(layer, m):
        raise LookupError(f"stumbled in layer {layer}")

    with pytest.raises(LookupError, match="stumbled in layer 2"), model.reading(visit, [2, 3]) as forward:
        forward(ids)
    assert hooks(model.model) == before
    assert torch.equal(model.logits(ids), expected)


def test_all_hooks_are_gone_when_the_forward_of_a_recording_fails(memories):
    model = memories("gpt2")
    before = hooks(model.model)

    def fail(*_):
        raise IndexError

    broken = model.blocks[-1].register_forward_hook(fail)
    with pytest.raises(IndexError):
        model.record(torch.tensor([[1]]))
    broken.remove()
    assert hooks(model.model) == before


@every_variant
def test_padding_on_the_right_changes_no_coefficient(memories, ids, variant):
    model = memories(variant)
    padded = ids.clone()
    padded[1, 5:] = 2
    whole, alone = read(model, padded), read(model, ids[1:, :5])
    for (_, m), (_, expected) in zip(whole, alone, strict=True):
        torch.testing.assert_close(m[1:, :5], expected, rtol=1e-4, atol=1e-5)


def test_a_model_whose_value_matrix_is_never_called_is_an_error(memories, ids, monkeypatch):
    model = memories("gpt2")
    monkeypatch.setattr(model.model.transformer.h[2], "forward", lambda hidden, *_, **__: hidden)
    with pytest.raises(ModelError, match="layer 3's value matrix was never called"):
        read(model, ids)
    with pytest.raises(ModelError, match=r"nothing flowed through 'mlp\.c_proj\.in' in layer 3"):
        model.record(ids)


@pytest.mark.parametrize("layer", [0, -1, 4, 99, True])
@pytest.mark.parametrize("variant", ["gpt2", "olmo2"])
def test_a_layer_that_is_not_there_is_an_error_wherever_one_is_named(memories, ids, variant, layer):
    model = memories(variant)
    ways = (model.keys, model.values, model.value_bias, model.block, model.value_module)
    for way in (*ways, partial(model.after_post_norm, torch.zeros(model.d)), partial(read, model, ids)):
        with pytest.raises(CellError, match=f"^expected layers from 1 to 3, found (layer )?{layer}$"):
            way(layer)
    with pytest.raises(CellError, match="from 1 to 3"):
        read(model, ids, [1, layer])


@pytest.mark.parametrize("layer", [1.0, "1", None, torch.zeros(2)])
def test_what_is_no_number_is_no_layer(memories, layer):
    with pytest.raises(CellError, match=r"^expected layers from 1 to 3, found "):
        memories("gpt2").block(layer)
    assert memories("gpt2").block(torch.tensor(1)) is memories("gpt2").block(1) is memories("gpt2").blocks[0]


def test_a_model_tells_its_sizes(memories):
    model = memories("gpt_neo")
    assert (model.layers, model.cells, model.d, model.context) == (2, [128, 128], 32, 64)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert memories("llama").cells == [64, 64, 64]
    assert memories("bloom").context == NO_LIMIT


def test_the_values_of_conv1d_and_linear_layers_have_a_row_a_cell(memories):
    conv, linear = memories("gpt2"), memories("llama")
    assert torch.equal(conv.values(2), conv.model.transformer.h[1].mlp.c_proj.weight)
    assert torch.equal(conv.keys(2), conv.model.transformer.h[1].mlp.c_fc.weight.T)
    assert torch.equal(conv.value_bias(2), conv.model.transformer.h[1].mlp.c_proj.bias)
    assert torch.equal(linear.values(3), linear.model.model.layers[2].mlp.down_proj.weight.T)
    assert torch.equal(linear.keys(3), linear.model.model.layers[2].mlp.gate_proj.weight)
    assert linear.value_bias(3) is None


@pytest.mark.parametrize(("bos", "eos", "first"), [(5, 7, 5), (0, 7, 0), (None, 7, 7), (None, 0, 0), (None, None, None)])
def test_the_first_token_is_bos_else_eos_else_none(bos, eos, first):
    tokenizer = type("Tokenizer", (), {"bos_token_id": bos, "eos_token_id": eos})
    model = MemoryModel(model=None, tokenizer=tokenizer, family=FAMILIES["gpt2"], name="nameless")
    assert model.bos == first
    assert model.check_bos("auto") == (first is not None)
    assert model.check_bos("off") is False
    if first is None:
        with pytest.raises(FfmemError, match="nameless: the tokenizer has neither a bos nor an eos token"):
            model.check_bos("on")
    else:
        assert model.check_bos("on") is True


def test_a_bos_switch_of_another_name_is_an_error(memories):
    with pytest.raises(FfmemError, match="expected bos auto, on or off, found 'maybe'"):
        memories("gpt2").check_bos("maybe")


def test_generating_text_is_taking_the_likeliest_token_again_and_again(gpt2):
    written = gpt2.generate("the king", 4)
    ids = [gpt2.bos, *gpt2.tokenizer("the king")["input_ids"]]
    for _ in range(4):
        ids.append(int(gpt2.logits(torch.tensor([ids]))[0, -1].argmax()))
    expected = ids[3:]
    if gpt2.bos in expected:
        expected = expected[: expected.index(gpt2.bos)]
    assert written == gpt2.tokenizer.decode(expected, skip_special_tokens=True)
    assert gpt2.generate("the king", 0) == ""
    with pytest.raises(FfmemError, match="tokens to generate"):
        gpt2.generate("the king", 10**6)


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ("The king", "found 'The king'"),
        ([[1, 2]], r"found \[\[1, 2\]\]"),
        (torch.tensor([1, 2]), r"found a tensor of torch.int64 \[2\]"),
        (torch.tensor([[0.5]]), r"found a tensor of torch.float32 \[1, 1\]"),
        (torch.zeros(1, 0, dtype=torch.int64), r"found a tensor of torch.int64 \[1, 0\]"),
        (torch.tensor([[3, 101]]), "expected token ids from 0 to 100, found 101"),
        (torch.tensor([[3, -1]]), "expected token ids from 0 to 100, found -1"),
        (torch.ones(1, 65, dtype=torch.int64), "takes at most 64 tokens at a time, found 65"),
    ],
)
def test_what_is_no_text_of_the_models_tokens_is_told_in_one_line(gpt2, ids, told):
    with pytest.raises(ModelError, match=told):
        gpt2.fed(ids)


def test_every_way_into_the_model_looks_at_its_ids(gpt2):
    wrong = torch.tensor([[3, 101]])
    with gpt2.reading(lambda layer, m: None) as forward:
        for way in (forward, gpt2.logits, gpt2.record, lambda ids: gpt2.record_at(ids, torch.tensor([0]))):
            with pytest.raises(ModelError, match="expected token ids from 0 to 100, found 101"):
                way(wrong)
