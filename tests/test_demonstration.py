"""The demonstration: what it shows of the bundled model, and that it goes through to the report."""

import pytest
import torch

import ffmem
from ffmem import demonstration
from ffmem.demonstration import agreement, demo, worth_seeing
from ffmem.reports.claims import judge_claims, summary
from ffmem.reports.figures import all_results
from ffmem.run.registry import all_experiments
from ffmem.run.results import saved_results
from tests.tiny import some_text


@pytest.fixture(scope="module")
def wiki16():
    return ffmem.load_model("wiki16")


def test_the_bundled_model_is_a_trained_model_of_the_papers_kind(wiki16):
    assert wiki16.name == "wiki16"
    assert (wiki16.layers, wiki16.d, wiki16.cells[0], wiki16.vocabulary.size) == (16, 384, 1536, 283_429)
    ids = [wiki16.bos, *wiki16.tokenizer("The capital of Norway is")["input_ids"]]
    following = wiki16.logits(torch.tensor([ids]))[0, -1].argmax()
    assert wiki16.tokenizer.decode([int(following)]) == "Oslo"


@pytest.mark.slow
def test_cells_worth_seeing_agree_with_their_triggers_each_in_another_layer(wiki16, tmp_path):
    index = ffmem.build_index(
        wiki16, "pocket:9/10", out=tmp_path / "run", top=10, layers=[10, 13], limit_tokens=12_000, stats="off", quiet=True
    )
    index = ffmem.values(index, wiki16, top=1, quiet=True)
    found = worth_seeing(index)
    assert [view.cell.layer for view in found] == [10, 13]
    assert all(agreement(view) >= demonstration.AGREEING for view in found)
    assert len(worth_seeing(index, 1)) == 1


def test_the_demo_goes_from_the_model_to_the_report(gpt2_folder, tmp_path, monkeypatch, capsys):
    for name, lines in (("seen", 40), ("unseen", 25)):
        (tmp_path / f"{name}.txt").write_text(some_text(lines), "utf-8")
    monkeypatch.setattr(demonstration, "MODEL", str(gpt2_folder))
    monkeypatch.setattr(demonstration, "CORPUS", str(tmp_path / "seen.txt"))
    monkeypatch.setattr(demonstration, "HELD_OUT", str(tmp_path / "unseen.txt"))
    for name in ("EXAMPLES", "CONTROL_EXAMPLES"):
        monkeypatch.setattr(demonstration, name, 10)
    index = demo(tmp_path / "run")
    out, err = capsys.readouterr()
    assert "has read" in out
    assert set(saved_results(index, "random")) == set(all_experiments())
    results, controls = all_results(index), all_results(index, "random")
    assert f"kept out of the index. {summary(judge_claims(results, controls))}" in out.replace("\n", " ")
    assert out.count("  layer ") == index.manifest.model.layers
    assert (index.path / "report.html").is_file()
    assert str(index.path / "report.html") in err
    assert f"ffmem show {index.path} L" in err
    again = demo(tmp_path / "run", quiet=True)  # a run that is there is not made again
    assert again.manifest == ffmem.open_index(index.path).manifest
    assert capsys.readouterr().err == ""


def test_without_the_packages_that_draw_it_the_demo_says_how_to_get_the_report(tmp_path, monkeypatch, capsys, gpt2):
    from ffmem.experiments import charts

    monkeypatch.setattr(charts, "import_module", _missing)
    index = ffmem.build_index(gpt2, ["the king left ."], out=tmp_path / "run", unit="line", quiet=True)
    ffmem.experiments.activity(gpt2, index, examples=1, quiet=True)
    assert demonstration._page(index) is None
    assert "pip install 'ffmem[report]'" in capsys.readouterr().err


def _missing(name):
    raise ImportError(name)
