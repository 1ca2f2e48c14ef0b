"""Models from folders, ids and memory; every refusal is one line that says what to mend."""

import shutil

import pytest
import torch
import transformers

from ffmem.model.loading import load_model
from ffmem.words import ModelError
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


def test_a_folder_without_a_tokenizer_is_refused(copy):
    for path in copy.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refusal(copy)


def test_a_checkpoint_that_lacks_weights_is_refused_and_not_filled_with_random_ones(save):
    assert "lm_head.weight" in refusal(save(tiny_model("llama").model))


def test_a_broken_gguf_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"junk")
    assert refusal(path).startswith(f"{path}: ")


@pytest.mark.parametrize("source", ["gpt2", "openai-community/gpt2", "not an id!"])
def test_an_id_that_cannot_be_fetched_is_one_clear_line(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    message = refusal(source)
    assert message.startswith(f"{source}: expected a causal language model on disk or on the Hugging Face hub, found: ")
    assert len(message) < 300


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


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 5, "moe_intermediate_size": 16, "head_dim": 8}),
    ],
)
def test_a_model_with_experts_is_refused_by_name_with_their_count(changed, save, tokenizer, model_type, settings):
    model = changed("llama", model_type, **settings)
    count = next(iter(settings.values()))
    reason = f"is a {model_type} with {count} experts a layer; models with experts are not supported yet, use a dense one"
    assert refusal(model, tokenizer=tokenizer) == f"{type(model).__name__} {reason}"
    folder = save(model)
    assert refusal(folder) == f"{folder} {reason}"


def test_a_model_without_an_unembedding_is_refused(tokenizer):
    assert "GPT2Model" in refusal(tiny_model("gpt2").base_model, tokenizer=tokenizer)


def test_an_encoder_with_a_decoder_is_refused(tokenizer):
    sizes = {"vocab_size": 101, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    assert "T5ForConditionalGeneration" in refusal(model.eval(), tokenizer=tokenizer)
