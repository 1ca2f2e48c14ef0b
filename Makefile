# Everything a developer types. A fresh machine needs Python 3.11 or later, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
RESULTS := benchmarks/results

.PHONY: demo quick test check lint types docs bench pages clean

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
	$(BIN)/python -m benchmarks.pages --check

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.index -o $(RESULTS)/benchmark.json
	$(BIN)/python -m benchmarks.index --long -o $(RESULTS)/benchmark.json
	$(BIN)/python -m benchmarks.index --loop -o $(RESULTS)/benchmark.json
	$(BIN)/python -m benchmarks.index --memory -o $(RESULTS)/benchmark.json
	$(BIN)/python -m benchmarks.experiments pocket -o $(RESULTS)/experiments.json
	$(BIN)/python -m benchmarks.live -o $(RESULTS)/live.json
	$(BIN)/python -m benchmarks.pages

pages: $(VENV)/.dev
	$(BIN)/python -m benchmarks.pages

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
