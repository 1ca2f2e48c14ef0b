"""Claims: every rule met and broken by planted rows, planted resamples and a planted control."""

from dataclasses import replace

import pytest

from ffmem.errors import RunError
from ffmem.reports.claims import judge_claims, summary
from ffmem.run.results import Result
from tests.reports.made import random_weights, resampled, with_draws, with_fact_draws


def verdicts(results):
    return {claim.id: claim.verdict for claim in judge_claims(results)}


def claim_of(results, name, controls=None):
    return next(claim for claim in judge_claims(results, controls) if claim.id == name)


def with_rows(result, change):
    return {result.experiment: Result(result.experiment, 0, {}, [row | change(row) for row in result.rows], result.facts)}


def with_facts(result, **facts):
    return {result.experiment: Result(result.experiment, 0, {}, result.rows, result.facts | facts)}


def test_every_claim_of_the_paper_holds_for_the_papers_own_numbers(sixteen):
    claims = judge_claims(sixteen)
    assert {claim.verdict for claim in claims} == {"holds"}
    assert len({claim.id for claim in claims}) == len(claims) >= 18
    assert all(claim.claim and claim.paper and claim.here and claim.rule for claim in claims)


def test_what_was_not_run_is_not_measured(sixteen):
    claims = judge_claims({"activity": sixteen["activity"]})
    measured = {claim.figure for claim in claims if claim.verdict != "not measured"}
    assert measured == {"Fig 7"}
    assert next(claim for claim in claims if claim.id == "last-token").here == "not run: ffmem experiments RUN removal"


def flipped(row):
    return {"layer": 17 - row["layer"]}


@pytest.mark.parametrize(
    ("claim", "experiment", "change"),
    [
        ("last-token", "removal", lambda row: {"mean": -0.1 if row["kind"] == "last" else -0.5}),
        ("last-token-depth", "removal", flipped),
        ("agreement-rises", "agreement", flipped),
        ("agreement-rises", "agreement", lambda row: {"share": 0.0}),
        ("agreement-chance", "agreement", lambda row: {"share": 0.0001}),
        ("rank-falls", "agreement", flipped),
        ("active-part", "activity", lambda row: {"active_median": 0.9}),
        ("active-part", "activity", lambda row: {"active_median": 0.01}),
        ("active-depth", "activity", flipped),
        ("zero-agreement", "composition", lambda row: {"zero_agreement": 0.67}),
        ("residual-rises", "refinement", flipped),
        ("decided-early", "refinement", lambda row: {"residual_matches_output": 0.19 if row["layer"] < 10 else 0.9}),
        ("probability-rises", "refinement", flipped),
        ("residual-commonest", "refinement", lambda row: {"residual": 0.1}),
        ("composition-changes", "refinement", lambda row: {"composition": 0.0}),
        ("ffn-rare", "refinement", lambda row: {"ffn": 0.06}),
    ],
)
def test_planted_rows_break_their_claim(claim, experiment, change, sixteen):
    assert verdicts(with_rows(sixteen[experiment], change))[claim] == "does not hold"


@pytest.mark.parametrize(
    ("claim", "experiment", "facts", "verdict"),
    [
        ("stop-words", "composition", {"stop_word_share": 0.4}, "holds"),
        ("stop-words", "composition", {"stop_word_share": 0.81}, "does not hold"),
        ("stop-words", "composition", {"stop_word_share": None}, "not measured"),
        ("short-prefixes", "composition", {"short_prefix_share": 0.2}, "does not hold"),
        ("last-layer-distant", "refinement", {"last_layer": {"distant": 0.5, "compositions": 30}}, "does not hold"),
        ("last-layer-distant", "refinement", {"last_layer": {"distant": 1.0, "compositions": 29}}, "not measured"),
        ("stop-words", "composition", {"stop_word_share": 0.6, "agreeing_cases": 29}, "not measured"),
        ("last-layer-distant", "refinement", {"last_layer": {"distant": None, "compositions": 0}}, "not measured"),
        ("normaliser", "normaliser", {"change_softmax_scaled_all": 0.05}, "does not hold"),
        ("normaliser", "normaliser", {"change_softmax_scaled_all": -0.2}, "holds"),
    ],
)
def test_planted_facts_decide_their_claim(claim, experiment, facts, verdict, sixteen):
    assert verdicts(with_facts(sixteen[experiment], **facts))[claim] == verdict


