"""Edits in a running model: what they compute, where they act, and that nothing of them stays behind."""

import threading
from contextlib import contextmanager

import pytest
import torch

from ffmem import FfmemError, load_model
from ffmem.live.intervene import intervene
from ffmem.live.scope import Scope
from tests.tiny import VARIANTS, tiny_model

IDS = [0, 11, 25, 7, 40, 33]
"""A beginning-of-sentence token and five words."""
EDITS = ("L1D3=2", "L2D5*-4", "L2D5+1", "L1D60-2", "L2D6,L2D3=-1")


def by_hand(m, layer):
    """The same edits, written out."""
    m = m.clone()
    if layer == 1:
        m[..., 3] = 2
        m[..., 60] = m[..., 60] - 2
    if layer == 2:
        m[..., 5] = m[..., 5] * -4 + 1
        m[..., 3] = m[..., 6] = -1
    return m


@contextmanager
def replaced(model, columns=None):
    """The two layers' outputs computed anew: product = m'·V + b, in some columns of the forward or all."""

    def install(layer):
        bias = model.value_bias(layer)

        def hook(_, args, output):
            m = args[0]
            product = by_hand(m, layer) @ model.values(layer) + (0 if bias is None else bias)
            if columns is not None:
                keep = torch.ones(product.reshape(-1, product.shape[-1]).shape[0], dtype=torch.bool)
                keep[columns] = False
                product = torch.where(keep.reshape(*product.shape[:-1], 1), output, product)
            return product

        return model.value_modules[layer - 1].register_forward_hook(hook)

    handles = [install(1), install(2)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooks_of(model):
    return [
        hook
        for module in model.model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
    ]


def generated(model, ids, **settings):
    fed = torch.tensor([ids]) if isinstance(ids[0], int) else ids
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 2} | settings
    settings.setdefault("attention_mask", torch.ones_like(fed))
    return model.model.generate(fed, output_logits=True, return_dict_in_generate=True, **settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_edits_equal_a_forward_written_by_hand(variant, tokenizer):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    ids = torch.tensor([IDS, IDS[::-1]])
    before = model.logits(ids)
    with replaced(model):
        expected = model.logits(ids)
    with intervene(model, *EDITS) as edited:
        found = edited.logits(ids)
    assert edited is model
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - before).abs().max() > 1e-3
    assert torch.equal(model.logits(ids), before)
    # In one row's last column alone: a causal model's other columns stay.
    with intervene(model, *EDITS, at="-1"):
        last = model.logits(ids)
    assert torch.equal(last[:, :-1], before[:, :-1])
    with replaced(model, [5, 11]):
        torch.testing.assert_close(last, model.logits(ids), rtol=1e-4, atol=1e-4)


def test_the_model_is_as_before_after_an_exception_inside_or_in_a_bad_edit(gpt2):
    ids = torch.tensor([IDS])
    before = gpt2.logits(ids)
    with pytest.raises(ZeroDivisionError), intervene(gpt2, "L1D0=9", at="2:"):
        1 / 0  # noqa: B018
    with pytest.raises(FfmemError, match="layers 1 to 3"), intervene(gpt2, "L1D0=9", "L9D0=9"):
        pass
    with pytest.raises(FfmemError, match="from 0 to 4 or from -5 to -1, found 5"), intervene(gpt2, "L1D0=9", at=5):
        gpt2.logits(ids)
    assert hooks_of(gpt2) == []
    assert torch.equal(gpt2.logits(ids), before)


def test_inner_edits_come_after_outer_ones_and_leave_with_their_own_block(gpt2):
    ids = torch.tensor([IDS])

    def logits(*edits):
        with intervene(gpt2, *edits):
            return gpt2.logits(ids)

    with intervene(gpt2, "L1D3=2"):
        with intervene(gpt2, "L1D3*3", "L2D0+1"):
            inner = gpt2.logits(ids)
        outer = gpt2.logits(ids)
    assert torch.equal(inner, logits("L1D3=6", "L2D0+1"))
    assert torch.equal(outer, logits("L1D3=2"))
    assert not torch.equal(inner, outer)


