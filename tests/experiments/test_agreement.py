"""Values against what follows their keys' triggers: against slow loops, and where the answer was planted."""

import sys
from collections import Counter
from statistics import quantiles

import numpy as np
import pytest
import torch

from ffmem import build_index, load_model, open_index
from ffmem.errors import FfmemError, RunError
from ffmem.experiments.value_agreement import _best_cell, _by_probability, _top_layers, agreement
from ffmem.experiments.value_scores import ValueScores
from ffmem.run.results import load_result
from tests.tiny import some_sentences, tiny_model

T = 6


def build(model, out, sentences=None, **settings):
    settings = {"unit": "line", "top": T, "quiet": True} | settings
    return build_index(model, some_sentences(40, seed=5) if sentences is None else sentences, out=out, **settings)


@pytest.fixture(scope="module", params=["gpt2", "llama", "adaptive_lm"])
def case(request, tokenizer, tmp_path_factory):
    """A model whose values say a few words loudly, its run in many batches, and the id behind a sentence's end."""
    network = tiny_model(request.param)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if any(part in name for part in ("mlp.c_proj.weight", "down_proj.weight", "fc2.weight")):
                weight.mul_(40)
    model = load_model(network, tokenizer=tokenizer)
    run = tmp_path_factory.mktemp("agreement") / request.param
    end = 0 if request.param == "adaptive_lm" else None
    return model, build(model, run, shard_tokens=70), end


def log_probs_of(model, vectors):
    """The whole matrix, by the network's own parts."""
    with torch.no_grad():
        if model.family.name == "adaptive_lm":
            return model.model.log_probs(vectors)
        return torch.log_softmax(model.model.lm_head(vectors), -1)


class Slow:
    """One cell after the other, by the reader's own triggers."""

    def __init__(self, model, index, end):
        self.end, self.model = end, model
        self.sentences = {row["sentence"]: row["tokens"] for row in index.table("sentences").to_pylist()}
        self.said = {layer: log_probs_of(model, model.values(layer)) for layer in index.layers}
        self.denied = {layer: log_probs_of(model, -model.values(layer)) for layer in index.layers}
        self.views = list(index)

    def following(self, trigger):
        tokens = self.sentences[trigger.sentence]
        return tokens[trigger.position] if trigger.position < len(tokens) else self.end

    def last(self, trigger):
        return self.sentences[trigger.sentence][trigger.position - 1]

    def log_prob(self, view):
        return self.said[view.cell.layer][view.cell.index]

    def top(self, view):
        return int(self.log_prob(view).argmax())

    def judged(self, layer=None):
        """Cells whose first trigger has a next token, and that token."""
        here = [view for view in self.views if layer in (None, view.cell.layer) and view.triggers]
        pairs = [(view, self.following(view.triggers[0])) for view in here]
        return [(view, token) for view, token in pairs if token is not None]

    def rank(self, view, token):
        order = sorted(range(101), key=lambda at: (-float(self.log_prob(view)[at]), at))
        return 1 + order.index(token)

    def precision(self, view):
        tokens = [token for token in map(self.following, view.triggers) if token is not None]
        return (tokens.count(self.top(view)), len(tokens))


@pytest.fixture(scope="module")
def slow(case):
    return Slow(*case)


@pytest.fixture(scope="module")
def result(case):
    model, index, _ = case
    return agreement(model, index, seed=3, top_values=9, quiet=True)


def share(part, whole):
    return pytest.approx(part / whole, rel=1e-9) if whole else None


@pytest.mark.slow
def test_rows_are_the_shares_and_quartiles_of_a_loop_over_cells(case, slow, result):
    _, index, _ = case
    assert [row["layer"] for row in result.rows] == index.layers == [1, 2, 3]
    for row in result.rows:
        judged = slow.judged(row["layer"])
        agreeing = sum(slow.top(view) == token for view, token in judged)
        ranks = [slow.rank(view, token) for view, token in judged]
        assert (row["cells"], row["agreeing"], row["share"]) == (len(judged), agreeing, share(agreeing, len(judged)))
        assert [row["rank_q1"], row["rank_median"], row["rank_q3"]] == pytest.approx(quantiles(ranks, method="inclusive"))
        assert sum(rank == 1 for rank in ranks) == agreeing
    assert result.facts["overall"]["agreeing"] == sum(row["agreeing"] for row in result.rows) > 0
    assert result.facts["overall"]["cells"] == sum(row["cells"] for row in result.rows)