@pytest.mark.parametrize(
    ("name", "claim", "least"),
    [("in_top_layers", "predictive-upper", 80), ("with_agreeing_trigger", "predictive-agree", 25)],
)
def test_predictive_values_are_counted_against_their_number(name, claim, least, sixteen):
    found = sixteen["agreement"].facts["predictive"]
    for count, verdict in ((least, "holds"), (least - 1, "does not hold")):
        assert verdicts(with_facts(sixteen["agreement"], predictive=found | {name: count}))[claim] == verdict


def test_four_layers_in_five_are_enough(sixteen):
    def broken(count):
        return with_rows(sixteen["removal"], lambda row: {"mean": 0.0} if row["layer"] <= count else {})

    assert verdicts(broken(3))["last-token"] == "holds"  # 13 of 16 are 81%
    assert verdicts(broken(4))["last-token"] == "does not hold"  # 12 of 16 are 75%


def test_chance_is_never_below_one_in_the_vocabulary(sixteen):
    for uniform, verdict in ((0.04, "does not hold"), (0.03, "holds")):
        baselines = {"uniform": uniform, "by_layer": [{"layer": 16, "shuffled": 0.0}]}
        assert verdicts(with_facts(sixteen["agreement"], baselines=baselines))["agreement-chance"] == verdict


def shuffled(best):
    return {"baselines": {"uniform": 1e-5, "by_layer": [{"layer": 16, "shuffled": best}]}}


@pytest.mark.parametrize(
    ("shares", "chances", "verdict"),
    [
        ((0.030, 0.040), (0.01, 0.02), "holds"),
        ((0.030, 0.040), (0.01, 0.034), "undecided"),  # both intervals reach into each other
        ((0.030, 0.040), (0.04, 0.05), "does not hold"),
    ],
)
def test_the_best_layers_interval_is_held_against_that_of_its_shuffled_pairs(shares, chances, verdict, sixteen):
    result = sixteen["agreement"]
    draws = [
        {"rows": [row | {"share": share} for row in result.rows], "facts": shuffled(chance)}
        for share in shares
        for chance in chances
    ]
    claim = claim_of(
        {"agreement": replace(result, facts=result.facts | shuffled(chances[0]), resamples=draws)}, "agreement-chance"
    )
    assert claim.verdict == verdict
    assert "in layer 16; shuffled pairs" in claim.here
    assert "one in the vocabulary 0.001%" in claim.here


def test_a_trend_is_not_judged_from_three_layers(sixteen):
    few = Result("activity", 0, {}, sixteen["activity"].rows[6:9])
    claim = next(claim for claim in judge_claims({"activity": few}) if claim.id == "active-depth")
    assert (claim.verdict, claim.here) == ("not measured", "too few layers for a trend (3; 4 needed)")


def test_a_rank_is_told_as_a_rank_and_a_change_as_percent(sixteen):
    claims = {claim.id: claim for claim in judge_claims(sixteen)}
    assert "difference −4,541 ranks; 9,611 in layer 1, 5,139 in 16" in claims["rank-falls"].here
    assert "71.7% in layer 1, 49.9% in 16" in claims["last-token-depth"].here
    low = with_rows(sixteen["agreement"], lambda row: {"rank_median": 1.0})
    assert "1 in layer 1" in {claim.id: claim for claim in judge_claims(low)}["rank-falls"].here


def test_a_result_of_another_shape_is_one_line():
    with pytest.raises(
        RunError, match=r"the result refinement lacks what Fig 9 needs .*make it again with ffmem experiments"
    ):
        judge_claims({"refinement": Result("refinement", 0, {}, [{"layer": 1}], {})})


def test_a_claim_holds_falls_or_is_undecided_by_its_whole_interval(sixteen):
    result = sixteen["composition"]
    for draws, verdict in (((0.45, 0.75), "holds"), ((0.3, 0.7), "undecided"), ((0.39, 0.81), "undecided")):
        found = with_fact_draws(result, *({"stop_word_share": share} for share in [draws[0]] * 50 + [draws[1]] * 50))
        claim = claim_of({"composition": found}, "stop-words")
        assert (claim.verdict, claim.value, claim.low, claim.high) == (verdict, 0.6, *draws)
    low = replace(result, facts=result.facts | {"stop_word_share": 0.2})
    for draws, verdict in (((0.1, 0.39), "does not hold"), ((0.1, 0.4), "undecided"), ((0.1, 0.9), "undecided")):
        found = with_fact_draws(low, *({"stop_word_share": share} for share in [draws[0]] * 50 + [draws[1]] * 50))
        assert claim_of({"composition": found}, "stop-words").verdict == verdict


