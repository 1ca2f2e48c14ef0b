"""All experiments on one run, from Python and from the command line."""

import json
from dataclasses import replace

import pytest

from ffmem import open_index
from ffmem.cli.app import main
from ffmem.errors import FfmemError
from ffmem.experiments import (
    activity,
    agreement,
    composition,
    each_experiment,
    normaliser,
    refinement,
    removal,
    run_experiments,
)
from ffmem.run.registry import all_experiments
from ffmem.run.results import saved_results
from tests.experiments.conftest import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_all_experiments_run_on_every_kind_of_model_and_are_kept(kind, made):
    model, index, _ = made(kind)
    results = run_experiments(index, model=model, examples=12, cells=4, quiet=True)
    assert [result.experiment for result in results] == list(all_experiments())
    assert set(saved_results(index)) >= set(all_experiments())
    for result in results:
        assert {row["layer"] for row in result.rows} == set(range(1, model.layers + 1))
        json.dumps(result.as_dict(), allow_nan=False)
        told = ", ".join(all_experiments()[result.experiment].columns).split(", ")
        assert [column for column in told if column in result.rows[0]] == list(result.rows[0])


def test_only_the_named_ones_run_in_their_order(made):
    model, index, _ = made("gpt2")
    found = run_experiments(index, ["refinement", "activity"], model=model, examples=5, quiet=True)
    assert [result.experiment for result in found] == ["activity", "refinement"]
    assert isinstance(found, list)


def test_one_after_the_other_each_is_made_when_it_is_asked_for(made, monkeypatch):
    model, index, _ = made("gpt2")
    original, asked = all_experiments()["agreement"], []

    def noted(model, index, *, seed, quiet):
        asked.append(seed)
        return original.run(model, index, seed=seed, quiet=quiet)

    monkeypatch.setitem(all_experiments(), "agreement", replace(original, run=noted))
    results = each_experiment(index, ["agreement", "removal"], model=model, cells=2, quiet=True)
    assert next(results).experiment == "removal"
    assert not asked
    assert next(results).experiment == "agreement"
    assert asked == [0]


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"names": ["figures"]}, r"expected experiments among removal, .* found 'figures'"),
        ({"control": "shuffled"}, "expected control random, found 'shuffled'"),
        ({"examples": 0}, "expected examples of at least 1, found 0"),
        ({"cells": -3}, "expected cells of at least 1, found -3"),
        ({"examples": 10**20}, "expected examples of at most 10,000,000, found"),
        ({"seed": -1}, "expected a seed of at least 0 and below 2"),
        ({"seed": 1 << 63}, "expected a seed of at least 0 and below 2"),
    ],
)
def test_what_cannot_be_asked_for_is_told_before_anything_is_opened(request_, told):
    with pytest.raises(FfmemError, match=told):
        each_experiment("there is no such run", **request_)


@pytest.mark.parametrize("experiment", [activity, agreement, composition, normaliser, refinement, removal])
def test_an_experiment_alone_looks_at_its_seed_before_it_looks_for_a_model(experiment, made):
    _, index, _ = made("gpt2")
    with pytest.raises(FfmemError, match="expected a seed of at least 0"):
        experiment(object(), index, seed=-1)


@pytest.fixture(scope="module")
def run(gpt2_folder, tmp_path_factory):
    """A run whose model is a folder, as a user has one."""
    folder = tmp_path_factory.mktemp("cli")
    text = folder / "text.txt"
    text.write_text("The king left the city . The queen found the river .\n" * 3, "utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["index", str(gpt2_folder), str(text), "-o", str(folder / "run"), "-q"])
    assert ended.value.code == 0
    return folder / "run"


def called(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code


def test_the_command_prints_a_table_and_keeps_the_result(run, capsys):
    assert called("experiments", str(run), "activity", "--examples", "4") == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("activity: 4 examples from ")
    assert "(the indexed corpus itself)" in out
    assert out.splitlines()[1].split()[:3] == ["layer", "examples", "active_q1"]
    assert len(out.splitlines()) == 2 + 3 + 1
    assert "results" in err
    assert saved_results(open_index(run)) == ["activity"]


def test_json_is_one_result_a_line(run, capsys, tmp_path):
    other = tmp_path / "eval.txt"
    other.write_text("The river is old .\n" * 5, "utf-8")
    arguments = ["activity", "refinement", "--eval", str(other), "--examples", "3", "--json", "-q"]
    assert called("experiments", str(run), *arguments) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["experiment"] for result in results] == ["activity", "refinement"]
    assert results[0]["settings"]["examples_from"] == str(other)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["figures"], "expected experiments among"),
        (["activity", "--examples", "0"], "expected examples from 1 to"),
        (["activity", "--seed=-1"], "expected seed from 0 to"),
        (["activity", "--control", "none"], "expected control random"),
        (["activity", "--eval", "none.txt"], "none.txt: no such file"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, told):
    assert called("experiments", str(run), *arguments) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ffmem: error:")
    assert told in last
