"""The sections of the page, one function each."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from typing import Any

from ffmem.experiments.charts import draw, shown, side_by_side, svg
from ffmem.experiments.experiment import Experiment, Figure
from ffmem.experiments.markup import Raw, data, details, element, facts, join, missing, table
from ffmem.experiments.panels import Axis, Panel, Point, Results
from ffmem.experiments.paper import the_paper
from ffmem.experiments.readings import FEWEST
from ffmem.experiments.rules import RUN_CONTROL, Claim, Finding, Verdict
from ffmem.reports.claims import summary
from ffmem.reports.figures import figures
from ffmem.run.reader import Index
from ffmem.run.registry import all_experiments

GLOSSARY = {
    "key": "A row of a feed-forward layer's first matrix. It is compared with what the model has read so far.",
    "value": "The row of the second matrix that belongs to it. It is added to the stream, and can be read as a prediction "
    "of the next token. A key and its value are a memory cell, named like L3D17: layer 3, cell 17.",
    "coefficient": "How strongly a cell fires at a token: what its value is multiplied with.",
    "trigger": "One of the prefixes of the text for which a cell has its largest coefficients.",
    "residual stream": "What flows from layer to layer, and to which every layer adds. Read through the vocabulary, it too "
    "predicts a token.",
}
SYMBOLS: dict[Verdict, str] = {
    "holds": "✓",
    "does not hold": "✗",
    "undecided": "?",
    "not measured": "–",
    "does not apply": "–",
}
OWN_TEXT = ("(the indexed corpus itself)", "sentences that the run kept")
"""The words by which results say that their examples are from text that the index has seen."""


def glossary() -> Raw:
    """The list of words that the page uses, with their meanings."""
    return element("section", element("h2", "Five words"), facts(GLOSSARY), aria_label="Five words")


def what_was_run(index: Index, results: Results, controls: Results) -> Raw:
    """The section on what was run: the model, the text, the settings and the experiments."""
    manifest, counts = index.manifest, index.counts
    model, settings = manifest.model, manifest.settings
    cells = sorted(set(model.cells))
    a_layer = f"{cells[0]:,}" if len(cells) == 1 else f"{cells[0]:,} to {cells[-1]:,}"
    layers = "all layers" if len(index.layers) == model.layers else f"layers {', '.join(map(str, index.layers))}"
    negative = "with" if settings.negative else "without"
    pairs = {
        "model": f"{model.name} ({model.architecture}, {'gated' if model.gated else 'not gated'})",
        "shape": f"{model.layers} layers, d {model.d:,}, {a_layer} cells a layer, {model.vocabulary:,} tokens",
        "precision": f"{model.dtype} on {model.device}",
        "indexed text": ", ".join(manifest.corpus.sources),
        "read": f"{counts.records:,} records, {counts.sentences:,} sentences, {counts.tokens:,} tokens",
        "indexed": f"{counts.cells:,} cells in {layers}; {counts.triggers:,} triggers, at most "
        f"{settings.top} a cell, distinct by {settings.distinct}, {negative} negative ones",
        "sentences": f"unit {settings.unit}, beginning-of-sentence token {'first' if settings.bos else 'not fed'}",
    }
    rows: list[list[Any]] = []
    for name in all_experiments():
        if name not in results:
            rows.append([name, None, None, "not run", None])
            continue
        result = results[name]
        examples = result.settings.get("examples")
        asked = result.settings.get("examples_asked", examples)
        count = None if examples is None else f"{examples:,}" + (f" of {asked:,} asked for" if asked != examples else "")
        origin = result.settings.get("examples_from", "the run's triggers")
        rows.append([name, result.seed, count, origin, "run" if name in controls else "not run"])
    own = [name for name, result in results.items() if _own_text(result.settings)]
    note = Raw("")
    if own:
        note = element(
            "p", element("strong", "Examples from the indexed text itself. "),
            f"No separate text was given to draw examples from, so {', '.join(own)} followed prefixes that the index, and "
            "perhaps the model in its training, has already seen. The paper used a validation set: give one with --eval.",
            class_="warning", role="note",
        )  # fmt: skip
    made = table(
        "Experiments of this run", ["experiment", "seed", "examples", "from", "random weights"], rows, class_="stacked"
    )
    return element("section", element("h2", "What was run"), facts(pairs), note, made, aria_label="What was run")


def _own_text(settings: dict[str, Any]) -> bool:
    return any(mark in str(settings.get("examples_from")) for mark in OWN_TEXT)


def opening(claims: Sequence[Claim]) -> Raw:
    """The first part of the page: how the claims fared."""
    return element("p", element("strong", summary(claims)), class_="summary")


def claims_section(claims: Sequence[Claim]) -> Raw:
    """The section with all claims, their numbers and their verdicts."""
    rows = [
        [
            join(_marks(claim)),
            join([claim.claim, element("small", f"{claim.figure}. Rule: {claim.rule}.")]),
            claim.paper,
            _found(claim.found),
            _control(claim),
        ]
        for claim in claims
    ]
    intro = (
        "A verdict follows from a number by the rule in its row and by nothing else. Behind a number stands its 95% "
        "interval: what the same number is on cells or examples drawn again from those that were looked at. A claim holds "
        "where the number and its whole interval meet the rule, does not hold where none of it does, and is undecided "
        "between. What holds for a model of this shape with random weights too says nothing about what this one has "
        "learned: it is no evidence. Spearman is the correlation of ranks: +1 where one always rises with the other, −1 "
        f"where it always falls; a trend is judged from {FEWEST} layers on, and the quarters at its two ends must agree."
    )
    columns = ["verdict", "claim", "the paper says", "here", "random weights"]
    made = table("The paper's claims, and what is so here", columns, rows, class_="claims stacked")
    return element("section", element("h2", "The paper says / here"), element("p", intro), made, aria_label="Claims")


def _marks(claim: Claim) -> list[Raw]:
    """A claim's verdict and, where it holds, what it is worth beside random weights."""
    marks = [element("span", f"{SYMBOLS[claim.verdict]} {claim.verdict}", class_=claim.verdict.replace(" ", "-"))]
    if claim.evidence:
        # A control that did not run, or did not tell, is no fault of the claim's.
        kind = claim.evidence if claim.evidence in ("evidence", "no evidence") else "open"
        marks.append(element("small", claim.evidence, class_=f"worth {kind.replace(' ', '-')}"))
    return marks