def test_the_interval_is_where_the_middle_95_percent_of_resamples_are(sixteen):
    found = with_fact_draws(sixteen["composition"], *({"short_prefix_share": at / 100} for at in range(30, 51)))
    claim = claim_of({"composition": found}, "short-prefixes")
    assert (claim.low, claim.high) == (pytest.approx(0.305), pytest.approx(0.495))
    assert claim.here == "43% (30.5% to 49.5%) are short (4,000 examples)"


def test_the_papers_own_numbers_hold_with_intervals_and_say_of_how_many(sixteen):
    claims = {claim.id: claim for claim in judge_claims(resampled(sixteen))}
    assert {claim.verdict for claim in claims.values()} == {"holds"}
    assert all(claim.low <= claim.value <= claim.high for claim in claims.values())
    assert not any("not there" in claim.here for claim in claims.values())
    assert claims["agreement-rises"].n == "65,536 cells"
    assert claims["predictive-upper"].n == "100 values"
    assert claims["zero-agreement"].n == "4,000 examples"
    assert claims["last-layer-distant"].n == "536 compositions"


def test_without_resamples_the_number_alone_is_judged_and_the_row_says_so(sixteen):
    claim = claim_of(sixteen, "stop-words")
    assert (claim.verdict, claim.low, claim.high) == ("holds", None, None)
    assert claim.here == "60% are stop words; interval: not there, run it again (4,000 examples)"


def test_resamples_without_what_a_claim_needs_take_its_interval_and_nothing_else(sixteen):
    found = {name: replace(result, resamples=[{"rows": [], "facts": {}}] * 3) for name, result in sixteen.items()}
    claims = judge_claims(found)
    assert {claim.verdict for claim in claims} == {"holds"}
    assert claim_of(found, "stop-words").low is None


def test_numbers_that_are_none_in_a_resample_are_left_out_of_the_interval(sixteen):
    draws = [{"stop_word_share": share} for share in (None, float("nan"), 0.5, 0.5)]
    claim = claim_of({"composition": with_fact_draws(sixteen["composition"], *draws)}, "stop-words")
    assert (claim.low, claim.high) == (0.5, 0.5)
    nothing = with_facts(sixteen["composition"], stop_word_share=float("nan"))
    assert claim_of(nothing, "stop-words").verdict == "not measured"


def test_what_random_weights_do_too_is_no_evidence(sixteen):
    claims = {claim.id: claim for claim in judge_claims(sixteen, random_weights())}
    assert claims["zero-agreement"].evidence == "no evidence"
    assert claims["zero-agreement"].control.verdict == "holds"
    assert claims["residual-rises"].evidence == "evidence"
    assert claims["residual-rises"].control.verdict == "does not hold"
    assert claims["active-part"].evidence == "no evidence"  # half of all cells is within the rule


def test_a_control_that_does_not_decide_is_told_as_that(sixteen):
    controls = random_weights()
    wide = with_fact_draws(controls["composition"], {"short_prefix_share": 0.1}, {"short_prefix_share": 0.5})
    assert claim_of(sixteen, "short-prefixes", {"composition": wide}).evidence == "control undecided"
    none = replace(wide, facts=wide.facts | {"short_prefix_share": None})
    assert claim_of(sixteen, "short-prefixes", {"composition": none}).evidence == "control not measured"
    assert claim_of(sixteen, "short-prefixes", {}).evidence == "control not run"
    fallen = with_facts(sixteen["composition"], short_prefix_share=0.1)
    assert claim_of(fallen, "short-prefixes", controls).evidence == ""


def test_a_damaged_control_is_one_line_that_says_how_to_make_it_again(sixteen):
    broken = Result("refinement", 0, {}, [{"layer": 1}], {}, control="random")
    with pytest.raises(RunError, match="make it again with ffmem experiments RUN refinement --control random"):
        judge_claims(sixteen, {"refinement": broken})


def test_the_ends_of_a_trend_must_agree_with_its_sign(sixteen):
    # Ranks fall nearly everywhere, and yet the top quarter of the layers is above the bottom quarter.
    values = [21_590, *range(21_500, 21_490, -1), 21_489, 21_488, 21_487, 21_486, 22_604]
    found = with_rows(sixteen["agreement"], lambda row: {"rank_median": float(values[row["layer"] - 1])})
    claim = claim_of(found, "rank-falls")
    assert claim.value < -0.5  # Spearman's
    assert claim.verdict == "does not hold"
    assert "top quarter of the layers 21,766, bottom quarter 21,522, difference +244 ranks" in claim.here


