"""Conversion: the same bits in another form, whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ffmem import build_index, load_model
from ffmem.atomic import atomic_file, is_unfinished
from ffmem.errors import ModelError
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.convert import convert
from tests.model.adaptive.conftest import SENTENCES, TINY


@pytest.mark.parametrize("kind", ["empty folder", "full folder", "file", "dead link"])
def test_nothing_is_converted_over_what_exists(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "dead link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
    if kind == "full folder":
        (out / "config.json").write_text("mine")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(ModelError, match="expected a folder that is not there yet"):
        convert(TINY, out)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def half_written(self, where, **_):
        (Path(where) / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(AdaptiveLM, "save_pretrained", half_written)
    with pytest.raises(ModelError, match=r"out/model\.safetensors: the model could not be written there .*No space left"):
        convert(TINY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_conversion_that_is_stopped_leaves_nothing(tmp_path, monkeypatch, stop):
    def stopped(self, where, **_):
        (Path(where) / "model.safetensors").write_text("half")
        raise stop

    monkeypatch.setattr(AdaptiveLM, "save_pretrained", stopped)
    with pytest.raises(stop):
        convert(TINY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from ffmem.model import convert
def die(folder, *_):
    (folder / "model.safetensors").write_text("half")
    os.kill(os.getpid(), 9)
convert._write = die
convert.convert(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_what_a_killed_conversion_left_is_cleared_by_the_next_and_nothing_else(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(TINY), str(tmp_path / "out")], check=False)
    (left,) = tmp_path.iterdir()
    assert done.returncode == -9
    assert is_unfinished(left.name)
    assert (left / "out" / "model.safetensors").read_text() == "half"
    others = [".out.ffmem-tmp", ".out.0123456789abcdef.ffmem-tmp.txt", "out.0123456789abcdef.ffmem-tmp"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.fedcba9876543210.ffmem-tmp").symlink_to(tmp_path / others[0])
    with atomic_file(tmp_path / "living") as living:  # that of a writer that lives
        living.write_text("x")
        convert(TINY, tmp_path / "out")
        assert living.exists()
    kept = [*others, ".out.fedcba9876543210.ffmem-tmp", "living", "out"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_two_conversions_to_one_place_do_not_clear_each_other(tmp_path, monkeypatch):
    import ffmem.model.convert as module

    plain = module._write

    def meanwhile(folder, *rest):
        monkeypatch.setattr(module, "_write", plain)
        convert(TINY, tmp_path / "out")
        plain(folder, *rest)

    monkeypatch.setattr(module, "_write", meanwhile)
    with pytest.raises(ModelError, match="could not be written there"):
        convert(TINY, tmp_path / "out")  # the other was first
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert load_model(tmp_path / "out").layers == 3


def test_a_folder_made_meanwhile_is_not_written_over(tmp_path, monkeypatch):
    def slow(self, where, **_):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")

    monkeypatch.setattr(AdaptiveLM, "save_pretrained", slow)
    with pytest.raises(ModelError, match="could not be written there"):
        convert(TINY, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_source_that_does_not_load_writes_nothing(tmp_path):
    with pytest.raises(ModelError, match=r"expected a model folder or a .gguf file, found nothing at"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_rows_is_a_quarter_and_says_nearly_the_same(tmp_path):
    whole, packed = convert(TINY, tmp_path / "whole"), convert(TINY, tmp_path / "packed", rows8=True)
    assert not (packed / "model.safetensors").exists()
    assert (packed / "rows8.safetensors").stat().st_size < 0.4 * (whole / "model.safetensors").stat().st_size
    ids = torch.arange(4, 20)[None]
    exact, near = load_model(whole), load_model(packed)
    torch.testing.assert_close(near.logits(ids), exact.logits(ids), atol=0.2, rtol=0.05)
    assert near.tokenizer("vidasa bako")["input_ids"] == exact.tokenizer("vidasa bako")["input_ids"]


def test_rows_packed_twice_are_the_same_bytes(tmp_path):
    once = convert(TINY, tmp_path / "once", rows8=True)
    twice = convert(once, tmp_path / "twice", rows8=True)
    assert (once / "rows8.safetensors").read_bytes() == (twice / "rows8.safetensors").read_bytes()


def test_the_original_folder_is_loaded_as_it_is_and_found_again_by_its_path(tmp_path):
    model = load_model(TINY)
    assert (model.family.name, model.layers, model.cells, model.found_by_shape) == ("adaptive_lm", 3, [64, 64, 64], False)
    assert model.name == str(TINY.resolve())
    index = build_index(model, SENTENCES, out=tmp_path / "run", quiet=True)
    assert index.counts.cells == 192


def test_a_model_of_another_kind_is_not_converted(gpt2_folder, tmp_path):
    with pytest.raises(
        ModelError, match=r"expected a model of the paper's kind \(adaptive_lm\) or a .gguf file, found a GPT2LMH"
    ):
        convert(gpt2_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
