"""The house: who imports whom, and what is loaded when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "ffmem"
ORDER = [
    "text",
    "errors",
    "atomic",
    "cells",
    "progress",
    "model",
    "corpus",
    "run",
    "indexing",
    "training",
    "experiments",
    "live",
    "reports",
    "demonstration",
    "cli",
]


def room_of(module: str) -> str | None:
    """The room of `ffmem.corpus.parts` is `corpus`; the package itself is no room."""
    parts = module.split(".")
    return parts[1] if parts[0] == "ffmem" and len(parts) > 1 else None


def imports_of(path: Path) -> set[str]:
    """Every ffmem module that a file names in an import that runs (not one for the type checker only)."""
    tree = ast.parse(path.read_text("utf-8"))
    hidden = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("ffmem")}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_itself_and_rooms_above(path):
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    above = ORDER[: ORDER.index(own) + 1]
    for name in imports_of(path):
        room = room_of(name)
        assert room is None or room in above, f"{own} imports {name}"


READING = [
    "import ffmem; ffmem.Cell.parse('L1D2'); ffmem.open_index; ffmem.export; ffmem.Dataset",
    "import sys; sys.argv = ['ffmem', '--help']; from ffmem.cli.app import main\ntry: main()\nexcept SystemExit: pass",
    "import sys; from ffmem.cli.app import main\ntry: main(['show', RUN, 'L1D0'])\nexcept SystemExit: pass",
    "import sys; from ffmem.cli.app import main\ntry: main(['info', RUN])\nexcept SystemExit: pass",
    "import sys; from ffmem.cli.app import main\ntry: main(['export', RUN, 'triggers'])\nexcept SystemExit: pass",
    "import ffmem; ffmem.open_index(RUN)['L1D0']._repr_html_()",
    "import sys; from ffmem.cli.app import main\ntry: main(['report', RUN])\nexcept SystemExit: pass",
    "import sys; from ffmem.cli.app import main\ntry: main(['experiments', RUN, 'nonsense'])\nexcept SystemExit: pass",
]


def test_importing_helping_and_reading_do_not_load_torch(gpt2, tmp_path):
    from ffmem import build_index, values

    build_index(gpt2, ["the king left ."], out=tmp_path / "run", quiet=True)
    values(tmp_path / "run", gpt2, quiet=True)
    steps = [f"RUN = {str(tmp_path / 'run')!r}"]  # one process for all, which is asked after every one of them
    for code in READING:
        steps += [code, "import sys", "loaded = {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"]
        steps += [f"assert not loaded, (loaded, {code!r})"]
    code = "\n".join(steps)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


def test_every_public_name_is_there():
    import ffmem

    for name in ffmem.__all__:
        assert getattr(ffmem, name) is not None
    assert set(dir(ffmem)) == set(ffmem.__all__)
    # Asked again, after their modules have been imported: a function must not have become a module.
    assert callable(ffmem.demo)
    assert callable(ffmem.experiments.agreement)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ffmem.nothing  # noqa: B018
