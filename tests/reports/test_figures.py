"""Figures: the rows' own numbers, the paper's beside them, at the right depth."""

import re

import pytest

from ffmem.errors import FfmemError
from ffmem.experiments.charts import png, svg
from ffmem.experiments.panels import COLOURS
from ffmem.experiments.paper import the_paper
from ffmem.reports.figures import figure, figures, panels, plot, save_figures
from ffmem.run.results import Result
from tests.reports.made import made_run, random_weights, resampled


def drawn(chart):
    """All rows in a chart's data."""
    found = []

    def walk(part):
        if isinstance(part, dict):
            if "values" in part.get("data", {}):
                found.extend(part["data"]["values"])
            for inside in part.values():
                walk(inside)
        elif isinstance(part, list):
            for inside in part:
                walk(inside)

    spec = chart.to_dict()
    walk(spec)
    for rows in spec.get("datasets", {}).values():
        found.extend(rows)
    return found


def series(chart, name):
    rows = {(row["at"], row["x"]): row["value"] for row in drawn(chart) if row["series"] == name}
    return [(at, x, value) for (at, x), value in sorted(rows.items())]


COLUMNS = {
    "fig4": ("agreement", "share", "this model"),
    "fig5": ("agreement", "rank_median", "this model"),
    "fig7": ("activity", "active_median", "this model"),
    "fig8": ("composition", "zero_agreement", "this model"),
    "fig9": ("refinement", "residual_matches_output", "this model"),
    "fig10": ("refinement", "residual_probability_median", "this model"),
    "normaliser": ("normaliser", "change_softmax_scaled", "softmax, same length"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_figure_holds_the_rows_numbers_at_their_layers(name, sixteen):
    experiment, column, label = COLUMNS[name]
    expected = [(row["layer"], float(row["layer"]), row[column]) for row in sixteen[experiment].rows]
    assert series(figure(name, sixteen), label) == expected


@pytest.mark.parametrize("kind", ["first", "last", "random"])
def test_the_removals_are_three_curves_with_intervals_and_the_papers_three(kind, sixteen):
    chart = figure("fig3", sixteen)
    rows = [row for row in sixteen["removal"].rows if row["kind"] == kind]
    assert series(chart, f"{kind} token") == [(row["layer"], row["layer"], row["mean"]) for row in rows]
    assert [value for *_, value in series(chart, f"{kind} token, paper")] == the_paper().removal[kind]
    spans = {
        row["at"]: (row["low"], row["high"]) for row in drawn(chart) if row["series"] == f"{kind} token" and "low" in row
    }
    assert spans == {row["layer"]: (row["low"], row["high"]) for row in rows}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fig4", the_paper().agreement),
        ("fig5", the_paper().rank_median),
        ("fig6", [share for _, share in the_paper().agreement_by_probability]),
        ("fig7", the_paper().active),
        ("fig8", the_paper().zero_agreement),
        ("fig9", the_paper().residual_matches),
        ("fig10", the_paper().residual_probability),
    ],
)
@pytest.mark.parametrize("results", ["sixteen", "twelve"])
def test_the_papers_own_curve_is_beside_ours_and_dashed(name, values, results, request):
    chart = figure(name, request.getfixturevalue(results))
    assert [value for *_, value in series(chart, "the paper")] == values
    (panel,) = panels(name, request.getfixturevalue(results))
    assert {curve.name: curve.dash for curve in panel.curves}["the paper"] == (5, 3)


def test_layers_are_rescaled_to_depth_where_their_number_differs(twelve):
    chart = figure("fig9", twelve)
    assert [x for _, x, _ in series(chart, "this model")] == [at / 11 for at in range(12)]
    assert [x for _, x, _ in series(chart, "the paper")] == [at / 15 for at in range(16)]


def test_a_run_of_some_layers_is_drawn_by_the_models_depth(sixteen):
    some = Result("activity", 0, {}, [row for row in sixteen["activity"].rows if row["layer"] in (1, 4)])
    assert [x for _, x, _ in series(figure("fig7", [some], layers=16), "this model")] == [1, 4]
    assert [x for _, x, _ in series(figure("fig7", [some], layers=7), "this model")] == [0, 0.5]
    one = Result("activity", 0, {}, some.rows[:1])
    assert [x for _, x, _ in series(figure("fig7", [one]), "this model")] == [1]  # one layer is the last layer


def test_the_four_cases_are_stacked_to_one_in_a_panel_each(sixteen):
    here, paper = panels("fig11", sixteen)
    assert [panel.title for panel in (here, paper)] == ["this model", "the paper"]
    for row in (row for row in drawn(figure("fig11", sixteen)) if row["series"] == "ffn"):
        assert row["top"] == pytest.approx(1, abs=0.003)
    first = {row["series"]: row for row in drawn(figure("fig11", sixteen)) if row["at"] == 1}
    assert (first["residual"]["base"], first["residual"]["top"]) == (0, 0.496)
    assert (first["composition"]["base"], first["composition"]["top"]) == (0.496, pytest.approx(1.001))


