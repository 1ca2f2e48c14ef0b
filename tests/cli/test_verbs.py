"""Every command is a Python function of the same name: the same arguments in the same order, options and defaults."""

import inspect

import pytest
import typer.main

import ffmem
from ffmem.cli.app import app
from ffmem.model.loading import load_model

COMMANDS = {verb: one for verb, one in typer.main.get_command(app).commands.items() if not one.hidden}
OTHER_NAMES = {"experiments": "experiments.each_experiment"}
"""`ffmem.experiments` is the package of all experiments."""
PRINTED = {"as_json", "export"}
"""Options that say what is printed, not what is done."""
SHELL_ONLY = {"show": {"top"}}
"""More of them: a cell in Python has all its triggers and tokens."""
PYTHON_ONLY = {
    "index": {"announce"},
    "train": {"compiled", "log_every"},
    "trace": {"bos"},
    "compare": {"bos"},
}
"""What cannot be typed, or what only a program needs."""
RENAMED = {"compare": {"edit": "edits", "token": "tokens"}}
"""An option that may be repeated is typed in the singular."""
LOADING = {name for name in inspect.signature(load_model).parameters if name != "source"} | {"device", "dtype"}
OTHER_DEFAULTS = {"trace": {"at", "grid"}}
"""In Python a trace shows itself, the grid too, and `.at` gives any token; a terminal shows one token unless it is asked."""
SAME = ((None, ()), (None, [], ()), ("10MB", 10_000_000))
"""Defaults that mean the same in the shell and in Python."""


def function_of(verb):
    found = ffmem
    for part in OTHER_NAMES.get(verb, verb).split("."):
        found = getattr(found, part)
    return found


def same(typed, default):
    return typed == default or any(typed in some and default in some for some in SAME)


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_and_its_function_take_the_same(verb):
    function = function_of(verb)
    known = {name: one for name, one in inspect.signature(function).parameters.items() if one.kind is not one.VAR_KEYWORD}
    loads = any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())
    typed = {
        RENAMED.get(verb, {}).get(parameter.name, parameter.name): parameter
        for parameter in COMMANDS[verb].params
        if parameter.name not in PRINTED | SHELL_ONLY.get(verb, set())
    }
    for name, parameter in typed.items():
        if name not in known:
            told = name == "quiet" or (loads and name in LOADING)
            assert told, f"ffmem {verb} has {name}, which {function.__name__} does not take"
        elif not parameter.required and name not in OTHER_DEFAULTS.get(verb, set()):
            assert same(parameter.default, known[name].default), f"{verb} {name}: {parameter.default!r} in the shell"
    assert known.keys() - typed.keys() == PYTHON_ONLY.get(verb, set())


@pytest.mark.parametrize("verb", COMMANDS)
def test_arguments_come_in_the_same_order(verb):
    arguments = [one.name for one in COMMANDS[verb].params if one.param_type_name == "argument"]
    first = list(inspect.signature(function_of(verb)).parameters)
    assert first[: len(arguments)] == arguments
    assert arguments[0] in ("model", "run", "corpus", "source") if arguments else verb == "demo"
