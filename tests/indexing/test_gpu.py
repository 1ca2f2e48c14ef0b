"""The fused kernels against plain torch on the same coefficients: on a GPU, or else in Triton's interpreter."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers.activations import ACT2FN

from ffmem import load_model
from ffmem.corpus.batches import Batch, document_keys, prefix_keys
from ffmem.indexing.coefficients import DeviceBatch
from ffmem.indexing.collect import LayerCollector, can_fuse, raised_flags, read_again, read_batch
from ffmem.indexing.statistics import BUILT_IN, Statistic
from ffmem.indexing.top import POSITION_BITS
from ffmem.indexing.worker import take_over_activations
from ffmem.model.activation import Activation
from tests.tiny import tiny_model

gpu = pytest.importorskip("ffmem.indexing.gpu")
pytestmark = pytest.mark.slow
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CELLS, T = 3, 3


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """An interpreter runs one after the other."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gpu, "ADD_PROGRAMS", 2)
        monkeypatch.setattr(gpu, "RETRY_PROGRAMS", 2)


def make_batch(
    seed: int, rows: int = 7, width: int = 19, start: int = 1, first: int = 0, words: int = 2, documents: int = 0
) -> Batch:
    """Few different words, so that many prefixes are equal; keyed by so many documents where there are some."""
    chance = np.random.default_rng(seed)
    lengths = np.sort(chance.integers(2, width + 1, rows))
    lengths[-1] = width
    ids = chance.integers(0, words, (rows, start + width))
    ids[:, start:][np.arange(width) >= lengths[:, None]] = 0
    sentences = first + chance.permutation(rows)
    keys = document_keys(sentences % documents, width) if documents else prefix_keys(ids[:, start:])
    return Batch(ids, lengths, sentences, keys, start)


def coefficients(seed: int, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Coarse numbers, so that many are equal; what stands before and behind the tokens is large and must not count."""
    chance = torch.Generator().manual_seed(seed)
    m = ((torch.randn(*batch.ids.shape, CELLS, generator=chance) * 2).round() / 2).to(dtype)
    m[:, : batch.start] = 99
    for row, length in enumerate(batch.lengths.tolist()):
        m[row, batch.start + length :] = 99 if row % 2 else -99
    return m.to(DEVICE)


def collector(*, fused: bool, distinct: str = "text", negative: bool = True, every: int = 1) -> LayerCollector:
    return LayerCollector(1, CELLS, t=T, distinct=distinct, negative=negative, every=every, device=DEVICE, fused=fused)


def collectors_of(model, first: int, *, every: int, fused: bool) -> dict[int, LayerCollector]:
    """Of a model's layers, from the first that is wanted on."""
    settings = {"t": T, "distinct": "text", "negative": False, "every": every, "device": model.device, "fused": fused}
    return {layer: LayerCollector(layer, model.cells[layer - 1], **settings) for layer in range(first, model.layers + 1)}


def assert_same(one: LayerCollector, two: LayerCollector) -> None:
    left, right = one.state(), two.state()
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("distinct", "negative", "start"),
    [("text", True, 1), ("sentence", True, 0), ("document", True, 1), ("text", False, 0)],
)
@pytest.mark.parametrize("busy", [0, gpu.BUSY], ids=["many-sentences-a-program", "one-sentence-a-program"])
def test_the_kernels_find_what_plain_torch_finds_ties_and_repeated_prefixes_included(
    dtype, distinct, negative, start, busy, monkeypatch
):
    monkeypatch.setattr(gpu, "BUSY", busy)
    plain, fused = (collector(fused=way, distinct=distinct, negative=negative) for way in (False, True))
    for seed in range(3):
        first = (0, (65535 << 27) + 200, 100)[seed]  # not in the order of the corpus, and of its very last part
        batch = make_batch(seed, start=start, first=first, documents=4 * (distinct == "document"))
        m, on = coefficients(seed, batch, dtype), DeviceBatch(batch, DEVICE)
        plain.add(m, on)
        fused.add(m, on)
        assert raised_flags({1: fused}) == ([], [])  # merges the pending hits
    for one in (plain, fused):
        one.end_shard()
    assert_same(plain, fused)
    assert plain.state()["L1.+.coefficient"].min() > 0


@pytest.mark.parametrize(
    ("module", "dtype", "kind"),
    [
        (torch.nn.ReLU(), torch.float32, "relu"),
        (torch.nn.ReLU(), torch.bfloat16, "relu"),
        (torch.nn.SiLU(), torch.bfloat16, "table"),
        (ACT2FN["gelu_new"], torch.float16, "table"),
    ],
    ids=str,
)
def test_coefficients_made_on_the_way_are_the_activations_own_and_so_is_what_is_found_in_them(module, dtype, kind):
    activation = Activation.of(module, torch.zeros(1, dtype=dtype, device=DEVICE))
    assert activation is not None
    assert activation.kind == kind
    plain, fused = collector(fused=False), collector(fused=True)
    fused.activation = activation
    for seed in range(2):
        batch = make_batch(seed, start=1 - seed, first=100 * seed)
        x, on = coefficients(seed, batch, dtype), DeviceBatch(batch, DEVICE)
        m = module(x)
        plain.add(m, on)
        made = fused.activate(x, on)
        assert torch.equal(made, m)  # in front of the first token and behind the last one too
        assert raised_flags({1: fused}) == ([], [])
    for one in (plain, fused):
        one.end_shard()
    assert_same(plain, fused)


