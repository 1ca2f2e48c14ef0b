"""Tiny models of every family, loaded once a session."""

from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ffmem.model.loading import load_model
from tests.tiny import VARIANTS, VOCABULARY, tiny_model

IDS = torch.arange(3, 27).reshape(2, 12) * 5 % VOCABULARY


@pytest.fixture
def ids():
    """Two texts of twelve tokens."""
    return IDS


@pytest.fixture(scope="session")
def memories(tokenizer):
    """The memories of a tiny variant: `memories("gpt2", torch.bfloat16)`. Shared: change nothing."""

    @cache
    def load(variant, dtype=torch.float32):
        return load_model(tiny_model(variant, dtype=dtype), tokenizer=tokenizer)

    return load


@pytest.fixture(scope="session")
def recorded(memories):
    """What flows through a tiny variant on `ids`. Shared: change nothing."""
    return cache(lambda variant, dtype=torch.float32: memories(variant, dtype).record(IDS))


@pytest.fixture(scope="session")
def changed():
    """A tiny model of a variant with other settings of its config: `changed("gpt2", n_layer=1)`."""

    def build(variant, model_type=None, **settings):
        own_type, own_settings = VARIANTS[variant]
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type or own_type, **(own_settings | settings))
        ).eval()

    return build


@pytest.fixture
def save(tmp_path, tokenizer):
    """Save a model with the word tokenizer as a user has it: `folder = save(model)`."""

    def to_folder(model, name="saved"):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return to_folder
