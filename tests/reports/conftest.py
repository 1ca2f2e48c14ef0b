"""Runs with the paper's own numbers at the paper's depth, at another depth, and of a gated model."""

import pytest

from tests.reports.made import made_run, paper_results


@pytest.fixture(scope="session")
def sixteen():
    return paper_results(16)


@pytest.fixture(scope="session")
def twelve():
    return paper_results(12)


@pytest.fixture(scope="session")
def gated():
    return paper_results(6, gated=True)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run with 16 layers and all results."""
    return made_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="session")
def page(run):
    """Its page, made once."""
    from ffmem.reports.page import render

    return render(run)
