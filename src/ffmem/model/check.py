"""The checks of a model at load: its tokenizer fits, its memories are where we read them, and our hooks change nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ffmem.errors import ModelError
from ffmem.model.memories import MemoryModel
from ffmem.model.spots import HALF_TOLERANCE, TOLERANCE, relative_error
from ffmem.text import visible

PROBE = 12
"""The number of tokens that the self-check feeds to a model."""


@dataclass(frozen=True)
class SelfCheck:
    """The relative errors of a model's self-check, each of its worst layer; rounding stays below `tolerance`."""

    value_product: float
    """The error of coefficients times values plus bias against the value matrix's own output."""
    residual_sum: float
    """The error of r + y against o."""
    causality: float
    """The error of a prefix's coefficients in a longer text against those of the prefix alone."""
    projection: float
    """The error of our vocabulary projection of the last layer's o against the model's own log-probabilities."""
    logits_equal: bool
    """Whether the logits of a forward with our hooks equal those without, bit for bit."""
    tolerance: float

    def failures(self) -> list[str]:
        """What failed, each with its error and its limit; an empty list for a sound model."""
        half = self.tolerance >= HALF_TOLERANCE
        limits = {
            "value_product": self.tolerance,
            "residual_sum": self.tolerance,
            # Rounding differs with the shape of a batch; looking ahead is orders of magnitude larger.
            "causality": 2.5 * self.tolerance if half else 100 * self.tolerance,
            "projection": self.tolerance if half else 10 * self.tolerance,
        }
        numbers = asdict(self)
        found = [f"{name} {numbers[name]:.1e} > {limit:.0e}" for name, limit in limits.items() if not numbers[name] <= limit]
        return found if self.logits_equal else [*found, "logits differ under hooks"]


@torch.inference_mode()
def check(model: MemoryModel) -> SelfCheck:
    """The errors of a model's self-check on a few tokens, whatever they are."""
    ids = probe_ids(model)
    untouched = model.logits(ids)
    recording = model.record(ids)
    product, total = 0.0, 0.0
    for layer in range(1, model.layers + 1):
        at = layer - 1
        out = recording.m[at] @ model.values(layer)
        bias = model.value_bias(layer)
        product = max(product, relative_error(out if bias is None else out + bias, recording.product[at]))
        total = max(total, relative_error(recording.r[at] + recording.y[at], recording.o[at]))
    alone: list[torch.Tensor] = []
    with model.reading(lambda _, m: alone.append(m.clone())) as forward:
        forward(ids[:, : PROBE // 2])
    looks_ahead = max(
        relative_error(prefix, whole[:, : PROBE // 2]) for prefix, whole in zip(alone, recording.m, strict=True)
    )
    ours = model.vocabulary.log_probs(model.after_post_norm(recording.o[-1], model.layers)[0], norm=True)
    theirs = torch.log_softmax(untouched[0].float(), dim=-1)
    return SelfCheck(
        value_product=product,
        residual_sum=total,
        causality=looks_ahead,
        projection=relative_error(ours, theirs.to(ours.device)),
        logits_equal=bool(torch.equal(untouched, recording.logits)),
        tolerance=TOLERANCE.get(model.dtype, HALF_TOLERANCE),
    )


def refuse_unless_sound(model: MemoryModel) -> SelfCheck:
    """The self-check's errors; if some are too large, a `ModelError` that names them."""
    try:
        result = check(model)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(f"{model.name}: the self-check could not run ({error})") from error
    failures = result.failures()
    if failures:
        how = "found by shape" if model.found_by_shape else f"read as {model.family.name}"
        raise ModelError(f"{model.name} ({type(model.model).__name__}, {how}) fails the self-check: {'; '.join(failures)}")
    return result


def refuse_unfit_tokenizer(tokenizer: Any, model: Any, name: str) -> None:
    """Raise an error for a tokenizer of another model, one without words, or one without a token for unknown words.

    A model may have more embeddings than its tokenizer has tokens: many are padded to a round number. Special tokens, such
    as one for padding, may have no embedding, because no text becomes one of them; but the one that begins a sentence may
    not.
    """
    where = visible(name)
    special = {*tokenizer.all_special_tokens, *(str(one) for one in tokenizer.added_tokens_decoder.values() if one.special)}
    words = {token: id for token, id in tokenizer.get_vocab().items() if token not in special}
    if not words:
        raise ModelError(f"{where}: expected a tokenizer beside the weights, found one without words; add its files")
    rows = model.config.get_text_config().vocab_size
    if tokenizer.bos_token is not None:
        words[tokenizer.bos_token] = tokenizer.bos_token_id
    token, last = max(words.items(), key=lambda item: item[1])
    if last >= rows:
        raise ModelError(
            f"{where}: expected a tokenizer for the model's {rows:,} embeddings, found one of another model: "
            f"its token {visible(token)!r} has the id {last:,}"
        )
    kind: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if type(kind).__name__ in ("WordLevel", "WordPiece") and kind.token_to_id(kind.unk_token) is None:
        raise ModelError(
            f"{where}: expected a tokenizer with a token for unknown words, found none ({visible(kind.unk_token)!r} is not "
            "in its vocabulary), so that it fails at the first such word; add the token to tokenizer.json"
        )


def probe_ids(model: MemoryModel) -> torch.Tensor:
    """A row of at most 12 different token ids, the same ones at every call."""
    size = model.config.vocab_size
    length = min(PROBE, model.context)
    return (torch.arange(1, length + 1, device=model.device) * 7919 % max(size - 1, 1))[None]
