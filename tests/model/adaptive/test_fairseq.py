"""The original checkpoint: equal to what fairseq computed, and refused with a reason where it cannot be."""

import argparse
import os
import pickle
import re
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ffmem.errors import ModelError
from ffmem.model.adaptive.fairseq import load_fairseq, read_words
from ffmem.model.adaptive.network import AdaptiveLM, register
from ffmem.model.convert import convert
from ffmem.model.names import is_fairseq
from tests.model.adaptive.conftest import SENTENCES, TINY

HEAD = "decoder.adaptive_softmax.head.word_proj.weight"
FIRST = "decoder.embed_tokens.embeddings.0.0.weight"
FC1 = "decoder.layers.1.fc1.weight"


@pytest.fixture(scope="session")
def tiny():
    return load_fairseq(TINY)[0]


def config_and_weights(folder):
    model, _ = load_fairseq(folder)
    return model.config, model.state_dict()


@torch.inference_mode()
def flow(model, ids):
    """What fairseq's reference holds: residuals, coefficients and outputs of every layer, and log-probabilities."""
    kept = {"r": [], "m": [], "y": []}
    hooks = []
    for block in model.model.layers:
        hooks.append(block.final_layer_norm.register_forward_pre_hook(lambda _, args: kept["r"].append(args[0][0])))
        hooks.append(block.fc2.register_forward_pre_hook(lambda _, args: kept["m"].append(args[0][0])))
        hooks.append(block.fc2.register_forward_hook(lambda _, args, out: kept["y"].append(out[0])))
    try:
        log_probs = model(input_ids=ids[None]).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return {"log_probs": log_probs} | {name: torch.stack(tensors) for name, tensors in kept.items()}


def error_of(folder):
    with pytest.raises(ModelError) as caught:
        config_and_weights(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


# ---- the same numbers


@pytest.mark.parametrize("number", range(len(SENTENCES)))
def test_every_tensor_is_what_fairseq_computed(tiny, reference, number):
    found = flow(tiny, reference[f"{number}.ids"])
    assert set(found) == {"r", "m", "y", "log_probs"}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, reference[f"{number}.{name}"], rtol=1e-6, atol=1e-5)


def test_words_have_fairseqs_ids(reference):
    words = read_words(TINY / "dict.txt")
    assert len(words) == 396
    for number, sentence in enumerate(SENTENCES):
        ids = [2, *(4 + words.index(word) for word in sentence.split())]
        assert ids == reference[f"{number}.ids"].tolist()


def test_the_config_holds_the_arguments(tiny):
    config = tiny.config
    assert (config.vocab_size, config.cutoffs, config.factor) == (400, [60, 160], 4)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (32, 64, 3)
    assert (config.num_attention_heads, config.max_position_embeddings) == (4, 128)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (1, 2, 2)


def test_no_weight_of_the_network_is_left_to_chance(tiny):
    fresh = AdaptiveLM(tiny.config)
    assert {name: tensor.shape for name, tensor in tiny.state_dict().items()} == {
        name: tensor.shape for name, tensor in fresh.state_dict().items()
    }
    assert not any(parameter.is_meta for parameter in tiny.parameters())


# ---- other forms of the same model


def same_weights(folder):
    config, state = config_and_weights(folder)
    expected_config, expected = config_and_weights(TINY)
    assert config.to_dict() == expected_config.to_dict()
    assert set(state) == set(expected)
    return all(torch.equal(state[name], expected[name]) for name in expected)


def test_packed_attention_of_older_files_gives_the_same_outputs(stored, folder, tiny, reference):
    state = stored["model"]
    for layer in range(3):
        prefix = f"decoder.layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{prefix}{part}_proj.{kind}") for part in "qkv"]
            state[f"{prefix}in_proj_{kind}"] = torch.cat(parts)
    model, _ = load_fairseq(folder(stored))
    ids = reference["7.ids"]
    expected = flow(tiny, ids)
    for name, tensor in flow(model, ids).items():
        assert torch.equal(tensor, expected[name])