def test_negative_triggers_are_judged_against_the_turned_value_and_reported_apart(case, slow, result):
    model, _, _ = case
    for row in result.rows:
        if not model.family.gated:
            assert not any(name.startswith("negative") for name in row)
            continue
        views = [view for view in slow.views if view.cell.layer == row["layer"] and view.negative_triggers]
        pairs = [(view, slow.following(view.negative_triggers[0])) for view in views]
        judged = [(view, token) for view, token in pairs if token is not None]
        agreeing = sum(int(slow.denied[row["layer"]][view.cell.index].argmax()) == token for view, token in judged)
        found = (row["negative_cells"], row["negative_agreeing"], row["negative_share"], row["negative_left_out"])
        assert found == (len(judged), agreeing, share(agreeing, len(judged)), 64 - len(judged))


def test_baselines_are_sums_over_words(case, slow, result):
    _, index, end = case
    words = Counter(token for tokens in slow.sentences.values() for token in tokens)
    if end is not None:
        words[end] += len(slow.sentences)
    found = result.facts["baselines"]
    commonest = max(words, key=lambda at: (words[at], -at))
    assert (found["most_frequent_id"], found["most_frequent_token"]) == (commonest, index.token(commonest))
    assert found["uniform"] == 1 / 101
    assert found["counted_tokens"] == words.total()
    assert ("</s> once behind each" in found["counted_over"]) == (end is not None)
    for layer, where in [(None, found), *((row["layer"], row) for row in found["by_layer"])]:
        following = [token for _, token in slow.judged(layer)]
        assert where["unigram"] == pytest.approx(sum(words[token] for token in following) / words.total() / len(following))
        assert where["most_frequent"] == share(following.count(commonest), len(following))


def test_the_shuffled_pairing_is_what_shuffles_give_on_average_and_every_chance_has_its_number(case, slow, result):
    found = result.facts["baselines"]
    hits = 0.0
    for row in found["by_layer"]:
        judged = slow.judged(row["layer"])
        said, following = Counter(slow.top(view) for view, _ in judged), Counter(token for _, token in judged)
        expected = sum(said[id] * following[id] for id in said) / len(judged)
        assert row["cells"] == len(judged)
        assert row["shuffled"] == pytest.approx(expected / len(judged))
        hits += expected
    assert found["shuffled"] == pytest.approx(hits / len(slow.judged()))
    assert (found["cells"], found["vocabulary"]) == (len(slow.judged()), 101)


def test_fig6_sorts_every_judged_cell_into_eight_bins_of_its_largest_probability(slow, result):
    bins = result.facts["fig6"]
    most = [float(slow.log_prob(view).max().exp()) for view in slow.views]
    assert len(bins) == 8
    assert bins[0]["low"] == pytest.approx(min(most), rel=1e-5)
    assert bins[-1]["high"] == pytest.approx(max(most), rel=1e-5)
    assert np.ptp([one["high"] - one["low"] for one in bins]) < 1e-9
    judged = slow.judged()
    for number, one in enumerate(bins):
        last = number == 7
        here = [
            (view, token)
            for view, token in judged
            if one["low"] <= (p := float(slow.log_prob(view).max().exp())) * (1 + 1e-6) and (p < one["high"] or last)
        ]
        agreeing = sum(slow.top(view) == token for view, token in here)
        assert (one["cells"], one["agreeing"], one["share"]) == (len(here), agreeing, share(agreeing, len(here)))
    assert sum(one["cells"] for one in bins) == len(judged)


def test_predictive_values_are_those_with_the_largest_probability_and_their_precision(case, slow, result):
    _, index, _ = case
    found = result.facts["predictive"]
    order = sorted(slow.views, key=lambda view: -float(slow.log_prob(view).max()))[:9]
    assert [one["cell"] for one in found["values"]] == [view.name for view in order]
    for one, view in zip(found["values"], order, strict=True):
        agreeing, judged = slow.precision(view)
        assert one["max_probability"] == pytest.approx(float(slow.log_prob(view).max().exp()), rel=1e-5)
        assert (one["token_id"], one["token"]) == (slow.top(view), index.token(slow.top(view)))
        assert (one["agreeing"], one["judged"], one["triggers"]) == (agreeing, judged, len(view.triggers))
        assert one["precision_at_t"] == share(agreeing, judged)
    assert found["cells"] == 9
    assert found["top_layers"] == [2, 3]  # 6/16 of 3, rounded up
    assert found["in_top_layers"] == sum(view.cell.layer >= 2 for view in order)
    assert found["with_agreeing_trigger"] == sum(slow.precision(view)[0] > 0 for view in order)


