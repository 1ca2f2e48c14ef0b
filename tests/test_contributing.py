"""What CONTRIBUTING.md shows can be added as it is shown, and so can the experiment of docs/own-experiment.md."""

import csv
import json
import re
import sys
import tomllib
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from ffmem import load_model, open_index
from ffmem.model import families
from tests.packages import install, python
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
OWN = (ROOT / "docs" / "own-experiment.md").read_text("utf-8")


def blocks(text, kind="python"):
    """The blocks of code of this kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shown(section, kind="python"):
    """The code of a section, block by block."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return blocks(text, kind)


def test_a_family_is_a_row(monkeypatch, tokenizer):
    (row,) = shown("A family")
    model = tiny_model("codegen")
    assert load_model(model, tokenizer=tokenizer).family.name != "codegen"  # as yet it is found by shape
    family = eval(row, vars(families))
    monkeypatch.setitem(families.FAMILIES, family.name, family)
    loaded = load_model(model, tokenizer=tokenizer)  # which compares what is read with what the model does
    assert (loaded.family.name, loaded.layers) == ("codegen", 3)


@pytest.fixture
def site(tmp_path):
    """A folder in which the experiment and the statistic of the page are installed, with the experiment of the docs, as one
    package."""
    modules, points = {}, {}
    here = [(shown(section), shown(section, "toml")) for section in ("An experiment", "A statistic")]
    for (code, *_), (toml,) in [*here, (blocks(OWN), blocks(OWN, "toml"))]:
        ((group, of),) = tomllib.loads(toml)["project"]["entry-points"].items()
        (value,) = of.values()
        points.setdefault(group, {}).update(of)
        modules[value.partition(":")[0].replace(".", "/") + ".py"] = code
    return install(tmp_path / "site", modules, points)


COMMANDS = """
import sys
from contextlib import redirect_stdout
import ffmem
from ffmem.cli.app import main
from ffmem.run.folder import RunFolder, is_part

model, text, folder = sys.argv[1:]
run = f"{folder}/run"
assert "silence" in ffmem.experiments.__all__ and callable(ffmem.experiments.silence)
assert is_part("results/silence.json") and is_part("figures/silence.svg") and not is_part("figures/silences.svg")
assert not {"torch", "transformers"} & set(sys.modules)


def ffmem_command(name, *arguments):
    with open(f"{folder}/{name}.out", "a") as out, redirect_stdout(out):
        try:
            main([name, *arguments])
        except SystemExit as ended:
            assert not ended.code, (name, ended.code)


ffmem_command("index", model, text, "-o", run, "-q")
ffmem_command("experiments", run, "silence", "-q")
ffmem_command("experiments", run, "silence", "--eval", text, "--control", "random", "-q")
ffmem_command("experiments", run, "concentration", "activity", "--eval", text, "--examples", "5", "-q")
ffmem_command("report", run, "-q")
ffmem_command("show", run, "L2D9", "--json")
ffmem_command("export", run, "cells", "--format", "csv", "-o", f"{folder}/cells.csv")
ffmem_command("export", run, "cells", "-o", f"{folder}/cells.jsonl")
index = ffmem.open_index(run)
assert ffmem.experiments.silence(None, index).plot().to_dict()
with open(f"{folder}/page.html", "w") as page:
    page.write(open(f"{run}/report.html").read())
RunFolder(run).clear("results", "figures")
assert RunFolder(run).names("results") == RunFolder(run).names("figures") == []
"""


@pytest.mark.slow
def test_an_experiment_is_a_file_and_a_statistic_a_class(site, gpt2_folder, text_file, tmp_path):
    done = python(site, COMMANDS, gpt2_folder, text_file, tmp_path)
    assert done.returncode == 0, done.stderr

    cells = open_index(tmp_path / "run").table("cells")
    layer, triggers, strong = (cells.column(name).to_numpy() for name in ("layer", "positive_triggers", "strong"))
    silent = [[str(one), f"{(triggers[layer == one] == 0).mean():.4g}"] for one in (1, 2, 3)]
    asked, control, *observed = (tmp_path / "experiments.out").read_text("utf-8").split("\n\n")
    assert [line.split() for line in asked.splitlines()[1:]] == [["layer", "silent"], *silent]
    assert control.startswith("silence")
    assert sorted(one.partition(":")[0] for one in observed if one.strip()) == ["activity", "concentration"]
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Own. Who is silent?" in page
    assert 'id="silence-1-spec"' in page
    assert json.dumps("Shares by layer.") in page
    assert "Most cells of every layer fire." in page
    assert "largest share below 50%" in page
    assert "No cell does half of a layer's work." in unescape(page)

    assert 0 < strong.sum() < cells.column("active").to_numpy().sum()
    row = 9 + int((layer == 1).sum())
    assert json.loads((tmp_path / "show.out").read_text("utf-8"))["stats"]["strong"] == strong[row]
    with (tmp_path / "cells.csv").open(encoding="utf-8", newline="") as file:
        assert [int(row["strong"]) for row in csv.DictReader(file)] == strong.tolist()
    lines = (tmp_path / "cells.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["strong"] for line in lines] == strong.tolist()


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
