"""Text as token ids and token ids as text, and which tokens a model predicts behind a prompt."""

from __future__ import annotations

import re
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GenerationConfig

from ffmem.errors import FfmemError
from ffmem.model.loading import quiet_transformers
from ffmem.model.memories import MemoryModel
from ffmem.model.spots import hooked, record_spot, spots_of
from ffmem.text import beginning, quoted

ERROR_WIDTH = 60
"""How many characters of what was found an error shows."""
_SPACE = "▁"
"""Sentencepiece's sign for a space in the name of a token."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def check_bos(bos: str, token: int | None, name: str) -> bool:
    """Whether sentences start with `token`, the bos token of the model `name` or None, for `auto`, `on` or `off`."""
    if bos not in ("auto", "on", "off"):
        raise FfmemError(f"expected bos auto, on or off, found {bos!r}")
    if bos == "on" and token is None:
        raise FfmemError(f"{name}: the tokenizer has neither a bos nor an eos token; use bos off")
    return bos != "off" and token is not None


def prompt_ids(model: MemoryModel, prompt: str, *, bos: bool, room: int = 0) -> list[int]:
    """The token ids of a prompt without a bos token; an error if there are none, or no context is left for `room` more."""
    ids = _text_ids(model, prompt, "a prompt")
    if not ids:
        raise FfmemError(f"expected a prompt of at least 1 token, found {quoted(prompt)}")
    most = model.context - int(bos)
    if len(ids) > most:
        raise FfmemError(f"expected a prompt of 1 to {most} tokens, as {model.name} takes, found {len(ids)}")
    if len(ids) + room > most:
        left = most - len(ids)
        raise FfmemError(f"expected 0 to {left} tokens to generate behind a prompt of {len(ids)}, found {room}")
    return ids


def _text_ids(model: MemoryModel, text: Any, what: str) -> list[int]:
    """The token ids of a text without special tokens; an error for what is no text or has no form in UTF-8."""
    if not isinstance(text, str):
        raise FfmemError(f"expected {what} as text, found {quoted(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"{quoted(text[error.start])} at character {error.start}"
        raise FfmemError(f"expected {what} in UTF-8, found {found}") from error
    return list(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def token_id(model: MemoryModel, token: str | int) -> int:
    """The id of one token, given by its text (a space in front counts: ` Paris`) or by the id itself."""
    if isinstance(token, int):
        if not 0 <= token < model.vocabulary.size:
            found = token if abs(token) < 10**ERROR_WIDTH else "a far other one"  # Python does not write the longest numbers
            raise FfmemError(f"expected a token id from 0 to {model.vocabulary.size - 1}, found {found}")
        return token
    ids = _text_ids(model, token, "one token")
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if len(ids) == 1 and (ids[0] != unknown or token == model.tokenizer.unk_token):
        return int(ids[0])
    found = " + ".join(repr(text) for text in token_texts(model, ids[:ERROR_WIDTH])) or "nothing"
    raise FfmemError(
        f"expected one token of {model.name}, found {quoted(token)}, which it reads as {beginning(found, ERROR_WIDTH)}; "
        "a space in front counts"
    )


def token_texts(model: MemoryModel, ids: list[int]) -> list[str]:
    """The texts of some token ids with their spaces, as a run's table of tokens has them."""
    names = model.tokenizer.convert_ids_to_tokens(ids)
    special = set(model.tokenizer.all_special_tokens)
    return [_text(model, id, name, name in special) for id, name in zip(ids, names, strict=True)]


def _text(model: MemoryModel, id: int, name: str | None, special: bool) -> str:
    if not name or special:
        return name or ""
    # Decoding a piece alone would lose the space in front that sentencepiece writes into its name.
    return name.replace(_SPACE, " ") if name.startswith(_SPACE) else str(model.tokenizer.decode([id]))


def vocabulary_texts(tokenizer: Any, size: int) -> list[str]:
    """The text of every id below `size`, such as ' Paris' with its space, so that a run can be read without its tokenizer.

    An id without a token has the text ''.
    """
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


@torch.inference_mode()
def log_probs_at(
    model: MemoryModel, ids: Int[Tensor, "batch pos"], at: Int[Tensor, " batch"]
) -> Float[Tensor, "batch vocab"]:
    """The float32 log-probabilities of the token behind column `at` of each row; no other column is projected."""
    kept: list[Tensor] = []
    ((path, side),) = spots_of(model.family.o)
    with hooked(record_spot(model.blocks[-1], path, side, kept.append)):
        model.model.base_model(input_ids=ids.to(model.device), use_cache=False)
    stream = kept[0].reshape(*ids.shape, -1)
    h = stream[torch.arange(len(ids), device=stream.device), at.to(stream.device)]
    return model.vocabulary.log_probs(model.after_post_norm(h, model.layers), norm=True)


def greedy(model: MemoryModel, ids: list[int], count: int) -> list[int]:
    """The ids that follow `ids` if the most likely token is taken `count` times, or up to the end of the text."""
    if not count:
        return []
    fed = torch.tensor([ids], device=model.device)
    end = getattr(model.model.generation_config, "eos_token_id", None)
    settings: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    settings |= {"max_new_tokens": count, "eos_token_id": end, "pad_token_id": model.bos or 0, "use_cache": True}
    with quiet_transformers():
        found = model.model.generate(
            fed, attention_mask=torch.ones_like(fed), generation_config=GenerationConfig(**settings)
        )
    return found[0, len(ids) :].tolist()
