import pytest

from tests.tiny import some_text


@pytest.fixture(scope="session")
def long_text(tmp_path_factory):
    """Enough for many shards."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    path.write_text(some_text(400, seed=9), "utf-8")
    return path
