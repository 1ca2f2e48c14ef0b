"""The definition of triggers, slowly: every prefix alone through the model, then a full sort."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ffmem.model.memories import MemoryModel


@dataclass(frozen=True)
class Offer:
    """A prefix that may trigger a cell."""

    coefficient: float
    sentence: int
    position: int
    prefix: tuple[int, ...]
    whole: tuple[int, ...]
    document: int = 0

    @property
    def order(self) -> tuple[float, int, int]:
        return (-self.coefficient, self.sentence, self.position)


def best_offers(offers: list[Offer], t: int, distinct: str) -> list[Offer]:
    """The t best positive offers of a cell by the spec's four modes."""
    found = sorted((offer for offer in offers if offer.coefficient > 0), key=lambda offer: offer.order)
    if distinct == "none":
        return found[:t]
    seen_sentences: set[int] = set()
    seen: set[object] = set()
    kept = []
    for offer in found:
        if offer.sentence in seen_sentences:
            continue
        seen_sentences.add(offer.sentence)
        key = {"text": offer.prefix, "sentence": offer.whole, "document": offer.document}[distinct]
        if key not in seen:
            seen.add(key)
            kept.append(offer)
    return kept[:t]


def coefficients_alone(
    model: MemoryModel, sentences: list[list[int]], bos: bool
) -> dict[tuple[int, int, int], torch.Tensor]:
    """(layer, sentence, position) to that layer's coefficients, each prefix in a forward of its own, by our own hook."""
    found: dict[tuple[int, int, int], torch.Tensor] = {}
    here = (0, 0)

    def keep(layer):
        def hook(_, args):
            found[layer, *here] = args[0].detach().reshape(-1, args[0].shape[-1])[-1].float().clone()

        return hook

    handles = [module.register_forward_pre_hook(keep(layer)) for layer, module in enumerate(model.value_modules, 1)]
    try:
        with torch.no_grad():
            for number, ids in enumerate(sentences):
                for position in range(1, len(ids) + 1):
                    here = (number, position)
                    prefix = ([model.bos] if bos else []) + ids[:position]
                    model.model(input_ids=torch.tensor([prefix]))
    finally:
        for handle in handles:
            handle.remove()
    return found


def offers_of(found: dict[tuple[int, int, int], torch.Tensor], sentences: list[list[int]], layer: int, cell: int, sign: int):
    """All offers of one cell."""
    return [
        Offer(sign * float(m[cell]), sentence, position, tuple(sentences[sentence][:position]), tuple(sentences[sentence]))
        for (at, sentence, position), m in found.items()
        if at == layer
    ]


SETTINGS = {"shard_tokens": 500, "batch_tokens": 256, "top": 5, "quiet": True}
"""Of a run of many small shards."""


def content(run):
    """Every file's bytes, the log left out."""
    return {
        path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "log.jsonl"
    }