def test_packed_and_split_attention_in_one_file_are_refused(stored, folder):
    state = stored["model"]
    state["decoder.layers.0.self_attn.in_proj_bias"] = torch.zeros(96)
    assert "in_proj_bias or decoder.layers.0.self_attn.q_proj.bias, found both" in error_of(folder(stored))


def test_packed_attention_of_another_shape_is_refused(stored, folder):
    stored["model"]["decoder.layers.0.self_attn.in_proj_weight"] = torch.zeros(64, 32)
    assert "in_proj_weight to be floats of shape [96, 32], found torch.float32 of [64, 32]" in error_of(folder(stored))


def test_files_from_before_torch_1_6_are_read(stored, folder):
    assert same_weights(folder(stored, _use_new_zipfile_serialization=False))


def test_arguments_of_a_cfg_are_read(stored, folder):
    stored["cfg"] = {"model": {"_name": "transformer_lm", **vars(stored.pop("args"))}, "task": {}}
    stored["args"] = None
    assert same_weights(folder(stored))


def test_a_cfg_whose_model_is_a_namespace_is_read(stored, folder):
    stored["cfg"] = {"model": stored.pop("args")}
    assert same_weights(folder(stored))


def test_old_files_leave_arguments_out(stored, folder):
    """Without --activation-fn everything was ReLU; pre-norm was always on; no_tie_adaptive_proj marked no final norm."""
    for name in ("activation_fn", "decoder_normalize_before", "no_decoder_final_norm", "tie_adaptive_proj"):
        delattr(stored["args"], name)
    for name in ("max_target_positions", "decoder_input_dim", "decoder_output_dim", "layernorm_embedding"):
        delattr(stored["args"], name)
    stored["args"].no_tie_adaptive_proj = False
    stored["args"].adaptive_input_factor = 4.0
    assert same_weights(folder(stored))


def test_sinusoids_that_were_stored_are_ignored(stored, folder):
    stored["model"]["decoder.embed_positions.weights"] = torch.zeros(130, 32)
    assert same_weights(folder(stored))


def test_half_precision_stays_and_mixed_becomes_float32(stored, folder):
    stored["model"] = {key: t.half() if t.is_floating_point() else t for key, t in stored["model"].items()}
    half = config_and_weights(folder(stored))[1]
    assert {tensor.dtype for tensor in half.values()} == {torch.float16}
    stored["model"][FC1] = stored["model"][FC1].float()
    mixed = config_and_weights(folder(stored))[1]
    assert {tensor.dtype for tensor in mixed.values()} == {torch.float32}
    assert torch.equal(mixed["model.layers.0.fc1.weight"], half["model.layers.0.fc1.weight"].float())


def test_the_context_is_what_the_positions_were_built_for(stored, folder):
    stored["args"].max_target_positions = 96
    assert config_and_weights(folder(stored))[0].max_position_embeddings == 96
    stored["args"].max_target_positions = None
    assert config_and_weights(folder(stored))[0].max_position_embeddings == 128


# ---- arguments the network has no form for


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adaptive_input", False),
        ("tie_adaptive_weights", False),
        ("tie_adaptive_proj", False),
        ("decoder_normalize_before", False),
        ("no_decoder_final_norm", False),
        ("activation_fn", "gelu"),
        ("decoder_learned_pos", True),
        ("no_token_positional_embeddings", True),
        ("no_scale_embedding", True),
        ("layernorm_embedding", True),
        ("character_embeddings", True),
        ("decoder_layers_to_keep", "0,2"),
        ("decoder_input_dim", 16),
        ("decoder_output_dim", 16),
        ("decoder_layers", 0),
        ("decoder_layers", True),
        ("decoder_attention_heads", "four"),
        ("decoder_ffn_embed_dim", float("nan")),
        ("decoder_embed_dim", None),
        ("adaptive_input_factor", 2.5),
        ("adaptive_softmax_factor", 2),
        ("adaptive_softmax_cutoff", "60,170"),
        ("adaptive_softmax_cutoff", None),
        ("adaptive_input_cutoff", "160,60"),
        ("adaptive_input_cutoff", "many"),
        ("max_target_positions", 0),
    ],
)
def test_an_argument_without_a_form_here_is_refused_by_name(stored, folder, name, value):
    setattr(stored["args"], name, value)
    message = error_of(folder(stored))
    assert f"expected {name}" in message
    assert str([60, 170] if value == "60,170" else value) in message


