"""Sealed files: what they say of themselves is in their first bytes, and is told from damage."""

import pytest
import torch

from ffmem.indexing.sealed import SealError, load_sealed, read_facts, save_sealed


@pytest.fixture
def sealed(tmp_path):
    path = tmp_path / "state.safetensors"
    save_sealed(path, {"a": torch.arange(100_000)}, {"covered": [0, 2], "of": "a run"})
    return path


def test_facts_are_read_from_the_header_alone(sealed):
    data, asked = sealed.read_bytes(), []

    def first_bytes(end):
        asked.append(end)
        return data[:end]

    assert read_facts(first_bytes) == {"covered": [0, 2], "of": "a run"} == load_sealed(sealed)[1]
    assert max(asked) < 1000 < len(data)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\xff" * 500, b"\x02" + bytes(7) + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_a_damaged_header_is_told(damage):
    with pytest.raises(SealError):
        read_facts(lambda end: damage[:end])
