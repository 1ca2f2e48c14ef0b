"""Conversion: the same bits in another form, whole or not at all."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ffmem import build_index, load_model
from ffmem.model.adaptive.convert import convert
from ffmem.model.adaptive.fairseq import load_fairseq
from ffmem.model.adaptive.network import AdaptiveLM, register
from ffmem.words import ModelError
from tests.model.adaptive.conftest import SENTENCES, TINY


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_converted_folder_gives_the_same_bits(stored, folder, tmp_path, reference, dtype):
    stored["model"] = {key: t.to(dtype) if t.is_floating_point() else t for key, t in stored["model"].items()}
    source = folder(stored)
    assert convert(source, str(tmp_path / "new" / "converted")) == tmp_path / "new" / "converted"
    out = tmp_path / "new" / "converted"
    assert [path.name for path in out.parent.iterdir()] == ["converted"]  # nothing temporary stays
    assert {"config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}
    register()
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    expected, expected_tokenizer = load_fairseq(source)
    assert isinstance(model, AdaptiveLM)
    assert model.dtype == expected.dtype == dtype
    for number, sentence in enumerate(SENTENCES):
        assert tokenizer(sentence).input_ids == expected_tokenizer(sentence).input_ids
        ids = reference[f"{number}.ids"][None]
        with torch.inference_mode():
            assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


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
    with pytest.raises(ModelError, match=r"could not be written there .*No space left"):
        convert(TINY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_a_conversion_that_was_killed_has_left_goes_with_the_next(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("ffmem.model.adaptive.convert._write", killed)
        patch.setattr("ffmem.model.adaptive.convert.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            convert(TINY, tmp_path / "out")
    assert list(tmp_path.iterdir())
    convert(TINY, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


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
    assert index.counts["cells"] == 192


def test_a_model_of_another_kind_is_not_converted(gpt2_folder, tmp_path):
    with pytest.raises(ModelError, match=r"expected a model of the paper's kind \(adaptive_lm\), found a GPT2LMHeadModel"):
        convert(gpt2_folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
