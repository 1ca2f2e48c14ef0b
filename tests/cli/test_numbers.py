"""Options that are numbers: what is read, and what is refused in one line, quickly."""

import pytest
import typer

from ffmem.cli.numbers import real, whole, whole_or_auto
from ffmem.errors import FfmemError


@pytest.mark.parametrize("text", ["10000", "10_000", "1e4", "1.0E+4", " 10000 ", 10000])
def test_every_notation_of_a_whole_number_is_read_exactly(text):
    found = whole("tokens")(text)
    assert (found, type(found)) == (10000, int)


def test_a_large_number_is_exact():
    assert whole("tokens")("1e18") == 10**18
    assert whole("seed", 0)("999999999999999999") == 999999999999999999


@pytest.mark.parametrize("text", ["0", "-1", "11", "inf", "-inf", "1e999999999", "9" * 5000])
def test_what_is_out_of_bounds_is_refused(text):
    with pytest.raises(FfmemError, match=r"^expected top from 1 to 10, found "):
        whole("top", 1, 10)(text)
    with pytest.raises(FfmemError, match=r"^expected minutes from 1 to 10, found "):
        real("minutes", 1, 10)(text)


def test_a_fraction_is_no_whole_number():
    for text in ("1.5", "1e-999999999", "2e-1"):
        with pytest.raises(FfmemError, match=r"expected top as a whole number"):
            whole("top", 0)(text)
    assert real("minutes")("1.5") == 1.5


@pytest.mark.parametrize("text", ["", "ten", "nan", "sNaN", "1e", "0x10", "--", "1 000"])
def test_what_is_no_number_is_a_wrong_option(text):
    for read in (whole("top"), real("minutes")):
        with pytest.raises(typer.BadParameter, match="expected a number such as 10000 or 1e4, found"):
            read(text)


def test_auto_may_stand_for_a_number():
    read = whole_or_auto("batch-tokens", 99)
    assert (read("auto"), read("1e1")) == ("auto", "10")
    with pytest.raises(FfmemError, match=r"^expected batch-tokens from 1 to 99, found 0$"):
        read("0")
    with pytest.raises(typer.BadParameter, match="expected a number such as 10000 or 1e4, found 'all'"):
        read("all")
