"""The page: whole, alone, escaped, the same again; and honest about what is missing."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from ffmem.errors import FfmemError, RunError
from ffmem.experiments.markup import data
from ffmem.reports import report
from ffmem.reports.claims import judge_claims, summary
from ffmem.reports.figures import figures
from ffmem.reports.page import model_title, render
from tests.reports.made import made_run, paper_results, random_weights, resampled


class Outline(HTMLParser):
    """Tags, headings, words and scripts of a page."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.headings, self.scripts, self.words, self.open = [], [], {}, [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "br"):
            self.open.append((tag, dict(attributes)))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append([int(tag[1]), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, text):
        tag, attributes = self.open[-1] if self.open else ("", {})
        if tag == "script":
            self.scripts[attributes.get("id", len(self.scripts))] = text
        elif tag != "style":
            self.words.append(text)
            if any(re.fullmatch("h[1-6]", name) for name, _ in self.open):
                self.headings[-1][1] += text


@pytest.fixture(scope="module")
def outline(page):
    return Outline(page)


def test_every_tag_is_closed_and_headings_go_down_one_at_a_time(outline):
    assert outline.open == []
    levels = [level for level, _ in outline.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_page_has_every_section_and_every_figure(outline, run):
    titles = [title for _, title in outline.headings]
    for title in (
        "Five words",
        "What was run",
        "The paper says / here",
        "Figures",
        "Table 2 for this model",
        "Examples to read",
    ):
        assert title in titles
    for _, caption in figures().values():
        assert f"{caption.number}. {caption.title}" in titles
    words = " ".join(outline.words)
    for claim in judge_claims(paper_results()):
        assert claim.claim in words
        assert claim.rule in words
    assert "✓ holds" in words
    for part in ("model", "tokenizer", "corpus"):
        assert run.manifest.identity[part] in words
    assert "wiki.train.tokens" in words


@pytest.fixture(scope="module")
def controlled(tmp_path_factory):
    """The page of a run with resamples and with the control of some experiments."""
    index = made_run(tmp_path_factory.mktemp("controlled") / "run", results=resampled(paper_results()))
    for name in ("composition", "refinement"):
        resampled(random_weights())[name].saved(index)
    return Outline(render(index))


def test_the_page_opens_with_how_the_claims_fared(outline, controlled):
    opening = summary(judge_claims(paper_results()))
    assert outline.words.index(opening) < outline.words.index("Five words")
    words = controlled.words
    controls = {name: resampled(random_weights())[name] for name in ("composition", "refinement")}
    opening = summary(judge_claims(resampled(paper_results()), controls))
    assert " are evidence, " in opening
    assert words.index(opening) < words.index("Five words")


def test_the_claims_table_has_intervals_counts_and_the_control(controlled):
    words = controlled.words
    at = words.index("Layer by layer the stream holds the final word more often.\n")
    row = " ".join("".join(words[at - 6 : at + 20]).split())
    assert "✓ holds evidence" in row
    assert "(4,000 examples)" in row
    assert "does not hold Spearman +0.00 (+0.00 to +0.00)" in row
    at = words.index("Values agree with their keys' triggers more often in upper layers.\n")
    row = " ".join("".join(words[at - 6 : at + 20]).split())
    assert "✓ holds control not run" in row
    assert "control not run: ffmem experiments RUN --control random" in row
    assert "Spearman +0.94 (+0.94 to +0.94)" in row


def test_a_result_without_resamples_says_that_its_interval_is_not_there(outline, controlled):
    missing = "interval: not there, run it again"
    assert sum(missing in word for word in outline.words) == len(judge_claims(paper_results()))
    assert not any(missing in word for word in controlled.words)


def test_the_page_draws_the_control_and_says_of_which_experiments_it_was_run(controlled):
    specs = {id: text for id, text in controlled.scripts.items() if str(id).endswith("-spec")}
    drawn = {id for id, text in specs.items() if "random weights" in text}
    assert drawn == {"fig8-1-spec", "fig9-1-spec", "fig10-1-spec", "fig11-3-spec"}
    at = controlled.words.index("Experiments of this run")
    assert controlled.words[at:].count("run") == 2


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("/home/someone/models/mine", "mine"),
        ("../mine/", "mine"),
        ("EleutherAI/pythia-70m", "EleutherAI/pythia-70m"),
        ("gpt2", "gpt2"),
        ("s3://bucket/models/mine", "mine"),
    ],
)
def test_a_folder_goes_by_its_own_name_and_a_model_of_a_hub_by_its_id(name, title):
    assert model_title(name) == title


