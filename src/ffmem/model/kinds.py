"""What kind of model a config describes, and an error that says so where ffmem does not read that kind."""

from __future__ import annotations

from typing import Any

from transformers.models.auto import modeling_auto as auto

from ffmem.errors import ModelError
from ffmem.model.families import FAMILIES, experts_of
from ffmem.text import visible

READ = "ffmem reads decoders that predict the next token, with one dense feed-forward layer a block"

# What a model that cannot be a causal language model is, by the first of transformers' tables that knows its type.
_OTHERS = (
    ("a model of pictures and text", auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ("a model of pictures and text", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    ("a vision model", auto.MODEL_FOR_IMAGE_MAPPING_NAMES),
    ("a vision model", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ("a speech model", auto.MODEL_FOR_CTC_MAPPING_NAMES),
    ("a speech model", auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
    ("an encoder, which reads both ways", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
)


def refuse_other_kinds(config: Any, name: str) -> None:
    """An error that says what a model is, if it is none that can be read; a type that nothing is known of passes."""
    if kind := _kind(config):
        raise ModelError(f"{visible(name)} is a {visible(str(config.model_type))}, {kind}; {READ}")


def _kind(config: Any) -> str | None:
    own = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder with a decoder"
    if experts := experts_of(config):
        return f"a decoder with {experts} experts a layer"
    if own in FAMILIES:
        return None
    if own not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return next((kind for kind, types in _OTHERS if own in types), None)
    # An encoder that can be made a decoder says whether it was: `xlm` by `causal`, all others by `is_decoder`.
    one_way = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    return None if one_way or own not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES else "an encoder, which reads both ways"


def refuse_headless(config: Any, name: str) -> None:
    """An error for a stored trunk: what was saved without an unembedding, where its embeddings do not stand for one."""
    stored = (getattr(config, "architectures", None) or [""])[0]
    if (
        stored
        and auto.MODEL_MAPPING_NAMES.get(config.model_type) == stored
        and not getattr(config, "tie_word_embeddings", False)
    ):
        raise ModelError(f"{visible(name)} is a {stored}, a trunk without an unembedding, so it predicts no token; {READ}")
