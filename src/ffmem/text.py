"""Text as a terminal or a page may show it: on one line, nothing hidden in it, as wide as there is room."""

from __future__ import annotations

from unicodedata import combining, east_asian_width

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_INVISIBLE = (0xAD, 0x200B, *range(0x2060, 0x2066), *range(0x206A, 0x2070), 0xFEFF, *range(0xFFF9, 0xFFFC))
_SEPARATORS = (0x2028, 0x2029)


class _Signs(dict[int, str]):
    """A table for `str.translate` with the text shown for each character; an unknown character is looked at once."""

    def __missing__(self, code: int) -> str:
        if 0xD800 <= code < 0xE000 or 0x80 <= code < 0xA0 or code in (*_BIDI, *_INVISIBLE, *_SEPARATORS):
            sign = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
        elif 0xE0000 <= code < 0xE0080:
            sign = f"\\U{code:08x}"
        else:
            sign = chr(code)
        self[code] = sign
        return sign


_SIGNS = _Signs({code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "␡", 0x09: "⇥", 0x0A: "⏎", 0x0D: "␍"})


def visible(text: str) -> str:
    """Text on one line, with every control character, direction mark and other invisible character written out.

    Whatever text comes from a corpus, a tokenizer, a model or a file's name goes through this before it is printed, so that
    it can neither move the cursor of a terminal nor turn the order of a line.

    >>> visible("two\\nlines"), visible("\\x1b[31mred"), visible("a\\u202eb")
    ('two⏎lines', '␛[31mred', 'a\\\\u202eb')
    """
    return text if text.isprintable() else text.translate(_SIGNS)


def shown_token(text: str | None) -> str:
    """A token in quotes that keep its spaces visible; the end of a sentence as ∎."""
    return "∎" if text is None else f"“{visible(text)}”"


def quoted(value: object, columns: int = 60) -> str:
    """A value that was found, as an error line quotes it: as much of it as the line has room for.

    >>> quoted("x" * 100, 10)
    "'xxxxxx..."
    """
    shown = repr(value)
    return shown if len(shown) <= columns else f"{shown[: columns - 3]}..."


def width(text: str) -> int:
    """Columns that a terminal gives a text: two for wide characters, none for accents.

    >>> width("東a")
    3
    """
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)


def beginning(text: str, columns: int) -> str:
    """The beginning of a text where it is too long for these columns.

    >>> beginning("a long word", 6)
    'a lon…'
    """
    if width(text) <= columns:
        return text
    text = text[: max(0, columns)]  # no character takes less than a column but accents
    while text and width(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def ending(text: str, columns: int) -> str:
    """The end of a text where it is too long: what a key looks at, and what comes next, stand there.

    >>> ending("a long word", 6)
    '… word'
    """
    if width(text) <= columns:
        return text
    text = text[-max(1, columns) :]
    while text and width(text) > columns - 1:
        text = text[1:]
    return "…" + text


def padded(text: str, columns: int) -> str:
    """A text with spaces behind it up to these columns."""
    return text + " " * (columns - width(text))


def shown_size(size: int | float) -> str:
    """A number of bytes for people, to three figures.

    >>> shown_size(10_000_000), shown_size(1536), shown_size(100), shown_size(999_900_000)
    ('10 MB', '1.54 kB', '100 bytes', '1 GB')
    """
    size = float(f"{size:.3g}")
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size:.0f} bytes"