def test_bins_without_cells_have_no_bar(sixteen):
    facts = sixteen["agreement"].facts
    bins = [one | {"share": None, "cells": 0} if at == 3 else one for at, one in enumerate(facts["fig6"])]
    result = Result("agreement", 0, {}, sixteen["agreement"].rows, facts | {"fig6": bins})
    chart = figure("fig6", [result])
    assert {row["at"] for row in drawn(chart) if row["series"] == "this model" and "top" in row} == {1, 2, 3, 5, 6, 7, 8}
    (gap,) = [row for row in drawn(chart) if row["at"] == 4 and row.get("shown") == "no cells"]
    assert (gap["few"], gap["spoken"]) == ("none", "this model, bin 4: no cells")


def test_a_gated_model_has_a_curve_of_its_negative_triggers_and_others_have_none(gated, sixteen):
    assert [value for *_, value in series(figure("fig4", gated), "negative triggers")] == [0.01] * 6
    assert series(figure("fig4", sixteen), "negative triggers") == []


def test_effective_memories_are_shares_of_the_layers_cells(sixteen):
    chart = figure("normaliser", sixteen)
    assert {value for *_, value in series(chart, "this model")} == {300 / 4096}


def test_numbers_that_are_none_are_left_out(sixteen):
    rows = [row | ({"share": None} if row["layer"] == 2 else {}) for row in sixteen["agreement"].rows]
    result = Result("agreement", 0, {}, rows, sixteen["agreement"].facts)
    assert [at for at, *_ in series(figure("fig4", [result]), "this model")] == [1, *range(3, 17)]


@pytest.mark.parametrize("name", figures())
def test_every_figure_answers_to_pointer_and_legend_and_lies_on_any_ground(name, sixteen):
    spec = figure(name, sixteen).to_dict()
    assert spec["background"] == "transparent"
    assert spec["params"]
    assert all(param["bind"] == "legend" for param in spec["params"])
    layers = [layer for part in spec.get("hconcat", [spec]) for layer in part["layer"]]
    assert all(layer["encoding"]["tooltip"] for layer in layers)
    assert figure(name, sixteen).to_dict() == spec  # no counter in a name