def test_table2_has_the_best_cell_of_each_top_layer_with_triggers_that_agree(case, slow, result):
    _, index, end = case
    found = result.facts["table2"]["cells"]
    some = {view.cell.layer for view in slow.views if slow.precision(view)[0]}
    assert [one["layer"] for one in found] == sorted(some & {2, 3}) != []
    for one in found:
        best = min(
            (view for view in slow.views if view.cell.layer == one["layer"]),
            key=lambda view: (
                -slow.precision(view)[0],
                slow.precision(view)[1],
                -float(slow.log_prob(view).max()),
                view.cell.index,
            ),
        )
        assert one["cell"] == best.name
        agreeing = [trigger for trigger in best.triggers if slow.following(trigger) == slow.top(best)][:3]
        texts = [(trigger.rank, trigger.prefix, trigger.next or index.token(end)) for trigger in agreeing]
        assert [(shown["rank"], shown["prefix"], shown["next"]) for shown in one["examples"]] == texts != []
        assert one["agreeing"] == slow.precision(best)[0]


def test_table2_keeps_the_layers_with_most_agreeing_triggers(case, slow, monkeypatch):
    model, index, _ = case
    monkeypatch.setattr(sys.modules[agreement.__module__], "TABLE_CELLS", 1)
    (one,) = agreement(model, index, quiet=True).facts["table2"]["cells"]
    best = max((slow.precision(view)[0], view.cell.layer) for view in slow.views if view.cell.layer > 1)
    assert (one["agreeing"], one["layer"]) == best


def by_hand(**columns):
    """A layer of nine cells, all of them judged and none agreeing unless told."""
    zeros = np.zeros(9, np.int64)
    given = dict.fromkeys(("rank", "next", "last", "triggers", "with_next", "matches"), zeros)
    given |= {"top": zeros + 1, "probability": np.linspace(0, 1, 9, dtype=np.float32), "first_at_end": zeros > 0}
    return ValueScores(layer=1, at_end=0, **(given | columns))


def test_the_best_cell_has_most_agreeing_triggers_then_precision_then_probability_then_the_lower_number():
    matches = np.array([1, 4, 4, 4, 4, 2, 0, 0, 0])
    judged = np.array([1, 9, 5, 5, 5, 2, 1, 0, 9])
    probability = np.array([9, 9, 1, 2, 2, 9, 9, 9, 9], np.float32)
    assert _best_cell(by_hand(matches=matches, with_next=judged, probability=probability)) == 3


def test_a_probability_on_the_edge_of_two_bins_is_in_the_higher_one_and_the_largest_in_the_last():
    found = _by_probability([by_hand(next=np.array([1, 0, 0, 0, 0, 0, 0, 1, 0]))])
    assert [one["cells"] for one in found] == [1, 1, 1, 1, 1, 1, 1, 2]
    assert [one["share"] for one in found] == [1, 0, 0, 0, 0, 0, 0, 0.5]


@pytest.mark.parametrize(("depth", "first"), [(16, 11), (12, 8), (3, 2), (1, 1), (32, 21)])
def test_the_top_layers_are_the_paper_s_six_of_sixteen_rounded_up(depth, first):
    layers, rule = _top_layers(depth)
    assert layers == list(range(first, depth + 1))
    assert f"{first} to {depth}" in rule


def test_the_control_takes_the_prefix_s_own_last_token(slow, result):
    found = result.facts["last_token_control"]
    for layer, where in [(None, found), *((row["layer"], row) for row in found["by_layer"])]:
        views = [view for view in slow.views if layer in (None, view.cell.layer) and view.triggers]
        hits = sum(slow.top(view) == slow.last(view.triggers[0]) for view in views)
        assert (where["cells"], where["agreeing"], where["share"]) == (len(views), hits, share(hits, len(views)))


def test_what_is_left_out_is_counted(slow, case, result):
    _, _, end = case
    found = result.facts["left_out"]
    for layer, where in [(None, found), *((row["layer"], row) for row in found["by_layer"])]:
        views = [view for view in slow.views if layer in (None, view.cell.layer)]
        ends = [[trigger.next is None for trigger in view.triggers] for view in views]
        at_end = sum(one[0] for one in ends if one)
        assert where["without_triggers"] == sum(not one for one in ends)
        assert where["top_trigger_ends_sentence"] == (at_end if end is None else 0)
        assert where["top_trigger_before_mark"] == (at_end if end is not None else 0)
        assert where["triggers_that_end_sentences"] == (sum(map(sum, ends)) if end is None else 0)
    assert found["without_triggers"] + found["top_trigger_ends_sentence"] + len(slow.judged()) == len(slow.views)


