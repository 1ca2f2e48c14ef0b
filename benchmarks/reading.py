"""How fast text is read, segmented and tokenized beside a GPU: tokens/s of `Corpus.stream` by number of processes.

    python benchmarks/reading.py [TEXT] [TOKENIZER] [--readers 1 6 14] [--tokens 20000000]

TEXT is by default the pocket encyclopedia over and over, TOKENIZER (a name or a folder) one that is trained on it, with
30,000 words. Tells when the first shard was ready, too, and how long a loop of Python took meanwhile, beside its time alone:
1.0 means that a thread which launches kernels is not held up.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from ffmem.corpus.corpus import Corpus
from ffmem.corpus.files import Pocket
from ffmem.corpus.readers import cores, getting_ready
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder

BATCH, SHARD = 1 << 17, 1 << 23


def tokenizer_of(name: str | None) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if name:
        return AutoTokenizer.from_pretrained(name)
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.train([str(Pocket().path)], trainers.BpeTrainer(vocab_size=30_000, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=found)


def loop(seconds: float) -> float:
    """Turns a second of a loop in Python that gives way now and then, as one that launches kernels does."""
    began, turns = time.perf_counter(), 0
    while (now := time.perf_counter()) - began < seconds:
        sum(range(200))
        turns += 1
    return turns / (now - began)


def measure(text: Path, tokenizer: Any, readers: int, tokens: int, *, ready: bool) -> dict[str, Any]:
    if ready:
        time.sleep(3)  # while a model would be loaded
    corpus = Corpus(open_sources(text), Encoder(tokenizer, 1023), Unit("sentence"), "en", SHARD, tokens, workers=readers)
    alone, turns, stopped = loop(0.5), [], threading.Event()
    began = time.perf_counter()
    first, last, read, gaps = 0.0, began, 0, []

    def consume() -> None:
        nonlocal first, last, read
        for shard in corpus.stream(planned=(BATCH, 1)):
            now = time.perf_counter()
            first, read = first or now - began, read + shard.tokens
            gaps.append(now - last)
            last = now
        stopped.set()

    thread = threading.Thread(target=consume)
    thread.start()
    while not stopped.is_set():
        turns.append(loop(0.2))
    thread.join()
    corpus.close()
    return {
        "readers": readers,
        "ready": ready,
        "tokens": read,
        "tokens_s": round(read / (last - began)),
        "steady_tokens_s": round(read / max(1e-9, last - began - first)),
        "first_shard_s": round(first, 2),
        "longest_wait_s": round(max(gaps), 2),
        "loop": round(alone / (sum(turns) / max(1, len(turns))), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("tokenizer", nargs="?")
    parser.add_argument("--readers", type=int, nargs="+", default=[1, max(1, cores() - 2)])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)  # as beside a GPU
    tokenizer = tokenizer_of(options.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        text = options.text or Path(folder) / "text.txt"
        if not options.text:
            text.write_bytes(Pocket().path.read_bytes() * (1 + options.tokens // 80_000))
        for readers in options.readers:
            for ready in (False, True)[: 1 + (readers > 1)]:
                with getting_ready(readers if ready else 1):
                    found = measure(text, tokenizer, readers, options.tokens, ready=ready)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