def _found(finding: Finding) -> Raw:
    """The numbers of a claim, each on a line of its own, and what stands beside them."""
    lines = [element("div", number.text) for number in finding.numbers if number.text]
    return join([*lines, element("small" if lines else "span", finding.beside)])


def _control(claim: Claim) -> Raw:
    if claim.control is None:
        return element("small", "–" if claim.verdict == "not measured" else RUN_CONTROL)
    return join([element("b", claim.control.verdict), _found(claim.control)])


def figures_section(results: Results, layers: int, controls: Results) -> Raw:
    """All figures, and once for all of them how layers are drawn."""
    depth = Raw("")
    if layers != the_paper().layers:
        count = f"{layers} layers" if layers != 1 else "1 layer"
        depth = element("p", f"This model has {count} and the paper's {the_paper().layers}, so both are drawn by depth.")
    found = [figure_section(*one, results, layers, controls) for one in figures().values()]
    return element("section", element("h2", "Figures"), depth, *found, aria_label="Figures")


def figure_section(experiment: Experiment, figure: Figure, results: Results, layers: int, controls: Results) -> Raw:
    """The section of one figure: a heading, two sentences, the chart and its numbers."""
    heading = element("h3", f"{figure.number}. {figure.title}", id=figure.name)
    if experiment.name not in results:
        return element("section", heading, element("p", figure.see), missing(experiment.name))
    found = figure.panels(results[experiment.name], Axis(layers), controls.get(experiment.name))
    drawn = [draw(panel, figure.alt, f"{figure.name}_{at}") for at, panel in enumerate(found, 1)]
    charts, specs = [], []
    for at, (panel, chart) in enumerate(zip(found, drawn, strict=True), 1):
        id = f"{figure.name}-{at}"
        spec = chart.to_dict() | {"width": "container"}
        spec.pop("$schema", None)  # an address, which nothing here needs
        spec.pop("config", None)
        charts.append(element("div", class_="chart", id=id, role="group", aria_label=_label(figure.alt, panel)))
        specs.append(data(f"{id}-spec", spec))
    still = svg(side_by_side(drawn))
    source = f"data:image/svg+xml;base64,{b64encode(still.encode()).decode()}"
    image = Raw(f'<noscript><img alt="{escape(figure.alt)}" src="{source}"></noscript>')
    return element(
        "section", heading, element("p", figure.see),
        element("div", *charts, class_="charts"), *specs, image,
        details("The numbers", *(_numbers(panel) for panel in found), class_="more numbers"),
    )  # fmt: skip


def _label(alt: str, panel: Panel) -> str:
    return f"{panel.title}: {alt}" if panel.title else alt


def _numbers(panel: Panel) -> Raw:
    """A panel's curves as a table, a column each, the layers (of this model, or of the paper) down."""
    parts = []
    for paper in (False, True):
        curves = [curve for curve in panel.curves if curve.points and ("paper" in curve.name) == paper]
        if not curves:
            continue
        by_layer = [{point.at: point for point in curve.points} for curve in curves]
        layers = sorted({at for points in by_layer for at in points} | (set() if paper else set(panel.empty)))
        rows = [[at, *(_cell(panel, points.get(at), at) for points in by_layer)] for at in layers]
        what = "bin" if panel.axis is None else "layer"
        title = panel.title or ("the paper" if paper else "this model")
        columns = [f"{c.name} ({c.interval})" if any(p.low is not None for p in c.points) else c.name for c in curves]
        parts.append(table(f"{title}: {panel.y}", [what, *columns], rows))
    return join(parts)


def _cell(panel: Panel, point: Point | None, at: int) -> str | None:
    """A point as a number, with the ends of its interval and what there is to note."""
    if point is None:
        return "no cells" if at in panel.empty else None
    ends = () if point.low is None or point.high is None else (point.low, point.high)
    span = f" ({' to '.join(shown(panel, end) for end in ends)})" if ends else ""
    return shown(panel, point.value) + span + (f" ({point.note})" if point.note else "")


def further_sections(index: Index, results: Results) -> list[Raw]:
    """The sections that experiments add besides claims and figures, one for each heading."""
    parts = [(section, results.get(one.name)) for one in all_experiments().values() for section in one.sections]
    by_heading: dict[str, list[Raw]] = {}
    for section, result in sorted(parts, key=lambda part: part[0].order):
        by_heading.setdefault(section.heading, []).extend(section.show(index, result))
    return [element("section", element("h2", heading), *shown, aria_label=heading) for heading, shown in by_heading.items()]