def contrast(colour, ground):
    def luminance(text):
        parts = [int(text[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#14171a"])
def test_every_colour_stands_out_from_a_light_and_a_dark_page(ground):
    assert {
        name: round(contrast(colour, ground), 1) for name, colour in COLOURS.items() if contrast(colour, ground) < 2.9
    } == {}


def test_a_result_plots_all_its_figures_side_by_side(sixteen):
    def titles(name):
        return [part["title"] for part in plot(sixteen[name]).to_dict()["hconcat"]]

    assert titles("agreement") == ["Fig 4", "Fig 5", "Fig 6"]
    assert titles("refinement") == ["Fig 9", "Fig 10", "Fig 11: this model", "Fig 11: the paper"]
    assert plot(sixteen["activity"]).to_dict()["title"] == "Fig 7"
    assert svg(plot(sixteen["refinement"])).startswith("<svg")
    with pytest.raises(FfmemError, match=r"expected a result of removal, agreement, .*, found 'patterns'"):
        plot(Result("patterns", 0, {}, [{"layer": 1}]))


def test_figures_are_saved_as_svg_and_png_for_the_results_there_are(tmp_path, sixteen):
    some = {name: sixteen[name] for name in ("activity", "composition")}
    index = made_run(tmp_path / "run", results=some)
    made = save_figures(index, tmp_path / "figures")
    assert [path.name for path in made] == ["fig7.svg", "fig7.png", "fig8.svg", "fig8.png"]
    assert all(path.read_bytes()[:4] == (b"\x89PNG" if path.suffix == ".png" else b"<svg") for path in made)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == sorted(path.name for path in made)
    assert png(figure("fig7", some)) == (tmp_path / "figures" / "fig7.png").read_bytes()


def test_what_cannot_be_drawn_is_told_in_one_line(sixteen):
    with pytest.raises(FfmemError, match=r"expected a figure among fig3, .*, found 'fig1'"):
        figure("fig1", sixteen)
    with pytest.raises(FfmemError, match="fig3 needs the result removal: make it with ffmem experiments RUN removal"):
        figure("fig3", {})


@pytest.mark.parametrize(("module", "package"), [("altair", "altair"), ("vl_convert", "vl-convert-python")])
def test_a_missing_library_is_one_line_that_says_what_to_install(module, package, sixteen, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        FfmemError, match=re.escape(f"figures need {package}, which is not installed: pip install 'ffmem[report]'")
    ):
        svg(figure("fig7", sixteen))


@pytest.mark.parametrize("name", figures())
def test_random_weights_are_beside_the_model_where_they_were_run(name, sixteen):
    def named(controls):
        return {
            text
            for panel in panels(name, sixteen, controls=controls)
            for text in (panel.title, *(curve.name for curve in panel.curves if curve.points))
            if "random weights" in text
        }

    assert named({}) == set()
    assert named(random_weights())


def test_random_weights_have_a_colour_and_dashes_of_their_own(sixteen):
    chart = figure("fig9", sixteen, controls=random_weights().values())
    assert [value for *_, value in series(chart, "random weights")] == [0.9] * 16
    (panel,) = panels("fig9", sixteen, controls=random_weights())
    curves = {curve.name: curve for curve in panel.curves}
    assert (
        len({curve.colour for curve in curves.values()})
        == len({curve.dash for curve in curves.values() if curve.form == "line"}) + 1
    )
    assert curves["random weights"].colour == COLOURS["random weights"]


def test_the_removals_of_random_weights_have_a_panel_on_the_same_scale(sixteen):
    here, random = panels("fig3", sixteen, controls=random_weights())
    assert random.title == "random weights"
    assert here.limits == random.limits == {"domain": [pytest.approx(-0.729), 0], "nice": True}


@pytest.mark.parametrize(
    ("name", "experiment", "column"),
    [
        ("fig4", "agreement", "share"),
        ("fig8", "composition", "zero_agreement"),
        ("fig9", "refinement", "residual_matches_output"),
    ],
)
def test_shares_have_the_interval_of_their_resamples(name, experiment, column, sixteen):
    results = resampled(sixteen, 41)  # from 0.99 to 1.01 in steps of 0.0005: the middle 95% are 0.9905 to 1.0095
    spans = {
        row["at"]: (row["low"], row["high"])
        for row in drawn(figure(name, results))
        if row["series"] == "this model" and "low" in row
    }
    assert spans == {
        row["layer"]: (pytest.approx(0.9905 * row[column]), pytest.approx(1.0095 * row[column]))
        for row in sixteen[experiment].rows
    }
    assert not any("low" in row for row in drawn(figure(name, sixteen)) if row["series"] == "this model")


@pytest.mark.parametrize(
    ("name", "spread"), [("fig4", "95% interval"), ("fig5", "quartiles"), ("fig9", "95% interval"), ("fig10", "quartiles")]
)
def test_the_height_says_what_bands_and_whiskers_are(name, spread, sixteen):
    layers = figure(name, resampled(sixteen)).to_dict()["layer"]
    assert any(layer["encoding"]["y"]["axis"]["title"].endswith(f"({spread})") for layer in layers)


def test_whiskers_stand_on_bars_and_bands_lie_on_lines(sixteen):
    def marks(name):
        return {layer["mark"]["type"] for layer in figure(name, resampled(sixteen)).to_dict()["layer"]}

    assert {"bar", "rule"} <= marks("fig9")
    assert "area" not in marks("fig9")
    assert "area" in marks("fig4")
    assert "rule" not in marks("fig4")


def test_a_bin_of_few_cells_is_hollow_and_says_how_many(sixteen):
    result = resampled(sixteen)["agreement"]
    bins = [one | {"cells": 29 if at == 7 else 30} for at, one in enumerate(result.facts["fig6"])]
    spec = figure(
        "fig6", [Result("agreement", 0, {}, result.rows, result.facts | {"fig6": bins}, result.resamples)]
    ).to_dict()
    found = {}
    for layer in spec["layer"]:
        for row in layer["data"]["values"]:
            if row["series"] == "this model":
                found.setdefault((layer["mark"]["type"], layer["mark"].get("filled", True)), set()).add(row["at"])
    assert found["bar", False] == {8}
    assert found["bar", True] == {1, 2, 3, 4, 5, 6, 7}
    assert found["rule", True] == {1, 2, 3, 4, 5, 6, 7, 8}
    assert {row["few"] for layer in spec["layer"] for row in layer["data"]["values"] if "few" in row} == {"n 29"}


def test_legends_show_a_square_for_bars_and_a_stroke_for_lines(sixteen):
    chart = figure("fig9", sixteen, controls=random_weights())
    (scale,) = [layer["encoding"]["shape"]["scale"] for layer in chart.to_dict()["layer"] if "shape" in layer["encoding"]]
    assert dict(zip(scale["domain"], scale["range"], strict=True)) == {
        "this model": "square", "the paper": "stroke", "random weights": "stroke",
    }  # fmt: skip


def test_no_share_is_ever_in_scientific_notation(sixteen):
    rows = [
        row | {"residual_probability_median": 8.33e-26, "residual_probability_q1": 0.0} for row in sixteen["refinement"].rows
    ]
    result = Result("refinement", 0, {}, rows, sixteen["refinement"].facts)
    shown = {row["shown"] for row in drawn(figure("fig10", [result])) if row["series"] == "this model"}
    assert shown == {"< 0.0001%"}
