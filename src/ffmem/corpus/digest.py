"""A hash of consecutive texts that is the same wherever they are cut: the hashes of stretches of text make that of all.

Each text's SHA-256 is a digit of a number whose base is a constant, modulo a prime. So the hash depends on the texts, where
each one ends, and their order; to put two stretches together takes one power of the base.
"""

from __future__ import annotations

import hashlib

PRIME = (1 << 255) - 19
BASE = int.from_bytes(hashlib.sha256(b"ffmem").digest(), "big") % PRIME


def with_text(digest: int, text: str) -> int:
    """The hash of some texts, as a number, once another follows; that of none is 0."""
    return (digest * BASE + int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), "big")) % PRIME


def joined(first: str, second: str, texts: int) -> str:
    """The hash of two stretches of text, given as they are shown; the second has so many texts.

    >>> one, two = with_text(0, "one"), with_text(0, "two")
    >>> joined(shown(one), shown(two), 1) == shown(with_text(one, "two")) != joined(shown(two), shown(one), 1)
    True
    """
    return shown(int(first or "0", 16) * pow(BASE, texts, PRIME) + int(second or "0", 16)) if texts else first


def shown(digest: int) -> str:
    """A hash as 64 hexadecimal digits."""
    return f"{digest % PRIME:064x}"