def test_edits_are_not_made_in_the_models_own_tensor_and_are_seen_by_who_reads_inside(gpt2):
    kept, read = [], {}
    handle = gpt2.value_modules[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    try:
        with intervene(gpt2, "L1D3=77"):
            gpt2.logits(torch.tensor([IDS]))
            with gpt2.reading(lambda layer, m: read.update({layer: m.clone()})) as forward:
                forward(torch.tensor([IDS]))
    finally:
        handle.remove()
    assert (kept[0][..., 3] != 77).all()
    assert (read[1][..., 3] == 77).all()
    assert (read[2][..., 3] != 77).all()


def test_edits_act_only_on_forwards_of_the_thread_that_opened_them(gpt2):
    ids = torch.tensor([IDS])
    plain = gpt2.logits(ids)
    opened, done, found = threading.Event(), threading.Event(), {}

    def other():
        with intervene(gpt2, "L2D1=50", at="1:"):
            opened.set()
            done.wait(10)
            found["other"] = gpt2.logits(ids)

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait(10)
    found["here"] = gpt2.logits(ids)
    with intervene(gpt2, "L1D1=50"):
        done.set()
        thread.join()
        found["edited here"] = gpt2.logits(ids)
    with intervene(gpt2, "L2D1=50", at="1:"):
        assert torch.equal(found["other"], gpt2.logits(ids))
    with intervene(gpt2, "L1D1=50"):
        assert torch.equal(found["edited here"], gpt2.logits(ids))
    assert torch.equal(found["here"], plain)
    assert not torch.equal(found["other"], plain)
    assert hooks_of(gpt2) == []


COLUMNS = {
    "all": lambda n: list(range(n)),
    "generated": lambda n: list(range(6, n)),
    "-1": lambda n: [5],
    "0": lambda n: [1],
    "1:3": lambda n: [2, 3],
    "2:": lambda n: [3, 4, 5],
    ":-3": lambda n: [1, 2],
}
"""The columns that a scope means in a text of n columns that begins with IDS."""


@pytest.mark.parametrize("variant", ["gpt2", "llama", "mistral-window", "opt", "bloom", "adaptive_lm"])
@pytest.mark.parametrize("at", COLUMNS)
def test_a_scope_means_the_same_columns_whether_generate_uses_a_cache_or_not(variant, at, tokenizer):
    model = load_model(tiny_model(variant), tokenizer=tokenizer)
    expected, ids = [], list(IDS)
    for _ in range(4):
        with replaced(model, COLUMNS[at](len(ids))):
            expected.append(model.logits(torch.tensor([ids]))[:, -1])
        ids.append(int(expected[-1].argmax()))
    with intervene(model, *EDITS, at=at):
        found = {cached: generated(model, IDS, use_cache=cached) for cached in (True, False)}
    for cached in (True, False):
        assert found[cached].sequences[0].tolist() == ids
        torch.testing.assert_close(torch.stack(found[cached].logits), torch.stack(expected), rtol=1e-3, atol=1e-4)


def test_a_second_prompt_begins_anew_and_beams_keep_their_columns(gpt2):
    with intervene(gpt2, *EDITS, at="generated"):
        beams = [generated(gpt2, IDS, num_beams=3, use_cache=cached) for cached in (True, False)]
        again = generated(gpt2, IDS[:4]).logits
        alone = gpt2.logits(torch.tensor([IDS]))
    assert torch.equal(beams[0].sequences, beams[1].sequences)
    assert torch.equal(alone, gpt2.logits(torch.tensor([IDS])))
    with intervene(gpt2, *EDITS, at="generated"):
        fresh = generated(gpt2, IDS[:4]).logits
    assert torch.equal(torch.stack(again), torch.stack(fresh))


def test_a_longer_prompt_behind_a_shorter_one_is_a_prompt_and_not_generated(gpt2):
    with intervene(gpt2, *EDITS, at="-1"):
        gpt2.logits(torch.tensor([IDS[:-1]]))
        found = gpt2.logits(torch.tensor([IDS]))
    with replaced(gpt2, [5]):
        torch.testing.assert_close(found, gpt2.logits(torch.tensor([IDS])))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("at", ["-1", "1:3"])
def test_padding_that_the_mask_tells_is_not_counted(llama, side, at):
    short, pad = IDS[:4], [2, 2]
    rows = torch.tensor([IDS, pad + short if side == "left" else short + pad])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0]])
    places = (mask.cumsum(1) - 1).clamp_min(0)
    with intervene(llama, *EDITS, at=at), torch.inference_mode():
        found = llama.model(input_ids=rows, attention_mask=mask, position_ids=places).logits
        alone = [llama.logits(torch.tensor([ids]))[0] for ids in (IDS, short)]
    torch.testing.assert_close(found[0], alone[0])
    torch.testing.assert_close(found[1][mask[1].bool()], alone[1], rtol=1e-4, atol=1e-4)