def planted(variant, tokenizer, tmp_path, agreeing, *, sentences=None):
    """A model whose last layer's first `agreeing` judged cells say what follows their top trigger, and no other does.

    Rows of the unembedding have length 1, so the value that says a token is that token's row, made long. The last layer's
    values change no coefficient, so the triggers stay what they were.
    """
    network = tiny_model(variant)
    rows = network.get_output_embeddings().weight
    with torch.no_grad():
        rows /= rows.norm(dim=1, keepdim=True)
    model = load_model(network, tokenizer=tokenizer)
    index = build(model, tmp_path / "before", sentences)
    reference = Slow(model, index, None)
    judged = {view.cell.index: token for view, token in reference.judged(3)}
    loud = {cell: token if number < agreeing else (token + 1) % 101 for number, (cell, token) in enumerate(judged.items())}
    with torch.no_grad():
        for cell in range(model.cells[2]):
            model.values(3)[cell] = 50 * rows[loud.get(cell, 0)]
    return load_model(network, tokenizer=tokenizer), judged


@pytest.mark.parametrize("agreeing", [0, 1, 7])
@pytest.mark.parametrize("variant", ["gpt2", "llama"])
@pytest.mark.slow
def test_planted_values_agree_in_exactly_the_planted_cells(variant, agreeing, tokenizer, tmp_path):
    model, judged = planted(variant, tokenizer, tmp_path, agreeing)
    index = build(model, tmp_path / "run")
    row = agreement(model, index, quiet=True).rows[-1]
    assert len(judged) > 20
    assert (row["cells"], row["agreeing"], row["share"]) == (len(judged), agreeing, agreeing / len(judged))
    assert row["rank_q1"] > 1


def test_where_every_value_says_what_follows_agreement_and_ranks_are_perfect(tokenizer, tmp_path):
    model, judged = planted("gpt2", tokenizer, tmp_path, 10**6)
    found = agreement(model, build(model, tmp_path / "run"), top_values=5, quiet=True)
    row = found.rows[-1]
    assert (row["cells"], row["share"]) == (len(judged), 1.0)
    assert row["rank_q1"] == row["rank_median"] == row["rank_q3"] == 1
    predictive = found.facts["predictive"]
    assert predictive["in_top_layers"] == 5
    assert all(one["max_probability"] > 0.99 and one["layer"] == 3 for one in predictive["values"])
    assert found.facts["fig6"][-1]["cells"] == len(judged)
    assert found.facts["fig6"][-1]["share"] == 1.0
    assert found.facts["fig6"][4]["share"] is None  # no cell at all


def test_a_value_that_says_the_opposite_of_what_follows_its_negative_trigger_agrees_on_the_negative_side(
    tokenizer, tmp_path
):
    network = tiny_model("llama")
    rows = network.lm_head.weight
    with torch.no_grad():
        rows /= rows.norm(dim=1, keepdim=True)
    model = load_model(network, tokenizer=tokenizer)
    first = build(model, tmp_path / "before")
    reference = Slow(model, first, None)
    negative = {
        view.cell.index: reference.following(view.negative_triggers[0])
        for view in reference.views
        if view.cell.layer == 3 and view.negative_triggers
    }
    judged = {cell: token for cell, token in negative.items() if token is not None}
    with torch.no_grad():
        for cell in range(64):
            model.values(3)[cell] = -50 * rows[judged.get(cell, 0)]
    model = load_model(network, tokenizer=tokenizer)
    row = agreement(model, build(model, tmp_path / "run"), quiet=True).rows[-1]
    assert (row["negative_cells"], row["negative_share"]) == (len(judged), 1.0)
    assert row["negative_left_out"] == 64 - len(judged)
    assert row["share"] < 0.2


def test_where_all_triggers_end_their_sentences_nothing_is_judged_and_all_is_counted(gpt2, tmp_path):
    index = build(gpt2, tmp_path / "run", ["the", "king", "sea"])
    found = agreement(gpt2, index, quiet=True)
    for row in found.rows:
        assert (row["cells"], row["agreeing"], row["share"], row["rank_median"]) == (0, 0, None, None)
    left_out = found.facts["left_out"]
    assert left_out["top_trigger_ends_sentence"] + left_out["without_triggers"] == 384
    assert found.facts["baselines"]["shuffled"] is None
    assert found.facts["table2"]["cells"] == []
    assert found.facts["last_token_control"]["cells"] == left_out["top_trigger_ends_sentence"] > 0
    assert load_result(index, "agreement").rows == found.rows


