"""Find the memories of an architecture that is not in the table, by the shapes of its matrices and one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ffmem.errors import ModelError
from ffmem.model.families import Family
from ffmem.model.spots import HALF_TOLERANCE, TOLERANCE, hooked, record_spot, relative_error


@torch.inference_mode()
def discover(model: Any) -> Family:
    """The family of a model that is not in the table, or an error that says what was not found in it.

    The value matrix is the widest linear map into the stream that a key matrix feeds and that is not attention's.
    The spots of r, y and o are those candidates for which r + y = o holds best in one forward.
    """
    name = type(model).__name__
    path, blocks = _blocks(model)
    if not any("att" in inner.lower() for inner, _ in blocks[0].named_modules()):
        raise ModelError(f"{name}: expected a transformer, found blocks without attention")
    d = next(model.get_input_embeddings().parameters()).shape[-1]
    key, up, value = _matrices(blocks[0], name, getattr(model.config, "hidden_size", d))
    r, y, o, joined = _stream(model, blocks, value)
    norm = _final_norm(model, path)
    return Family(name=name, blocks=path, key=key, up=up, value=value, norm=norm, r=r, y=y, o=o, joined=joined)


def _blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The path and modules of the model's blocks: the list of modules of one class that holds the most weights."""
    found: tuple[int, str, list[nn.Module]] | None = None
    for path, module in model.named_modules():
        children = list(module.children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and children and len({type(c) for c in children}) == 1:
            size = sum(p.numel() for p in module.parameters())
            if found is None or size > found[0]:
                found = (size, path, children)
    if found is None:
        raise ModelError(f"{type(model).__name__}: expected a list of equal blocks, found none")
    return found[1], found[2]


def _linears(block: nn.Module) -> Iterator[tuple[str, int, int]]:
    """(path, inputs, outputs) of every linear map of a block that is not part of attention."""
    for path, module in block.named_modules():
        if "att" in path.lower():
            continue
        if isinstance(module, nn.Linear):
            yield path, module.in_features, module.out_features
        elif type(module).__name__ == "Conv1D":
            yield path, module.weight.shape[0], module.weight.shape[1]  # type: ignore[index, union-attr]


def _matrices(block: nn.Module, name: str, d: int) -> tuple[str, str | None, str]:
    """Paths of key (or gate), up (None in a plain layer) and value."""
    linears = list(_linears(block))
    values = []
    for path, inputs, outputs in linears:
        keys = [key for key, i, o in linears if i == d and o == inputs and key != path]
        fused = [key for key, i, o in linears if i == d and o == 2 * inputs]
        if outputs == d and (keys or fused):
            values.append((inputs, path, keys, fused))
    if not values:
        shapes = ", ".join(f"{path} {i}x{o}" for path, i, o in linears) or "none"
        raise ModelError(
            f"{name}: expected a key and a value matrix between the stream ({d} wide) and the cells in a block; "
            f"linear maps outside attention: {shapes}"
        )
    # Equal widths: the value matrix is registered after its keys.
    _, value, keys, fused = max(values, key=lambda v: (v[0], linears.index(next(x for x in linears if x[0] == v[1]))))
    if not keys:
        return f"{fused[0]}[0]", f"{fused[0]}[1]", value
    if len(keys) == 1:
        return keys[0], None, value
    gate = next((key for key in keys if "gate" in key or key.endswith("w1")), keys[0])
    return gate, next(key for key in keys if key != gate), value


def _stream(model: Any, blocks: list[nn.Module], value: str) -> tuple[str, str, str, str | None]:
    """The spots of r, y and o, and of the input of the norm that makes r, if a norm does.

    They are the candidates whose r + y comes closest to o in the first and the last block.
    """
    inner = [path for path, _ in blocks[0].named_modules() if path]
    norms = [path for path in inner if "norm" in path.lower() or "ln" in path.lower()]
    spots = [(path, side) for path in ["block", *inner] for side in ("in", "out")]
    kept = [_record(model, block, spots) for block in (blocks[0], blocks[-1])]
    width = kept[0]["block.in"].numel()
    wide = [spot for spot, tensor in kept[0].items() if tensor.numel() == width]  # in the order of the forward
    behind_value = wide[wide.index(f"{value}.out") :] if f"{value}.out" in wide else []

    above = [value.rsplit(".", n)[0] for n in range(value.count(".") + 1)]
    y_options = [spot for spot in behind_value if spot.removesuffix(".out") in [*above, *norms]]
    parts = [f"{path}.out" for path in inner if "att" in path.lower() or path in norms]
    r_options = [
        *(f"{path}.in" for path in [*norms, *inner]),
        "block.in",
        *(f"block.in + {part}" for part in parts),
        *(f"{path}.out" for path in norms),
    ]
    o_options = ["block.out", *(f"{path}.in" for path in norms)]
    # In half precision a sum in another order is off by 3e-3, a wrong multiplier by 1e-2.
    best = (TOLERANCE.get(kept[0]["block.in"].dtype, HALF_TOLERANCE / 4), "", "", "")
    for o, y, r in product(o_options, y_options, r_options):
        terms = r.split(" + ")
        if y in terms or o in terms or not {o, y, *terms} <= set(wide):
            continue
        error = max(_error(tensors, [*terms, y], o) for tensors in kept)
        if error < best[0]:
            best = (error, r, y, o)
    if not best[1]:
        raise ModelError(f"{type(model).__name__}: no tensors of a block were found with r + y = o (value matrix {value})")
    _, r, y, o = best
    outputs = [path for path in norms if " + " not in r and f"{path}.out" in wide]
    behind = [path for path in outputs if torch.equal(kept[0][f"{path}.out"].flatten(), kept[0][r].flatten())]
    return r, y, o, f"{behind[-1]}.in" if behind else None


def _error(tensors: dict[str, Tensor], terms: list[str], o: str) -> float:
    """The relative error of the sum of some recorded spots against `o`; infinite if one of them was not recorded."""
    if not {*terms, o} <= set(tensors):
        return float("inf")
    return relative_error(torch.stack([tensors[term].flatten().float() for term in terms]).sum(0), tensors[o].flatten())


def _record(model: Any, block: nn.Module, spots: list[tuple[str, str]]) -> dict[str, Tensor]:
    """The tensors at those spots of a block that a forward on a few tokens reaches, in the order of the forward."""
    kept: dict[str, Tensor] = {}

    def keeper(spot: str) -> Callable[[Tensor], None]:
        return lambda tensor: kept.__setitem__(spot, tensor)

    hooks = [record_spot(block, path, side, keeper(f"{path}.{side}")) for path, side in spots]
    size = model.config.get_text_config().vocab_size
    with hooked(*hooks):
        model(input_ids=torch.arange(1, 8, device=model.device)[None] % size, use_cache=False)
    return kept


def _final_norm(model: Any, blocks: str) -> str | None:
    """The path of the last norm beside the list of blocks; None if there is none."""
    parent = blocks.rpartition(".")[0]
    root = model.get_submodule(parent)
    names = [name for name, child in root.named_children() if "norm" in name.lower() or "ln" in name.lower()]
    return f"{parent}.{names[-1]}".lstrip(".") if names else None
