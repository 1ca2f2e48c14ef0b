"""How a trace shows itself: in a terminal of 100 columns, and in a notebook."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ffmem import load_model
from ffmem.cells import Cell, Trigger
from ffmem.live.blocks import WIDTH
from ffmem.live.position import Grid, GridTile, TokenRank
from ffmem.live.trace import trace
from ffmem.run.reader import TokenProbability
from ffmem.text import width
from tests.tiny import tiny_model, word_tokenizer

NASTY = '<b onclick="x">&\n'
WIDE = "東京" * 80


@pytest.fixture(scope="module", params=["gpt2", "adaptive_lm", "opt-post-norm-projected"])
def found(request):
    model = load_model(tiny_model(request.param), tokenizer=word_tokenizer())
    return trace(model, "the king left the river " * 10, target="Paris")


class Checker(HTMLParser):
    """Which tags a page has, and whether every one is closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.titles, self.text = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.titles += [value for name, value in attrs if name == "title"]
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_every_line_fits_a_terminal_and_every_part_is_told(found):
    position = found.at(-1)
    lines = found.lines()
    assert max(map(width, lines)) <= WIDTH
    text = str(found)
    assert text == "\n".join(lines)
    assert str(position) in text
    for part in (
        "embedding",
        "attention",
        "cells",
        "promoting",
        "suppressing",
        "the other",
        str(position.promoting[0].cell),
    ):
        assert part in text
    for norm in position.frozen:
        assert norm in text
    assert "no norm in the way" in text or position.frozen


def test_long_and_wide_words_are_cut_to_their_columns(found):
    position = found.at(-1)
    said = TokenProbability(WIDE, 5, 1e-12)
    long = Trigger(Cell(1, 2), "+", 1, 1.0, 0, 3, WIDE, WIDE[:7])
    part = replace(position.promoting[0], value=(said,) * 5, trigger=long, coefficient=-1.23456e-12)
    reading = replace(position.layers[0].r, top=(said,))
    layers = tuple(replace(layer, r=reading, y=reading, o=replace(layer.o, top=(said,))) for layer in position.layers)
    changed = replace(position, prefix=WIDE, final=said, next=said, layers=layers, promoting=(part,), suppressing=())
    lines = changed.lines()
    assert max(map(width, lines)) <= WIDTH
    assert any("▸" in line for line in lines)
    assert "suppressing: no cell" in lines
    assert Checker(changed._repr_html_()).tags.count("table") >= 2


def test_a_value_shows_how_far_its_tokens_stand_out_and_no_part_of_a_number(found):
    position = found.at(-1)
    said = tuple(TokenProbability("x" * 20, id, 1e-9, z=12.345) for id in range(5))
    lines = replace(position, promoting=(replace(position.promoting[0], value=said, coefficient=-0.5, sign="-"),)).lines()
    (line,) = [line for line in lines if "“xxx" in line]
    assert line.count(" 12.3") == line.count("“") == 2
    assert line.endswith(" 12.3")
    assert "  −v “x" in line
    assert any("what v, or −v where m is negative, promotes, with z" in line for line in lines)
    older = replace(position.promoting[0], value=(TokenProbability("x", 1, 0.25),), coefficient=0.5, sign="+")
    (line,) = [line for line in replace(position, promoting=(older,)).lines() if "“x” 0.25" in line]
    assert "   v “x” 0.25" in line


def test_of_a_long_trigger_the_end_is_what_a_page_and_a_line_show(found):
    long = Trigger(Cell(1, 2), "+", 1, 1.0, 0, 3, "begin " * 500 + "the end", "next")
    position = replace(found.at(-1), promoting=(replace(found.at(-1).promoting[0], trigger=long),))
    assert any(line.endswith("begin the end ▸ “next”") for line in position.lines())
    page = position._repr_html_()
    assert "begin the end ▸ “next”" in page
    assert page.count("begin") < 50


def test_a_terminal_shows_the_last_columns_of_the_grid_that_it_has_room_for(found):
    lines = found.grid.lines()
    assert max(map(width, lines)) <= WIDTH
    assert lines[0] == "the last 7 of 50 tokens; a notebook and JSON have all"
    assert lines[1].split() == ["layer", *found.tokens[-7:]]
    assert [line.split()[0] for line in lines[2:]] == ["3", "2", "1"]
    assert lines[1] in found.lines()
    short = trace(found.model, "the king", at=0, grid=True)
    assert "the last" not in str(short.grid)
    assert str(short.grid) in str(short)


def test_of_a_layer_the_text_says_so(found):
    lines = trace(found.model, "the king", of="layer").at(-1).lines()
    assert any("in each layer's own output" in line for line in lines)
    assert not any("the other" in line for line in lines)


def test_a_notebook_shows_a_grid_of_layers_and_tokens(found):
    page = found._repr_html_()
    checker = Checker(page)
    assert checker.tags.count("td") >= 3 * 50
    assert len(checker.titles) == 3 * 50
    assert "script" not in checker.tags
    assert "http" not in page
    assert "river" in checker.text
    one = Checker(trace(found.model, "the king", at=0)._repr_html_())
    assert one.titles == []  # no grid was asked for


def test_words_are_escaped_and_likely_ones_are_darker(found):
    given = TokenRank(0.5, 1)
    tile = GridTile(*(TokenProbability(NASTY, 1, p) for p in (0.1, 0.2, 1.0)), "composition", given, None, 1.0, -1.0)
    unlikely = replace(tile, o=TokenProbability("x", 2, 0.0), target=given)
    page = Grid((NASTY, "b"), ((tile, unlikely),))._repr_html_()
    checker = Checker(page)
    assert "b" not in checker.tags
    assert '<b onclick="x">&⏎' in checker.text
    assert "0.75)" in page
    assert "0.05)" in page
    assert "residual “<b onclick" in checker.titles[0]
    assert "target" not in checker.titles[0]
    assert "target 0.5, rank 1" in checker.titles[1]
    position = replace(found.at(-1), prefix=NASTY, final=TokenProbability(NASTY, 1, 0.5))
    assert "onclick" in "".join(Checker(position._repr_html_()).text)
    assert "<b onclick" not in position._repr_html_()
