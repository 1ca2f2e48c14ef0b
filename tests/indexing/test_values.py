"""Value projections of a whole run."""

import errno
import json
import os
import shutil
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from ffmem import build_index, compare, experiments, export, intervene, load_model, open_index, recipe, trace, values
from ffmem.errors import ModelError, RunError
from ffmem.indexing.values import together
from ffmem.live.causal import causal
from ffmem.run.folder import VALUES, RunFolder, write_table
from ffmem.run.manifest import ValueFacts
from ffmem.run.model import model_of
from ffmem.run.reader import Index
from ffmem.run.registry import all_experiments
from ffmem.run.store import LocalStore
from tests.tiny import tiny_model, word_tokenizer

room = import_module("ffmem.indexing.values")  # its name is the function's too


@pytest.fixture
def run(gpt2, tmp_path):
    build_index(gpt2, ["the king left ."], out=tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_values_load_the_run_s_own_model_and_check_it(gpt2_folder, tmp_path):
    run = tmp_path / "run"
    build_index(str(gpt2_folder), ["the king left ."], out=run, quiet=True)
    index = values(run, top=3, quiet=True)
    assert len(index["L1D0"].value.top(3)) == 3
    assert open_index(run).manifest.values == ValueFacts(top=3, norm=False, dtype="float32")


def test_another_model_is_refused_with_both_names(run, llama):
    with pytest.raises(RunError, match=r"was made with model .* but .* has"):
        values(run, llama, quiet=True)


def intervened(run, model):
    with intervene(model, "L1D0=0", run=run):
        pass


WAYS = {
    "open_index": lambda run, model: open_index(run, model=model),
    "Index": lambda run, model: Index(open_index(run).folder, open_index(run).manifest, model),
    "model_of": lambda run, model: model_of(open_index(run), model),
    "values": lambda run, model: values(run, model, quiet=True),
    "causal": lambda run, model: causal(run, "L1D0", eval=["the king left ."], model=model, quiet=True),
    "trace": lambda run, model: trace(model, "the king", run=run),
    "intervene": intervened,
    "recipe": lambda run, model: recipe(model, "L1D0=0", run=run),
    "compare": lambda run, model: compare(model, "the king", "L1D0=0", run=run),
    "run_experiments": lambda run, model: next(experiments.run_experiments(run, ["activity"], model=model, quiet=True)),
} | {
    name: lambda run, model, name=name: getattr(experiments, name)(model, open_index(run), quiet=True)
    for name in all_experiments()
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_no_way_from_a_run_takes_another_model_or_another_tokenizer(way, run, gpt2):
    before = (run / "manifest.json").read_bytes()
    with pytest.raises(RunError, match=r"was made with model .* but .* has .*: give the model it was made with"):
        WAYS[way](run, load_model(tiny_model("gpt2", seed=1), tokenizer=gpt2.tokenizer))
    other = word_tokenizer()
    other.add_tokens(["unheard"])
    with pytest.raises(RunError, match=r"was made with tokenizer .* but .* has .*: give the tokenizer it was made with"):
        WAYS[way](run, load_model(gpt2.model, tokenizer=other))
    assert (run / "manifest.json").read_bytes() == before


def test_a_model_in_memory_that_changed_behind_an_open_run_is_refused(run, tokenizer):
    model = load_model(tiny_model("gpt2"), tokenizer=tokenizer)
    index = open_index(run, model=model)
    assert model_of(index) is model is index.model
    with torch.no_grad():
        model.model.transformer.wte.weight[0, 0] += 1
    with pytest.raises(RunError, match="was made with model"):
        values(index, quiet=True)
    with pytest.raises(AttributeError):
        index.model = model


def test_the_check_hashes_the_weights_of_a_model_that_was_loaded_once(gpt2_folder, tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr("ffmem.model.loading.model_hash", lambda model: hashed.append(model) or "a hash")
    loaded = load_model(str(gpt2_folder))
    index = build_index(loaded, ["the king left ."], out=tmp_path / "run", quiet=True)
    for _ in range(3):
        assert model_of(open_index(index.path, model=loaded)) is loaded
    assert hashed == [loaded.model]


def test_a_run_opened_with_a_name_has_that_model(gpt2_folder, tmp_path):
    build_index(str(gpt2_folder), ["the king left ."], out=tmp_path / "run", quiet=True)
    assert len(open_index(tmp_path / "run", model=gpt2_folder)["L1D0"].value.top(2)) == 2


def test_a_model_that_is_gone_is_an_error(gpt2_folder, tmp_path):
    copy = shutil.copytree(gpt2_folder, tmp_path / "model")
    build_index(str(copy), ["the king left ."], out=tmp_path / "run", quiet=True)
    shutil.rmtree(copy)
    with pytest.raises(ModelError, match="found nothing at"):
        values(tmp_path / "run", quiet=True)
    assert len(values(tmp_path / "run", str(gpt2_folder), quiet=True)["L1D0"].value.top(2)) == 2


def test_the_norm_is_an_option_and_changes_the_projection(run, gpt2):
    bare = values(run, gpt2, quiet=True)["L1D3"].value.max_probability
    normed = values(run, gpt2, norm=True, quiet=True)["L1D3"].value
    vector = gpt2.values(1)[3][None]
    with torch.no_grad():
        wanted = torch.softmax(gpt2.model.lm_head(gpt2.model.transformer.ln_f(vector))[0], 0)
    assert normed.top(1)[0].id == int(wanted.argmax())
    assert normed.max_probability == pytest.approx(float(wanted.max()), rel=1e-5)
    assert bare != normed.max_probability


def test_how_far_a_token_stands_out_is_stored_beside_its_probability(run, gpt2, tmp_path):
    index = values(run, gpt2, top=4, quiet=True)
    logits = gpt2.values(1)[3] @ gpt2.model.lm_head.weight.detach().T
    z = (logits - logits.mean()) / logits.std(correction=0)
    value = index["L1D3"].value
    for said, ids in ((value.top(4), z.argsort(descending=True)), (value.bottom(4), z.argsort())):
        assert [(one.id, one.z) for one in said] == [(id, pytest.approx(float(z[id]), rel=1e-4)) for id in ids[:4].tolist()]
    export(index, "cells", out=tmp_path / "cells.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text("utf-8").splitlines()]
    assert rows[3]["value_top_z"] == value.top(1)[0].z


def test_values_that_were_made_before_there_was_a_z_are_read_without(run, gpt2, monkeypatch):
    index = values(run, gpt2, top=4, quiet=True)
    older = index.table("values").drop_columns(["promoted_z", "suppressed_z"])
    with index.folder.writing(VALUES) as path:
        write_table(path, older.schema, older.to_batches())
    files = index.manifest.files | index.folder.described(VALUES)
    index.folder.write_manifest(replace(index.manifest, files=files))
    cell = open_index(run)["L1D3"]
    assert [said.z for said in cell.value.top(4)] == [None] * 4
    assert [said.id for said in cell.value.top(4)] == [said.id for said in index["L1D3"].value.top(4)]
    assert "promotes" in repr(cell)
    assert "promotes" in cell._repr_html_()


def test_a_run_of_some_layers_has_the_values_of_those(gpt2, tmp_path):
    index = build_index(gpt2, ["the king left ."], out=tmp_path / "run", layers="2-3", quiet=True)
    stored = values(index, gpt2, quiet=True)
    logits = gpt2.values(3)[9] @ gpt2.model.lm_head.weight.T
    assert stored["L3D9"].value.top(1)[0].id == int(logits.argmax())
    assert stored.table("values").num_rows == 256


def test_a_run_of_a_model_in_memory_asks_for_that_model(run):
    with pytest.raises(RunError, match=r"was made with a GPT2LMHeadModel in memory: give that model"):
        values(run, quiet=True)


def test_a_run_without_values_says_how_to_add_them(run):
    with pytest.raises(RunError, match="add them with ffmem values"):
        open_index(run)["L1D0"].value.top(1)


def test_a_model_loaded_in_another_dtype_is_still_the_same_model(gpt2_folder, tmp_path):
    build_index(load_model(str(gpt2_folder)), ["the king left ."], out=tmp_path / "run", quiet=True)
    index = values(tmp_path / "run", dtype="bfloat16", quiet=True)
    assert index.manifest.values.dtype == "bfloat16"


@pytest.fixture
def valued(run, gpt2):
    """A run with values, which are all there is to lose."""
    values(run, gpt2, top=3, quiet=True)
    return run


def kept_of(run):
    """How many tokens the run's values have, checked against their hash; and the files that hold values."""
    return open_index(run)["L1D0"].value.kept, sorted(path.name for path in run.glob("values*"))


def test_values_that_are_made_anew_take_the_place_of_the_earlier_ones(valued, gpt2):
    for top, name in ((4, "values-2.arrow"), (5, "values.arrow"), (5, "values-2.arrow")):
        assert values(valued, gpt2, top=top, quiet=True)["L1D0"].value.kept == top
        assert kept_of(valued) == (top, [name])


def test_whoever_has_opened_the_run_before_is_told_to_open_it_again(valued, gpt2):
    before, read = open_index(valued), open_index(valued)
    read.table("values")
    values(valued, gpt2, top=4, quiet=True)
    with pytest.raises(RunError, match=r"has changed since it was opened \(values.arrow is gone\): open it again"):
        before.table("values")
    assert read["L1D0"].value.kept == 3


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_values_that_could_not_be_made_leave_the_earlier_ones(valued, gpt2, monkeypatch, error):
    def failing(path, *_):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(room, "write_table", failing)
    with pytest.raises((RunError, KeyboardInterrupt)) as told:
        values(valued, gpt2, top=5, quiet=True)
    if isinstance(error, OSError):
        assert "values-2.arrow: cannot be written: No space left on device" in str(told.value)
    assert kept_of(valued) == (3, ["values.arrow"])


@pytest.mark.parametrize(("killed", "kept"), [("replace", 3), ("write_manifest", 3), ("remove", 5)])
def test_a_kill_at_any_moment_leaves_the_earlier_values_or_the_new_ones(valued, gpt2, monkeypatch, killed, kept):
    def deadly(*_):
        raise KeyboardInterrupt

    owner = {"replace": os, "write_manifest": RunFolder, "remove": LocalStore}[killed]
    monkeypatch.setattr(owner, killed, deadly)
    with pytest.raises(KeyboardInterrupt):
        values(valued, gpt2, top=5, quiet=True)
    monkeypatch.undo()
    assert kept_of(valued)[0] == kept
    values(valued, gpt2, top=4, quiet=True)
    assert kept_of(valued)[0] == 4
    assert len(kept_of(valued)[1]) == 1


def test_small_parts_are_put_together_in_their_order():
    parts = [(layer, torch.full((size, 1), float(layer))) for layer, size in ((1, 2), (2, 3), (2, 1), (3, 4))]
    found = [(layer, part[:, 0].tolist()) for layer, part in together(parts, 5)]
    assert found == [(2, [1, 1, 2, 2, 2]), (3, [2, 3, 3, 3, 3])]
    assert [layer for layer, _ in together(parts, 7)] == [3]
    assert list(together([], 5)) == []