def test_the_title_is_the_models_name(tmp_path):
    outline = Outline(render(made_run(tmp_path / "run", 2, results={}, name="/home/someone/models/mine")))
    assert outline.headings[0] == [1, "Feed-forward memories of mine, beside the paper"]
    assert "/home/someone/models/mine (AdaptiveLM, not gated)" in outline.words


def test_no_percentage_is_in_scientific_notation(controlled):
    words = "".join(controlled.words)
    assert re.findall(r"\de[−+-]\d+%", words) == []


def test_tables_that_are_wide_are_stacked_on_a_phone(page, outline):
    stacked = [found["aria-label"] for _, found in outline.tags if "stacked" in found.get("class", "")]
    assert stacked == ["Experiments of this run", "The paper's claims, and what is so here"]
    narrow = page[page.index("@media (max-width: 44rem)") :]
    assert ".stacked td, .stacked tbody th { display: block;" in narrow.replace("\n", " ")[:600]


def test_nothing_is_fetched_from_anywhere(page, outline):
    for _, attributes in outline.tags:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            assert attributes.get(name, "data:").startswith("data:")
    policy = next(found["content"] for tag, found in outline.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    library = max((text for text in outline.scripts.values()), key=len)
    rest = page.replace(library, "")
    rest = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", rest)
    assert re.findall(r"https?://\S+|@import|url\(", rest) == []


def test_text_of_the_corpus_is_never_markup(page, outline):
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in page
    assert "&amp;amp; the city" in page
    assert sum(tag == "script" for tag, _ in outline.tags) == 2 + 12  # the library, ours, and a spec a panel
    assert "“<script>”" in "".join(outline.words)


def test_names_of_models_and_texts_are_escaped_too(tmp_path):
    index = made_run(tmp_path / "run", 2, results={}, name="<img src=x onerror=alert(1)>")
    page = render(index)
    assert "<img src=x" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_data_for_the_script_cannot_end_it():
    written = data("a", {"text": "</script><!-- \u2028"})
    assert written.count("<") == 2
    assert json.loads(re.search(r">(.*)<", written)[1]) == {"text": "</script><!-- \u2028"}


def test_every_chart_has_its_data_a_label_and_a_still_picture(outline):
    charts = [found for tag, found in outline.tags if found.get("class") == "chart"]
    assert len(charts) == 12
    for chart in charts:
        assert chart["aria-label"]
        spec = json.loads(outline.scripts[f"{chart['id']}-spec"])
        assert spec["width"] == "container"
        assert spec["description"]
        assert "$schema" not in spec
    images = [found for tag, found in outline.tags if tag == "img"]
    assert len(images) == len(figures())
    assert all(image["alt"] for image in images)


def test_tables_have_captions_and_boxes_that_can_be_reached_by_keyboard(outline):
    tables = sum(tag == "table" for tag, _ in outline.tags)
    assert tables == sum(tag == "caption" for tag, _ in outline.tags)
    assert tables == sum(found.get("class", "").startswith("wide") and found["tabindex"] == "0" for _, found in outline.tags)
    assert ("html", {"lang": "en"}) in outline.tags


def test_the_numbers_of_a_figure_are_in_its_table(outline):
    words = outline.words
    at = words.index("this model: examples")
    assert "86.2%" in words[at : at + 60]
    assert any("−71.7% (−72.7% to −70.7%)" in word for word in words)


def test_examples_can_be_opened_with_their_triggers(outline):
    words = "".join(outline.words)
    assert "2 of 536 cases" in words
    assert "L16D0 says “</s>” (probability 40%); 1 of its 2 triggers agree" in words
    assert "the king\n▸ “ <script>alert" in words
    assert "It has no trigger." in words  # of L16D1


def test_the_page_is_small_and_the_same_again(page, run):
    assert 500_000 < len(page.encode()) < 5_000_000
    assert render(run) == page


def test_the_page_says_plainly_when_examples_are_from_the_indexed_text(page, tmp_path):
    warning = "Examples from the indexed text itself."
    assert warning not in page
    for number, origin in enumerate(("pocket (the indexed corpus itself)", "sentences that the run kept for its triggers")):
        results = {name: paper_results(2, examples_from=origin)[name] for name in ("activity", "removal")}
        own = render(made_run(tmp_path / str(number), 2, results=results))
        assert warning in own
        assert "so activity followed prefixes" in own


def test_experiments_that_were_not_run_are_named_with_their_command(tmp_path):
    index = made_run(tmp_path / "run", 12, results={"activity": paper_results(12)["activity"]})
    outline = Outline(render(index))
    words = "".join(outline.words)
    for name in ("removal", "agreement", "composition", "refinement", "normaliser"):
        assert f"not run: ffmem experiments RUN {name}" in words
    assert [found["id"] for _, found in outline.tags if found.get("class") == "chart"] == ["fig7-1"]
    assert "This model has 12 layers and the paper's 16, so both are drawn by depth." in words


def test_a_gated_model_has_a_page(tmp_path, gated):
    words = "".join(Outline(render(made_run(tmp_path / "run", 6, gated=True, results=gated))).words)
    assert "negative triggers" in words
    assert "(AdaptiveLM, gated)" in words


def test_the_page_and_its_figures_are_written_beside_each_other(tmp_path):
    index = made_run(tmp_path / "run", 3, results={"activity": paper_results(3)["activity"]})
    assert report(index.path) == index.path / "report.html"
    assert sorted(path.name for path in (index.path / "figures").iterdir()) == ["fig7.png", "fig7.svg"]
    assert report(index, tmp_path / "new" / "mine.html") == tmp_path / "new" / "mine.html"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mine-figures", "mine.html"]
    assert (tmp_path / "new" / "mine.html").read_bytes() == (index.path / "report.html").read_bytes()


def test_a_link_stays_and_a_device_gets_the_page_alone(tmp_path):
    index = made_run(tmp_path / "run", 3, results={"activity": paper_results(3)["activity"]})
    (tmp_path / "disk").mkdir()
    (tmp_path / "mine.html").symlink_to("disk/page.html")
    report(index, tmp_path / "mine.html")
    assert (tmp_path / "mine.html").is_symlink()
    assert (tmp_path / "disk" / "page.html").read_bytes()[:15] == b"<!doctype html>"
    assert (tmp_path / "mine-figures" / "fig7.svg").exists()
    (tmp_path / "null").symlink_to("/dev/null")
    report(index, tmp_path / "null")
    assert (tmp_path / "null").is_char_device()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "disk", "mine.html", "mine-figures", "null"}


def test_errors_are_one_line_and_leave_the_old_page(tmp_path):
    with pytest.raises(RunError, match="expected a run folder"):
        report(tmp_path / "nothing")
    index = made_run(tmp_path / "run", 3, results={"activity": paper_results(3)["activity"]})
    with pytest.raises(FfmemError, match="expected a file for the page, found a folder"):
        report(index, tmp_path)
    report(index)
    before = (index.path / "report.html").read_bytes()
    (index.path / "results" / "activity.json").write_text("{")
    with pytest.raises(RunError, match="damaged; make it"):
        report(index)
    assert (index.path / "report.html").read_bytes() == before


@pytest.mark.slow
def test_a_report_needs_no_torch(run, tmp_path):
    code = f"""
import sys
from ffmem.reports import report
report({str(run.path)!r}, {str(tmp_path / "page.html")!r})
assert not {{'torch', 'transformers', 'tokenizers'}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(tmp_path / "page.html").stat().st_size > 500_000


def test_importing_the_room_loads_no_library_that_draws():
    code = "import sys, ffmem.reports; assert not {'altair', 'vl_convert', 'torch'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
