"""The page for a run: everything in a single file that needs no network."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path, PurePosixPath
from string import Template

import ffmem
from ffmem.errors import FfmemError
from ffmem.experiments.charts import bundle
from ffmem.experiments.markup import Raw, element, facts, join
from ffmem.experiments.paper import the_paper
from ffmem.reports.claims import judge_claims
from ffmem.reports.figures import all_results, save_figures
from ffmem.reports.sections import claims_section, figures_section, further_sections, glossary, opening, what_was_run
from ffmem.run.folder import FIGURES, PAGE, folder_of, refuse_part
from ffmem.run.reader import Index, open_index
from ffmem.run.results import CONTROL
from ffmem.text import visible


def report(run: str | Path | Index, out: str | Path | None = None) -> Path | str:
    """Write a run's report and its figures (SVG and PNG), and return the page's path or URL.

    The page is `RUN/report.html` with `RUN/figures`, or `out` with a folder `NAME-figures` beside it (none where `out` is a
    device or a pipe). The same results give the same bytes.
    """
    index = run if isinstance(run, Index) else open_index(run)
    folder, name = (index.folder, PAGE) if out is None else folder_of(out)
    page = folder.location(name)
    if isinstance(page, Path) and page.is_dir():
        raise FfmemError(f"expected a file for the page, found a folder at {page}: try {page / PAGE}")
    refuse_part(page, but=PAGE)
    html = render(index)
    if not (isinstance(page, Path) and page.exists() and not page.is_file()):  # beside a device or a pipe lies nothing
        save_figures(index, folder.location(figures_beside(name, out)))
    folder.sweep()
    with folder.writing(name) as path:
        path.write_text(html, "utf-8", "backslashreplace")
    return page


def figures_beside(name: str, out: str | Path | None) -> str:
    """The folder of a page's figures, beside the page of this name: the run's own, or one that is called after it."""
    return FIGURES if out is None else f"{PurePosixPath(name).stem}-{FIGURES}"


def render(index: Index) -> str:
    """The HTML of a run's page."""
    results, controls, layers = all_results(index), all_results(index, CONTROL), index.manifest.model.layers
    claims = judge_claims(results, controls)
    body = [
        what_was_run(index, results, controls),
        claims_section(claims),
        figures_section(results, layers, controls),
        *further_sections(index, results),
    ]
    return Template(_part("page.html")).substitute(
        title=escape(f"Feed-forward memories of {visible(model_title(index.manifest.model.name))}, beside the paper"),
        style=_part("page.css"),
        opening=opening(claims),
        glossary=glossary(),
        body=join(body),
        source=escape(the_paper().source),
        footer=_footer(index),
        # No tag may end the script early, whatever a later version of the library holds.
        library=bundle().replace("</script", "<\\/script").replace("<!--", "<\\!--"),
        script=_part("page.js"),
    )


def model_title(name: str) -> str:
    """A model's name for a heading: a folder goes by its own name, a model of a hub by its author's and its own.

    >>> model_title("/data/models/gpt2/"), model_title("EleutherAI/pythia-70m"), model_title("s3://bucket/runs/mine")
    ('gpt2', 'EleutherAI/pythia-70m', 'mine')
    """
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    folder = len(parts) > 2 or name.startswith(("/", ".", "~")) or name.endswith("/") or "\\" in name
    return parts[-1] if parts and folder else name


def _footer(index: Index) -> Raw:
    manifest = index.manifest
    hashes = {name: manifest.identity[name] for name in ("model", "tokenizer", "corpus")}
    made = {f"{name} hash": element("code", value) for name, value in hashes.items()}
    files_of = {name: element("code", file.sha256) for name, file in manifest.files.items()}
    with_ = ", ".join(f"{name} {version}" for name, version in manifest.environment.items())
    return facts({"page made by": f"ffmem {ffmem.__version__}", "run made with": with_} | made | files_of)


def _part(name: str) -> str:
    return files(__name__.rpartition(".")[0]).joinpath(name).read_text("utf-8")
