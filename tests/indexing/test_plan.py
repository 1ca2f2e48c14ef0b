"""A plan agrees with known totals, with what a collector really holds, and with itself."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ffmem.errors import FfmemError
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.estimate import state_bytes
from ffmem.indexing.plan import FUSED, SHARE, SPILLED, USABLE, held_bytes, plan
from ffmem.indexing.rates import Rate, measured_rates, nearest
from ffmem.model.shape import SHAPES, shape_of

KNOWN = {"gpt2": 124_439_808, "paper": 246_933_504, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}
signs_and_stats = pytest.mark.parametrize(("negative", "every"), [(False, 0), (True, 0), (False, 16), (True, 1)])


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_have_the_parameters_that_are_known_of_them(name):
    assert shape_of(name).parameters == KNOWN[name]


def test_the_flops_of_a_position_are_twice_its_weights_and_what_attention_multiplies():
    shape = shape_of("llama3-8b")
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14_336 + 2 * 4096  # attention, memories, norms
    assert shape.block_parameters == 32 * layer
    assert shape.flops(0) == 2 * (32 * layer - 14_336 * 4096)
    # Every head multiplies a query with `length` keys, and as many weights with values.
    assert shape.flops(24) - shape.flops(0) == 32 * 2 * 2 * 24 * 4096
    assert shape.flops(24) / shape.flops(0) < 1.01


@pytest.mark.parametrize("source", ["gpt2", "llama"])
def test_a_folder_has_the_shape_of_the_model_that_is_loaded_from_it(source, request, tmp_path):
    loaded = request.getfixturevalue(source)
    loaded.model.config.save_pretrained(tmp_path)  # no weights at all
    shape = shape_of(tmp_path)
    assert (shape.layers, shape.d, shape.cells) == (loaded.layers, loaded.d, loaded.cells)
    assert shape.gated == loaded.family.gated
    assert shape.parameters == sum(one.numel() for one in loaded.model.parameters())


def test_the_bundled_model_can_be_planned_for():
    found = plan("wiki16", tokens=1e6)
    assert (found.shape.d, len(found.shape.cells), sum(found.shape.cells)) == (384, 16, 24_576)


@signs_and_stats
@pytest.mark.parametrize(("t", "fused"), [(5, False), (50, True), (100, True)])
def test_the_state_of_a_cell_is_what_a_collector_holds(negative, every, t, fused):
    if fused:
        pytest.importorskip("triton")
    cells = 8
    made = LayerCollector(
        1, cells, t=t, distinct="text", negative=negative, every=every, device=torch.device("cpu"), fused=fused
    )
    signs = len(made.top)
    made.end_shard()
    tops = [
        (*top.slots, top.pending, top.bound) if fused else (top.coefficient, top.place, top.key) for top in made.top.values()
    ]
    statistics = made.statistics.each.values() if every else []
    per_cell = [*made.sums().values(), *(tensor for one in statistics for tensor in one.state().values())]
    per_cell += [getattr(one, name) for one in statistics for name in one.sums]
    found = size(tensor for top in tops for tensor in top) + size(per_cell)
    assert cells * held_bytes(t, signs, bool(every), fused=fused) == found
    # What is written has no pending slots and no sums.
    assert cells * state_bytes(t, signs, bool(every)) == size(one for one in made.state().values() if len(one) == cells)


def test_the_kernels_are_for_as_many_triggers_as_the_plan_thinks():
    pytest.importorskip("triton")
    from ffmem.indexing.gpu import MOST, GpuTopTriggers

    assert FUSED == MOST
    assert sum(map(size, GpuTopTriggers(1, 1, "text", "cpu").overflow)) == SPILLED


def test_more_tokens_take_longer_and_more_gpus_do_not():
    by_tokens = [plan("gpt2", tokens=10**power, gpus=4) for power in range(4, 12)]
    assert all(a.time.reading <= b.time.reading for a, b in pairwise(by_tokens))
    assert all(a.disk.run_bytes <= b.disk.run_bytes for a, b in pairwise(by_tokens))
    assert all(a.network.text < b.network.text for a, b in pairwise(by_tokens))
    assert by_tokens[-1].time.reading == pytest.approx(10 * by_tokens[-2].time.reading)
    assert len({one.memory.whole for one in by_tokens}) == 1
    by_gpus = [plan("llama3-8b", tokens=1e9, gpus=gpus) for gpus in (1, 2, 3, 5, 8, 64)]
    assert all(a.time.reading > b.time.reading for a, b in pairwise(by_gpus))
    assert all(a.disk.work_bytes < b.disk.work_bytes for a, b in pairwise(by_gpus))


def test_time_is_flops_over_the_rate_and_the_ratio():
    rate = Rate("hand", d=768, layers=12, tflops=100, ratio_with_index=1.0, ratio_with_statistics=2.0, machine="", date="")
    alone = plan("gpt2", tokens=1e9, stats=False, rate=rate, length=100, padding=0)
    assert alone.flops == shape_of("gpt2").flops(100) * 1.01
    assert alone.time.reading == pytest.approx(1e9 * alone.flops / 100e12)
    assert plan("gpt2", tokens=1e9, rate=rate, length=100, padding=0).time.reading == pytest.approx(2 * alone.time.reading)
    assert plan("gpt2", tokens=1e9, gpus=4, stats=False, rate=rate, length=100, padding=0).time.reading == pytest.approx(
        alone.time.reading / 4
    )


def test_of_a_model_that_no_gpu_holds_each_worker_has_a_copy_spread_over_its_share_and_as_fast_as_one():
    large, pair, odd = (plan("llama3-70b", tokens=1e9, gpus=gpus) for gpus in (8, 2, 3))
    assert (large.memory.gpus, large.time.workers) == (2, 4)
    assert pair.time.workers == odd.time.workers == 1
    assert pair.time.tokens_a_second == large.time.tokens_a_second
    assert pair.time.reading == pytest.approx(4 * large.time.reading, rel=0.05)  # checkpoints of smaller shards
    assert "--workers 4 --device-map auto" in str(large)
    assert "one after another" in str(large)
    assert plan("llama3-70b", tokens=1e9, gpu_memory=200).memory.gpus == 1


def test_shards_are_large_enough_for_cheap_checkpoints_where_there_is_text_enough():
    assert plan("llama3-70b", tokens=1e9, gpus=2).time.checkpoint_share <= SHARE
    assert plan("gpt2", tokens=1e10, gpus=8).time.checkpoint_share <= SHARE
    short = plan("gpt2", tokens=1e7, gpus=8)
    assert short.time.checkpoint_share > SHARE  # every worker shall have something to do
    assert short.tokens / short.shard_tokens >= short.gpus


def test_the_rate_is_that_of_the_nearest_width_and_never_above_it():
    known = [
        Rate(str(d), d=d, layers=1, tflops=d, ratio_with_index=1, ratio_with_statistics=1, machine="", date="")
        for d in (100, 1000)
    ]
    assert [nearest(known, d).shape for d in (10, 100, 300, 400, 10**5)] == ["100", "100", "100", "1000", "1000"]
    assert [nearest(known, d).tflops for d in (10, 100, 300, 400, 10**5)] == [10, 100, 100, 1000, 1000]


def test_the_packaged_rates_can_be_read_and_make_sense():
    rates, host = measured_rates()
    assert all(1 < rate.tflops < 2000 for rate in rates)
    assert all(0.9 < ratio < 2 for rate in rates for ratio in (rate.ratio_with_index, rate.ratio_with_statistics))
    assert host.text_tokens_a_second > 1e4
    assert host.merged_triggers_a_second > 1e4


def test_what_the_benchmark_measures_on_a_gpu_becomes_rates_over_the_same_part_of_the_trunk():
    from benchmarks.plan import end_to_end, gpu_rates

    names = ("bare trunk to the last coefficients", "ffmem, triggers", "ffmem, triggers and statistics")
    ways = {name: {"whole": whole} for name, whole in zip(names, (0.8, 0.88, 0.96), strict=True)}
    shape = {"d": 1024, "layers": 16, "tflops": 400.0, "machine": "some GPU", "date": "2026-01-01"}
    run = {"tokens": 10**8, "seconds": 70.0, "peak_memory": 5 * 10**9, "run_folder_bytes": 10**9}
    measured = {"paper": shape | {"ways": ways | {"usual": {"part": 5.0}}}, "end to end": run | shape}
    (found,) = gpu_rates(measured).items()
    rate = Rate(found[0], **found[1])
    assert (rate.ratio_with_index, rate.ratio_with_statistics) == pytest.approx((1.1, 1.2))
    assert rate.measured
    assert end_to_end(measured)["rows"]["time to read and to finish, s"][1] == 70.0


def test_a_number_that_is_not_measured_says_so():
    rate = replace(measured_rates()[0][0], measured=False)
    assert "NOT MEASURED" in str(plan("gpt2", tokens=1e6, rate=rate))


def test_a_plan_prints_every_number_and_is_json_too():
    found = plan("llama3-70b", tokens=1e9, gpus=8)
    told = str(found)
    for word in ("time to read", "GPU memory, state", "disk, the run", "network, checkpoints", "--shard-tokens", "Assumed:"):
        assert word in told
    assert json.loads(json.dumps(found.as_dict()))["network"]["checkpoint"] == found.network.checkpoint


@pytest.mark.parametrize(
    ("model", "facts", "message"),
    [
        ("no-such-model", {"tokens": 1}, "no-such-model: found no such folder, .*; gpt2, paper, .* can be planned for"),
        ("./nowhere", {"tokens": 1}, "found nothing at ./nowhere"),
        ("gpt2", {"tokens": 0}, "expected tokens of at least 1, found 0"),
        ("gpt2", {"tokens": 1, "gpus": 0}, "expected gpus of at least 1"),
        ("llama3-70b", {"tokens": 1, "gpus": 1}, "2 GPUs of 141 GB, found 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_line(model, facts, message):
    with pytest.raises(FfmemError, match=message) as error:
        plan(model, **facts)
    assert "\n" not in str(error.value)


def test_a_model_of_another_kind_is_refused(tmp_path):
    from transformers import XGLMConfig

    XGLMConfig().save_pretrained(tmp_path)
    with pytest.raises(FfmemError, match=r"known family .* found a xglm"):
        plan(tmp_path, tokens=1)


def test_the_command_prints_the_plan(capsys):
    from ffmem.cli.app import main

    with pytest.raises(SystemExit) as end:
        main(["plan", "gpt2", "--tokens", "1e9", "--gpus", "8", "--no-stats"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == str(plan("gpt2", tokens=1e9, gpus=8, stats=False))
    with pytest.raises(SystemExit):
        main(["plan", "gpt2", "--tokens", "1e9", "--json"])
    assert json.loads(capsys.readouterr().out)["tokens"] == 10**9


def test_every_gpu_of_a_spread_copy_has_room_for_a_batch():
    memory = plan("llama3-70b", tokens=1e9, gpus=16, gpu_memory=24).memory
    each = (memory.weights + memory.state) / memory.gpus + memory.activations
    assert each <= USABLE * 24e9 < (memory.weights + memory.state) / (memory.gpus - 1) + memory.activations
    assert memory.whole == pytest.approx(each * memory.gpus)
