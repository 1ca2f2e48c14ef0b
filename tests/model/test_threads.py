"""Several threads on one model: a thread's hooks are nobody else's, however the calls fall together."""

import gc
import threading
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from ffmem import intervene
from ffmem.model.spots import Hook, hooked, touched
from tests.model.threads import tiny, together, work

IDS = torch.tensor([[0, 11, 25, 7, 40, 33]])


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def elsewhere():
    """Calls a function in another thread and waits for its answer."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *args: pool.submit(call, *args).result(timeout=60)


def test_eight_threads_at_mixed_work_get_the_answers_that_each_gets_alone(model):
    found = together(2.0)
    assert not found.wrong, Counter(found.wrong).most_common(5)
    assert found.done.keys() == work(model).keys()


def read(model, layers=None, visit=None):
    seen = []

    def keep(layer, m):
        seen.append(m.clone())
        if visit:
            visit()

    with model.reading(keep, layers) as forward:
        forward(IDS)
    return seen


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_a_forward_that_is_made_while_a_visitor_looks_is_not_read(model, elsewhere):
    expected, logits, alone = read(model), model.logits(IDS), model.record(IDS).o
    ways = [lambda: torch.equal(model.logits(IDS), logits), lambda: same(read(model), expected)]
    ways.append(lambda: same(model.record(IDS).o, alone))
    for way in ways:
        for call in (lambda way=way: elsewhere(way), way):
            found = []
            assert same(read(model, [1, 3], lambda call=call, found=found: found.append(call())), [expected[0], expected[2]])
            assert found == [True, True]


class Changing(OrderedDict):
    """A module's hooks while another thread changes them: they cannot be gone through, one after the other."""

    def items(self):
        raise RuntimeError("OrderedDict mutated during iteration")


def test_the_end_of_a_reader_s_forward_looks_at_no_hooks_that_others_may_change(model, monkeypatch):
    expected = read(model, [1, 2])
    for module in (model.model.base_model, model.block(2)):
        monkeypatch.setattr(module, "_forward_hooks", Changing({0: lambda *_: None}))
    assert same(read(model, [1, 2]), expected)


def test_a_reader_s_forward_may_be_called_by_any_thread_and_by_two_at_once(model, elsewhere):
    expected, seen = read(model, [2])[0], []
    with model.reading(lambda _, m: seen.append(m.clone()), [2]) as forward:
        elsewhere(forward, IDS)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(forward, [IDS] * 20))
    assert len(seen) == 21
    assert all(torch.equal(m, expected) for m in seen)


def test_an_edit_is_the_thread_s_that_made_it(model, elsewhere):
    before = model.logits(IDS)
    for at in ("all", "2:"):
        with intervene(model, "L1D3=2", at=at):
            edited = model.logits(IDS)
            assert not torch.equal(edited, before)
            assert torch.equal(elsewhere(model.logits, IDS), before)
            assert all(elsewhere(model.find_activations))
            assert not any(model.find_activations())
            with intervene(model, "L2D3=2"):
                assert not torch.equal(model.logits(IDS), edited)
            assert torch.equal(model.logits(IDS), edited)


def test_a_thread_that_left_a_hook_behind_hands_it_to_no_later_thread(elsewhere):
    module, left = nn.Identity(), ExitStack()
    thread = threading.Thread(target=left.enter_context, args=(hooked(Hook(module, "out", lambda *_: "hooked")),))
    thread.start()
    thread.join()
    number, numbers = thread.ident, []

    def later():
        numbers.append(threading.get_ident())
        return module("plain")

    while number not in numbers and len(numbers) < 200:  # they are given again
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(later).result() == "plain"
    assert number in numbers
    left.close()
    assert not module._forward_hooks


@pytest.mark.parametrize("side", ["in", "out"])
def test_a_hook_passes_by_however_torch_calls_it_late(side, elsewhere):
    """With keyword arguments or without, in another thread, or when it has been taken off."""
    module, calls = nn.Identity(), []
    with hooked(Hook(module, side, lambda *given: calls.append(given))):
        (hook,) = (module._forward_pre_hooks if side == "in" else module._forward_hooks).values()
        module(1)
        assert len(calls) == 1
        assert elsewhere(hook, module, (1,)) is elsewhere(hook, module, (1,), {}) is None
    assert hook(module, (1,)) is hook(module, (1,), {}) is None
    assert len(calls) == 1
    assert not module._forward_pre_hooks_with_kwargs


@pytest.mark.parametrize("own", [False, True])
def test_forwards_are_replaced_by_several_threads_at_once_and_taken_off_in_any_order(own, elsewhere):
    module = nn.Identity()
    if own:
        module.forward = lambda x: f"own {x}"
    plain = module("x")

    def put(name):
        return hooked(Hook(module, "instead", lambda x: f"{name} {x}"))

    here, inner, there = put("here"), put("inner"), put("there")
    here.__enter__()
    elsewhere(there.__enter__)
    inner.__enter__()
    assert (module("x"), elsewhere(module, "x")) == ("inner x", "there x")
    here.__exit__(None, None, None)
    assert (module("x"), elsewhere(module, "x")) == ("inner x", "there x")
    stand_in = module.forward
    inner.__exit__(None, None, None)
    assert (module("x"), elsewhere(module, "x")) == (plain, "there x")
    assert (touched(module), elsewhere(touched, module)) == (own, True)
    elsewhere(there.__exit__, None, None, None)
    assert (module("x"), elsewhere(module, "x"), stand_in("x")) == (plain,) * 3
    assert (touched(module), "forward" in vars(module)) == (own, own)


def test_hooks_are_taken_off_by_whoever_collects_a_context_that_was_left_open(elsewhere):
    module = nn.Identity()

    def left_open():
        with hooked(Hook(module, "out", lambda *_: "hooked"), Hook(module, "instead", lambda x: x)):
            yield

    waiting = left_open()
    elsewhere(next, waiting)
    assert module("plain") == "plain"
    assert elsewhere(module, "plain") == "hooked"
    del waiting
    gc.collect()
    assert not module._forward_hooks
    assert "forward" not in vars(module)
