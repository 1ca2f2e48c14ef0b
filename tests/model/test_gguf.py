"""A GGUF file, written here with the gguf package, is loaded through transformers and read like any model."""

import gguf
import pytest
import torch

from ffmem import build_index, load_model
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
    assert index.counts["tokens"] > 0
    assert index.manifest.model.name == str(gguf_file)
