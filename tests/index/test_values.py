"""Value projections of a whole run."""

import json
import shutil

import pytest
import torch

from ffmem import build_index, export, load_model, open_index, values
from ffmem.index.folder import VALUES
from ffmem.index.tables import write_table
from ffmem.index.values import together
from ffmem.words import ModelError, RunError


@pytest.fixture
def run(gpt2, tmp_path):
    build_index(gpt2, ["the king left ."], out=tmp_path / "run", quiet=True)
    return tmp_path / "run"


def test_values_load_the_run_s_own_model_and_check_it(gpt2_folder, tmp_path):
    run = tmp_path / "run"
    build_index(str(gpt2_folder), ["the king left ."], out=run, quiet=True)
    index = values(run, top=3, quiet=True)
    assert len(index["L1D0"].value.top(3)) == 3
    assert open_index(run).manifest["values"] == {"top": 3, "norm": False, "dtype": "float32"}


def test_another_model_is_refused_with_both_names(run, llama):
    with pytest.raises(RunError, match=r"was made with model .* but .* has"):
        values(run, llama, quiet=True)


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
    index.folder.write_manifest(index.manifest | {"files": index.manifest["files"] | index.folder.described(VALUES)})
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
    assert index.manifest["values"]["dtype"] == "bfloat16"


def test_small_parts_are_put_together_in_their_order():
    parts = [(layer, torch.full((size, 1), float(layer))) for layer, size in ((1, 2), (2, 3), (2, 1), (3, 4))]
    found = [(layer, part[:, 0].tolist()) for layer, part in together(parts, 5)]
    assert found == [(2, [1, 1, 2, 2, 2]), (3, [2, 3, 3, 3, 3])]
    assert [layer for layer, _ in together(parts, 7)] == [3]
    assert list(together([], 5)) == []
