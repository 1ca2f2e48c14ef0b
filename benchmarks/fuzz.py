"""Throw nasty input at every command, in this process: each must end well, or with one line.

    python -m benchmarks.fuzz --count 10000 --seed 1 --seconds 600
    python -m benchmarks.fuzz --seed 1 --only 4711      # one input again, with what it printed

Inputs are made from the options that each command has, so that a new one is tried as soon as it is there. Looked for are
errors that nobody foresaw, errors of more than one line or longer ones than are printed, whatever hangs, and characters that
a terminal would obey.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import lzma
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import typer.main

from benchmarks.workshop import counted, furnish
from ffmem.cli.app import app, main
from ffmem.cli.ending import LONGEST
from ffmem.text import visible

GOOD = 0.9
"""How often a value is one that the command can use."""
SLOW = {"train", "demo"}
"""Commands that are tried elsewhere: a training takes its minutes."""
NEVER = {"--help", "--workers", "--devices", "--address"}
"""Options that start processes; bad values of them are tried in the tests."""
TEXTS = [
    *("", " ", "\t", "\n", "a\nb", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\u202eright", "\u2066", "\u2028", "\u200b"),
    *(
        "\x7f",
        "\x9b2J",
        "\udc80",
        "a\udcffb",
        "東京",
        "e\u0301" * 50,
        "🏳️‍🌈",
        "\ufeff",
        "\U000e0041",
        "[red]",
        "[/]",
        "%s",
        "{x}",
    ),
    *("-", "--", "-1", "--x", "~", "~nobody", "..", "/", "/dev/null", "@", "@nothing", "=", ",", ":", "a" * 5000, "*", "\\"),
    *("memory://x", "nosuch://x", "s3:/x", "file:///nowhere", "http://", "hf:", "hf:x,split=", "auto", "none", "null"),
]
NUMBERS = [
    *(
        "0",
        "-0",
        "1",
        "-1",
        "2",
        "7",
        "1.5",
        "1e4",
        "1e-4",
        "1e309",
        "-1e309",
        "1_000",
        "nan",
        "inf",
        "-inf",
        "0x10",
        "٣",
        "１",
    ),
    *("9" * 20, "9" * 5000, "-" + "9" * 30, str(2**31), str(2**63), str(2**64), "1" + "0" * 12, "", " ", "+1", "1,000"),
]
CELLS = [
    *("L1D0", "L3D127", "l2d7", "L0D0", "L4D0", "L1D128", "L-1D0", "L1D" + "9" * 5000, "L" + "9" * 5000 + "D0", "L1E2D3"),
    *("blocks.2.mlp.hook_post[17]", "transformer.h.2.mlp.c_proj:17", "blocks.9.mlp.hook_post[17]", "L1D٣", "L1D0,L1D1", "@"),
]
LAYERS = ["1", "1-3", "3-1", "0", "-1", "1-99999999999", "9" * 5000, "1,1,1", ",", "1-", "-", "a", "2", "1,3", "1-2-3"]
EDITS = [
    *("L2D3=0", "L2D3*2", "L2D3+1", "L2D3*-1", "L1D1,L2D2=0", "L2D3~q0.5*2", "L2D3~q2", "L2D3=nan", "L2D3=inf", "L2D3=1e39"),
    *(
        "L2D3*1e309",
        "L9D1=0",
        "L2D3",
        "=0",
        "L2D3==0",
        "L2D3=",
        "L2D3=" + "9" * 5000,
        "@nothing=0",
        "L2D3*0x1",
        "L2D3=0;L2D4=0",
    ),
]
PLACES = ["all", "generated", "0", "-1", "2:5", "3:", ":", ":-1", "9", "9" * 5000, "1:2:3", "-9:9", "5:2", "x", "1-2"]
RECORDS: list[Any] = [
    *({"text": 1}, {"text": None}, {"text": ["a"]}, {"text": {"a": 1}}, {"other": "a"}, [], "text", 1, None, {}),
    *(
        {"text": "\ud800 the king"},
        {"text": "\x1b[31m the \u202e king .\u0000"},
        {"text": ""},
        {"text": "the king left . " * 9},
    ),
]


@dataclass
class Case:
    """One input and what it came to."""

    number: int
    arguments: list[str]
    code: Any = None
    out: str = ""
    err: str = ""
    thrown: str = ""
    """The exception that came out of `main`, if one did."""
    seconds: float = 0.0

    def faults(self) -> list[str]:
        """What is wrong with how it ended, by name."""
        errors = [line for line in self.err.splitlines() if line.startswith("ffmem: error: ")]
        stray = [line for line in self.err.split("\n")[:-1] if not re.match("(ffmem|[a-z][a-z ]+): ", line)]
        found = {
            "hang": self.thrown == "Hang",
            "traceback": self.thrown not in ("", "Hang") or "Traceback (most" in self.err,
            "unexpected": any(line.startswith("ffmem: error: unexpected ") for line in errors),
            "exit code": self.code not in (0, 1, 2),
            "no line": self.code in (1, 2) and len(errors) != 1,
            "stray line": bool(stray),
            "too long": any(len(line) > LONGEST for line in errors),
            "hidden characters": any(visible(line) != line for line in (self.out + self.err).split("\n")),
        }
        if self.thrown:
            found["exit code"] = found["no line"] = False
        if self.arguments[0] == "export":  # for other programs
            found["hidden characters"] = any(visible(line) != line for line in self.err.split("\n"))
        return [name for name, is_so in found.items() if is_so]


class Hang(BaseException):
    """It took too long."""


class Inputs:
    """Command lines, each made from a seed and its number alone."""

    def __init__(self, folder: Path, places: dict[str, Path], seed: int) -> None:
        self.folder, self.places, self.seed = folder, places, seed
        self.odd = odd_files(folder / "odd")
        self.commands = {
            name: command.params
            for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
            if name not in SLOW
        }

    def arguments(self, number: int) -> list[str]:
        chooser = Random(f"{self.seed} {number}")
        verb = chooser.choice(list(self.commands))
        given: list[str] = []
        for parameter in chooser.sample(self.commands[verb], len(self.commands[verb])):
            name = parameter.opts[0] if parameter.param_type_name == "argument" else max(parameter.opts, key=len)
            if name in NEVER:
                continue
            if parameter.param_type_name == "argument":
                continue
            if not parameter.required and chooser.random() < 0.75:
                continue
            if getattr(parameter, "is_flag", False):
                given.append(chooser.choice([*parameter.opts, *parameter.secondary_opts]))
            else:
                value = self.value(chooser, verb, parameter.name, number)
                given += [f"{name}={value}"] if chooser.random() < 0.7 else [name, value]
        for parameter in self.commands[verb]:
            if parameter.param_type_name == "argument" and (parameter.required or chooser.random() < 0.5):
                given += [
                    self.value(chooser, verb, parameter.name, number)
                    for _ in range(chooser.choice([1, 1, 2]) if parameter.nargs == -1 else 1)
                ]
        if chooser.random() < 0.02:
            given.insert(chooser.randrange(len(given) + 1), chooser.choice(TEXTS))
        if chooser.random() < 0.02 and given:
            given.pop(chooser.randrange(len(given)))
        return [verb, *given]

    def value(self, chooser: Random, verb: str, name: str, number: int) -> str:
        at = self.places
        good: dict[str, list[Any]] = {
            "run": [at["run"]],
            "model": ["gpt2", at["model"]] if verb == "plan" else [at["model"]],
            "corpus": [*[at["text"]] * 50, *self.odd],
            "eval": [*[at["other"]] * 50, *self.odd],
            "out": [self.folder / "out" / str(number)],
            "prompt": ["the old king", "Paris", "the \x1b[31m king \u202e", *TEXTS],
            "source": [*[at["fairseq"]] * 50, *self.odd],
            "cell": CELLS[:3],
            "cells": CELLS[:3] if verb == "causal" else ["2", "3"],
            "edit": EDITS[:5],
            "at": PLACES[:6],
            "layers": LAYERS[:3],
            "table": ["triggers", "cells", "sentences"],
            "format": ["jsonl", "csv", "parquet"],
            "names": ["activity", "removal", "agreement", "composition", "refinement", "normaliser"],
            "tokens": ["1e6", "3"],
            "limit_tokens": ["100", "1e2"],
            "examples": ["5", "20"],
            "unit": ["sentence", "line", "window:9"],
            "target": [" king", "war", "\x1b[31m"],
            "quantile": ["0.5", "0.9"],
            "position": ["-1", "0"],
            "device": ["auto", "cpu"],
            "dtype": ["auto", "float32", "bfloat16"],
            "bos": ["auto", "on", "off"],
            "negative": ["auto", "on", "off"],
            "stats": ["auto", "full", "sample", "off"],
            "distinct": ["text", "sentence", "document", "none"],
            "wikitext": ["auto", "keep", "plain"],
            "of": ["output", "layer"],
            "column": ["text", "other"],
            "language": ["en", "de", "ja"],
        }
        numbers = {"top", "seed", "generate", "control", "prefixes", "gpus", "gpu_memory", "batch_tokens", "shard_tokens"}
        if chooser.random() < GOOD and (name in good or name in numbers):
            return str(chooser.choice(good.get(name, ["1", "3", "9"])))
        own = {"cell": CELLS, "cells": CELLS, "layers": LAYERS, "edit": EDITS, "at": PLACES}.get(name, [])
        # Whoever writes to a pipe waits for somebody who reads it.
        odd = [path for path in self.odd if name != "out" or not path.endswith("fifo.txt")]
        return str(chooser.choice([*own, *chooser.choice([TEXTS, NUMBERS, odd])]))


def odd_files(folder: Path) -> list[str]:
    """Files that are no text, or hardly."""
    folder.mkdir()
    text = "The king left Paris . He built a red river .\n" * 20
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    packed = {"gz": gzip.compress(text.encode()), "xz": lzma.compress(text.encode())}
    files: dict[str, bytes] = {
        "empty.txt": b"",
        "blank.txt": b"\n \n\t\n",
        "binary.txt": bytes(range(256)) * 40,
        "nul.txt": b"the king\0left .\n" * 9,
        "latin.txt": "é à ü .\n".encode("latin-1") * 9,
        "utf16.txt": text.encode("utf-16"),
        "bom.txt": b"\xef\xbb\xbf" + text.encode(),
        "long.txt": b"the king " * 20_000,
        "bidi\u202e.txt": text.encode(),
        "\x1b[31m.txt": text.encode(),
        "odd.jsonl": lines.encode(),
        "half.jsonl": b'{"text": "the king"}\n{"text": "the',
        "deep.jsonl": b"[" * 100_000,
        "number.jsonl": b"9" * 5000 + b"\n",
        "text.parquet": text.encode(),
        "magic.parquet": b"PAR1" + b"\0" * 99 + b"PAR1",
        "empty.gguf": b"",
        "zeros.gguf": b"GGUF" + b"\0" * 99,
        "cells.txt": b"L1D0\nL2D7\n",
        "bad-cells.txt": "L1D0\n\x1b[31m\u202e\n".encode(),
    }
    for kind, data in packed.items():
        files |= {
            f"whole.txt.{kind}": data,
            f"half.txt.{kind}": data[: len(data) // 2],
            f"none.txt.{kind}": b"",
            f"text.txt.{kind}": text.encode(),
        }
    files["half.txt.zst"] = b"\x28\xb5\x2f\xfd\x00"
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / "folder").mkdir()
    (folder / "folder.txt").mkdir()
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text('{"model_type": "gpt2", "n_layer": -1}')
    (folder / "nowhere.txt").symlink_to("nothing")
    os.mkfifo(folder / "fifo.txt")
    return sorted(str(path) for path in folder.iterdir())


def tried(case: Case, limit: float) -> Case:
    """Run one input in this process, as long as it may take."""

    def hung(*_: Any) -> None:
        raise Hang

    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n", write_through=True) for _ in range(2)]
    before, began = signal.signal(signal.SIGALRM, hung), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            main(case.arguments)
    except SystemExit as exit:
        case.code = exit.code
    except BaseException as error:
        case.thrown = type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    case.seconds = time.monotonic() - began
    case.out, case.err = (stream.buffer.getvalue().decode("utf-8") for stream in streams)  # type: ignore[attr-defined]
    if "unexpected Hang" in case.err:
        case.thrown = "Hang"
    return case


def fuzz() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    parser.add_argument("--limit", type=float, default=60, help="seconds that an input may take")
    parser.add_argument("--only", type=int, help="the number of the one input to try")
    options = parser.parse_args()
    rows: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="ffmem-fuzz-") as name:
        folder = Path(name)
        places = furnish(folder)
        whole = folder / "whole"
        shutil.copytree(places["run"], whole)
        inputs = Inputs(folder, places, options.seed)
        (folder / "here").mkdir()
        os.chdir(folder / "here")
        began = time.monotonic()
        for number in range(options.count) if options.only is None else [options.only]:
            if time.monotonic() - began > options.seconds:
                break
            case = tried(Case(number, inputs.arguments(number)), options.limit)
            row, faults = rows.setdefault(case.arguments[0], Counter()), case.faults()
            row.update(["inputs", *(faults or ["well" if case.code == 0 else "one line"])])
            if faults or options.only is not None:
                told = {"faults": faults, "code": case.code, "seconds": round(case.seconds, 1), "arguments": case.arguments}
                print(json.dumps({"number": number} | told | {"out": case.out[:300], "err": case.err[-600:]}), flush=True)
            if case.arguments[0] in ("values", "experiments", "causal", "report") or faults:
                shutil.rmtree(places["run"], ignore_errors=True)
                shutil.copytree(whole, places["run"])
            shutil.rmtree(folder / "out", ignore_errors=True)
        os.chdir("/")
    print(counted(rows, ["inputs", "well", "one line"]), file=sys.stderr)
    return int(any(set(row) - {"inputs", "well", "one line"} for row in rows.values()))


if __name__ == "__main__":
    sys.exit(fuzz())
