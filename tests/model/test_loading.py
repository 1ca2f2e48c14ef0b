"""Models from folders, ids and memory; every refusal is one line that says what to mend."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from ffmem.errors import ModelError
from ffmem.model import loading
from ffmem.model.loading import load_model
from ffmem.model.shape import shape_of
from tests.tiny import tiny_model


@pytest.fixture
def copy(gpt2_folder, tmp_path):
    """A copy of the GPT-2 folder that a test may damage."""
    return shutil.copytree(gpt2_folder, tmp_path / "copy")


def refusal(source, **settings):
    """The message of the error, which is one line."""
    with pytest.raises(ModelError) as caught:
        load_model(source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("as_type", [str, lambda folder: folder], ids=["str", "Path"])
def test_a_folder_is_loaded_with_its_tokenizer(gpt2_folder, tokenizer, ids, as_type):
    model = load_model(as_type(gpt2_folder))
    assert model.name == str(gpt2_folder.resolve())
    assert model.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert not model.model.training
    with torch.inference_mode():
        assert torch.equal(model.logits(ids), tiny_model("gpt2")(ids).logits)


def test_a_relative_folder_is_named_by_its_absolute_path(gpt2_folder, monkeypatch):
    monkeypatch.chdir(gpt2_folder.parent)
    assert load_model(gpt2_folder.name).name == str(gpt2_folder.resolve())


def test_a_tokenizer_that_is_given_takes_the_place_of_the_folders(gpt2_folder, tokenizer):
    assert load_model(gpt2_folder, tokenizer=tokenizer).tokenizer is tokenizer


def test_a_loaded_model_is_handed_back_as_it_is(gpt2):
    assert load_model(gpt2) is gpt2


def test_the_transformers_log_and_bars_are_left_as_they_were(gpt2_folder):
    log = transformers.logging
    for switch, on in ((log.disable_progress_bar, False), (log.enable_progress_bar, True)):
        switch()
        verbosity = log.get_verbosity()
        load_model(gpt2_folder)
        assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (verbosity, on)


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ("auto", torch.float32),
        ("fp32", torch.float32),
        ("float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("fp16", torch.float16),
        ("float16", torch.float16),
    ],
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["stored-fp32", "stored-bf16"])
def test_a_folder_is_cast_to_the_dtype_asked_for_and_auto_is_float32_on_a_cpu(save, asked, dtype, stored):
    model = load_model(save(tiny_model("gpt2", dtype=stored)), dtype=asked, device="cpu")
    assert model.dtype == dtype
    assert {parameter.dtype for parameter in model.model.parameters()} == {dtype}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["stored-fp32", "stored-bf16"])
def test_the_fingerprint_is_that_of_the_stored_weights_whatever_the_dtype(save, stored):
    folder = save(tiny_model("gpt2", dtype=stored))
    fingerprints = {load_model(folder, dtype=dtype).fingerprint() for dtype in ("auto", "fp32", "bf16", "fp16")}
    assert len(fingerprints) == 1


def test_the_fingerprint_changes_with_a_weight(save):
    model = tiny_model("gpt2")
    before = load_model(save(model, "before")).fingerprint()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 4] += 1e-3
    assert load_model(save(model, "after")).fingerprint() != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_a_model_in_memory_keeps_its_dtype_by_default(tokenizer, dtype):
    assert load_model(tiny_model("gpt2", dtype=dtype), tokenizer=tokenizer).dtype == dtype


def test_a_model_in_memory_is_not_cast_under_its_owners_hands(tokenizer):
    own = tiny_model("gpt2")
    assert "move it first with model.to('cpu', torch.bfloat16)" in refusal(own, tokenizer=tokenizer, dtype="bf16")
    assert own.dtype == torch.float32


def test_a_model_in_memory_needs_its_tokenizer():
    assert refusal(tiny_model("gpt2")) == "GPT2LMHeadModel is in memory: give its tokenizer too (tokenizer=...)"


@pytest.mark.parametrize("source", [7, None, torch.nn.Linear(2, 2)], ids=["int", "None", "Linear"])
def test_another_type_is_named(source, tokenizer):
    found = f"expected a model id, a folder or a transformers model, found {type(source).__name__}"
    assert refusal(source, tokenizer=tokenizer) == found


def test_a_missing_folder_is_not_looked_for_on_the_hub(tmp_path):
    for source in (tmp_path / "nowhere", str(tmp_path / "nowhere"), "./nowhere", "a/b/c", "nowhere.gguf"):
        assert refusal(source) == f"expected a model folder or a .gguf file, found nothing at {source}"


def test_the_home_of_nobody_is_a_missing_folder():
    assert "nothing at ~nobody-here/model" in refusal("~nobody-here/model")


def test_a_folder_without_a_config_is_refused(tmp_path):
    expected = (
        "expected config.json and weights of a transformers model, or fairseq's model.pt and dict.txt, found no config.json"
    )
    assert refusal(tmp_path) == f"{tmp_path}: {expected}"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "nothing-known"}'),
        ("model.safetensors", None),
        ("model.safetensors", b"junk" * 100),
        ("model.safetensors", "half"),
    ],
    ids=["config-broken", "config-unknown", "weights-missing", "weights-junk", "weights-cut-short"],
)
def test_a_damaged_folder_is_refused_by_its_name(copy, name, content):
    path = copy / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content == "half" else content)
    assert refusal(copy).startswith(f"{copy}: expected a causal language model")


@pytest.mark.parametrize("variant", ["gpt2", "llama"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path, tokenizer, variant):
    tiny_model(variant).save_pretrained(tmp_path)
    assert "expected a tokenizer beside the weights, found none of its files (such as tokenizer.json)" in refusal(tmp_path)
    assert load_model(tmp_path, tokenizer=tokenizer).layers == 3


def test_a_tokenizer_without_its_words_is_refused(copy):
    (copy / "tokenizer.json").unlink()
    assert refusal(copy).startswith(f"{copy}: expected a tokenizer beside the weights, found: ")


def test_a_checkpoint_that_lacks_weights_is_refused_and_not_filled_with_random_ones(save):
    folder = save(tiny_model("llama"))
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert "found none for lm_head.weight" in refusal(folder)


def test_a_broken_gguf_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"junk")
    assert refusal(path).startswith(f"{path}: ")


def test_an_unknown_device_is_refused(tokenizer):
    message = refusal(tiny_model("gpt2"), tokenizer=tokenizer, device="toaster")
    assert message == "expected a device such as cpu, cuda or cuda:1, found 'toaster'"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_a_gpu_is_refused(tokenizer, device):
    message = refusal(tiny_model("gpt2"), tokenizer=tokenizer, device=device)
    assert message.startswith(f"{device} was asked for, but torch ")
    assert message.endswith("sees no such device (CUDA devices: 0); use --device cpu")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has the device")
def test_a_device_of_another_kind_that_is_not_there_is_refused(tokenizer):
    assert "mps" in refusal(tiny_model("gpt2"), tokenizer=tokenizer, device="mps")


def test_an_unknown_dtype_is_refused(tokenizer):
    message = refusal(tiny_model("gpt2"), tokenizer=tokenizer, dtype="int8")
    assert message == "expected dtype auto, float32, fp32, bfloat16, bf16, float16, fp16, found 'int8'"


@pytest.mark.parametrize("settings", [{"dtype": "int8"}, {"device": "toaster"}])
def test_a_dtype_or_device_that_is_none_is_told_before_weights_are_read(gpt2_folder, monkeypatch, settings):
    monkeypatch.setattr(loading, "stored_model", lambda *_, **__: pytest.fail("the model was read"))
    assert refusal(gpt2_folder, **settings).startswith(f"expected {'a ' * ('device' in settings)}{next(iter(settings))} ")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dtype", torch.float16),
        ("dtype", None),
        ("device", 0),
        ("device_map", {"": 0}),
        ("revision", 7),
        ("tokenizer", "gpt2"),
        ("trust", "yes"),
    ],
)
def test_a_setting_of_the_wrong_type_is_one_line(setting, value):
    settings = {"tokenizer": None, "revision": None, "device": "cpu", "dtype": "auto", "device_map": None}
    with pytest.raises(ModelError, match=r"^expected [^\n]*, found [^\n]*$"):
        loading.refuse_wrong_settings(**(settings | {setting: value}))


# ---- the tokenizer


def words_to(count):
    return {"</s>": 0, "<unk>": 1, **{f"w{number}": number for number in range(2, count)}}


def with_tokenizer(folder, vocabulary, *, kind=models.WordLevel, **special):
    """A folder whose tokenizer is another one; `special` tokens are those it is told of."""
    for path in folder.glob("*token*"):
        path.unlink()
    made = Tokenizer(kind(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    return folder


def test_a_tokenizer_of_another_model_is_refused_at_load(copy):
    folder = with_tokenizer(copy, words_to(102), unk_token="<unk>")
    expected = (
        "expected a tokenizer for the model's 101 embeddings, found one of another model: its token 'w101' has the id 101"
    )
    assert refusal(folder) == f"{folder}: {expected}"


def test_ids_count_and_not_how_many_there_are(copy):
    folder = with_tokenizer(copy, {"</s>": 0, "<unk>": 1, "late": 500}, unk_token="<unk>")
    assert "'late' has the id 500" in refusal(folder)


def test_a_tokenizer_in_memory_is_checked_alike(gpt2_folder, copy):
    tokenizer = load_model(with_tokenizer(copy, words_to(90), unk_token="<unk>")).tokenizer  # padded embeddings: accepted
    tokenizer.add_tokens([f"new{number}" for number in range(20)])
    assert "has the id 109" in refusal(gpt2_folder, tokenizer=tokenizer)


def test_a_special_token_needs_no_embedding_unless_it_begins_a_sentence(copy):
    assert (
        load_model(with_tokenizer(copy, words_to(101), unk_token="<unk>", pad_token="<pad>")).tokenizer.pad_token_id == 101
    )
    assert "'<s>' has the id 101" in refusal(with_tokenizer(copy, words_to(101), unk_token="<unk>", bos_token="<s>"))


@pytest.mark.parametrize("kind", [models.WordLevel, models.WordPiece])
def test_a_tokenizer_that_has_nothing_for_unknown_words_is_refused(copy, kind):
    folder = with_tokenizer(copy, {"</s>": 0, "king": 1}, kind=kind)
    assert "expected a tokenizer with a token for unknown words, found none ('<unk>' is not in" in refusal(folder)


# ---- code that comes with a model

CONFIG = """
from transformers import GPT2Config
with open({marker!r}, "a") as marker:
    marker.write("config")
