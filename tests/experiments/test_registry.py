"""An experiment of another package: one file, found by its entry point, run, drawn and judged as the paper's are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ffmem.run.registry import all_experiments, registered

TOY = '''
"""How much of a layer's work does its largest cell do?"""

import numpy as np

from ffmem.experiments import Claim, Experiment, Figure, Measure, Panel, Reading, Result, Rule, curve_of, followed


class Largest:
    """Median share of a layer's mass that its largest cell carries."""

    def __init__(self, model, examples):
        self.sizes = [model.values(layer).float().norm(dim=1) for layer in range(1, model.layers + 1)]
        self.shares = np.zeros((model.layers, len(examples)))

    def see(self, seen):
        for at, sizes in enumerate(self.sizes):
            mass = seen.places.m[at].float().abs() * sizes
            self.shares[at, seen.numbers] = (mass.amax(1) / mass.sum(1).clamp_min(1e-12)).cpu().numpy()

    def result(self, settings):
        rows = [{"layer": layer, "share": float(np.median(of))} for layer, of in enumerate(self.shares, 1)]
        return Result("toy", settings["seed"], settings, rows)


def panels(result, axis, control):
    return [Panel("", "mass of the layer", [curve_of(result, axis, "share")], axis)]


def claims():
    def read(result):
        return Reading("", [Measure("", lambda sample: sample.rows[-1]["share"], Rule(above=0), of="in the last layer")])

    return [Claim("toy-some", "Toy", "The largest cell carries some of the mass.", "", "share above 0", read)]


EXPERIMENT = Experiment(
    name="toy",
    question=__doc__,
    columns={"layer": "from 1", "share": "median share of the mass"},
    run=followed(Largest),
    observer=Largest,
    figures=[Figure("toy", "Toy", "Does one cell do most?", "A curve over the layers.", "Shares by layer.", panels)],
    claims=claims,
)
'''
RUN = """
import sys, ffmem
from ffmem.cli.app import main
from ffmem.run.folder import RunFolder, is_part

run, text = sys.argv[1:]
assert "toy" in ffmem.experiments.__all__ and callable(ffmem.experiments.toy)
assert not {"torch", "transformers"} & set(sys.modules)
assert is_part("results/toy.json") and is_part("figures/toy.svg") and not is_part("figures/toys.svg")
for arguments in (["experiments", run, "toy", "activity", "--eval", text, "--examples", "5"], ["report", run]):
    try:
        main([*arguments, "-q"])
    except SystemExit as ended:
        assert not ended.code, ended.code
index = ffmem.open_index(run)
found = ffmem.experiments.toy(None, index, text, examples=5, quiet=True)
assert "toy" in str(found.plot().to_dict())
RunFolder(run).clear("results", "figures")
assert RunFolder(run).names("results") == RunFolder(run).names("figures") == []
"""


@pytest.fixture
def package(tmp_path):
    """A package of one file and its entry point, as pip would leave it."""

    def make(value="its_toy:EXPERIMENT", name="toy", code=TOY):
        folder = tmp_path / "site"
        (folder / "its_toy-1.0.dist-info").mkdir(parents=True)
        (folder / "its_toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: its-toy\nVersion: 1.0\n")
        (folder / "its_toy-1.0.dist-info" / "entry_points.txt").write_text(f"[ffmem.experiments]\n{name} = {value}\n")
        (folder / "its_toy.py").write_text(code)
        return folder

    return make


def python(folder, code, *arguments):
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )


@pytest.mark.slow
def test_an_experiment_of_one_file_is_run_drawn_judged_and_known_to_be_of_the_run(package, gpt2_folder, text_file, tmp_path):
    from ffmem import build_index

    run = build_index(str(gpt2_folder), text_file, out=tmp_path / "run", quiet=True).path
    code = RUN.replace("RunFolder(run).clear", "page = open(f'{run}/report.html').read()\nRunFolder(run).clear")
    done = python(package(), code + "print(page)", str(run), str(text_file))
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert out.startswith("toy: ") or "\ntoy: 5 examples" in out
    page = out[out.index("<!doctype html>") :]
    assert "Toy. Does one cell do most?" in page
    assert "The largest cell carries some of the mass." in page
    assert 'id="toy-1-spec"' in page
    assert json.dumps("Shares by layer.") in page


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({"value": "its_toy:NOTHING"}, "the experiment toy of its-toy cannot be imported"),
        ({"name": "other"}, "its-toy: expected an experiment called other, found 'toy'"),
        ({"name": "agreement"}, "its-toy registers an experiment 'agreement'"),
        ({"name": "causal"}, "its-toy registers an experiment 'causal'"),
        (
            {"code": TOY.replace('Figure("toy"', 'Figure("photo"')},
            "the experiment toy of its-toy: expected figures called toy, toy_2 and so on, found 'photo'",
        ),
    ],
)
def test_what_cannot_be_an_experiment_is_one_line_that_names_its_package(package, made, told):
    done = python(package(**made), "from ffmem.run.results import check_request; check_request()")
    assert done.returncode == 1
    assert f"FfmemError: {told}" in done.stderr.splitlines()[-1]


def test_the_docs_table_is_what_the_experiments_declare():
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text("utf-8")
    for name, experiment in all_experiments().items():
        figures = ", ".join(figure.number.removeprefix("Fig ") for figure in experiment.figures)
        columns = ", ".join(f"`{column}` ({meaning})" for column, meaning in experiment.columns.items())
        assert f"| `{name}` | {figures} | {experiment.question} | {columns} |" in page


def test_every_file_of_questions_is_an_experiment_and_none_loads_torch():
    assert list(all_experiments()) == ["removal", "agreement", "activity", "composition", "refinement", "normaliser"]
    assert set(registered()) == set(all_experiments())
    code = "import sys; from ffmem.run.registry import all_experiments; all_experiments(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
