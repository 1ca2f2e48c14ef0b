"""The manifest: typed, checked as a whole, and never a traceback."""

import json
import random
from contextlib import suppress

import pytest

from ffmem import open_index
from ffmem.errors import RunError
from ffmem.run.manifest import FORMAT, Manifest, ManifestError, json_hash


@pytest.fixture(scope="module")
def manifest(built):
    return open_index(built).manifest


def resealed(whole: dict) -> bytes:
    """As someone would write it who knows how the hash is made."""
    return json.dumps(whole | {"hash": json_hash(whole)}).encode()


def test_a_manifest_comes_back_as_it_was(manifest):
    assert Manifest.parse(manifest.as_json().encode()) == manifest


@pytest.mark.parametrize(
    ("where", "value", "told"),
    [
        (["settings"], "", "settings: expected an object, found ''"),
        (["settings", "top"], "x", "settings.top: expected a number, found 'x'"),
        (["settings", "top"], True, "settings.top: expected a number, found True"),
        (["settings", "distinct"], "word", "settings.distinct: expected text or sentence"),
        (["settings", "layers"], [1, 1], r"layers \[1, 1\] of a model"),
        (["settings", "layers"], [99], r"layers \[99\] of a model"),
        (["model", "cells"], "x", "model.cells: expected a list, found 'x'"),
        (["model", "cells"], [1, "x"], r"model.cells\[1\]: expected a number, found 'x'"),
        (["model", "cells"], [], "layers with cells"),
        (["model", "bos"], -1, "model.bos: expected a number or null, found -1"),
        (["counts", "tokens"], [1], r"counts.tokens: expected a number, found \[1\]"),
        (["counts", "cells"], 7, "7 cells in layers that have"),
        (["state"], "done", "state: expected building or complete, found 'done'"),
        (["files", "cells.arrow"], {"bytes": 3}, "files.cells.arrow lacks 'sha256'"),
        (["files", "../cells.arrow"], {"bytes": 3, "sha256": ""}, "a file '../cells.arrow' outside the run"),
        (["surprise"], 1, "it has an unknown 'surprise'"),
        (["values"], {"top": 1, "norm": "no", "dtype": "float32"}, "values.norm: expected true or false, found 'no'"),
    ],
)
def test_an_altered_field_is_named_even_where_the_hash_was_made_anew(manifest, where, value, told):
    whole = {**manifest.as_dict(), "format": FORMAT}
    part = whole
    for name in where[:-1]:
        part = part[name]
    part[where[-1]] = value
    with pytest.raises(ManifestError, match=f"altered since it was written \\(.*{told}"):
        Manifest.parse(resealed(whole))


def test_any_part_may_be_missing_or_of_any_type_without_a_traceback(manifest):
    chance = random.Random(3)
    odd = ["", "x", 0, -1, 1.5, None, True, [], {}, [[]], {"a": {}}, 10**40, "9" * 100, float("nan")]

    def paths(value, path=()):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
            yield (*path, name)
            yield from paths(part, (*path, name))

    for path in paths(manifest.as_dict()):
        for value in [*chance.sample(odd, 4), "missing"]:
            whole = json.loads(json.dumps({**manifest.as_dict(), "format": FORMAT}))
            part = whole
            for name in path[:-1]:
                part = part[name]
            if value == "missing":
                del part[path[-1]]
            else:
                part[path[-1]] = value
            with suppress(ManifestError):
                Manifest.parse(resealed(whole))


def test_a_manifest_of_another_run_is_named_itself_and_not_the_files(built, gpt2, tmp_path):
    from ffmem import build_index

    other = build_index(gpt2, ["the queen left the old castle ."], out=tmp_path / "other", quiet=True)
    (other.path / "manifest.json").write_bytes((built / "manifest.json").read_bytes())
    with pytest.raises(
        RunError, match=r"manifest\.json: not the manifest of this run: \d of its \d files are not as it says"
    ):
        open_index(other.path)
