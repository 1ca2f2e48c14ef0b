"""A GGUF file, written here with the gguf package, is loaded through transformers and read like any model."""

import struct
import time

import gguf
import pytest
import torch

from ffmem import build_index, convert, load_model
from ffmem.errors import ModelError
from ffmem.model import process
from ffmem.model.loading import stored_model
from ffmem.model.shape import shape_of
from tests.tiny import WORDS, tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@pytest.fixture(scope="module")
def source():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def gguf_file(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = source.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    words = ["</s>", "ab", *(f"Ġ{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz.,"][: config.vocab_size]
    words += [f"<{number}>" for number in range(config.vocab_size - len(words))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] + [1] * (len(words) - 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in source.state_dict().items():
        stem, _, kind = name.rpartition(".")
        stem = stem.replace("model.layers.", "blk.")
        for ours, theirs in NAMES.items():
            stem = stem.replace(ours, theirs)
        writer.add_tensor(f"{stem}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_the_memories_it_was_made_from(gguf_file, source, tmp_path):
    model = load_model(gguf_file)
    assert (model.family.name, model.cells) == ("llama", [64, 64, 64])
    for layer in (1, 2, 3):
        assert torch.equal(model.values(layer), source.model.layers[layer - 1].mlp.down_proj.weight.T)
        assert torch.equal(model.keys(layer), source.model.layers[layer - 1].mlp.gate_proj.weight)
    index = build_index(model, ["a b c d", "c a b"], out=tmp_path / "run", unit="line", quiet=True)
    assert index.counts.tokens > 0
    assert index.manifest.model.name == str(gguf_file)


def test_the_file_is_parsed_once_a_load_and_the_package_is_left_as_it_was(gguf_file, monkeypatch):
    before = gguf.GGUFReader
    parsed = []
    plain = gguf.GGUFReader.__init__
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda self, *args: parsed.append(args) or plain(self, *args))
    for times in (1, 2):
        stored_model(str(gguf_file))
        assert len(parsed) == times
    assert gguf.GGUFReader is before


def test_a_file_is_converted_to_a_folder_with_the_same_coefficients(gguf_file, tmp_path, ids):
    folder = convert(gguf_file, tmp_path / "folder")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert "quantization" not in (folder / "config.json").read_text()
    before, after = load_model(gguf_file), load_model(folder)
    assert after.tokenizer("a b c d")["input_ids"] == before.tokenizer("a b c d")["input_ids"]
    for ours, theirs in zip(before.record(ids).m, after.record(ids).m, strict=True):
        assert torch.equal(ours, theirs)


def test_a_gguf_file_has_no_rows(gguf_file, tmp_path):
    with pytest.raises(ModelError, match=r"expected a model of the paper's kind \(adaptive_lm\), found a LlamaForCausalLM"):
        convert(gguf_file, tmp_path / "folder", rows8=True)
    assert not list(tmp_path.iterdir())


def test_a_plan_reads_the_shape_of_a_gguf_file(gguf_file, source):
    shape = shape_of(gguf_file)
    assert shape.parameters == sum(one.numel() for one in source.parameters())


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_extra_the_error_says_what_to_install(gguf_file, monkeypatch, package):
    monkeypatch.setattr(process, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(ModelError, match=rf"needs the {package} package: pip install 'ffmem\[gguf\]'"):
        load_model(gguf_file)


STRINGS = struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"


def array(kind, length):
    return struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, length)


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + STRINGS + array(4, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + STRINGS + array(8, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + STRINGS + struct.pack("<Q1sIQQIQ", 1, b"t", 2, 2**40, 2**40, 0, 0),
    ],
    ids=["magic", "tensors", "values", "numbers", "strings", "shape"],
)
def test_counts_that_the_file_is_too_short_for_are_refused_at_once(content, tmp_path):
    path = tmp_path / "short.gguf"
    path.write_bytes(content)
    begin = time.monotonic()
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < 3


def test_a_file_cut_short_is_one_line(gguf_file, tmp_path):
    content = gguf_file.read_bytes()
    for share in (0.05, 0.3, 0.999):
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(ModelError, match="expected a causal language model"):
            load_model(path)


def test_a_file_whose_layers_are_not_there_is_refused(gguf_file, tmp_path):
    content = gguf_file.read_bytes()
    at = content.index(b"llama.block_count") + len("llama.block_count") + 4
    path = tmp_path / "layers.gguf"
    path.write_bytes(content[:at] + struct.pack("<I", 10**9) + content[at + 4 :])
    with pytest.raises(ModelError, match=r"expected num_hidden_layers to be 1 to 1,024, found 1,000,000,000"):
        load_model(path)
