"""Activity, composition and refinement: against a slow clear reference that follows one example at a time."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from ffmem import build_index, load_model
from ffmem.errors import RunError
from ffmem.experiments.examples import sample_examples
from ffmem.experiments.observe import follow
from ffmem.experiments.questions.activity import MASS, Activity, activity, carriers
from ffmem.experiments.questions.composition import Composition, composition
from ffmem.experiments.questions.refinement import Refinement, refinement
from ffmem.experiments.resampling import quartiles
from ffmem.run.results import load_result
from tests.experiments.conftest import KINDS
from tests.tiny import tiny_model

COUNT = 40


@pytest.fixture(scope="module", params=KINDS)
def case(request, made):
    """A model, its run, the examples drawn, and what flows at the end of each, recorded alone."""
    model, index, _ = made(request.param)
    examples = sample_examples(model, index, count=COUNT, quiet=True)
    flows = [model.record(torch.tensor([[model.bos, *example.ids.tolist()]])) for example in examples.examples]
    return model, index, examples, flows


def top(model, vector, layer, *, norm):
    """The token a vector puts first, by the definition."""
    h = model.after_post_norm(vector, layer) if norm else vector
    return int(model.vocabulary.log_probs(h[None], norm=norm)[0].argmax())


@pytest.mark.slow
def test_activity_is_the_share_of_cells_above_zero(case):
    model, index, _, flows = case
    result = activity(model, index, examples=COUNT, quiet=True)
    assert [row["layer"] for row in result.rows] == list(range(1, model.layers + 1))
    for row in result.rows:
        shares = [float((flow.m[row["layer"] - 1][0, -1] > 0).double().mean()) for flow in flows]
        found = [row["active_q1"], row["active_median"], row["active_q3"]]
        assert found == pytest.approx(np.quantile(shares, [0.25, 0.5, 0.75]), abs=0.02)


@pytest.mark.slow
def test_mass_is_the_smallest_share_of_cells_that_carry_nine_tenths(case):
    model, index, _, flows = case
    result = activity(model, index, examples=COUNT, quiet=True)
    for row in result.rows:
        sizes = model.values(row["layer"]).float().norm(dim=1)
        shares = []
        for flow in flows:
            mass = sorted((flow.m[row["layer"] - 1][0, -1].abs() * sizes).tolist(), reverse=True)
            count = next(n for n in range(1, len(mass) + 1) if sum(mass[:n]) >= MASS * sum(mass) * (1 - 1e-9))
            shares.append(count / len(mass))
        assert row["mass_median"] == pytest.approx(np.median(shares), abs=0.02)


@pytest.mark.slow
def test_refinement_follows_the_residual_to_the_output(case):
    model, index, _, flows = case
    result = refinement(model, index, examples=COUNT, quiet=True)
    finals = [top(model, flow.o[-1][0, -1], model.layers, norm=True) for flow in flows]
    for row in result.rows:
        layer = row["layer"]
        kinds = Counter()
        same, violations, chances = 0, 0, []
        for flow, final in zip(flows, finals, strict=True):
            r, y, o = (top(model, getattr(flow, name)[layer - 1][0, -1], layer, norm=True) for name in ("r", "y", "o"))
            same += r == final
            h = model.after_post_norm(flow.r[layer - 1][0, -1], layer)
            chances.append(float(model.vocabulary.log_probs(h[None], norm=True)[0, final].exp()))
            if o == r == y:
                kinds["agreement"] += 1
            elif o == r:
                kinds["residual"] += 1
            elif o == y:
                kinds["ffn"] += 1
            else:
                kinds["composition"] += 1
                violations += r == y
        assert row["residual_matches_output"] == pytest.approx(same / COUNT)
        assert row["violations"] == pytest.approx(violations / COUNT)
        for kind in ("residual", "ffn", "agreement", "composition"):
            assert row[kind] == pytest.approx(kinds[kind] / COUNT), (layer, kind)
        assert sum(row[kind] for kind in ("residual", "ffn", "agreement", "composition")) == pytest.approx(1)
        assert row["residual_probability_median"] == pytest.approx(np.median(chances), rel=1e-3)
    assert result.rows[-1]["residual_matches_output"] <= 1


@pytest.mark.slow
def test_the_model_s_own_prediction_is_what_the_model_says(case):
    model, index, _, flows = case
    seen = []

    class Watch:
        def __init__(self, *_):
            pass

        def see(self, batch):
            seen.extend(zip(batch.numbers, batch.said.tolist(), strict=True))

        def result(self, settings):
            from ffmem.run.results import Result

            return Result("watch", 0, settings, [{"layer": 1}])

    follow(model, index, [Watch], examples=COUNT, seed=0, quiet=True)
    assert dict(seen) == {number: int(flow.logits[0, -1].argmax()) for number, flow in enumerate(flows)}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.slow
def test_composition_counts_examples_whose_prediction_no_cell_makes(case, norm):
    model, index, _, flows = case
    result = composition(model, index, examples=COUNT, norm=norm, quiet=True)
    for row in result.rows:
        layer = row["layer"]
        values = model.values(layer)
        plus, minus = (model.vocabulary.log_probs(sign * values, norm=norm).argmax(1).tolist() for sign in (1.0, -1.0))
        none = Counter()
        for flow in flows:
            m = flow.m[layer - 1][0, -1].tolist()
            y, o = (top(model, getattr(flow, name)[layer - 1][0, -1], layer, norm=norm) for name in ("y", "o"))
            said = [minus[cell] if m[cell] < 0 else plus[cell] for cell in range(len(m))]
            none["zero_agreement"] += y not in said
            none["zero_agreement_active"] += not any(m[cell] > 0 and plus[cell] == y for cell in range(len(m)))
            none["zero_agreement_output"] += o not in said
        assert row["examples"] == COUNT
        for name in ("zero_agreement", "zero_agreement_active", "zero_agreement_output"):
            assert row[name] == pytest.approx(none[name] / COUNT), (layer, name)


def planted(tokenizer, tmp_path, *, change):
    """A GPT-2 whose layers do nothing but what `change` plants, and its run."""
    raw = tiny_model("gpt2-relu")
    with torch.no_grad():
        for block in raw.transformer.h:
            for part in (block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
        change(raw)
    model = load_model(raw, tokenizer=tokenizer)
    text = tmp_path / "text.txt"
    text.write_text("the king left the city .\n" * 12, "utf-8")
    return model, build_index(model, text, out=tmp_path / "run", quiet=True)


def test_a_residual_that_knows_the_answer_matches_in_every_layer(tokenizer, tmp_path):
    model, index = planted(tokenizer, tmp_path, change=lambda raw: None)
    result = refinement(model, index, examples=12, quiet=True)
    for row in result.rows:
        assert row["residual_matches_output"] == 1
        assert row["ffn"] == row["composition"] == 0


@pytest.mark.slow
def test_a_layer_whose_prediction_is_one_cell_s_has_no_zero_agreement(tokenizer, tmp_path):
    def one_cell(raw):
        second = raw.transformer.h[1].mlp
        second.c_fc.bias[3] = 5.0  # cell 3 of layer 2 always fires, and nothing else does
        second.c_proj.weight[3] = 40 * raw.lm_head.weight[17]

    model, index = planted(tokenizer, tmp_path, change=one_cell)
    result = composition(model, index, examples=12, quiet=True)
    assert result.rows[1]["zero_agreement"] == result.rows[1]["zero_agreement_active"] == 0
    followed = refinement(model, index, examples=12, quiet=True)
    assert followed.rows[1]["ffn"] + followed.rows[1]["agreement"] == 1
    counted = activity(model, index, examples=12, quiet=True)
    assert counted.rows[1]["active_median"] == pytest.approx(1 / model.cells[1])
    assert counted.rows[0]["active_median"] == 0


@pytest.mark.slow
def test_all_three_in_one_pass_are_the_same_as_each_alone_to_the_byte(made):
    model, index, _ = made("llama")
    alone = [function(model, index, examples=COUNT, quiet=True) for function in (activity, composition, refinement)]
    together = follow(model, index, [Activity, Composition, Refinement], examples=COUNT, seed=0, quiet=True)
    assert [json.dumps(one.as_dict()) for one in alone] == [json.dumps(one.as_dict()) for one in together]


def test_results_are_kept_in_the_run(made):
    model, index, _ = made("gpt2")
    result = activity(model, index, examples=8, quiet=True)
    assert load_result(index, "activity").as_dict() == result.as_dict()
    assert (index.path / "results" / "activity.parquet").is_file()
    assert result.table.column_names[0] == "layer"
    with pytest.raises(RunError, match="has no result nothing: make it with ffmem experiments"):
        load_result(index, "nothing")


def test_the_last_layer_s_compositions_can_be_read(made):
    model, index, _ = made("llama")
    facts = refinement(model, index, examples=COUNT, quiet=True).facts["last_layer"]
    assert facts["compositions"] >= len(facts["cases"]) > 0
    assert facts["related"] + facts["distant"] == pytest.approx(1)
    for case in facts["cases"]:
        assert not case["output"] or case["output"] not in (case["residual"], case["ffn"])
        assert case["related"] == (case["cosine"] >= 0.3)


def test_a_token_is_as_near_to_itself_as_can_be(made):
    model, index, _ = made("gpt2")
    examples = sample_examples(model, index, count=3, quiet=True)
    found = Refinement(model, examples)._cosines(np.array([5, 6]), np.array([5, 9]))
    assert found[0] == pytest.approx(1, abs=1e-5)
    assert found[1] < 0.9


def test_another_model_s_run_is_refused(made, llama):
    _, index, _ = made("gpt2")
    with pytest.raises(RunError, match="was made with model"):
        activity(llama, index, quiet=True)


def test_carriers_of_a_row_by_hand():
    assert carriers(torch.tensor([[5.0, 4.0, 1.0, 0.0]])).tolist() == [0.5]
    assert carriers(torch.tensor([[1.0] * 10])).tolist() == [0.9]


def test_quartiles_of_nothing_are_no_numbers():
    assert np.isnan(quartiles(np.zeros(0))).all()
