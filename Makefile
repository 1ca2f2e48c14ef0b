# Everything a developer types. A fresh machine needs Python 3.11 or later, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo quick test check lint types docs bench clean

demo: $(VENV)/.core
	$(BIN)/ffmem demo

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal

check: lint types docs test

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/index.py -o docs/benchmark.json
	$(BIN)/python benchmarks/index.py --long -o docs/benchmark.json
	$(BIN)/python benchmarks/index.py --loop -o docs/benchmark.json
	$(BIN)/python benchmarks/index.py --memory -o docs/benchmark.json
	$(BIN)/python -m benchmarks.table
	$(BIN)/python -m benchmarks.card
	$(BIN)/python -m benchmarks.experiments pocket -o docs/experiments.json
	$(BIN)/python -m benchmarks.cost

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[report]'
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.core

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
