"""Read the checkpoint that the paper's model was released as: fairseq's `model.pt` beside its `dict.txt`."""

from __future__ import annotations

import argparse
import re
import reprlib
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ffmem.errors import ModelError
from ffmem.model.adaptive.config import AdaptiveConfig
from ffmem.model.adaptive.network import AdaptiveLM
from ffmem.model.adaptive.tokenizer import SPECIALS, WikiTokenizer, wiki_tokenizer
from ffmem.model.config_check import bytes_of_archive
from ffmem.text import visible

# What the network does, by fairseq's names: (argument, the value it stands for, what its absence meant to fairseq).
# `decoder_normalize_before` was set to true by every transformer_lm architecture, so old files may leave it out.
_FIXED: tuple[tuple[str, object, object], ...] = (
    ("adaptive_input", True, False),
    ("tie_adaptive_weights", True, False),
    ("tie_adaptive_proj", True, False),
    ("decoder_normalize_before", True, True),
    ("no_decoder_final_norm", True, False),
    ("activation_fn", "relu", "relu"),
    ("decoder_learned_pos", False, False),
    ("no_token_positional_embeddings", False, False),
    ("no_scale_embedding", False, False),
    ("layernorm_embedding", False, False),
    ("character_embeddings", False, False),
    ("decoder_layers_to_keep", None, None),
)

_DICTIONARY_LINE = re.compile(r"(?P<word>[^ ]+) -?\d+(?P<flag> #fairseq:overwrite)?")

# Markers, and tables of sinusoids, which follow from the width.
_IGNORED = {
    "decoder.version",
    "decoder.embed_tokens._float_tensor",
    "decoder.embed_positions._float_tensor",
    "decoder.embed_positions.weights",
    "decoder.adaptive_softmax.version",
    "decoder.adaptive_softmax.head._float_tensor",
}


def load_fairseq(folder: str | Path) -> tuple[AdaptiveLM, WikiTokenizer]:
    """The model of a fairseq folder and its tokenizer, every argument and shape of the files checked.

    The model is in eval mode and in the dtype it was stored in, float32 where several dtypes are mixed.
    """
    folder = Path(folder)
    path = folder / "model.pt"
    for file in (path, folder / "dict.txt"):
        if not file.is_file():
            raise ModelError(f"{folder}: expected a fairseq language model with model.pt and dict.txt, found no {file.name}")
    words = read_words(folder / "dict.txt")
    arguments, stored = _open(path)
    _check_dictionary(stored, len(words), path)
    config = _config(arguments, vocabulary=len(SPECIALS) + len(words), path=path)
    _check_layers(stored, config.num_hidden_layers, path)
    state = _state(stored, config, path)
    tokenizer = wiki_tokenizer(words, context=config.max_position_embeddings)
    with torch.device("meta"):  # random numbers for 247M weights take longer than reading them
        model = AdaptiveLM(config)
    # Copies, so that the model does not hang on the mapped file.
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    return model.eval(), tokenizer