@pytest.mark.parametrize(
    "name",
    [
        "decoder_layers",
        "decoder_embed_dim",
        "decoder_ffn_embed_dim",
        "decoder_attention_heads",
        "adaptive_input_cutoff",
        "adaptive_softmax_cutoff",
        "adaptive_input_factor",
        "adaptive_softmax_factor",
        "tie_adaptive_weights",
        "tie_adaptive_proj",
        "no_decoder_final_norm",
        "adaptive_input",
    ],
)
def test_no_argument_is_made_up(stored, folder, name):
    delattr(stored["args"], name)
    assert f"expected {name}" in error_of(folder(stored))


def test_pre_norm_is_not_assumed_of_a_cfg(stored, folder):
    delattr(stored["args"], "decoder_normalize_before")
    stored["cfg"] = {"model": vars(stored.pop("args"))}
    assert "expected decoder_normalize_before to be True" in error_of(folder(stored))


def test_a_final_norm_asked_for_by_its_old_name_is_refused(stored, folder):
    stored["args"].decoder_final_norm = True
    assert "expected no_decoder_final_norm to be True" in error_of(folder(stored))


def test_sizes_that_do_not_go_together_are_refused(stored, folder):
    stored["args"].decoder_attention_heads = 5
    assert "5 heads" in error_of(folder(stored))


@pytest.mark.parametrize(
    ("change", "found"),
    [({"args": None}, "args: NoneType"), ({"args": None, "cfg": {"task": {}}}, "args: NoneType, cfg: dict")],
)
def test_missing_arguments_say_what_was_found(stored, folder, change, found):
    assert error_of(folder(stored | change)).endswith(f"found {found}")


# ---- weights that do not fit


@pytest.mark.parametrize("key", [FC1, HEAD, FIRST, "decoder.adaptive_softmax.head.class_proj.weight"])
def test_a_missing_key_is_named(stored, folder, key):
    del stored["model"][key]
    message = error_of(folder(stored))
    if key == FIRST:  # a table less is also a vocabulary less
        assert "expected 336 words" in message
    else:
        assert f"expected the key {key} of shape" in message


def test_a_wrong_shape_is_named(stored, folder):
    stored["model"][FC1] = torch.zeros(64, 31)
    assert f"{FC1} to be floats of shape [64, 32], found torch.float32 of [64, 31]" in error_of(folder(stored))


def test_whole_numbers_for_weights_are_refused(stored, folder):
    stored["model"][FC1] = torch.zeros(64, 32, dtype=torch.int8)
    assert f"{FC1} to be floats of shape [64, 32], found torch.int8" in error_of(folder(stored))


@pytest.mark.parametrize("key", ["decoder.layer_norm.weight", "decoder.layers.3.fc1.weight", "encoder.version"])
def test_an_unknown_key_is_named(stored, folder, key):
    stored["model"][key] = torch.zeros(32)
    assert error_of(folder(stored)).endswith(f"found {key}")


@pytest.mark.parametrize(
    ("key", "tied"),
    [
        (HEAD, FIRST),
        ("decoder.adaptive_softmax.tail.0.0.weight", "decoder.embed_tokens.embeddings.1.1.weight"),
        ("decoder.adaptive_softmax.tail.1.2.weight", "decoder.embed_tokens.embeddings.2.0.weight"),
    ],
)
def test_tied_copies_that_differ_in_one_number_are_refused(stored, folder, key, tied):
    stored["model"][key] = stored["model"][key].clone()
    assert same_weights(folder(stored))  # a copy alone is no difference
    stored["model"][key][3, 1] += 1e-3
    assert f"expected {key} to equal {tied}" in error_of(folder(stored))


