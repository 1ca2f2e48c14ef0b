"""The recipe of an edit: a few lines of Python that need transformers alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ffmem.live.edits import Change, Changes, Edit, parse_edits, resolve, statistics_for
from ffmem.live.scope import Scope
from ffmem.model.loading import load_model
from ffmem.model.memories import MemoryModel
from ffmem.run.reader import Index
from ffmem.text import visible

_EVERYWHERE = """

def edit(changes):
    def hook(module, args):
        m = args[0].clone()
        for cells, kind, amounts in changes:
            amounts = torch.tensor(amounts, dtype=m.dtype, device=m.device)
            before = m[..., cells]
            m[..., cells] = {"=": amounts.expand_as(before), "*": before * amounts, "+": before + amounts}[kind]
        return (m, *args[1:])
    return hook


handles = [model.get_submodule(path).register_forward_pre_hook(edit(changes)) for path, changes in EDITS.items()]
"""

_SOMEWHERE = """

def follow(module, args, kwargs):
    # For one text at a time, without padding, and a prompt that is followed by generated tokens through a cache.
    ids, cache = kwargs["input_ids"] if "input_ids" in kwargs else args[0], kwargs.get("past_key_values")
    past = 0 if cache is None else int(cache.get_seq_length())
    columns = list(range(past + ids.shape[1]))
    if past == 0:
        text["start"] = int(ids[0, 0] == BOS)  # the beginning-of-sentence token is not counted
        text["end"] = len(columns)
    chosen = CHOSEN
    text["where"] = [column - past for column in chosen if column >= past]


def edit(changes):
    def hook(module, args):
        m = args[0].clone()
        flat = m.view(-1, m.shape[-1])  # a row a column of the text
        for column in text["where"]:
            for cells, kind, amounts in changes:
                amounts = torch.tensor(amounts, dtype=m.dtype, device=m.device)
                before = flat[column, cells]
                flat[column, cells] = {"=": amounts, "*": before * amounts, "+": before + amounts}[kind]
        return (m, *args[1:])
    return hook


text = {}
handles = [model.register_forward_pre_hook(follow, with_kwargs=True)]
handles += [model.get_submodule(path).register_forward_pre_hook(edit(changes)) for path, changes in EDITS.items()]
"""


def recipe(
    model: MemoryModel | Any,
    *edits: str | tuple[Any, str] | Edit,
    at: str | int | slice | Scope = "all",
    run: str | Path | Index | None = None,
    **load: Any,
) -> str:
    """Python source that loads the model by its name and hooks the same edits into it (see `intervene`).

    Quantiles are written as the numbers they are. Only a model whose architecture transformers does not know (the
    original paper's) is loaded by ffmem; one that was brought in memory has to be there, as `model`.
    """
    scope, parsed = Scope.parse(at), parse_edits(edits)
    loaded = load_model(model, **load)
    changes = resolve(loaded, parsed, statistics_for(loaded, run))
    where = {"all": "all positions", "generated": "generated tokens only"}.get(str(scope), f"tokens [{scope}] of the prompt")
    # A comment of one line, whatever the model is called.
    title = visible(f"{', '.join(edit.shown for edit in parsed)} in {loaded.name}, at {where}")
    lines = [f"# {title}", *_loading(loaded), ""]
    lines += [
        "# What enters these matrices is the coefficients of a layer's cells: (cells, operation, amounts).",
        "EDITS = {",
    ]
    lines += [f"    {path!r}: [{written}]," for path, written in _written(loaded, changes)]
    lines += ["}"]
    if str(scope) == "all":
        body = _EVERYWHERE
    else:
        lines += [f"BOS = {loaded.bos}"]
        body = _SOMEWHERE.replace("CHOSEN", _chosen(scope))
    return "\n".join(lines) + "\n" + body + "# To take the edits off again: for handle in handles: handle.remove()\n"


def _loading(model: MemoryModel) -> list[str]:
    """Python source, line by line, that makes `model` and `tokenizer`."""
    if model.in_memory:
        return ["import torch", "", f"# `model` is the {visible(type(model.model).__name__)} that was brought in memory."]
    if model.family.own_network:
        return [
            "import ffmem  # transformers does not know this architecture",
            "import torch",
            "",
            f"loaded = ffmem.load_model({model.name!r}, dtype={model.dtype_name!r})",
            "model, tokenizer = loaded.model, loaded.tokenizer",
        ]
    name, where = model.name, f", revision={model.revision!r}" if model.revision else ""
    where += ", trust_remote_code=True" if model.trust_remote_code else ""
    if name.endswith(".gguf"):
        name, where = str(Path(name).parent), f"{where}, gguf_file={Path(name).name!r}"
    return [
        "import torch",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({name!r}{where})",
        f"model = AutoModelForCausalLM.from_pretrained({name!r}{where}, dtype=torch.{model.dtype_name}).eval()",
    ]


def _written(model: MemoryModel, changes: Changes) -> Iterable[tuple[str, str]]:
    """The path in the model of each edited value matrix, and its changes as Python source."""
    paths = {id(module): path for path, module in model.model.named_modules()}
    for layer, parts in changes.items():
        yield paths[id(model.value_modules[layer - 1])], ", ".join(map(_change, parts))


def _change(change: Change) -> str:
    return f"({change.cells}, {change.operation.kind!r}, {change.amounts})"


def _chosen(scope: Scope) -> str:
    """Python source for the columns of a text that a scope means."""
    if scope.part is None:
        return 'columns[text["end"] :]'
    prompt = 'columns[text["start"] : text["end"]]'
    if isinstance(scope.part, int):
        return f"[{prompt}[{scope.part}]]"
    ends = ["" if end is None else str(end) for end in (scope.part.start, scope.part.stop)]
    return f"{prompt}[{ends[0]}:{ends[1]}]"