# ---- the file


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and weights of a checkpoint as they are stored. Nothing in the file can run: only plain values are read."""
    try:
        size = bytes_of_archive(path)
        archive = zipfile.is_zipfile(path)  # files from before torch 1.6 are not, and cannot be mapped
        if archive and (damaged := _damaged_part(path)):
            raise OSError(f"the checksum of {damaged} is wrong")
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about pickles and storages of another age
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
    except ModelError:
        raise
    except Exception as error:  # damage reaches torch as any of a dozen kinds
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise ModelError(
                f"{path}: expected tensors, plain values and an argparse.Namespace, found {foreign[1]}, which is not run; "
                "if you trust the file, save its `args` (or `cfg`) and `model` alone with torch.save"
            ) from error
        why = _first_line(error).split(". ")[0]  # the rest is torch's advice, which is to run the file
        raise ModelError(
            f"{path}: expected a checkpoint that torch can read, found a damaged or foreign file "
            f"({type(error).__name__}{': ' if why else ''}{why}); download it again"
        ) from error
    if not isinstance(found, Mapping) or not isinstance(found.get("model"), Mapping):
        keys = ", ".join(map(str, list(found)[:6])) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ModelError(f"{path}: expected a fairseq checkpoint with `args` and `model`, found {keys or 'nothing'}")
    for key, value in found["model"].items():
        if not isinstance(value, Tensor):
            raise ModelError(f"{path}: expected a tensor at {key}, found a {type(value).__name__}")
        if value.layout != torch.strided or value.device.type != "cpu":
            raise ModelError(f"{path}: expected stored numbers at {key}, found {value.layout} on {value.device}")
        # A tensor can claim to repeat a few numbers in as many rows as it likes, and a storage to be longer than its file.
        if max(value.numel() * value.element_size(), value.untyped_storage().nbytes()) > size:
            raise ModelError(f"{path}: expected no more than its {size:,} bytes, found {list(value.shape)} at {key}")
    return _arguments(found, path), dict(found["model"])


def _damaged_part(path: Path) -> str | None:
    """The first part of an archive with a wrong checksum, None if all are right; torch does not look."""
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()


def _arguments(checkpoint: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """fairseq's arguments by name, from `args` or from the `cfg` that replaced it at the end of 2020."""
    if isinstance(args := checkpoint.get("args"), argparse.Namespace):
        arguments = dict(vars(args))
        if "no_tie_adaptive_proj" in arguments:  # an option of 2018: such models never had a final norm
            arguments["no_decoder_final_norm"] = True
            arguments.setdefault("tie_adaptive_proj", arguments["no_tie_adaptive_proj"] is False)
        if "decoder_final_norm" in arguments:
            arguments["no_decoder_final_norm"] = not arguments["decoder_final_norm"]
        return arguments
    cfg = checkpoint.get("cfg")
    model = cfg.get("model") if isinstance(cfg, Mapping) else None
    if isinstance(model, argparse.Namespace):
        model = vars(model)
    if not isinstance(model, Mapping):
        kinds = ", ".join(f"{name}: {type(checkpoint[name]).__name__}" for name in ("args", "cfg") if name in checkpoint)
        raise ModelError(
            f"{path}: expected the model's arguments as a Namespace `args` or a plain dict `cfg` with `model`, "
            f"found {kinds or 'neither'}"
        )
    # A cfg names every option, and without an architecture that turns it on, pre-norm is off.
    return {"decoder_normalize_before": False, **model}


# ---- the dictionary


def read_words(path: Path) -> list[str]:
    """The words of fairseq's `dict.txt`, a word and its count a line, in the order of their ids.

    The first word has id 4, after fairseq's four special tokens. Filler such as `madeupword0000` stays, because ids count
    it. A word that comes again needs fairseq's `#fairseq:overwrite` flag: it is then read as the later id, and the earlier
    one keeps its row under a name that no text can hold.
    """
    try:
        # Not splitlines(): a word may hold characters that Python takes for line ends.
        lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise ModelError(f"{path}: expected fairseq's dictionary, found: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: expected UTF-8 text, found byte {error.start} that is not; download it again") from error
    words: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        match = _DICTIONARY_LINE.fullmatch(line.rstrip("\r"))
        if match is None:
            raise ModelError(f"{path}, line {number}: expected `word count`, found {line[:60]!r}")
        word = match["word"]
        if word in SPECIALS:
            raise ModelError(f"{path}, line {number}: expected a word, found {word}, which has an id of its own before them")
        if word in seen:
            if not match["flag"]:
                raise ModelError(
                    f"{path}, line {number}: expected a new word, found {word!r} again without the #fairseq:overwrite flag"
                )
            words[seen[word]] = f"{word} (overwritten, line {seen[word] + 1})"
        seen[word] = len(words)
        words.append(word)
    return words


# ---- the arguments


