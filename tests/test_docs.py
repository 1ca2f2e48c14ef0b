"""The docs are true: their code runs, their commands run, their tables name every option and no other."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from ffmem.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["tutorial.md", "live.md", "python.md", "own-experiment.md"])
@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(page, "python"))
    assert code.count("assert") >= 1
    exec(compile(code, page, "exec"), {"__name__": page})
    for console in blocks(page, "console"):
        for line in console.splitlines():
            command = shlex.split(line.removeprefix("$ ffmem "))
            assert line.startswith("$ ffmem ")
            done = subprocess.run(
                [sys.executable, "-m", "ffmem", *command], capture_output=True, text=True, check=False, env=os.environ
            )
            assert done.returncode == 0, f"{line}: {done.stderr}"


def test_the_command_line_page_names_every_option_of_every_verb_and_no_other():
    page = (DOCS / "cli.md").read_text("utf-8")
    sections = dict(re.findall(r"^## ffmem (\w+).*?\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    command = typer.main.get_command(app)
    assert set(sections) == {name for name, one in command.commands.items() if not one.hidden}
    for verb, section in sections.items():
        parameters = command.commands[verb].params
        options = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        known = {option for option in options if option.startswith("--")} - {"--help"}
        told = set(re.findall(r"`(?:-\w`, `)?(--[a-z0-9-]+)", section))
        assert told == known, verb


def test_the_models_page_names_every_family():
    from ffmem.model.families import FAMILIES

    page = (DOCS / "models.md").read_text("utf-8")
    assert all(re.search(rf"\b{name.removesuffix('_text')}\b", page) for name in FAMILIES)


def test_the_python_page_names_every_public_name_and_every_keyword_it_shows_is_one():
    import inspect

    import ffmem

    page = (DOCS / "python.md").read_text("utf-8")
    public = [
        *ffmem.__all__,
        *ffmem.experiments.__all__,
        *(f"reports.{name}" for name in ("judge_claims", "figure", "Claim")),
    ]
    assert [name for name in public if name != "__version__" and not re.search(rf"`[^`]*\b{re.escape(name)}\b", page)] == []
    shown = re.findall(r"`(?:(experiments|reports)\.)?(\w+)\(([^`]*)\)`", page)
    signatures = 0
    for room, name, arguments in shown:
        function = getattr(getattr(ffmem, room) if room else ffmem, name, None)
        if function is None or inspect.isclass(function):
            continue
        signatures += 1
        known = inspect.signature(function).parameters
        if function is not ffmem.experiments.run_experiments:  # its options are those of each_experiment
            assert set(re.findall(r"(\w+)=", arguments)) <= known.keys(), name
    assert signatures > 15


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text("utf-8")
    assert all(page.name in navigation for page in DOCS.glob("*.md"))
