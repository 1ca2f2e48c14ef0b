"""Runs of tiny models, a model family each: softmax, gated, adaptive."""

import pytest

from ffmem import build_index, load_model
from tests.tiny import some_text, tiny_model

KINDS = ["gpt2-relu", "gpt2", "llama", "opt-post-norm-projected", "adaptive_lm"]


@pytest.fixture(scope="session")
def made(tokenizer, tmp_path_factory):
    """`made(kind)`: the model, its run over a small text, and the file of that text."""
    kept = {}

    def make(kind):
        if kind not in kept:
            model = load_model(tiny_model(kind), tokenizer=tokenizer)
            folder = tmp_path_factory.mktemp("experiments")
            text = folder / "text.txt"
            text.write_text(some_text(80), "utf-8")
            kept[kind] = model, build_index(model, text, out=folder / "run", top=5, quiet=True), text
        return kept[kind]

    return make
