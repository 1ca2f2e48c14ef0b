"""Claims: every rule met and broken by planted rows."""

import pytest

from ffmem.reports.claims import judge_claims
from ffmem.results import Result
from ffmem.words import RunError


def verdicts(results):
    return {claim.id: claim.verdict for claim in judge_claims(results)}


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
        ("agreement-chance", "agreement", lambda row: {"share": 0.0005}),
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
        (
            "agreement-probability",
            "agreement",
            {"fig6": [{"share": x} for x in (0.4, 0.3, None, 0.2, 0.1)]},
            "does not hold",
        ),
        ("agreement-probability", "agreement", {"fig6": [{"share": x} for x in (0.1, 0.2, None, 0.2, 0.4)]}, "holds"),
        ("agreement-probability", "agreement", {"fig6": [{"share": x} for x in (0.1, None, None, 0.4)]}, "not measured"),
        ("stop-words", "composition", {"stop_word_share": 0.4}, "holds"),
        ("stop-words", "composition", {"stop_word_share": 0.81}, "does not hold"),
        ("stop-words", "composition", {"stop_word_share": None}, "not measured"),
        ("short-prefixes", "composition", {"short_prefix_share": 0.2}, "does not hold"),
        ("last-layer-distant", "refinement", {"last_layer": {"distant": 0.5, "compositions": 2}}, "does not hold"),
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
    baselines = {"uniform": 0.01, "by_layer": [{"layer": 16, "shuffled": 0.0}]}
    assert verdicts(with_facts(sixteen["agreement"], baselines=baselines))["agreement-chance"] == "does not hold"
    assert (
        verdicts(with_facts(sixteen["agreement"], baselines=baselines | {"uniform": 0.001}))["agreement-chance"] == "holds"
    )


def test_a_trend_is_not_judged_from_three_layers(sixteen):
    few = Result("activity", 0, {}, sixteen["activity"].rows[:3])
    claim = next(claim for claim in judge_claims({"activity": few}) if claim.id == "active-depth")
    assert (claim.verdict, claim.here) == ("not measured", "too few layers for a trend (3; 4 needed)")


def test_a_rank_is_told_as_a_rank_and_a_change_as_percent(sixteen):
    claims = {claim.id: claim for claim in judge_claims(sixteen)}
    assert "9,611 in layer 1, 5,139 in 16" in claims["rank-falls"].here
    assert "−71.7% in layer 1, −49.9% in 16" in claims["last-token-depth"].here
    low = with_rows(sixteen["agreement"], lambda row: {"rank_median": 1.0})
    assert "1 in layer 1" in {claim.id: claim for claim in judge_claims(low)}["rank-falls"].here


def test_a_result_of_another_shape_is_one_line():
    with pytest.raises(
        RunError, match=r"the result refinement lacks what Fig 9 needs .*make it again with ffmem experiments"
    ):
        judge_claims({"refinement": Result("refinement", 0, {}, [{"layer": 1}], {})})