def _config(arguments: Mapping[str, Any], *, vocabulary: int, path: Path) -> AdaptiveConfig:
    """The network that the arguments describe, or an error that names the first one it cannot have."""
    for name, supported, absent in _FIXED:
        found = arguments.get(name, absent)
        if found != supported and not (supported is None and not found):
            raise ModelError(f"{path}: expected {name} to be {supported!r}, the only form supported, found {_shown(found)}")
    d = _whole(arguments, "decoder_embed_dim", path)
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if arguments.get(name, d) != d:
            raise ModelError(f"{path}: expected {name} to equal decoder_embed_dim, {d}, found {_shown(arguments[name])}")
    factor = _whole(arguments, "adaptive_input_factor", path)
    cutoffs = _cutoffs(arguments, "adaptive_input_cutoff", path)
    if (other := _whole(arguments, "adaptive_softmax_factor", path)) != factor:
        raise ModelError(f"{path}: expected adaptive_softmax_factor to equal adaptive_input_factor, {factor}, found {other}")
    if (others := _cutoffs(arguments, "adaptive_softmax_cutoff", path)) != cutoffs:
        raise ModelError(
            f"{path}: expected adaptive_softmax_cutoff to equal adaptive_input_cutoff, {cutoffs}, found {others}"
        )
    # What the positions were built for; where it is not said they were built for the training windows.
    context = "max_target_positions" if arguments.get("max_target_positions") is not None else "tokens_per_sample"
    sizes: dict[str, Any] = {
        "hidden_size": d,
        "num_hidden_layers": _whole(arguments, "decoder_layers", path),
        "num_attention_heads": _whole(arguments, "decoder_attention_heads", path),
        "intermediate_size": _whole(arguments, "decoder_ffn_embed_dim", path),
        "max_position_embeddings": _whole(arguments, context, path),
    }
    try:
        return AdaptiveConfig(vocab_size=vocabulary, cutoffs=cutoffs, factor=factor, **sizes)
    except ValueError as error:  # sizes that do not go together: heads and width, cut-offs and vocabulary
        raise ModelError(f"{path}: {_first_line(error)}") from error


def _whole(arguments: Mapping[str, Any], name: str, path: Path) -> int:
    """The value of an argument that has to be a whole number above 0; fairseq stores factors as floats."""
    found = arguments.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 1 <= found < 2**31 or found % 1:
        known = (
            _shown(found) if name in arguments else f"none (arch {_shown(arguments.get('arch', arguments.get('_name')))})"
        )
        raise ModelError(f"{path}: expected {name} to be a whole number above 0, found {known}")
    return int(found)


def _cutoffs(arguments: Mapping[str, Any], name: str, path: Path) -> list[int]:
    """The cutoffs of an argument, which is text such as "20000,60000" or a list of numbers."""
    found = arguments.get(name)
    parts = found.strip("[]() ").split(",") if isinstance(found, str) else found
    try:
        cutoffs = [int(part) for part in parts]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        cutoffs = []
    if not cutoffs or cutoffs != sorted({cutoff for cutoff in cutoffs if cutoff > 0}):
        raise ModelError(f"{path}: expected {name} to be rising numbers such as '20000,60000', found {_shown(found)}")
    return cutoffs


# ---- the weights


def _state(stored: Mapping[str, Tensor], config: AdaptiveConfig, path: Path) -> dict[str, Tensor]:
    """fairseq's tensors under the network's names; every tensor of the file is used, known or refused."""
    left = {key: tensor for key, tensor in stored.items() if key not in _IGNORED}
    if "decoder.adaptive_softmax.version" not in stored:
        # Before this marker fairseq read a band's probability one row too early, and still does for such files.
        raise ModelError(
            f"{path}: expected the key decoder.adaptive_softmax.version, found none; "
            "an adaptive softmax from before it was numbered is not supported"
        )
    _unpack_attention(left, config, path)
    shapes = _shapes(config)
    state = {name: _take(left, key, shape, path) for name, (key, shape) in shapes.items()}
    for copy, name in _ties(config).items():
        tensor = _take(left, copy, shapes[name][1], path)
        if not tensor.is_set_to(state[name]) and not torch.equal(tensor, state[name]):
            raise ModelError(f"{path}: expected {copy} to equal {shapes[name][0]}, which it is tied to, found other numbers")
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ModelError(f"{path}: expected only the tensors of a transformer_lm, found {next(iter(left))}{more}")
    dtypes = {tensor.dtype for tensor in state.values()}
    return state if len(dtypes) == 1 else {name: tensor.float() for name, tensor in state.items()}


def _check_dictionary(stored: Mapping[str, Tensor], words: int, path: Path) -> None:
    """Raise an error where the word tables have more or fewer rows than the dictionary has words, the likeliest mistake."""
    rows = sum(tensor.shape[0] for key, tensor in stored.items() if re.fullmatch(_table(r"\d+", 0), key) and tensor.ndim)
    if rows and rows != len(SPECIALS) + words:
        raise ModelError(
            f"{path}: expected {rows - len(SPECIALS)} words in {path.with_name('dict.txt')} ({rows} rows of its tables "
            f"less {len(SPECIALS)} special tokens), found {words}; use the dict.txt that came with this model.pt"
        )


