"""The commands that need a live model: what they print, as text and as JSON, and one line for bad input."""

import json

import pytest

from ffmem import build_index, values
from tests.cli.test_app import call
from tests.tiny import some_text

PROMPT = "the old king"


@pytest.fixture(scope="module")
def run(gpt2_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    (folder / "text.txt").write_text(some_text(80), "utf-8")
    (folder / "other.txt").write_text(some_text(80, seed=1), "utf-8")
    build_index(str(gpt2_folder), folder / "text.txt", out=folder / "run", top=5, stats="full", quiet=True)
    values(folder / "run", top=5, quiet=True)
    return folder / "run"


@pytest.mark.slow
def test_a_trace_names_layers_and_cells(capsys, gpt2_folder, run):
    code, out, _ = call(capsys, "trace", gpt2_folder, PROMPT, "--cells", "2", "--run", run)
    assert code == 0
    assert "promoting" in out
    assert "suppressing" in out
    assert PROMPT in out
    assert "layer the" not in out
    code, out, _ = call(capsys, "trace", gpt2_folder, PROMPT, "--cells", "1e0", "--grid", "-q")
    assert code == 0
    assert "layer the" in out


def test_a_trace_as_json_has_a_position_a_layer_list_and_a_grid_if_asked(capsys, gpt2_folder):
    code, out, _ = call(capsys, "trace", gpt2_folder, PROMPT, "--at", "all", "--target", "war", "--grid", "--json", "-q")
    found = json.loads(out)
    assert code == 0
    assert [place["position"] for place in found["positions"]] == [0, 1, 2]
    assert len(found["positions"][0]["layers"]) == 3
    assert found["grid"] is not None
    assert found["target"]["text"].strip() == "war"


def test_an_intervention_stands_beside_the_baseline(capsys, gpt2_folder):
    code, out, _ = call(capsys, "compare", gpt2_folder, PROMPT, "--edit", "L2D3*4", "--generate", "2", "--control", "2")
    assert code == 0
    assert "baseline" in out
    assert "controls" in out
    code, out, err = call(capsys, "compare", gpt2_folder, PROMPT, "--edit", "L2D3*4", "--json", "-q", "--token", "war")
    assert json.loads(out)["edits"] == ["L2D3*4"]
    assert json.loads(out)["tokens_compared"][0]["token"].strip() == "war"
    assert err == ""
    # As the command was called before.
    assert call(capsys, "intervene", gpt2_folder, PROMPT, "--edit", "L2D3*4", "--json", "-q", "--token", "war")[1] == out


def test_an_edit_is_exported_as_python(capsys, gpt2_folder):
    code, out, _ = call(capsys, "compare", gpt2_folder, PROMPT, "--edit", "L2D3=0", "--export")
    assert code == 0
    compile(out, "recipe", "exec")
    assert "register_forward_pre_hook" in out


def test_a_causal_check_shows_promise_and_effect_and_is_kept(capsys, run):
    code, out, err = call(
        capsys, "causal", run, "L2D3", "--eval", run.parent / "other.txt", "--quantile", "0.9", "--prefixes", "5"
    )
    assert code == 0
    assert "L2D3  promises" in out
    assert "fires" in out
    assert (run / "results" / "causal.json").is_file()
    assert "kept in" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "MODEL", ""], "at least 1 token"),
        (["trace", "MODEL", PROMPT, "--at", "9"], "from 0 to 2"),
        (["trace", "MODEL", PROMPT, "--at", "9" * 5000], "expected positions as all, generated"),
        (["trace", "MODEL", PROMPT, "--at", ":" + "9" * 5000], "expected positions as all, generated"),
        (["trace", "MODEL", PROMPT, "--of", "all"], "output"),
        (["trace", "MODEL", PROMPT, "--target", "the war"], "one token"),
        (["compare", "MODEL", PROMPT, "--edit", "L9D1=0"], "layers 1 to 3"),
        (["compare", "MODEL", PROMPT, "--edit", "L1D1"], "expected an edit"),
        (["compare", "MODEL", PROMPT, "--edit", "L1D1=0", "--at", "7:"], "0 to 2"),
        (["trace", "MODEL", PROMPT, "--cells", "2.5"], "expected cells as a whole number, found 2.5"),
        (["compare", "MODEL", PROMPT, "--edit", "L1D1=0", "--top", "0"], "expected top from 1"),
        (["causal", "RUN", "L1D0", "--eval", "TEXT", "--quantile", "2"], "expected quantile from 0 to 1, found 2"),
        (["causal", "RUN", "L9D0", "--eval", "TEXT"], "layers 1 to 3"),
    ],
)
@pytest.mark.slow
def test_bad_input_gets_one_line_with_what_was_expected(capsys, gpt2_folder, run, arguments, message):
    names = {"MODEL": gpt2_folder, "RUN": run, "TEXT": run.parent / "other.txt"}
    code, _, err = call(capsys, *(names.get(part, part) for part in arguments))
    assert code == 1
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert message in line
