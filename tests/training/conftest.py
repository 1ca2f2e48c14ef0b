import pytest

from tests.tiny import some_text
from tests.training.small import fit


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """About 3,000 words of 69 kinds."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(some_text(300), "utf-8")
    return path


@pytest.fixture(scope="session")
def whole(text, tmp_path_factory):
    """A training that nobody disturbed. Tests must not change it."""
    return fit(text, tmp_path_factory.mktemp("whole") / "model")