def test_a_softmax_without_its_version_is_refused(stored, folder):
    """fairseq reads the bands of such files one row off, so the same weights would mean another model."""
    del stored["model"]["decoder.adaptive_softmax.version"]
    assert "expected the key decoder.adaptive_softmax.version" in error_of(folder(stored))


def test_a_weight_that_is_no_tensor_is_refused(stored, folder):
    stored["model"][FC1] = [1.0]
    assert f"expected a tensor at {FC1}, found a list" in error_of(folder(stored))


# ---- files that are not what they should be


@pytest.mark.parametrize("kept", [0, 1, 30, 5000, 0.5, 0.999])
@pytest.mark.parametrize("archive", [True, False])
def test_a_truncated_file_is_one_line(stored, folder, kept, archive):
    path = folder(stored, _use_new_zipfile_serialization=archive) / "model.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    assert "found a damaged or foreign file" in error_of(path.parent)


@pytest.mark.parametrize("layers", [4, 10**9])
def test_more_layers_than_the_file_has_are_refused_before_they_are_named(stored, folder, layers):
    stored["args"].decoder_layers = layers
    assert re.search(rf"expected the {layers:,} layers of its decoder_layers, found tensors of 3$", error_of(folder(stored)))


def test_a_tensor_that_repeats_itself_beyond_the_file_is_refused_before_it_is_copied(stored, folder):
    stored["model"][FC1] = torch.zeros(1).expand(1 << 40, 32)
    assert re.search(rf"expected no more than its [\d,]+ bytes, found \[{1 << 40}, 32\] at {FC1}$", error_of(folder(stored)))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1 << 40, device="meta"), torch.zeros(64, 32).to_sparse()], ids=["nowhere", "sparse"]
)
def test_numbers_that_are_not_stored_are_refused(stored, folder, tensor):
    stored["model"][FC1] = tensor
    assert re.search(rf"expected stored numbers at {FC1}, found torch.\w+ on \w+$", error_of(folder(stored)))


