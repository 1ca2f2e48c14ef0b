"""WikiText's layout: headings, and text whose words and marks stand apart, turned back to text as it is written."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

UNKNOWN = "<unk>"
ELLIPSIS = "…"
"""The text that replaces an unknown word in plain text: every reader knows it, while few tokenizers have a token for unknown
words that their model was trained on."""
JOINED = {"@-@": "-", "@,@": ",", "@.@": "."}
"""WikiText's own marks (such as `@-@`), which join the words on both sides."""
LOOKED_AT = 1000
"""The number of records at the beginning of a corpus that are looked at for WikiText's marks."""
MARKED = 0.02
"""The share of records that must have a mark: in WikiText half of all lines do, elsewhere next to none."""
BEHIND = frozenset(",.;!?)]}%”’′″")
"""Punctuation marks that belong to the word before them."""
BEFORE = frozenset("([{$£€¥#“‘")
"""Punctuation marks that belong to the word behind them."""
BETWEEN = frozenset("—/‑")
"""Punctuation marks that have no spaces around them."""
ALONE = frozenset(JOINED) | BEHIND | BEFORE | frozenset("\"':")
"""Words that a line has only where punctuation marks were set apart from words."""


def is_heading(line: str) -> bool:
    """Whether a line is a WikiText heading: as many lone equals signs behind a title as before it.

    >>> is_heading(" = = Early life = = "), is_heading("a = b"), is_heading("= = =")
    (True, False, False)
    """
    stripped = line.strip()
    if not (stripped.startswith("= ") and stripped.endswith(" =")):
        return False
    words = stripped.split()
    before = next((at for at, word in enumerate(words) if word != "="), len(words))
    behind = next((at for at, word in enumerate(reversed(words)) if word != "="), len(words))
    return before == behind < len(words)


def is_title(line: str) -> bool:
    """Whether a line is a heading of the first level, with which an article of WikiText begins.

    >>> is_title(" = Norway = "), is_title(" = = History = = ")
    (True, False)
    """
    return is_heading(line) and not line.lstrip().startswith("= =")


def shows_marks(records: Iterable[str]) -> bool:
    """Whether a corpus that begins with these records has WikiText's marks: `@-@`, `@,@` or `@.@` in many of them.

    >>> shows_marks(["a well @-@ known text"]), shows_marks(["a well-known text"]), shows_marks([])
    (True, False, False)
    """
    found = [any(f" {mark} " in record for mark in JOINED) for record in islice(records, LOOKED_AT)]
    return sum(found) > MARKED * len(found)


def plain(text: str) -> str:
    """Text of WikiText's layout as it was written before its words and marks were set apart.

    Which side of a space a mark belongs to was lost: quotation marks are taken in turns, a lone apostrophe for the end of a
    plural where there is one, a dash for part of a range between numbers or names. A line without marks that stand alone is
    left as it is.

    >>> plain(' The " well @-@ known " cat ( 3 @.@ 5 kg ) didn \\'t stay , they said . ')
    'The "well-known" cat (3.5 kg) didn\\'t stay, they said.'
    """
    return "\n".join(map(_plain_line, text.split("\n")))


def _plain_line(line: str) -> str:
    if is_heading(line):
        return line.strip().strip("= ")
    words = [word for word in line.split(" ") if word]
    if ALONE.isdisjoint(words):
        return line.replace(UNKNOWN, ELLIPSIS)
    apostrophes = words.count("'")
    parts: list[str] = []
    is_double = is_single = False
    glued = True  # whether the next word follows without a space
    for at, word in enumerate(words):
        before, behind = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
        left = right = False
        if word in JOINED:
            word, left, right = JOINED[word], True, True
        elif word == UNKNOWN:
            word = ELLIPSIS
        elif word in BEHIND:
            left = True
        elif word in BEFORE:
            right = True
        elif word in BETWEEN:
            left = right = True
        elif word == '"':
            left, right, is_double = is_double, not is_double, not is_double
        elif word == "'":
            apostrophes -= 1
            if behind[:1].isdigit() and behind.endswith("0s"):  # the '90s
                right = True
            elif is_single or before.endswith("s") or not apostrophes:
                left, is_single = True, False
            else:
                right = is_single = True
        elif word[0] == "'" and word[1:2].isalpha():  # 's, 't, 've: a quotation mark stands alone
            left = True
        elif word == ":":
            left, right = True, _is_time(before, behind)
        elif word == "–":
            left = right = _is_range(before, behind)
        elif word == "−":
            right = behind[:1].isdigit() and not before[-1:].isdigit()
        elif word == "°":
            left, right = behind not in ("C", "F"), behind in ("C", "F")
        parts += [word] if left or glued else [" ", word]
        glued = right
    return "".join(parts)


def _is_time(hour: str, minute: str) -> bool:
    return hour.isdigit() and minute.isdigit() and len(hour) <= 2 == len(minute)


def _is_range(one: str, other: str) -> bool:
    """Whether a dash between these stands for "to": of numbers, or of names."""
    numbers = one[-1:].isdigit() or one[:1].isdigit()
    if numbers:
        return other[:1].isdigit() or other in BEFORE or other == "present"
    return one[:1].isupper() and other[:1].isupper()
