"""A config that cannot be true is refused before anything is made as large as it says."""

import json
import resource
import shutil
import struct
import time
import zipfile

import pytest
import torch

from ffmem.errors import ModelError
from ffmem.model import config_check
from ffmem.model.config_check import bytes_of_archive, refuse_larger_than_files, refuse_mad_sizes
from ffmem.model.loading import load_model
from ffmem.model.names import locate
from ffmem.model.shape import shape_of
from tests.tiny import VARIANTS, tiny_model


@pytest.fixture
def quick():
    """What is tested takes neither time nor memory, whatever the config says."""
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - begin < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


@pytest.fixture
def with_config(gpt2_folder, tmp_path):
    """The GPT-2 folder with other entries in its config."""

    def change(**entries):
        folder = shutil.copytree(gpt2_folder, tmp_path / "changed")
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
        return folder

    return change


@pytest.mark.parametrize("reader", [load_model, shape_of])
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"n_layer": 10**9}, "expected n_layer to be 1 to 1,024, found 1,000,000,000; the config is damaged"),
        ({"n_layer": 0}, "expected n_layer to be 1 to 1,024, found 0; the config is damaged"),
        ({"n_layer": -1}, "expected n_layer to be 1 to 1,024, found -1; the config is damaged"),
        ({"n_layer": "12"}, "expected n_layer to be a whole number, found '12'"),
        ({"n_layer": 2.5}, "expected n_layer to be a whole number, found 2.5"),
        ({"n_embd": 2**62}, f"expected n_embd to be 1 to 16,777,216, found {2**62:,}; the config is damaged"),
        (
            {"vocab_size": 10**12},
            "expected vocab_size to be 1 to 16,777,216, found 1,000,000,000,000; the config is damaged",
        ),
        ({"vocab_size": True}, "expected vocab_size to be a whole number, found True"),
        ({"n_positions": 0}, "expected n_positions to be 1 to 2,147,483,648, found 0; the config is damaged"),
    ],
)
def test_a_size_that_no_model_has_is_refused_as_it_is_written(with_config, quick, reader, entries, said):
    folder = with_config(**entries)
    with pytest.raises(ModelError) as caught:
        reader(folder)
    assert str(caught.value) == f"{folder}: {said}"


@pytest.mark.parametrize(
    ("entries", "path"),
    [
        ({"model_type": "qwen2", "max_window_layers": 10**9}, "max_window_layers"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers"),
        ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 10**9]]}, "attention_types"),
    ],
)
def test_lists_that_a_config_makes_of_a_size_are_not_made(with_config, quick, entries, path):
    with pytest.raises(ModelError, match=rf"expected {path} to be .* 1,024, found 1,000,000,000"):
        load_model(with_config(**entries))


@pytest.mark.parametrize(
    "entries",
    [
        {"n_layer": 300, "n_embd": 4096},
        {"n_embd": 2**20},
        {"n_positions": 2**31},
        {"n_inner": 2**24},
        {"vocab_size": 2**24},
    ],
    ids=str,
)
def test_more_than_the_files_hold_is_refused_before_it_is_allocated(with_config, quick, entries):
    with pytest.raises(ModelError) as caught:
        load_model(with_config(**entries))
    assert "expected as many weights as the config says (num_hidden_layers " in str(caught.value)
    held = sum(one.numel() for one in tiny_model("gpt2").parameters())
    assert f"found files for {held:,} at most" in str(caught.value)


def test_tables_that_are_kept_beside_the_weights_are_counted(save, quick):
    folder = save(tiny_model("gptj"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_positions": 2**31}))
    with pytest.raises(ModelError, match=r"its config describes tables of [\d,]+ numbers beside [\d,]+ weights"):
        load_model(folder)


def test_sizes_that_do_not_go_together_are_one_line(with_config):
    with pytest.raises(ModelError) as caught:
        shape_of(with_config(n_head=5))
    assert "expected a causal language model whose sizes go together, found: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_family_passes_with_its_own_weights(variant, save, monkeypatch):
    """The count is exact: with no slack left, nothing is refused, and a weight less is too few."""
    monkeypatch.setattr(config_check, "MISSING", 0)
    model = tiny_model(variant)
    refuse_mad_sizes(model.config.to_dict(), variant)
    location = locate(str(save(model)))
    refuse_larger_than_files(model.config, variant, location)
    count = sum(one.numel() for one in model.parameters())
    monkeypatch.setattr(config_check, "_held", lambda _: (count - 1) // 2)
    with pytest.raises(ModelError, match="expected as many weights as the config says"):
        refuse_larger_than_files(model.config, variant, location)


@pytest.mark.parametrize("claimed", [2**62, 500])
def test_a_weight_file_whose_header_lies_about_its_length_is_refused(with_config, quick, claimed):
    folder = with_config()
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    size = claimed if claimed > 1000 else len(header)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + header)
    with pytest.raises(ModelError, match="expected a causal language model"):
        load_model(folder)


def test_an_archive_that_unpacks_to_more_than_it_is_is_refused_unread(with_config, quick):
    folder = with_config()
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(50_000_000))
    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin: expected weights that are not compressed, found [\d,]+ bytes"
    ):
        load_model(folder)


def test_a_torch_file_is_counted_by_its_bytes(tmp_path):
    torch.save({"w": torch.zeros(1000)}, tmp_path / "pytorch_model.bin")
    assert bytes_of_archive(tmp_path / "pytorch_model.bin") == (tmp_path / "pytorch_model.bin").stat().st_size
