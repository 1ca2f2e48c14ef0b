"""The small genuine checkpoint, as it is and to be changed."""

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

TINY = Path(__file__).parent / "fairseq-tiny"
SENTENCES = (TINY / "sentences.txt").read_text("utf-8").splitlines()


@pytest.fixture
def stored():
    """The tiny checkpoint as plain values that a test may change."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(TINY / "model.pt", weights_only=True)


@pytest.fixture
def folder(tmp_path):
    """Save a changed checkpoint beside the tiny dictionary: `folder(stored)`."""

    def save(checkpoint, **options):
        made = tmp_path / "checkpoint"
        made.mkdir(exist_ok=True)
        torch.save(checkpoint, made / "model.pt", **options)
        (made / "dict.txt").write_bytes((TINY / "dict.txt").read_bytes())
        return made

    return save


@pytest.fixture(scope="session")
def reference():
    return load_file(TINY / "reference.safetensors")
