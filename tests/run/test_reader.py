"""Cells, triggers, values and statistics as a user reads them."""

import re
import time
from dataclasses import replace

import pytest
import torch

from ffmem import Cell, open_index
from ffmem.errors import CellError, FfmemError, RunError
from ffmem.run.pages import trigger_text
from ffmem.run.reader import Triggers
from ffmem.text import width


@pytest.fixture
def index(built):
    return open_index(built)


def test_a_cell_is_found_by_any_of_its_names(index):
    names = ["L3D17", "l3d17", "blocks.2.mlp.hook_post[17]", "model.layers.2.mlp.down_proj:17", Cell(3, 17)]
    assert {str(index[name].cell) for name in names} == {"L3D17"}
    assert len({index[name].triggers for name in names}) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("L4D0", "this run has layers 1 to 3, found layer 4"),
        ("L3D64", "layer 3 has cells 0 to 63, found 64"),
        (Cell(3, -1), "layer 3 has cells 0 to 63, found -1"),
        ("L0D0", "layers are counted from 1"),
        ("three", "expected a cell such as L3D17"),
    ],
)
def test_a_cell_that_does_not_exist_is_an_error_with_the_valid_range(index, name, message):
    with pytest.raises(CellError, match=message):
        index[name]


def test_triggers_are_ranked_and_split_text_into_prefix_and_next(index):
    for view in list(index)[::17]:
        for triggers, sign in ((view.triggers, 1), (view.negative_triggers, -1)):
            assert [trigger.rank for trigger in triggers] == list(range(1, len(triggers) + 1))
            sizes = [sign * trigger.coefficient for trigger in triggers]
            assert sizes == sorted(sizes, reverse=True)
            assert all(size > 0 for size in sizes)
            for trigger in triggers:
                words = trigger.prefix.split()
                assert len(words) == trigger.position
                assert (trigger.next is None) == (words[-1] == ".")


def test_a_slice_of_triggers_shows_itself_too(index):
    triggers = index["L1D5"].triggers[:2]
    assert len(triggers) == 2
    assert triggers._repr_html_().count("<tr>") == 2


def test_everything_shows_itself_in_a_notebook_with_its_text_escaped(index, llama, tmp_path):
    from ffmem import build_index

    hostile = build_index(llama, ["the <script> & king ."], out=tmp_path / "run", unit="line", quiet=True)
    pages = [index._repr_html_()]
    for view in (index["L2D3"], hostile["L2D3"]):
        pages += [view._repr_html_(), view.triggers._repr_html_(), view.value._repr_html_(), view.stats._repr_html_()]
    pages.append(llama._repr_html_())
    assert "192 in 3 layers" in pages[-1]
    assert repr(llama).startswith("MemoryModel(")
    assert all(page.strip().startswith("<") for page in pages)
    assert any("&lt;script&gt; &amp;" in page for page in pages)
    assert not any("<script>" in page for page in pages)
    assert "L2D3" in repr(index["L2D3"])


def test_everything_prints_itself_shortly(index, llama, built):
    view = index["L2D3"]
    assert len(repr(view.triggers).splitlines()) <= 5
    assert "and 3 more" in repr(view.triggers)
    assert repr(Triggers()) == "0 triggers"
    long = replace(view.triggers[0], prefix="x" * 5000 + "the end\n\u202e", next="\x1b[31m")
    assert len(repr(long)) < 150
    assert "the end\\n\\u202e' ▸ '\\x1b[31m'" in repr(long)
    said = view.value.top(1)[0]
    assert repr(said) == f"TokenProbability(“{said.token}” {said.probability:.2g} z {said.z:.1f})"
    assert repr(view.value).startswith(f"Value(L2D3: promotes “{said.token}”")
    assert repr(view.stats).startswith("CellStatistics(active ")
    assert all("\n" not in repr(one) for one in (view.value, view.stats, said, view.triggers[0]))
    bare = open_index(built)
    bare.has_values = False
    assert repr(bare["L2D3"].value) == "Value(L2D3: not in this run)"


def test_of_a_long_prefix_the_end_is_shown(index):
    trigger = replace(index["L2D3"].triggers[0], prefix="a <b> " * 900 + "and its end", next="东" * 300)
    page = Triggers([trigger])._repr_html_()
    assert "and its end <b>▸" in page
    assert "<b> a" not in page
    assert len(page) < 1500
    text = trigger_text(trigger, 80)
    assert width(text) <= 80
    assert "its end ▸ “东" in text


def test_tokens_that_stand_out_are_darker(index):
    value = index["L2D3"].value
    shades = [float(shade) for shade in re.findall(r"rgba\(70,130,220,([0-9.]+)\)", value._repr_html_())]
    said = [*value.top(10), *value.bottom(10)]
    assert shades == [pytest.approx(0.05 + 0.7 * min(1, abs(one.z) / 12), abs=0.01) for one in said]
    assert len(set(shades)) > 5


def test_stored_values_equal_the_model_s_own_projection(index, built, llama):
    live = open_index(built, model=llama)
    vector = llama.values(2)[7].float()
    logits = vector @ llama.model.lm_head.weight.detach().T.float()
    probabilities = torch.softmax(logits, 0)
    order = probabilities.argsort(descending=True)
    value = index["L2D7"].value
    assert [said.id for said in value.top(5)] == order[:5].tolist()
    assert [said.id for said in value.bottom(5)] == order.flip(0)[:5].tolist()
    assert value.max_probability == pytest.approx(float(probabilities.max()), rel=1e-5)
    assert value.norm == pytest.approx(float(vector.norm()), rel=1e-5)
    assert [said.token for said in value.top(3)] == [
        llama.tokenizer.decode([id]) if id < 71 else "" for id in order[:3].tolist()
    ]
    live.has_values = False
    assert [said.id for said in live["L2D7"].value.top(5)] == order[:5].tolist()


def test_more_tokens_than_were_stored_is_an_error_that_says_how_to_have_them(index):
    with pytest.raises(RunError, match="at most the 12 tokens that are known of each value, found 13"):
        index["L1D0"].value.top(13)


def test_statistics_know_their_bounds(index):
    stats = index["L1D0"].stats
    assert stats.minimum <= stats.quantile(0.1) <= stats.quantile(0.5) <= stats.quantile(0.99) <= stats.maximum
    assert stats.quantile(1.0) == pytest.approx(stats.maximum, rel=0.05)
    assert 0 <= stats.active <= 1
    with pytest.raises(FfmemError, match="from 0 to 1"):
        stats.quantile(2.0)


def test_opening_a_run_and_reading_a_cell_takes_under_five_milliseconds_warm(built):
    def once():
        began = time.perf_counter()
        view = open_index(built)["L3D17"]
        _ = view.triggers, view.stats.mean, view.value.top(10)
        return time.perf_counter() - began

    once()
    assert min(once() for _ in range(20)) < 0.005