def test_a_pass_that_makes_the_activation_itself_finds_the_same_and_puts_it_back(tokenizer):
    model = load_model(tiny_model("gpt2").to(DEVICE, torch.bfloat16), tokenizer=tokenizer)
    batches = [make_batch(seed, rows=3, width=6, first=3 * seed, words=30) for seed in range(2)]
    found = []
    for fused in (False, True):
        collectors = collectors_of(model, 1, every=1, fused=fused)
        take_over_activations(model, collectors)
        assert {one.activation.kind if one.activation else None for one in collectors.values()} == {
            "table" if fused else None
        }
        for batch in batches:
            read_batch(model, batch, collectors)
        if fused:
            assert read_again(model, batches, collectors) == 0
            assert all("forward" not in vars(one.activation.module) for one in collectors.values())
        for one in collectors.values():
            one.end_shard()
        found.append(collectors)
    for layer in found[0]:
        assert_same(found[0][layer], found[1][layer])


class Strong(Statistic):
    """How many tokens have a coefficient above 1, which no kernel counts."""

    schema = pa.schema([("strong", pa.int64())])

    def __init__(self, cells, device):
        self.strong = torch.zeros(cells, dtype=torch.int64, device=device)

    def add(self, found):
        for m in found.unpadded:
            self.strong += (m > 1).sum((0, 1))


@pytest.mark.parametrize("way", ["add", "activate"])
def test_a_statistic_that_no_kernel_knows_is_read_beside_the_kernels(way):
    settings = {"t": T, "distinct": "text", "negative": False, "every": 16, "device": DEVICE}
    settings["statistics"] = {**BUILT_IN, "strong": Strong}
    plain, fused = (LayerCollector(1, CELLS, **settings, fused=fused) for fused in (False, True))
    module, batch = torch.nn.ReLU(), make_batch(0)
    x, on = coefficients(0, batch, torch.float32), DeviceBatch(batch, DEVICE)
    fused.activation = Activation.of(module, torch.zeros(1, device=DEVICE))
    plain.add(module(x), on)
    if way == "add":
        fused.add(module(x), on)
    else:
        fused.activate(x, on)
    for one in (plain, fused):
        one.end_shard()
    assert_same(plain, fused)
    assert plain.state()["L1/strong/strong"].min() > 0


def rising(rows: int, first: int = 0) -> tuple[DeviceBatch, torch.Tensor]:
    """Sentences of one prefix each, all different and better than those before: every one passes."""
    numbers = np.arange(first, first + rows)
    batch = Batch(numbers[:, None], np.ones(rows, np.int64), numbers, prefix_keys(numbers[:, None]), 0)
    m = torch.from_numpy(numbers + 1.0).float().to(DEVICE)[:, None, None].expand(-1, 1, CELLS).contiguous()
    return DeviceBatch(batch, DEVICE), m


@pytest.mark.parametrize("lost", [False, True])
def test_hits_without_a_slot_overflow_or_else_raise_the_flag_and_are_read_again(lost, monkeypatch):
    if lost:
        monkeypatch.setattr(gpu, "OVERFLOW", 2)
    plain, fused = collector(fused=False, every=0, negative=False), collector(fused=True, every=0, negative=False)
    on, m = rising(fused.top["+"].pending_slots + 3)
    fused.merged = 1 << 20  # as if thresholds were settled, so that the batch is read in one step
    fused.add(m, on)
    assert fused.top["+"].overflow_count[0].item() == 3 * CELLS
    assert raised_flags({1: fused}) == ([], [1] if lost else [])
    assert raised_flags({1: fused}) == ([], [])
    if lost:
        fused.add_again(m, on)
    plain.add(m, on)
    for one in (plain, fused):
        one.end_shard()
    assert_same(plain, fused)


def add_overflow(top, found: list[tuple[float, int, int]]) -> None:
    """Hits of the cell in the middle, by coefficient, sentence and word, as if they had found no slot."""
    cell, best, place, key = top.overflow[0]
    for line, (coefficient, sentence, word) in enumerate(found):
        cell[line], best[line], place[line] = 1, coefficient, (sentence << POSITION_BITS) | 1
        key[line] = torch.from_numpy(prefix_keys(np.array([[word]]))[0, 0])
    top.overflow_count[0].fill_(len(found))


