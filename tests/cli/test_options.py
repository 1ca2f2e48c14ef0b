"""What commands print of corpora, tokens and names can be read, and does nothing to a terminal."""

import io
import json
import sys

import pytest
from rich.console import Console

from ffmem import progress
from ffmem.cli.printing import note, say, say_json
from ffmem.progress import Reporter

NASTY = "two\nlines \x1b[31m \u202e \x9b \ud800 é東 [red]"


def test_a_page_keeps_its_lines_and_shows_what_is_hidden(capsys):
    say(NASTY)
    assert (
        capsys.readouterr().out.encode("utf-8", "replace").decode() == "two\nlines ␛[31m \\u202e \\x9b \\ud800 é東 [red]\n"
    )


def test_a_note_is_one_line(capsys):
    note(False, NASTY)
    note(True, "nothing")
    assert capsys.readouterr().err == "ffmem: two⏎lines ␛[31m \\u202e \\x9b \\ud800 é東 [red]\n"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_means_the_same_in_every_encoding_and_hides_nothing(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    say_json({"text": NASTY + "\U000e0041"}, indent=2)
    printed = stream.buffer.getvalue().decode(encoding)
    assert json.loads(printed) == {"text": NASTY + "\U000e0041"}
    assert all(line.isprintable() for line in printed.split("\n"))
    assert ("東" in printed) == (encoding == "utf-8")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_what_is_hidden_and_reads_no_markup(monkeypatch, capsys, terminal):
    monkeypatch.setattr(progress, "PATIENCE", 0)
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0)
    reporter = Reporter("a \u202e name")
    screen = io.StringIO()
    if terminal:
        reporter.console = Console(file=screen, force_terminal=True, width=200, color_system=None)
    reporter.update(0.5, NASTY)
    reporter.close()
    shown = screen.getvalue() if terminal else capsys.readouterr().err
    for part in ("a \\u202e name", "two⏎lines ␛[31m \\u202e \\x9b \\ud800 é東 [red]"):
        assert part in shown
