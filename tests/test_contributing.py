"""What CONTRIBUTING.md shows can be added as it is shown."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from ffmem import load_model
from ffmem.model import families
from tests.tiny import tiny_model

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")


def shown(section):
    """The code of a section, block by block."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_a_family_is_a_row(monkeypatch, tokenizer):
    (row,) = shown("A family")
    model = tiny_model("codegen")
    assert load_model(model, tokenizer=tokenizer).family.name != "codegen"  # as yet it is found by shape
    family = eval(row, vars(families))
    monkeypatch.setitem(families.FAMILIES, family.name, family)
    loaded = load_model(model, tokenizer=tokenizer)  # which compares what is read with what the model does
    assert (loaded.family.name, loaded.layers) == ("codegen", 3)


@pytest.fixture
def command(monkeypatch):
    """The function and the command of the page, each in a module of its own."""
    made = []
    for name, code in zip(("ffmem.run.silent", "silent_command"), shown("A command"), strict=True):
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(code, name, "exec"), vars(module))
        made.append(module.silent)
    return made


def test_a_command_is_a_function_and_what_prints_it(command, built):
    function, printing = command
    app = typer.Typer()
    app.command()(printing)
    assert function(built) == []
    done = CliRunner().invoke(app, [str(built), "--json"])
    assert (done.exit_code, done.output) == (0, "[]\n")
    assert CliRunner().invoke(app, [str(built), "--most", "2"]).output == "\n"
