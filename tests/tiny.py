"""Tiny random models of every family and config variant, a word tokenizer, and text to feed them."""

from __future__ import annotations

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = (
    "the a of in to and is was by for with on as from at it that he she they river city king queen war army sea "
    "mountain capital country France Norway Spain Paris Oslo Madrid year century music film game song red green blue "
    "old new first last great small north south east west played wrote built found left right one two three . , ! ?"
).split()
VOCABULARY = 101

_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_HEADS = _LLAMA | {"head_dim": 8}
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
_NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "max_position_embeddings": 64,
    "window_size": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_ADAPTIVE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "cutoffs": [20, 60],
    "max_position_embeddings": 64,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2", _GPT),
    "gpt2-relu": ("gpt2", _GPT | {"activation_function": "relu"}),
    "gpt_neo": ("gpt_neo", _NEO),
    "gptj": ("gptj", _GPT | {"rotary_dim": 4}),
    "gpt_neox-parallel": ("gpt_neox", _LLAMA),
    "gpt_neox-sequential": ("gpt_neox", _LLAMA | {"use_parallel_residual": False}),
    "opt": ("opt", _OPT),
    "opt-post-norm-projected": ("opt", _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "bloom": ("bloom", _BLOOM),
    "bloom-residual-post-layernorm": ("bloom", _BLOOM | {"apply_residual_connection_post_layernorm": True}),
    "falcon-parallel": ("falcon", _LLAMA),
    "falcon-new": ("falcon", _LLAMA | {"new_decoder_architecture": True}),
    "falcon-new-one-norm": ("falcon", _LLAMA | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    "falcon-sequential-alibi": ("falcon", _LLAMA | {"parallel_attn": False, "bias": True, "alibi": True}),
    "llama": ("llama", _LLAMA),
    "llama-mlp-bias": ("llama", _LLAMA | {"mlp_bias": True}),
    "llama-tied": ("llama", _LLAMA | {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", _LLAMA | {"sliding_window": 8}),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", _HEADS),
    "gemma": ("gemma", _HEADS | {"pad_token_id": 0}),
    "gemma2": ("gemma2", _HEADS | {"pad_token_id": 0, "sliding_window": 8}),
    "gemma3": ("gemma3_text", _HEADS | {"pad_token_id": 0, "sliding_window": 8}),
    "phi": ("phi", _LLAMA),
    "phi3": ("phi3", _LLAMA | {"pad_token_id": 0}),
    "olmo2": ("olmo2", _LLAMA),
    "stablelm-sequential": ("stablelm", _LLAMA | {"use_parallel_residual": False}),
    "stablelm-parallel": ("stablelm", _LLAMA | {"use_parallel_residual": True}),
    "starcoder2": ("starcoder2", _LLAMA),
    "adaptive_lm": ("adaptive_lm", _ADAPTIVE),
}
UNKNOWN: dict[str, tuple[str, dict[str, object]]] = {
    "cohere": ("cohere", _LLAMA),
    "olmo": ("olmo", _LLAMA),
    "exaone4": ("exaone4", _LLAMA),
    "nemotron": ("nemotron", _LLAMA),
    "gpt_bigcode": ("gpt_bigcode", _GPT),
    "codegen": ("codegen", _GPT | {"rotary_dim": 4}),
    "xglm": (
        "xglm",
        {"vocab_size": VOCABULARY, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}
        | {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0},
    ),
}
"""Architectures that are not in the table and must be found by shape."""


def tiny_model(variant: str, *, seed: int = 0, dtype: torch.dtype = torch.float32):
    """A random model, its norms and biases shaken so that none of them is the identity."""
    from ffmem.model.adaptive.network import register

    register()
    model_type, settings = (VARIANTS | UNKNOWN)[variant]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.dim() == 1 else 0.05))
    return model.to(dtype).eval()


def silent_gpt2(size: int) -> GPT2LMHeadModel:
    """One ReLU layer of four cells with all weights at zero, as wide as its vocabulary: a test plants what it needs."""
    config = GPT2Config(
        vocab_size=size,
        n_embd=size,
        n_layer=1,
        n_head=1,
        n_inner=4,
        activation_function="relu",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token a word; unknown words are <unk>. Ids 0 to 2 are special."""
    names = ["</s>", "<unk>", "<pad>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def some_sentences(count: int, *, seed: int = 0, longest: int = 14) -> list[str]:
    """Random sentences of known words; short ones repeat, and many share a beginning."""
    chooser = random.Random(seed)
    words = [word for word in WORDS if word.isalpha()]
    sentences = []
    for _ in range(count):
        length = chooser.choice([1, 2, 3, *range(3, longest)])
        begin = chooser.choice(["the", "a", "he", "the river"])
        sentences.append(" ".join([begin, *chooser.choices(words, k=length)]) + " .")
    return sentences


def some_text(count: int, *, seed: int = 0) -> str:
    """The same as paragraphs of a few sentences under WikiText headings."""
    sentences = [sentence[0].upper() + sentence[1:] for sentence in some_sentences(count, seed=seed)]
    lines = [" = A Title = "]
    for begin in range(0, count, 4):
        lines += [" ".join(sentences[begin : begin + 4]), ""]
    return "\n".join(lines) + "\n"