def test_the_difference_of_a_trends_ends_has_an_interval_of_its_own(sixteen):
    result = sixteen["activity"]
    flat = with_draws(
        result, *[lambda row: {}] * 5, *[lambda row: {"active_median": 0.2 + 1e-9 * (row["layer"] > 8) * row["layer"]}] * 5
    )
    ranks, step = claim_of({"activity": flat}, "active-depth").found.numbers
    assert step.verdict == "undecided"
    assert step.low == pytest.approx(-0.324, abs=0.01)
    assert ranks.name == "Spearman"


def test_a_claim_about_most_layers_names_the_layer_that_is_farthest_from_it(sixteen):
    def one_at_90(row):
        return {"ffn": 0.9 if row["layer"] == 7 else 0.0}

    claim = claim_of(with_rows(sixteen["refinement"], one_at_90), "ffn-rare")
    assert claim.verdict == "holds"
    assert "15 of 16, the weakest is layer 7: 90%" in claim.here
    some = with_rows(sixteen["refinement"], lambda row: {"ffn": 0.9 if row["layer"] <= 4 else 0.0})
    assert claim_of(some, "ffn-rare").verdict == "does not hold"  # though the median over layers is 0%


def bins(*counted):
    """Fig 6 from (cells, share) a bin."""
    return [
        {"low": at / 8, "high": (at + 1) / 8, "cells": cells, "share": share} for at, (cells, share) in enumerate(counted)
    ]


@pytest.mark.parametrize(
    ("counted", "verdict"),
    [
        # One cell in the surest bin decides nothing, either way.
        ([(9000, 0.001), (900, 0.02), (90, 0.2), (1, 0.0)], "holds"),
        ([(9000, 0.2), (900, 0.02), (90, 0.001), (1, 1.0)], "does not hold"),
        # Bins without cells are none.
        ([(500, 0.1), (0, None), (500, 0.2), (0, None)], "holds"),
        ([(500, 0.1), (500, 0.1), (0, None)], "does not hold"),
        # Nearly all cells in one bin: there is nothing to compare.
        ([(9000, 0.1), (29, 0.2), (3, 0.5), (1, 1.0)], "not measured"),
    ],
)
def test_bins_count_by_their_cells(counted, verdict, sixteen):
    found = with_facts(sixteen["agreement"], fig6=bins(*counted))
    claim = claim_of(found, "agreement-probability")
    assert claim.verdict == verdict
    assert claim.n == ("" if verdict == "not measured" else f"{sum(cells for cells, _ in counted):,} cells")


def test_activity_is_not_judged_where_the_sign_is_the_toss_of_a_coin(sixteen):
    half = with_rows(sixteen["activity"], lambda row: {"active_median": 0.499})
    for name in ("active-part", "active-depth"):
        claim = claim_of(half, name)
        assert claim.verdict == "does not apply"
        assert "49.9% of the coefficients are above 0" in claim.here
        assert "90% of the mass is in 8.65% of the cells" in claim.here
    rectified = {"activity": replace(half["activity"], facts={"exact_zeros": 0.501})}
    assert claim_of(rectified, "active-part").verdict == "holds"
    gated = {"activity": replace(sixteen["activity"], settings={"gated": True})}
    assert claim_of(gated, "active-part").verdict == "does not apply"
    assert "the layers are gated" in claim_of(gated, "active-part").here


def test_the_summary_says_what_holds_and_what_of_it_is_evidence(sixteen):
    assert summary(judge_claims(sixteen)) == (
        "Of the paper's 21 claims 21 hold on this model; which of them are evidence is not known (control not run: ffmem "
        "experiments RUN --control random)."
    )
    one = {"activity": with_rows(sixteen["activity"], flipped)["activity"]}
    assert summary(judge_claims(one)) == (
        "Of the paper's 21 claims 1 holds on this model; which of them are evidence is not known (control not run: ffmem "
        "experiments RUN --control random). 1 does not hold and 19 were not measured."
    )
    claims = judge_claims(sixteen, random_weights())
    yes, none = (sum(claim.evidence == worth for claim in claims) for worth in ("evidence", "no evidence"))
    assert yes + none == 21
    assert summary(claims) == (
        f"Of the paper's 21 claims 21 hold on this model: {yes} are evidence, {none} are no evidence, since random weights "
        "do the same."
    )
    assert summary(judge_claims({})) == "Of the paper's 21 claims 0 hold on this model. 21 were not measured."


def test_a_claim_whose_experiment_has_no_control_cannot_be_told_apart(sixteen):
    some = {"refinement": random_weights()["refinement"]}
    assert "and 14 cannot be told apart" in summary(judge_claims(sixteen, some))
