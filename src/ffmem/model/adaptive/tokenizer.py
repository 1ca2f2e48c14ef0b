"""WikiText's word tokens: from raw text or from WikiText files as they are, and back to readable text.

The rules are those of the Moses English tokenizer with hyphens split, which is how WikiText-103 was made: punctuation
stands alone, except the point of an abbreviation; a hyphen inside a word is the word `@-@`, the comma and the point
inside a number are `@,@` and `@.@`. Text that is already split is left as it is, so both kinds can be read alike.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
"""The tokens with ids 0 to 3, in the order of fairseq's dictionaries; words follow."""

_MARKERS = {"@-@": "-", "@,@": ",", "@.@": "."}

# Words that keep their point whatever follows; and those that keep it before a number only ("No" is also an answer).
_TITLES = (
    "Adm|Bros|Brig|Capt|Cmdr|Col|Corp|Cpl|Dr|Drs|Gen|Gov|Hon|Lt|Maj|Messrs|Mlle|Mme|Mr|Mrs|Ms|Msgr|Prof|Pvt|Rep|Rev"
    "|Sen|Sgt|Sr|St|Supt|v|vs"
)
_NUMBERED = "Art|No|Nos|Nr|Op|Vol|p|pp|vol"


def _rules() -> tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer]:
    """The normalizer that writes the markers, and the pre-tokenizer whose matches are the words (Oniguruma's syntax)."""
    alnum = r"[\p{Alnum}]"
    # Each pattern starts with a literal where it can, and looks no further than some bound: an unbounded look back or ahead
    # would take quadratic time over a long text.
    hyphen = rf"-(?<={alnum}-|<unk>-)(?={alnum}|<unk>)"

    def inside_number(mark: str) -> str:
        # The whole word has to be a number: 23,000 and 0.7 are taken apart, 1,000th and T2.5 are not.
        right = r"(?=(?>\d{1,40}(?:[.,]\d{1,40}){0,9})(?!\.?-?\p{Alpha}))"
        left = rf"(?<!\p{{Alpha}}(?:\.-?)?\d{{1,40}}(?:[.,]\d{{1,40}}){{0,9}}{mark})"
        return rf"{mark}(?<=\d{mark}){right}{left}"

    start = r"(?:\A|[^\p{Alnum}])"
    point = (
        r"\.(?!\.)(?:(?=\s++(?:\p{Lower}|<unk>))"  # an unknown word's case is unknown: the point stays where it is
        rf"|(?<={start}(?:\p{{Lu}}|{_TITLES})\.)"
        rf"|(?<={start}(?:{_NUMBERED})\.)(?=\s++\d))"
    )
    # U.S. and example.org hold an inner point; numbers with one are gone by now.
    inner = rf"(?:(?:\.-?|(?<=\d),(?=\d)){alnum}++)++(?:\.(?!\.))?"
    word = rf"{alnum}++(?:{inner}|{point}|-(?!-))?+"
    # A space and an apostrophe before a letter: the clitic of text that is already split, unless a quotation that opens
    # here is closed further on. Once split, no text has a closing quote at a word's end, so splitting again changes nothing.
    after_space = rf"(?<={alnum}\s'|<unk>\s')(?![^\n]{{0,999}}?[^\s']'(?!\p{{Alpha}}))"
    clitic = rf"'(?=\p{{Alpha}})(?:(?<={alnum}'|<unk>')|{after_space}){word}"
    alone = r"\.\.+|--+|(?<!\S)@[-,.]@(?!\S)|<unk>|<formula>|\S"
    words = rf"{word}|(?<![.-])[.-]{word}|{clitic}|{alone}"  # the commonest first: this is where the time goes
    markers = [(hyphen, "@-@"), (inside_number(r"\."), "@.@"), (inside_number(","), "@,@")]
    return (
        normalizers.Sequence([normalizers.Replace(Regex(pattern), f" {marker} ") for pattern, marker in markers]),
        pre_tokenizers.Split(Regex(words), "removed", invert=True),
    )


_shared_rules = cache(_rules)


def split_words(texts: Sequence[str]) -> list[list[str]]:
    """The words of each text, by the tokenizer's own rules and without a vocabulary.

    >>> split_words(["Mr. Smith's well-known cat didn't eat 1,500 mice (in the U.S.)."])[0]
    ['Mr.', 'Smith', "'s", 'well', '@-@', 'known', 'cat', 'didn', "'t", 'eat', '1', '@,@', '500', 'mice', '(', 'in', 'the', \
'U.S.', ')', '.']
    """
    normalizer, pre_tokenizer = _shared_rules()
    return [[word for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text))] for text in texts]


