"""Which experiments there are: the paper's, and those of packages; tests/test_contributing.py runs one of these."""

import subprocess
import sys
from pathlib import Path

import pytest

from ffmem.run.registry import all_experiments, registered
from tests.packages import install, python

TOY = """
from ffmem.experiments import Experiment, Figure

figure = Figure("toy", "Toy", "Does one cell do most?", "A curve over the layers.", "Shares by layer.", lambda *_: [])
EXPERIMENT = Experiment("toy", "How much does its largest cell do?", {}, run=print, figures=[figure])
"""


@pytest.mark.parametrize(
    ("name", "value", "code", "told"),
    [
        ("toy", "its_toy:NOTHING", TOY, "the experiment toy of toy cannot be imported"),
        ("other", "its_toy:EXPERIMENT", TOY, "toy: expected an experiment called other, found 'toy'"),
        ("agreement", "its_toy:EXPERIMENT", TOY, "toy registers an experiment 'agreement'"),
        ("causal", "its_toy:EXPERIMENT", TOY, "toy registers an experiment 'causal'"),
        (
            "toy",
            "its_toy:EXPERIMENT",
            TOY.replace('Figure("toy"', 'Figure("photo"'),
            "the experiment toy of toy: expected figures called toy, toy_2 and so on, found 'photo'",
        ),
    ],
)
def test_what_cannot_be_an_experiment_is_one_line_that_names_its_package(tmp_path, name, value, code, told):
    site = install(tmp_path, {"its_toy.py": code}, {"ffmem.experiments": {name: value}})
    done = python(site, "from ffmem.run.results import check_request; check_request()")
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
