"""The demonstration: a tiny model trained on a tiny text on the spot, indexed, and its clearest memories shown."""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from math import log
from pathlib import Path
from typing import TYPE_CHECKING

from ffmem.index.pages import shown_token, visible
from ffmem.progress import reporting

if TYPE_CHECKING:
    from ffmem.index.reader import CellView, Index
    from ffmem.model.memories import MemoryModel

CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Norway": "Oslo",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
}
CALLS = {"dog": "barks", "cat": "meows", "lion": "roars", "duck": "quacks", "horse": "neighs", "wolf": "howls"}
SEASONS = {"winter": "snow", "spring": "rain", "summer": "sun", "autumn": "wind"}
STEPS = 300
SHOWN = 6


def demo_sentences(count: int = 1500, seed: int = 0) -> list[str]:
    """Sentences from a few patterns, each a fact that a memory can hold."""
    chooser = random.Random(seed)
    sentences = []
    for _ in range(count):
        country, animal, season = (chooser.choice(list(facts)) for facts in (CAPITALS, CALLS, SEASONS))
        sentences.append(
            chooser.choice(
                [
                    f"The capital of {country} is {CAPITALS[country]} .",
                    f"We went to {CAPITALS[country]} , the capital of {country} .",
                    f"At night the {animal} {CALLS[animal]} .",
                    f"A {animal} in {country} {CALLS[animal]} .",
                    f"In {season} there is much {SEASONS[season]} in {country} .",
                    f"The {season} in {CAPITALS[country]} brings {SEASONS[season]} .",
                ]
            )
        )
    return sentences


def demo_model(sentences: list[str], *, seed: int = 0, quiet: bool = False) -> MemoryModel:
    """A two-layer GPT-2 with ReLU memories, trained on the sentences in a few seconds."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from ffmem.model.loading import load_model

    names = ["</s>", *sorted({word for sentence in sentences for word in sentence.split()})]
    words = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="</s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="</s>", eos_token="</s>")
    torch.manual_seed(seed)
    shape = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "activation_function": "relu"}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(names), bos_token_id=0, eos_token_id=0, **shape))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    ids = [torch.tensor([0, *tokenizer(sentence)["input_ids"], 0]) for sentence in sentences]
    chooser = random.Random(seed)
    with reporting("training a tiny model", quiet=quiet) as reporter:
        for step in range(STEPS):
            rows = chooser.choices(ids, k=64)
            inputs = torch.nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
            targets = torch.nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
            logits = model(input_ids=inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            reporter.update(step / STEPS, f"loss {loss.item():.2f}")
    model.config._name_or_path = "demo"
    return load_model(model.eval(), tokenizer=tokenizer)


def agreement(view: CellView) -> float:
    """The share of a cell's triggers whose next token is its value's top token; the paper's agreement, over all triggers."""
    said = view.value.top(1)[0].token
    nexts = [trigger.next.strip() for trigger in view.triggers if trigger.next]
    return nexts.count(said.strip()) / len(nexts) if len(nexts) >= 5 else 0.0


def worth_seeing(index: Index, count: int = SHOWN) -> list[CellView]:
    """The cells whose value best agrees with what follows their triggers, rare words first, a different word each.

    The score is the agreement times the word's surprise, -log of its share among all sentences' words.
    """
    words = Counter(word for row in index.table("sentences").column("text").to_pylist() for word in row.split())

    def score(view: CellView) -> float:
        share = words[view.value.top(1)[0].token.strip()] / words.total()
        return agreement(view) * -log(share) if share else 0.0

    found: dict[str, CellView] = {}
    for view in sorted(index, key=lambda view: (-score(view), view.cell)):
        found.setdefault(view.value.top(1)[0].token, view)
        if len(found) == count:
            break
    return list(found.values())


def demo(out: str | Path | None = None, *, quiet: bool = False) -> Index:
    """Train, index, project the values, and print the cells worth seeing. Returns the index."""
    from ffmem.index.build import build_index, threads
    from ffmem.index.values import values

    sentences = demo_sentences()
    run = Path(out) if out is not None else Path(tempfile.mkdtemp(prefix="ffmem-demo-")) / "run"
    with threads(1):  # matrices this small are slower with more
        model = demo_model(sentences, quiet=quiet)
        index = build_index(model, sentences, out=run, unit="line", top=20, quiet=quiet)
        index = values(index, model, top=10, quiet=quiet)
    _print(index, quiet)
    return index


def _print(index: Index, quiet: bool) -> None:
    counts = index.counts
    print(
        f"A model of {counts['cells']} memory cells read {counts['sentences']:,} sentences. These are the cells whose "
        "value predicts what follows their triggers, surprising words first:\n"
    )
    for view in worth_seeing(index):
        said = view.value.top(1)[0]
        print(f"{view.name}  promotes {shown_token(said.token)}  (agrees with {agreement(view):.0%} of its triggers)")
        for trigger in view.triggers[:4]:
            print(f"    {trigger.coefficient:5.2f}  {visible(trigger.prefix)} ▸ {shown_token(trigger.next)}")
        print()
    if not quiet:
        print(f"Next: ffmem info {index.path}", file=sys.stderr)
        print(f"      ffmem show {index.path} L2D0", file=sys.stderr)
        print("      ffmem index MODEL TEXT -o RUN   with a model and a text of your own", file=sys.stderr)