class Config(GPT2Config):
    model_type = "gpt2-of-its-own"
"""
MODEL = """
from transformers import GPT2LMHeadModel
from .configuration import Config
with open({marker!r}, "a") as marker:
    marker.write("model")
class Model(GPT2LMHeadModel):
    config_class = Config
"""
TOKENIZER = """
from transformers import PreTrainedTokenizerFast
with open({marker!r}, "a") as marker:
    marker.write("tokenizer")
class Words(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def own_code(copy, tmp_path, monkeypatch):
    """A folder whose config, model and tokenizer are Python beside them, which leaves a marker when it is run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    marker = tmp_path / "marker"
    for name, code in (("configuration", CONFIG), ("modeling", MODEL), ("words", TOKENIZER)):
        (copy / f"{name}.py").write_text(code.format(marker=str(marker)))

    def change(name, **entries):
        path = copy / name
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    parts = {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"}
    change("config.json", model_type="gpt2-of-its-own", auto_map=parts)
    change("tokenizer_config.json", tokenizer_class="Words", auto_map={"AutoTokenizer": [None, "words.Words"]})
    return copy, marker


def test_code_of_a_folder_is_never_run_unasked_and_the_user_is_not_asked(own_code):
    folder, marker = own_code
    message = refusal(folder)
    assert message.startswith(f"{folder} brings Python code of its own, which is not run; ")
    assert message.endswith("say --trust-remote-code (in Python trust_remote_code=True)")
    with pytest.raises(ModelError, match="brings Python code of its own"):
        shape_of(folder)
    assert not marker.exists()


def test_code_of_a_tokenizer_alone_is_not_run_either(own_code, gpt2_folder):
    folder, marker = own_code
    shutil.copy(gpt2_folder / "config.json", folder)
    assert type(load_model(folder).tokenizer).__name__ != "Words"  # transformers has a class for its files
    assert not marker.exists()


def test_code_of_a_folder_is_run_where_it_is_trusted(own_code, ids):
    folder, marker = own_code
    model = load_model(folder, trust_remote_code=True)
    assert {"config", "model", "tokenizer"} == {
        part for part in ("config", "model", "tokenizer") if part in marker.read_text()
    }
    assert (type(model.model).__name__, model.found_by_shape) == ("Model", True)


def test_code_for_a_known_type_gives_way_to_what_transformers_has(own_code):
    folder, marker = own_code
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gpt2"}))
    (folder / "tokenizer_config.json").write_text("{}")
    assert type(load_model(folder).model).__name__ == "GPT2LMHeadModel"
    assert not marker.exists()