def test_in_the_paper_s_model_the_mark_follows_a_sentence_s_end_and_values_may_say_it(tokenizer, tmp_path):
    network = tiny_model("adaptive_lm")
    head = network.model.embed.bands[0].words.weight
    with torch.no_grad():
        # Far along its own row the mark has all of the probability.
        network.model.layers[2].fc2.weight[:] = 1000 * head[0][:, None]
    model = load_model(network, tokenizer=tokenizer)
    words = ["the", "king", "sea"]
    found = agreement(model, build(model, tmp_path / "run", words), quiet=True)
    row = found.rows[-1]
    assert row["share"] == 1.0
    assert row["cells"] == found.facts["left_out"]["by_layer"][-1]["top_trigger_before_mark"] > 30
    assert found.facts["left_out"]["top_trigger_ends_sentence"] == 0
    assert found.settings["end_token"] == "</s>"
    example = found.facts["table2"]["cells"][-1]["examples"][0]
    assert example["prefix"] in words
    assert example["next"] == "</s>"


def test_cells_that_never_fire_are_in_no_share_but_their_values_still_count_as_values(tokenizer, tmp_path):
    network = tiny_model("gpt2-relu")
    network.transformer.h[2].mlp.c_fc.bias.data[[4, 9]] = -1000.0
    network.transformer.h[2].mlp.c_proj.weight.data[4] = 100 * network.lm_head.weight.data[17]
    model = load_model(network, tokenizer=tokenizer)
    index = build(model, tmp_path / "run")
    found = agreement(model, index, top_values=1, quiet=True)
    assert found.facts["left_out"]["by_layer"][2]["without_triggers"] >= 2
    assert found.rows[2]["cells"] <= 126
    (one,) = found.facts["predictive"]["values"]
    assert one["cell"] == "L3D4"
    assert (one["triggers"], one["agreeing"], one["precision_at_t"]) == (0, 0, None)


def test_a_run_of_some_layers_gives_the_rows_of_those_and_shuffles_alike(gpt2, tmp_path):
    whole = agreement(gpt2, build(gpt2, tmp_path / "whole"), quiet=True)
    part = agreement(gpt2, build(gpt2, tmp_path / "part", layers="1,3"), quiet=True)
    assert part.rows == [whole.rows[0], whole.rows[2]]
    shuffled = [row["shuffled"] for row in part.facts["baselines"]["by_layer"]]
    assert shuffled == [whole.facts["baselines"]["by_layer"][at]["shuffled"] for at in (0, 2)]
    assert part.facts["predictive"]["top_layers"] == [2, 3]
    assert {one["layer"] for one in part.facts["table2"]["cells"]} <= {3}


def test_the_same_seed_gives_the_same_bytes_and_another_other_draws(case, result):
    model, index, _ = case
    file = index.path / "results" / "agreement.json"
    first = result.saved(index) and file.read_bytes()
    agreement(model, index, seed=3, top_values=9, quiet=True)
    assert file.read_bytes() == first
    other = agreement(model, index, seed=4, top_values=9, quiet=True)
    assert other.resamples != result.resamples
    assert (other.rows, other.facts) == (result.rows, result.facts)


def test_the_norm_is_an_option_and_the_result_says_which(gpt2, tmp_path):
    index = build(gpt2, tmp_path / "run")
    normed = agreement(gpt2, index, norm=True, top_values=500, quiet=True)
    assert normed.settings["norm"] is True
    assert normed.facts["predictive"]["cells"] == 384  # all there are
    with torch.no_grad():
        wanted = torch.softmax(gpt2.model.lm_head(gpt2.model.transformer.ln_f(gpt2.values(2)[5])), -1)
    (one,) = (one for one in normed.facts["predictive"]["values"] if one["cell"] == "L2D5")
    assert (one["token_id"], one["max_probability"]) == (int(wanted.argmax()), pytest.approx(float(wanted.max()), rel=1e-5))


@pytest.mark.slow
def test_another_model_is_refused_and_without_one_the_run_s_own_is_loaded(gpt2_folder, llama, tmp_path):
    index = build(str(gpt2_folder), tmp_path / "run")
    with pytest.raises(RunError, match=r"was made with model .* but .* has"):
        agreement(llama, index, quiet=True)
    assert agreement(None, open_index(index.path), quiet=True).rows == agreement(index.model, index, quiet=True).rows


def test_no_values_at_all_cannot_be_asked_for(gpt2, tmp_path):
    with pytest.raises(FfmemError, match="expected top_values of at least 1, found 0"):
        agreement(gpt2, build(gpt2, tmp_path / "run"), top_values=0, quiet=True)
