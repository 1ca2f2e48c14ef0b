"""fairseq's dictionary, `dict.txt`: a word and its count a line, in the order of ids."""

from __future__ import annotations

import re
from pathlib import Path

from ffmem.errors import ModelError
from ffmem.model.adaptive.tokenizer import SPECIALS

_LINE = re.compile(r"(?P<word>[^ ]+) -?\d+(?P<flag> #fairseq:overwrite)?")


def read_words(path: Path) -> list[str]:
    """The words of a `dict.txt` in the order of their ids; the first has id 4, after fairseq's four special tokens.

    Filler such as `madeupword0000` stays, because ids count it. A word that comes again needs fairseq's
    `#fairseq:overwrite` flag. It is then read as the later id; the earlier one keeps its row under a name that no
    text can hold.
    """
    try:
        # Not splitlines(): a word may hold characters that Python takes for line ends.
        lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise ModelError(f"{path}: expected fairseq's dictionary, found: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: expected UTF-8 text, found byte {error.start} that is not; download it again") from error
    words: list[str] = []
    places: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line.rstrip("\r"))
        if match is None:
            raise ModelError(f"{path}, line {number}: expected `word count`, found {line[:60]!r}")
        word = match["word"]
        if word in SPECIALS:
            raise ModelError(f"{path}, line {number}: expected a word, found {word}, which has an id of its own before them")
        if word in places:
            if not match["flag"]:
                raise ModelError(
                    f"{path}, line {number}: expected a new word, found {word!r} again without the #fairseq:overwrite flag"
                )
            words[places[word]] = f"{word} (overwritten, line {places[word] + 1})"
        places[word] = len(words)
        words.append(word)
    return words