@pytest.mark.parametrize("times", [1, gpu.RETRIES, gpu.RETRIES + 2])
def test_hits_of_the_overflow_list_are_merged_however_many_there_are(times, monkeypatch):
    monkeypatch.setattr(gpu, "RETRY_PROGRAMS", 1)  # one after the other
    fused = collector(fused=True, every=0, negative=False)
    top = fused.top["+"]
    on, m = rising(T)
    fused.add(m, on)
    # One that came too late is too small for the threshold now, one is held already, and all others are better than any
    # before them, so that none is dropped while it is pending.
    better = [(float(10 + n), 100 + n, 100 + n) for n in range(times * top.pending_slots)]
    add_overflow(top, [(0.5, 900, 900), (1.0, 0, 0), *better])
    assert raised_flags({1: fused}) == ([], [])
    assert top.overflow_count[0].item() == max(0, times - gpu.RETRIES) * top.pending_slots
    assert top.overflow_count[1].item() == 0
    assert top.pending.tolist() == [0] * CELLS
    fused.end_shard()
    assert top.overflow_count[0].item() == 0
    assert top.coefficient[0].tolist() == top.coefficient[2].tolist() == [3, 2, 1]
    last = 10 + times * top.pending_slots - 1
    assert top.coefficient[1].tolist() == [last, last - 1, last - 2]
    assert top.bound.tolist() == [1, last - 2, 1]


def test_what_overflows_again_is_joined_by_what_finds_no_slot_next(monkeypatch):
    monkeypatch.setattr(gpu, "RETRIES", 1)
    plain, fused = collector(fused=False, every=0, negative=False), collector(fused=True, every=0, negative=False)
    fused.merged = 1 << 20  # as if thresholds were settled, so that a batch is read in one step
    first = 0
    for rows in (3 * fused.top["+"].pending_slots, 2 * fused.top["+"].pending_slots):
        on, m = rising(rows, first)
        for one in (plain, fused):
            one.add(m, on)
        assert raised_flags({1: fused}) == ([], [])
        first += rows
    for one in (plain, fused):
        one.end_shard()
    assert_same(plain, fused)


def test_a_prefix_that_opens_very_many_sentences_takes_one_slot():
    plain, fused = collector(fused=False, every=0, negative=False), collector(fused=True, every=0, negative=False)
    rows = 2 * fused.top["+"].pending_slots + gpu.OVERFLOW // 1000
    ids = np.zeros((rows, 1), np.int64)
    batch = Batch(ids, np.ones(rows, np.int64), np.arange(rows)[::-1].copy(), prefix_keys(ids), 0)
    m = torch.ones(rows, 1, CELLS, device=DEVICE)
    m[rows // 2] = 2
    fused.merged = 1 << 20  # as if thresholds were settled, so that the batch is read in one step
    for one in (plain, fused):
        one.add(m, DeviceBatch(batch, DEVICE))
    assert raised_flags({1: fused}) == ([], [])
    for one in (plain, fused):
        one.end_shard()
    assert_same(plain, fused)


def test_without_thresholds_rows_are_read_in_steps_that_cannot_overflow():
    fused = collector(fused=True, every=0, negative=False)
    rows = fused.top["+"].pending_slots
    on, m = rising(rows)
    fused.add(m, on)
    assert fused.top["+"].overflow_count[0].item() == 0
    assert raised_flags({1: fused}) == ([], [])
    assert fused.top["+"].coefficient[0].tolist() == [rows, rows - 1, rows - 2]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_noticed(value):
    fused = collector(fused=True, every=1 if DEVICE.type == "cuda" else 0)
    batch = make_batch(0, rows=3, width=4)
    m = coefficients(0, batch, torch.float32)
    m[0, 0, 0] = torch.nan  # in front of the first token: nobody looks
    fused.add(m, DeviceBatch(batch, DEVICE))
    assert raised_flags({1: fused}) == ([], [])
    m[1, 1, CELLS - 1] = value
    fused.add(m, DeviceBatch(batch, DEVICE))
    assert raised_flags({1: fused}) == ([1], [])


def test_a_model_is_read_alike_and_an_overflow_is_read_again_through_it(tokenizer):
    model = load_model(tiny_model("gpt2").to(DEVICE), tokenizer=tokenizer)
    batches = [make_batch(seed, rows=2, width=6, first=2 * seed, words=30) for seed in range(2)]
    found = []
    for fused in (False, True):
        collectors = collectors_of(model, 2, every=0, fused=fused)
        for batch in batches:
            read_batch(model, batch, collectors)
        if fused:
            collectors[2].top["+"].lost.fill_(1)  # as if a hit had been lost
            assert read_again(model, batches, collectors) == 1
            assert [one.overflows for one in collectors.values()] == [1, 0]
        for one in collectors.values():
            one.end_shard()
        found.append(collectors)
    for layer in found[0]:
        assert_same(found[0][layer], found[1][layer])


def test_the_kernels_are_for_gpus_and_for_a_sentences_best_prefix():
    assert not can_fuse(torch.device("cpu"), 50, "text")
    assert not can_fuse(torch.device("cuda"), 50, "none")
    assert not can_fuse(torch.device("cuda"), 1000, "text")
    assert can_fuse(torch.device("cuda"), 50, "text")
