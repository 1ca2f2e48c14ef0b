"""The text of every token of a vocabulary, spaces kept, so that a run can be read without its tokenizer."""

from __future__ import annotations

import re
from typing import Any

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_texts(tokenizer: Any, size: int) -> list[str]:
    """What each id stands for: ' Paris' with its space; ids without a token are ''."""
    known = {id: name for name, id in tokenizer.get_vocab().items()}
    names = [known.get(id, "") for id in range(size)]
    if sum(name.startswith(_SPACE) for name in names) > len(names) // 20:
        # Sentencepiece marks spaces itself, and decoding one token alone would lose them.
        return [_byte(name.replace(_SPACE, " ")) for name in names]
    special = set(tokenizer.all_special_tokens)
    texts = tokenizer.batch_decode([[id] for id in range(len(names)) if names[id] and names[id] not in special])
    rest = iter(texts)
    return [name if not name or name in special else next(rest) for name in names]


def _byte(name: str) -> str:
    match = _BYTE.fullmatch(name)
    return bytes([int(match[1], 16)]).decode("utf-8", "replace") if match else name
