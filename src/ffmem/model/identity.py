"""Hashes that say which model and which tokenizer made a run."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import nn

HASHED_BYTES = 1 << 24
"""How many bytes of a tensor are copied to the host and hashed at a time."""
VOLATILE = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
"""Entries of a config that say nothing about what a model computes."""


def model_hash(model: Any) -> str:
    """The hash of a model's config and weights, which together decide what it computes."""
    return hashlib.sha256(_config(model.config) + weights_hash(model).encode()).hexdigest()


def weights_hash(model: nn.Module) -> str:
    """The hash of the names, shapes, dtypes and bytes of all weights; tied weights count once."""
    tensors = dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if buffer.numel() > 1}
    keep = set(model.state_dict())

    def digest(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        total = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), HASHED_BYTES):
            total.update(flat[start : start + HASHED_BYTES].cpu().numpy().data)
        return total.digest()

    with ThreadPoolExecutor(4) as pool:
        parts = pool.map(digest, sorted((name, tensor) for name, tensor in tensors.items() if name in keep))
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _config(config: Any) -> bytes:
    """The entries of a config that decide what a model computes, as JSON that stays the same after saving and loading."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): clean(part) for key, part in sorted(value.items(), key=str) if key not in VOLATILE}
        return [clean(part) for part in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(clean(config.to_dict()), sort_keys=True, default=str).encode()


def tokenizer_hash(tokenizer: Any) -> str:
    """The hash of a tokenizer's vocabulary, rules and special tokens, which together decide the ids of a text."""
    special = json.dumps(
        {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}, ensure_ascii=True
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _hash_of_rules(special, backend.to_str() if backend is not None else tuple(tokenizer.get_vocab().items()))


@lru_cache(maxsize=1)
def _hash_of_rules(special: str, rules: str | tuple[tuple[str, int], ...]) -> str:
    """The hash, kept for the next who asks about equal rules: sorting a large vocabulary takes a second."""
    # A call with padding or truncation leaves its settings in the backend.
    kept = {**json.loads(rules), "padding": None, "truncation": None} if isinstance(rules, str) else dict(rules)
    return hashlib.sha256(f"{special}\n{json.dumps(kept, sort_keys=True)}".encode()).hexdigest()