def test_a_batch_padded_on_the_left_generates_as_each_prompt_does_alone(llama):
    rows = torch.tensor([IDS, [2, 2, *IDS[:4]]])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    for at in ("1:3", "generated"):
        with intervene(llama, *EDITS, at=at):
            both = generated(llama, rows, attention_mask=mask).sequences[:, 6:].tolist()
            assert both == [generated(llama, ids).sequences[0, len(ids) :].tolist() for ids in (IDS, IDS[:4])]


def test_a_text_without_a_beginning_of_sentence_token_is_counted_from_its_first_token(gpt2):
    with intervene(gpt2, *EDITS, at=0):
        found = gpt2.logits(torch.tensor([IDS[1:]]))
    with replaced(gpt2, [0]):
        torch.testing.assert_close(found, gpt2.logits(torch.tensor([IDS[1:]])))


def test_ids_may_be_given_by_place_or_as_embeddings(gpt2):
    ids = torch.tensor([IDS[1:]])
    with torch.inference_mode(), intervene(gpt2, *EDITS, at="2:"):
        expected = gpt2.model(input_ids=ids).logits
        assert torch.equal(gpt2.model(ids).logits, expected)
        embedded = gpt2.model.get_input_embeddings()(ids)
        assert torch.equal(gpt2.model(inputs_embeds=embedded).logits, expected)


def test_a_cache_made_outside_is_refused_where_the_prompt_matters(gpt2):
    with torch.inference_mode():
        cache = gpt2.model(torch.tensor([IDS]), use_cache=True).past_key_values
        with intervene(gpt2, "L1D0=0", at="generated"), pytest.raises(FfmemError, match="behind 6 cached columns"):
            gpt2.model(torch.tensor([[7]]), past_key_values=cache)
        with intervene(gpt2, "L1D0=0"):
            gpt2.model(torch.tensor([[7]]), past_key_values=cache)


@pytest.mark.parametrize("at", ["some", "1:2:3", "", ":x", slice(0, 4, 2), "1.5", "9" * 5000, f"{'9' * 5000}:"])
def test_a_scope_that_cannot_be_read_is_refused(at):
    with pytest.raises(FfmemError, match="expected positions as all, generated, a position") as caught:
        Scope.parse(at)
    assert len(str(caught.value)) < 200


def test_a_scope_is_counted_as_python_counts():
    assert Scope.parse(slice(1, None)).tokens(3) == Scope.parse("1:").tokens(3) == [1, 2]
    assert Scope.parse(-1).tokens(3) == Scope.parse("2").tokens(3) == [2]
    assert Scope.parse("-2:99").tokens(3) == [1, 2]
    with pytest.raises(FfmemError, match=r"some of the prompt's 3 tokens \(0 to 2\), found 3:"):
        Scope.parse("3:").tokens(3)


def test_a_name_is_loaded_and_the_model_is_handed_over(gpt2_folder, gpt2):
    with intervene(str(gpt2_folder), "L1D3=2") as model:
        found = model.logits(torch.tensor([IDS]))
    with intervene(gpt2, "L1D3=2"):
        torch.testing.assert_close(found, gpt2.logits(torch.tensor([IDS])))


def test_gradients_flow_through_an_edit(gpt2):
    kept = []
    handle = gpt2.value_modules[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]) or args[0].retain_grad())
    try:
        with intervene(gpt2, "L1D3*0"):
            gpt2.model(torch.tensor([IDS])).logits[0, -1].max().backward()
    finally:
        handle.remove()
        gpt2.model.zero_grad()
    assert (kept[0].grad[..., 3] == 0).all()
    assert (kept[0].grad[..., 4] != 0).any()