def wiki_tokenizer(words: Sequence[str], context: int = 512) -> WikiTokenizer:
    """A tokenizer with these words from id 4 on, in this order; a special token among them keeps its own id.

    >>> tokenizer = wiki_tokenizer(["the", "well", "@-@", "known", "cat"])
    >>> tokenizer("the well-known dog")["input_ids"]
    [4, 5, 6, 7, 3]
    >>> tokenizer.decode([4, 5, 6, 7, 8])
    'the well-known cat'
    """
    known = [*SPECIALS, *(word for word in words if word not in SPECIALS)]
    vocabulary = {word: id for id, word in enumerate(known)}
    if len(vocabulary) < len(known):
        twice = next(word for id, word in enumerate(known) if vocabulary[word] != id)
        raise ValueError(f"expected each word once, found {twice!r} twice among {len(words):,} words: count them first")
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer, backend.pre_tokenizer = _shared_rules()
    return WikiTokenizer(
        tokenizer_object=backend,
        bos_token="</s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=context,
        # Text is not searched for special tokens: a '</s>' in a prompt is four words, and rules can look past '<unk>'.
        split_special_tokens=True,
    )


class WikiTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A fast tokenizer between text and ids of WikiText's words; its offsets are those of the raw text.

    It has no `__init__` of its own: transformers would then rebuild a loaded tokenizer without its rules.
    """

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return join_words(tokens)

    def _decode(self, token_ids: int | list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return join_words(self.convert_ids_to_tokens(ids, skip_special_tokens=skip_special_tokens))


_NO_SPACE_BEFORE = set(",.;:!?)]}%”°′″’…") | {"..."}
_NO_SPACE_AFTER = set("([{$£€¥₱#“‘")
_CLITICS = {"s", "t", "d", "m", "ll", "re", "ve"}
_NO_SPACE_AROUND = set("/—‑⁄") | set(_MARKERS)


def join_words(words: Sequence[str]) -> str:
    """Readable text of words, which splits into the same words again wherever `split_words` could have made them.

    A single word is left as it is, so that a lone '@-@' is not taken for a dash.

    >>> join_words(["(", "a", "well", "@-@", "known", "cat", "'s", '"', "mice", '"', ")", "."])
    '(a well-known cat\\'s "mice").'
    """
    if len(words) == 1:
        return words[0]
    parts: list[str] = []
    run: list[str] = []
    for word in words:
        if word in SPECIALS and word != "<unk>":
            parts += [_join(run)] if run else []
            parts.append(word)
            run = []
        else:
            run.append(word)
    return " ".join(parts + ([_join(run)] if run else []))


def _join(words: list[str]) -> str:
    """Readable text of words without special tokens, which splits into the same words again where that is possible."""
    glued = _glue(words)
    wanted = _offsets(words)
    while any(glued):
        text = _write(words, glued)
        found = set(_offsets(split_words([text])[0]))
        wrong = {number for number, offset in enumerate(wanted) if offset not in found}
        if not wrong:
            return text
        # Where the text would be split otherwise, spaces go back in: 'vitamin C .' is not 'vitamin C.', an initial.
        loose = [glue and not {before, before + 1} & wrong for before, glue in enumerate(glued)]
        if loose == glued:
            break
        glued = loose
    apart = " ".join(words)
    # Words in an order that no text has are shown at their best.
    return apart if not any(glued) or split_words([apart])[0] == words else _write(words, glued)


def _write(words: list[str], glued: list[bool]) -> str:
    """The text of some words, without a space between the neighbours of which `glued` is true."""
    inner = [before and after for before, after in zip([False, *glued], [*glued, False], strict=True)]
    shown = [_MARKERS.get(word, word) if within else word for word, within in zip(words, inner, strict=True)]
    spaces = ["" if glue else " " for glue in glued]
    return "".join(piece for pair in zip(shown, [*spaces, ""], strict=True) for piece in pair)


def _offsets(words: Sequence[str]) -> list[tuple[int, str]]:
    """Each word with the number of characters before it, spaces apart; a marker counts as the character it stands for."""
    offsets, position = [], 0
    for word in words:
        offsets.append((position, word))
        position += 1 if word in _MARKERS else len(word)
    return offsets


def _glue(words: list[str]) -> list[bool]:
    """For each pair of neighbours whether a reader expects no space between them."""
    before = [False] * len(words)
    after = [False] * len(words)
    is_open = {'"': False, "'": False}
    for number, word in enumerate(words):
        last = words[number - 1] if number else ""
        following = words[number + 1] if number + 1 < len(words) else ""
        if word == '"' or (word == "'" and (is_open["'"] or not last.endswith("s"))):
            before[number], after[number] = is_open[word], not is_open[word]
            is_open[word] = not is_open[word]
        elif word in _NO_SPACE_AROUND:
            before[number] = after[number] = True
        elif word in "–:" and last[-1:].isdigit() and following[:1].isdigit():
            before[number] = after[number] = True  # 5–6 and 21:30
        else:
            clitic = word[0] == "'" and (last[-1:].isalnum() or last == "<unk>")
            before[number] = clitic or word == "'" or word in _NO_SPACE_BEFORE or unicodedata.category(word[0])[0] == "M"
            after[number] = word in _NO_SPACE_AFTER or (word == "’" and following in _CLITICS)
    return [left or right for left, right in zip(after, before[1:], strict=False)]