def test_an_archive_that_is_compressed_is_refused_before_it_is_unpacked(stored, folder):
    made = folder(stored)
    with zipfile.ZipFile(made / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    assert re.search(
        r"model\.pt: expected weights that are not compressed, found [\d,]+ bytes that unpack to 50,000,000$", error_of(made)
    )


def laughs():
    """A list of lists that is short on disk and has 2**60 entries when it is written out."""
    nested = ["ha"]
    for _ in range(60):
        nested = [nested, nested]
    return nested


@pytest.mark.parametrize("name", ["decoder_layers", "activation_fn", "decoder_output_dim", "adaptive_input_cutoff"])
@pytest.mark.parametrize("value", ["digits", "lists"])
def test_an_argument_that_is_endless_is_shown_in_a_few_words(stored, folder, name, value):
    setattr(stored["args"], name, 10**600 if value == "digits" else laughs())
    message = error_of(folder(stored))
    assert f"expected {name} to " in message
    assert len(message) < 500


def test_a_byte_that_changed_in_a_weight_is_found(stored, folder):
    path = folder(stored) / "model.pt"
    raw = bytearray(path.read_bytes())
    raw[raw.index(stored["model"][FC1].numpy().tobytes()) + 100] ^= 0x40
    path.write_bytes(raw)
    assert "checksum" in error_of(path.parent)


@pytest.mark.parametrize("content", [b"hello, this is no checkpoint", b"PK\x03\x04", pickle.dumps({"model": {}})])
def test_a_foreign_file_is_one_line(folder, content):
    made = folder({})
    (made / "model.pt").write_bytes(content)
    assert "weights_only" not in error_of(made)  # torch's advice is to run the file


class Trap:
    """A pickle that makes a file when it is run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_that_would_run_something_does_not(stored, folder, tmp_path, archive):
    trap = tmp_path / "sprung"
    stored["extra_state"] = {"harmless": Trap(trap)}
    made = folder(stored, _use_new_zipfile_serialization=archive)
    message = error_of(made)
    assert "mkdir, which is not run" in message
    assert not trap.exists()
    with torch.serialization.safe_globals([argparse.Namespace]):  # the trap is a real one
        torch.load(made / "model.pt", weights_only=False)
    assert trap.exists()


def test_another_class_in_the_pickle_is_named(stored, folder):
    stored["extra_state"]["where"] = Path("/tmp")
    assert "found pathlib." in error_of(folder(stored))


def test_the_list_of_allowed_classes_is_put_back():
    config_and_weights(TINY)
    assert argparse.Namespace not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize(
    ("checkpoint", "found"), [({}, "nothing"), ({"weights": 1, "step": 2}, "weights, step"), ([1], "a list")]
)
def test_something_else_saved_by_torch_is_refused(folder, checkpoint, found):
    assert error_of(folder(checkpoint)).endswith(f"found {found}")


@pytest.mark.parametrize("name", ["model.pt", "dict.txt"])
def test_a_missing_file_is_named(stored, folder, name):
    made = folder(stored)
    assert is_fairseq(made)
    (made / name).unlink()
    assert not is_fairseq(made)
    assert error_of(made).endswith(f"found no {name}")


def test_a_transformers_folder_is_no_fairseq_folder(stored, folder, tmp_path):
    made = folder(stored)
    (made / "config.json").write_text("{}")
    assert not is_fairseq(made)
    assert not is_fairseq(tmp_path / "nowhere")


# ---- the dictionary


def test_words_keep_their_place_whatever_they_are(tmp_path):
    path = tmp_path / "dict.txt"
    text = (
        "the 12\n@-@ 7\n= 5\n1 4\n\u2028 3\nna\u00efve 2\n#fairseq:overwrite 2\nthe 1 #fairseq:overwrite\nmadeupword0000 0\n"
    )
    path.write_bytes(text.encode())
    words = ["the (overwritten, line 1)", "@-@", "=", "1", "\u2028", "naïve", "#fairseq:overwrite", "the", "madeupword0000"]
    assert read_words(path) == words
    path.write_bytes(text.replace("\n", "\r\n").removesuffix("\r\n").encode())
    assert read_words(path) == words


@pytest.mark.parametrize(
    "line",
    [
        "word",
        "word ",
        " 3",
        "word three",
        "two words 3",
        "",
        "word 3 #fairseq",
        "word 3.5",
        "the 2",
        "<unk> 9",
        "</s> 9 #fairseq:overwrite",
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "dict.txt"
    path.write_text(f"the 5\n{line}\nof 3\n", "utf-8")
    with pytest.raises(ModelError, match=r"dict.txt, line 2: expected"):
        read_words(path)


def test_a_dictionary_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_bytes("naïve 2\n".encode("latin-1"))
    with pytest.raises(ModelError, match="expected UTF-8 text, found byte 2"):
        read_words(path)


@pytest.mark.parametrize("change", [-1, 1, -300])
def test_a_dictionary_of_another_length_is_refused(stored, folder, change):
    path = folder(stored) / "dict.txt"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:change] if change < 0 else [*lines, "more 1\n"]), "utf-8")
    message = error_of(path.parent)
    assert "expected 396 words" in message
    assert f"found {396 + change};" in message


# ---- the tokenizer, and a folder for transformers


def test_load_gives_model_and_tokenizer(reference):
    model, tokenizer = load_fairseq(TINY)
    assert not model.training
    assert tokenizer.model_max_length == 128
    for number, sentence in enumerate(SENTENCES):
        ids = reference[f"{number}.ids"]
        assert [2, *tokenizer(sentence, add_special_tokens=False).input_ids] == ids.tolist()
        with torch.inference_mode():
            found = model(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(found, reference[f"{number}.log_probs"], rtol=1e-6, atol=1e-5)


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
