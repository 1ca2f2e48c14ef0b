"""The edit as lines of Python for transformers alone: run, they give what intervene gives."""

import ast

import pytest
import torch

from ffmem import load_model
from ffmem.live.intervene import intervene
from ffmem.live.recipe import recipe
from tests.tiny import tiny_model

IDS = torch.tensor([[0, 11, 25, 7, 40, 33]])
EDITS = ("L1D3=2", "L2D5,L2D6*-4", "L2D5+1", "L3D0-2")


@pytest.mark.parametrize("at", ["all", "generated", "1:3", "-2", ":"])
def test_the_lines_run_without_ffmem_and_give_the_same_logits_and_text(at, gpt2_folder):
    model = load_model(gpt2_folder)
    source = recipe(model, *EDITS, at=at)
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported == {"torch", "transformers"}
    made = {}
    exec(source, made)
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    settings |= {"attention_mask": torch.ones_like(IDS), "output_logits": True, "return_dict_in_generate": True}
    with intervene(model, *EDITS, at=at), torch.inference_mode():
        expected = model.model(IDS).logits, torch.stack(model.model.generate(IDS, **settings).logits)
    with torch.inference_mode():
        found = made["model"](IDS).logits, torch.stack(made["model"].generate(IDS, **settings).logits)
    torch.testing.assert_close(found, expected)
    for handle in made["handles"]:
        handle.remove()
    plain = model.logits(IDS)
    torch.testing.assert_close(made["model"](IDS).logits, plain)
    assert not torch.allclose(expected[1][1], torch.stack(model.model.generate(IDS, **settings).logits)[1])


@pytest.mark.parametrize("name", ["models/a\nimport os\nos.abort()  #", "a'b\"\\", "x\r\x0cy\u2028z\udcff"])
def test_whatever_a_folder_is_called_the_recipe_has_the_same_statements(name, gpt2_folder):
    model = load_model(gpt2_folder)
    named = type(model)(model.model, model.tokenizer, model.family, name=name)
    nasty = ast.parse(recipe(named, "L1D3=2").encode())
    assert [type(one) for one in nasty.body] == [type(one) for one in ast.parse(recipe(model, "L1D3=2")).body]
    assert [one.value for one in ast.walk(nasty) if isinstance(one, ast.Constant)].count(name) == 2  # tokenizer and model


def test_a_model_in_memory_has_to_be_there_and_one_that_transformers_does_not_know_is_loaded_by_ffmem(llama, tokenizer):
    made = {"model": llama.model}
    exec(recipe(llama, "L1D3=2"), made)
    found = llama.logits(IDS)
    for handle in made["handles"]:
        handle.remove()
    with intervene(llama, "L1D3=2"):
        assert torch.equal(found, llama.logits(IDS))
    adaptive = load_model(tiny_model("adaptive_lm"), tokenizer=tokenizer)
    adaptive.in_memory = False
    assert "import ffmem  # transformers does not know this architecture" in recipe(adaptive, "L1D3=2")


def test_a_revision_and_a_gguf_file_are_named(gpt2):
    gpt2 = load_model(gpt2)
    lines = {}
    for name, revision in (("some/model", "v2"), ("/models/some.gguf", None)):
        stored = type(gpt2)(gpt2.model, gpt2.tokenizer, gpt2.family, name=name, revision=revision)
        lines[name] = recipe(stored, "L1D3=2")
    assert "from_pretrained('some/model', revision='v2', dtype=torch.float32)" in lines["some/model"]
    assert "from_pretrained('/models', gguf_file='some.gguf', dtype=torch.float32)" in lines["/models/some.gguf"]
