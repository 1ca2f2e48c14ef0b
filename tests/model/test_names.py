"""Where a model is found, and how fast it is told that there is none."""

import time

import huggingface_hub
import pytest

from ffmem.errors import ModelError
from ffmem.model.loading import load_model
from ffmem.model.names import known_name, locate, refuse_swapped


def refusal(name):
    with pytest.raises(ModelError) as caught:
        locate(known_name(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that is not reached, and how often it was tried; an empty cache and an empty folder to be in."""
    tried = []

    def unreachable(self, name, **_):
        tried.append(name)
        raise ConnectionError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tried


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2"])
def test_the_hub_is_tried_once_and_an_unknown_model_is_told_at_once(hub, name):
    begin = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_model(name)
    expected = "found no such folder, not in the Hugging Face cache, and the hub is not reached (Name or service not known)"
    assert str(caught.value) == f"{name}: {expected}"
    assert hub == [name]
    assert time.monotonic() - begin < 3


def test_a_cached_model_is_read_from_the_cache_where_the_hub_is_not_reached(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json")
    assert locate("gpt2").arguments == {"trust_remote_code": False, "local_files_only": True}


def test_a_model_that_the_hub_has_is_left_to_transformers(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    assert locate("gpt2", revision="v2").arguments == {"trust_remote_code": False, "revision": "v2"}


def test_offline_the_hub_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert refusal("gpt2").endswith("and the hub is not asked, because HF_HUB_OFFLINE is set")


def test_half_a_path_says_which_half_is_there(hub, tmp_path):
    (tmp_path / "models").mkdir()
    assert "models/gpt3: found no such folder (models is a folder here, without gpt3)" in refusal("models/gpt3")


@pytest.mark.parametrize("name", ["not an id!", "two--dashes", "a\x1b[31mb"])
def test_what_can_be_no_name_is_told_without_asking(hub, name):
    assert "expected a model folder that is there or a Hugging Face id" in refusal(name)
    assert "\x1b" not in refusal(name)
    assert hub == []


@pytest.mark.parametrize("name", ["a" * 300, "models/weights.safetensors", "corpus.txt", "model\\folder", "a/b/c"])
def test_what_looks_like_a_path_is_one(hub, name):
    assert "found nothing at" in refusal(name)
    assert hub == []


def test_a_file_is_no_model(hub, tmp_path):
    (tmp_path / "small.txt").write_text("text")
    assert refusal("small.txt") == "expected a model folder or a .gguf file, found the file small.txt"


def test_arguments_in_the_wrong_order_are_recognised(gpt2_folder, tmp_path):
    text = tmp_path / "small.txt"
    text.write_text("text")
    for model, other in ((str(text), "wiki16"), ("pocket", "wiki16"), ("The king", str(gpt2_folder)), ("far.txt", "wiki16")):
        with pytest.raises(ModelError) as caught:
            refuse_swapped(model, ["first.txt", other])
        assert str(caught.value) == f"{other} is a model and {model} a text: the other way round?"


def test_arguments_in_the_right_order_pass(gpt2_folder, tmp_path):
    for model, other in (("wiki16", "pocket"), ("gpt2", "wiki16"), (str(gpt2_folder), "wiki16"), ("gpt2", "The king")):
        refuse_swapped(model, [other])
