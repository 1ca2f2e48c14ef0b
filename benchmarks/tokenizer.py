"""What tokenizing costs: words a second on one core, from raw text to lists of ids.

    python benchmarks/tokenizer.py corpus.txt            texts of 25 words from the file's beginning
    python benchmarks/tokenizer.py corpus.txt.xz --words 1000000

The vocabulary is the file's own words, filled up with made ones to the size asked. Every way goes over the same texts in
turn, several times, and its quickest pass counts. Time is the processor's, so that other programs matter less.
"""

from __future__ import annotations

import argparse
import lzma
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read when the library is loaded

from ffmem.model.adaptive.tokenizer import WikiTokenizer, split_words, wiki_tokenizer

LENGTH = 25
"""Words between spaces of a text: a sentence's."""


def read_texts(path: Path, words: int) -> list[str]:
    """The file's first words, cut into texts of `LENGTH`."""
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as lines:
        found = list(islice((word for line in lines for word in line.split()), words))
    return [" ".join(found[start : start + LENGTH]) for start in range(0, len(found), LENGTH)]


def make_tokenizer(texts: list[str], size: int) -> WikiTokenizer:
    counts = Counter(word for words in split_words(texts) for word in words)
    known = [word for word, _ in counts.most_common(size)]
    return wiki_tokenizer(known + [f"made{number}" for number in range(size - len(known))], context=1 << 20)


def quickest(work: Callable[[], object], passes: int) -> float:
    seconds = []
    for _ in range(passes):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file, or one compressed by xz")
    parser.add_argument("--words", type=int, default=500_000, help="words to read, as spaces separate them")
    parser.add_argument("--vocabulary", type=int, default=280_000, help="words the tokenizer knows")
    parser.add_argument("--passes", type=int, default=3)
    arguments = parser.parse_args()
    texts = read_texts(arguments.text, arguments.words)
    tokenizer = make_tokenizer(texts, arguments.vocabulary)
    total = sum(map(len, split_words(texts)))
    ways: dict[str, Callable[[], object]] = {
        "tokenizer(texts)": lambda: tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"],
        "encode_batch_fast": lambda: [
            found.ids for found in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ],
        "split_words": lambda: split_words(texts),
    }
    rates = [f"{name} {total / quickest(work, arguments.passes):,.0f}" for name, work in ways.items()]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        loading = quickest(lambda: WikiTokenizer.from_pretrained(folder), arguments.passes)
    print(f"{total:,} words; words/s: {', '.join(rates)}; {len(tokenizer):,} known words load in {loading:.2f} s")


if __name__ == "__main__":
    main()
