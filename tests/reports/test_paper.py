"""The paper's numbers are in the package, as shares."""

import pytest

from ffmem.experiments.paper import the_paper


def test_every_curve_has_a_number_a_layer_and_shares_are_shares():
    paper = the_paper()
    assert paper.layers == 16
    curves = [*paper.removal.values(), paper.agreement, paper.active, paper.zero_agreement, paper.residual_matches]
    curves += [paper.residual_probability, *paper.cases.values()]
    assert all(len(curve) == 16 and all(-1 <= x <= 1 for x in curve) for curve in curves)
    assert len(paper.rank_median) == len(paper.rank_q1) == 16
    assert paper.removal["last"][0] == -0.717
    assert paper.agreement[-1] == 144 / 4096
    assert paper.zero_agreement[-1] == 0.6835  # over 4,000 examples, not the plot's 4,096
    assert paper.agreement_by_probability[2] == (1.78e-4, 0.1477)
    assert paper.table2[0] == ("L15D222", "each", 0.68)
    assert paper.last_layer_distant == 0.66
    assert paper.zero_agreement_text["at_least"] == 0.68
    assert all(sum(case[layer] for case in paper.cases.values()) == pytest.approx(1, abs=0.003) for layer in range(16))
