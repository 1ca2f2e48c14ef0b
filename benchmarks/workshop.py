"""A tiny model, a text and a finished run of them in a folder: what commands are tried on, over and over."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import transformers

from ffmem import build_index, values
from tests.tiny import some_text, tiny_model, word_tokenizer

FAIRSEQ = Path(__file__).parents[1] / "tests" / "model" / "adaptive" / "fairseq-tiny"
NASTY_TOKENS = {
    "game": "\x1b[31m",
    "song": "\u202e",
    "film": "two\nlines",
    "red": "\x9b2J",
    "blue": "[red]",
    "green": "\u0007",
}
"""Words of the tiny tokenizer and what stands in their places here: a terminal must show them, not obey them."""


def furnish(folder: Path) -> dict[str, Path]:
    """The places of what was made."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, text, other, run = folder / "model", folder / "text.txt", folder / "other.txt", folder / "run"
    tiny_model("gpt2").save_pretrained(model)
    word_tokenizer().save_pretrained(model)
    tokenizer = json.loads((model / "tokenizer.json").read_text("utf-8"))
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {NASTY_TOKENS.get(word, word): id for word, id in words.items()}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    text.write_text(some_text(60) + "The king \u202eleft \x1b[31m Paris\u0007 .\n", "utf-8")
    other.write_text(some_text(60, seed=1), "utf-8")
    build_index(str(model), text, out=run, top=5, stats="full", quiet=True)
    values(run, top=5, quiet=True)
    return {"model": model, "text": text, "other": other, "run": run, "fairseq": FAIRSEQ}


def counted(rows: dict[str, Counter[str]], names: list[str]) -> str:
    """A table of what came of each command: these columns first, faults behind them, and a line for all."""
    names = [*names, *sorted({name for row in rows.values() for name in row} - set(names))]
    whole = {"all": sum(rows.values(), Counter[str]())}
    lines = [["command", *names], *([verb, *(str(row[name]) for name in names)] for verb, row in (rows | whole).items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