def _check_layers(stored: Mapping[str, Tensor], layers: int, path: Path) -> None:
    """Raise an error where the arguments tell of more layers than the file has, before names are made for all of them."""
    found = {match[1] for key in stored if (match := re.match(r"decoder\.layers\.(\d+)\.", key))}
    if layers > len(found):
        raise ModelError(f"{path}: expected the {layers:,} layers of its decoder_layers, found tensors of {len(found):,}")


def _table(band: int | str, part: int) -> str:
    """fairseq's key of a band's words (part 0) or of their projection into the stream (part 1)."""
    return f"decoder.embed_tokens.embeddings.{band}.{part}.weight"


def _shapes(config: AdaptiveConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The key in the file and the shape of every tensor of the network, by the network's name for it."""
    d, cells = config.hidden_size, config.intermediate_size
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, band in enumerate(config.bands):
        found[f"model.embed.bands.{number}.words.weight"] = (_table(number, 0), (band.size, band.width))
        found[f"model.embed.bands.{number}.project.weight"] = (_table(number, 1), (d, band.width))
    square = {f"self_attn.{part}_proj": (d, d) for part in ("q", "k", "v", "out")}
    for layer in range(config.num_hidden_layers):
        for part, shape in {**square, "fc1": (cells, d), "fc2": (d, cells)}.items():
            found[f"model.layers.{layer}.{part}.weight"] = (f"decoder.layers.{layer}.{part}.weight", shape)
            found[f"model.layers.{layer}.{part}.bias"] = (f"decoder.layers.{layer}.{part}.bias", shape[:1])
        for part in ("self_attn_layer_norm", "final_layer_norm"):
            for kind in ("weight", "bias"):
                found[f"model.layers.{layer}.{part}.{kind}"] = (f"decoder.layers.{layer}.{part}.{kind}", (d,))
    found["softmax.bands.weight"] = ("decoder.adaptive_softmax.head.class_proj.weight", (len(config.cutoffs), d))
    return found


def _ties(config: AdaptiveConfig) -> dict[str, str]:
    """The keys of the softmax's copies and the names of the tensors that they have to equal, stored in the same shape."""
    ties = {"decoder.adaptive_softmax.head.word_proj.weight": "model.embed.bands.0.words.weight"}
    for tail in range(len(config.cutoffs)):
        ties[f"decoder.adaptive_softmax.tail.{tail}.0.weight"] = f"model.embed.bands.{tail + 1}.project.weight"
        ties[f"decoder.adaptive_softmax.tail.{tail}.2.weight"] = f"model.embed.bands.{tail + 1}.words.weight"
    return ties


def _unpack_attention(left: dict[str, Tensor], config: AdaptiveConfig, path: Path) -> None:
    """Split, within `left`, the tensors of files from before 2020, which hold queries, keys and values in one."""
    d = config.hidden_size
    for layer in range(config.num_hidden_layers):
        for kind, shape in (("weight", (3 * d, d)), ("bias", (3 * d,))):
            prefix = f"decoder.layers.{layer}.self_attn."
            if f"{prefix}in_proj_{kind}" not in left:
                continue
            packed = _take(left, f"{prefix}in_proj_{kind}", shape, path)
            for part, tensor in zip("qkv", packed.chunk(3), strict=True):
                if left.setdefault(f"{prefix}{part}_proj.{kind}", tensor) is not tensor:
                    raise ModelError(
                        f"{path}: expected {prefix}in_proj_{kind} or {prefix}{part}_proj.{kind}, found both in one file"
                    )


def _take(left: dict[str, Tensor], key: str, shape: tuple[int, ...], path: Path) -> Tensor:
    """Remove the tensor at `key` from `left` and return it; an error if it is missing or has another shape."""
    if key not in left:
        raise ModelError(f"{path}: expected the key {key} of shape {list(shape)}, found none")
    tensor = left.pop(key)
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise ModelError(
            f"{path}: expected {key} to be floats of shape {list(shape)}, found {tensor.dtype} of {list(tensor.shape)}"
        )
    return tensor


def _shown(value: object) -> str:
    """A value of the file, shortened: it may be a list of lists of shared lists, or a number of 600 digits."""
    short = reprlib.Repr()
    short.maxlevel = 2
    return visible(short.repr(value))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" :") if lines else ""
