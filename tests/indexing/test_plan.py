"""A plan agrees with known totals, with what a collector really holds, and with itself."""

import json
from importlib.resources import files
from itertools import pairwise

import pytest
import torch

from ffmem.errors import FfmemError
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.estimate import state_bytes
from ffmem.indexing.plan import nearest, plan
from ffmem.model.shape import SHAPES, shape_of

KNOWN = {"gpt2": 124_439_808, "paper": 246_933_504, "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496}
MEASURED = json.loads((files("ffmem.indexing") / "rates.json").read_text("utf-8"))


def size_of(thing, seen):
    """Bytes of all tensors that an object of ours reaches, each storage once."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, dict):
        [size_of(one, seen) for one in thing.values()]
    elif isinstance(thing, (list, tuple)):
        [size_of(one, seen) for one in thing]
    elif type(thing).__module__.startswith("ffmem"):
        size_of(vars(thing), seen)
    return sum(seen.values())


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
    assert plan("wiki16", tokens=1e6).cells == 24_576


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.slow
def test_a_cell_takes_the_bytes_that_a_collector_holds_and_writes(stats):
    """The measured bytes a trigger are those at t = 50: other t have other waiting places on a GPU."""
    pytest.importorskip("triton")
    cells, top = 4096, 50
    cpu = torch.device("cpu")
    made = LayerCollector(1, cells, t=top, distinct="text", negative=False, every=16 * stats, device=cpu, fused=True)
    made.end_shard()
    memory = MEASURED["memory"]
    planned = cells * (memory["bytes_a_trigger"] * top + memory["bytes_a_cell_of_statistics"] * stats)
    # What a layer holds whatever its number of cells is not planned for.
    slack = 5 << 20
    assert planned * 0.98 <= size_of(made, {}) <= planned * 1.02 + slack
    assert cells * state_bytes(top, 1, stats) == sum(
        one.numel() * one.element_size() for one in made.state().values() if len(one) == cells
    )


def test_more_tokens_take_longer_and_more_gpus_do_not():
    by_tokens = [plan("gpt2", tokens=10**power, gpus=4) for power in range(4, 12)]
    assert all(a.reading_seconds < b.reading_seconds for a, b in pairwise(by_tokens))
    assert all(a.run_bytes <= b.run_bytes for a, b in pairwise(by_tokens))
    assert by_tokens[-1].reading_seconds == pytest.approx(10 * by_tokens[-2].reading_seconds)
    assert len({one.gpu_bytes for one in by_tokens}) == 1
    by_gpus = [plan("llama3-8b", tokens=1e9, gpus=gpus) for gpus in (1, 2, 3, 5, 8, 64)]
    assert all(a.reading_seconds > b.reading_seconds for a, b in pairwise(by_gpus))
    assert all(a.work_bytes < b.work_bytes for a, b in pairwise(by_gpus))


def test_time_is_flops_over_the_measured_rate_times_the_measured_ratio():
    rate, text = MEASURED["gpus"]["gpt2"], MEASURED["text"]
    length, padding = text["tokens_a_sentence"], text["padding"]
    flops = shape_of("gpt2").flops(length) * (length + 1) / length / (1 - padding)
    bare = 1e9 * flops / (rate["tflops"] * 1e12)
    found = plan("gpt2", tokens=1e9, stats=False)
    assert found.reading_seconds == pytest.approx(bare * rate["ratio_with_index"])
    assert plan("gpt2", tokens=1e9).reading_seconds == pytest.approx(bare * rate["ratio_with_statistics"])
    assert plan("gpt2", tokens=1e9, gpus=4, stats=False).reading_seconds == pytest.approx(found.reading_seconds / 4)


def test_of_a_model_that_no_gpu_holds_each_worker_has_a_copy_spread_over_its_share_and_as_fast_as_one():
    large, pair, three = (plan("llama3-70b", tokens=1e9, gpus=gpus) for gpus in (8, 2, 3))
    assert (large.gpus_a_worker, large.workers) == (2, 4)
    assert pair.workers == three.workers == 1
    assert pair.tokens_a_second == large.tokens_a_second
    assert pair.reading_seconds == pytest.approx(4 * large.reading_seconds)
    assert "--workers 4 --device-map auto" in str(large)
    assert "one after another" in str(large)
    assert plan("llama3-70b", tokens=1e9, gpu_memory=250).gpus_a_worker == 1


def test_every_gpu_of_a_spread_copy_has_room_for_a_batch():
    found = plan("llama3-70b", tokens=1e9, gpus=16, gpu_memory=24)
    memory = MEASURED["memory"]
    batch = 24e9 * memory["batch_share"]
    assert found.gpu_bytes <= memory["usable_share"] * 24e9 * found.gpus_a_worker
    one_less = found.gpus_a_worker - 1
    assert found.gpu_bytes - batch > memory["usable_share"] * 24e9 * one_less


def test_the_rate_is_that_of_the_nearest_width_and_never_above_it():
    known = {str(d): {"d": d, "tflops": d} for d in (100, 1000)}
    found = [nearest(known, d) for d in (10, 100, 300, 400, 10**5)]
    assert [one["d"] for one in found] == [100, 100, 100, 1000, 1000]
    assert [one["tflops"] for one in found] == [10, 100, 100, 1000, 1000]


def test_the_packaged_rates_make_sense():
    for rate in MEASURED["gpus"].values():
        assert 1 < rate["tflops"] < 2000
        assert 0.9 < rate["ratio_with_index"] < 2
        assert 0.9 < rate["ratio_with_statistics"] < 2
    assert MEASURED["host"]["text_tokens_a_second"] > 1e4
    assert MEASURED["host"]["merged_triggers_a_second"] > 1e4


def test_a_plan_prints_every_number_and_is_json_too():
    found = plan("llama3-70b", tokens=1e9, gpus=8)
    told = str(found)
    for word in ("workers", "time to read", "GPU memory", "host memory", "disk, the run", "Assumed:", "TFLOP/s"):
        assert word in told
    assert json.loads(json.dumps(found.as_dict()))["gpu_bytes"] == found.gpu_bytes


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
