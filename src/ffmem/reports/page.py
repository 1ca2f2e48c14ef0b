"""One page for a run: everything in a single file that needs no network."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path, PurePosixPath
from string import Template

import ffmem
from ffmem.index.folder import FIGURES, PAGE, folder_of
from ffmem.index.reader import Index, open_index
from ffmem.reports.claims import judge_claims
from ffmem.reports.drawing import bundle
from ffmem.reports.figures import all_results, save_figures
from ffmem.reports.markup import Raw, element, facts, join
from ffmem.reports.paper import the_paper
from ffmem.reports.sections import claims_section, examples, figures_section, glossary, table2, what_was_run
from ffmem.words import FfmemError


def report(run: str | Path | Index, out: str | Path | None = None) -> Path | str:
    """Write a run's report and its figures (SVG and PNG), and return the page's path or URL.

    The page is `RUN/report.html` with `RUN/figures`, or `out` with a folder `NAME-figures` beside it. The same results
    give the same bytes.
    """
    index = run if isinstance(run, Index) else open_index(run)
    folder, name = (index.folder, PAGE) if out is None else folder_of(out)
    page = folder.place(name)
    if isinstance(page, Path) and page.is_dir():
        raise FfmemError(f"expected a file for the page, found a folder at {page}: try {page / PAGE}")
    html = render(index)
    save_figures(index, folder.place(FIGURES if out is None else f"{PurePosixPath(name).stem}-{FIGURES}"))
    with folder.writing(name) as path:
        path.write_text(html, "utf-8", "backslashreplace")
    return page


def render(index: Index) -> str:
    """The page of a run."""
    results, layers = all_results(index), index.manifest["model"]["layers"]
    name = index.manifest["model"]["name"]
    body = [
        what_was_run(index, results),
        claims_section(judge_claims(results)),
        figures_section(results, layers),
        table2(results),
        examples(index, results),
    ]
    return Template(_part("page.html")).substitute(
        title=escape(f"Feed-forward memories of {name}, beside the paper"),
        style=_part("page.css"),
        glossary=glossary(),
        body=join(body),
        source=escape(the_paper().source),
        footer=_footer(index),
        # No tag may end the script early, whatever a later version of the library holds.
        library=bundle().replace("</script", "<\\/script").replace("<!--", "<\\!--"),
        script=_part("page.js"),
    )


def _footer(index: Index) -> Raw:
    manifest = index.manifest
    hashes = {name: manifest[name]["hash"] for name in ("model", "tokenizer", "corpus")}
    made = {f"{name} hash": element("code", value) for name, value in hashes.items()}
    files_of = {name: element("code", file["sha256"]) for name, file in manifest["files"].items()}
    with_ = ", ".join(f"{name} {version}" for name, version in manifest["environment"].items())
    return facts({"page made by": f"ffmem {ffmem.__version__}", "run made with": with_} | made | files_of)


def _part(name: str) -> str:
    return files(__name__.rpartition(".")[0]).joinpath(name).read_text("utf-8")
