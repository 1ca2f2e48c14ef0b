import pytest

from ffmem import build_index, values
from tests.tiny import some_sentences, some_text


@pytest.fixture(scope="session")
def built(llama, tmp_path_factory):
    """A finished run of a gated model, with negatives, statistics and values. Tests must not change it."""
    run = tmp_path_factory.mktemp("built") / "run"
    build_index(llama, some_sentences(50, seed=11), out=run, unit="line", top=6, quiet=True)
    values(run, llama, top=12, quiet=True)
    return run


@pytest.fixture(scope="session")
def long_text(tmp_path_factory):
    """Enough for many shards."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(some_text(400, seed=9), "utf-8")
    return path
