"""Stop every command at random moments, by SIGINT, SIGTERM and SIGKILL, and give it again: nothing may be left over or lost.

    python -m benchmarks.kills --count 100 --seed 1
    python -m benchmarks.kills --count 10 --scratch 10 --only values

A command runs in a fork of this process, which has imported everything, so that signals come while it works; with
`--scratch` as many more runs are of a Python of its own, so that signals come while it imports. Looked at are the exit code,
what is printed, what is left over, and whether the same command afterwards makes the bytes that an undisturbed one makes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch

from benchmarks.workshop import FAIRSEQ, counted, furnish
from ffmem.__main__ import main
from ffmem.run.folder import VALUES, VALUES_ANEW
from ffmem.training import recipe
from tests.tiny import some_text
from tests.training.small import RECIPE

IMPORTED = ("experiments.run", "index.build", "index.export", "index.values", "model.convert", "reports.page")
"""What commands import when they are given: a fork has it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}


@dataclass(frozen=True)
class Verb:
    """A command that works on a folder, which holds what it begins with."""

    arguments: Callable[[Path], list[str]]
    again: bool = True
    """Whether it can be given again when it has ended well."""


def verbs(shop: Path) -> dict[str, Verb]:
    model, text, other = str(shop / "model"), str(shop / "long.txt"), str(shop / "other.txt")
    index = ["--top", "5", "--shard-tokens", "200", "--batch-tokens", "64", "-q"]
    names = ["removal", "activity", "refinement", "normaliser"]
    few = ["--examples", "10", "--cells", "1", "--eval", other, "-q"]
    train = [
        "--size",
        "small",
        "--steps",
        "80",
        "--min-count",
        "1",
        "--device",
        "cpu",
        "--checkpoint-minutes",
        "0.002",
        "-q",
    ]
    return {
        "index": Verb(lambda at: ["index", model, text, "-o", str(at / "new"), *index]),
        "values": Verb(lambda at: ["values", str(at / "run"), "--top", "5", "-q"]),
        "export": Verb(
            lambda at: ["export", str(at / "run"), "triggers", "--format", "parquet", "-o", str(at / "triggers.parquet")]
        ),
        "experiments": Verb(lambda at: ["experiments", str(at / "run"), *names, *few]),
        "report": Verb(lambda at: ["report", str(at / "run"), "-q"]),
        "train": Verb(lambda at: ["train", text, "-o", str(at / "trained"), *train]),
        "convert": Verb(lambda at: ["convert", str(shop / "fairseq"), str(at / "converted"), "-q"], again=False),
    }


def begin(arguments: list[str], printed: Path) -> int:
    """Start a command in a fork of this process; returns its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.argv = ["ffmem", *arguments]
        main()
    except SystemExit as exit:
        code = int(exit.code or 0)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does at its end
        os._exit(code)


def begin_from_scratch(arguments: list[str], printed: Path) -> int:
    with printed.open("wb") as file:
        # Its small models are set in a fork alone.
        return subprocess.Popen([sys.executable, "-m", "ffmem", *arguments], stdout=subprocess.DEVNULL, stderr=file).pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until_it_listens(pid: int) -> None:
    """Python itself takes a moment until the first line of the program."""
    bit, end = 1 << (signal.SIGTERM - 1), time.monotonic() + 30
    while time.monotonic() < end:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        except (OSError, IndexError):
            return
        if caught & bit:
            return
        time.sleep(0.0005)


def content(folder: Path) -> dict[str, bytes]:
    """Every file's bytes by its name, without times. Values that were made twice have the other one of their two names."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    found = {name: data for name, data in found.items() if not name.endswith("log.jsonl")}
    for name in found:
        if name.endswith("training.json"):
            found[name] = json.dumps({**json.loads(found[name]), "seconds": 0}).encode()
        if name.endswith("manifest.json"):
            manifest = {**json.loads(found[name]), "hash": ""}
            found[name] = json.dumps(manifest, sort_keys=True).replace(VALUES_ANEW, VALUES).encode()
    return {name.replace(VALUES_ANEW, VALUES): data for name, data in found.items()}


def left_over(folder: Path) -> list[str]:
    """What was to be temporary."""
    return [str(path) for path in folder.rglob("*") if path.suffix == ".tmp" or path.name.startswith(".")]


class Trial:
    """One command, stopped and given again."""

    def __init__(self, verb: Verb, start: Path, whole: dict[str, bytes], folder: Path) -> None:
        self.verb, self.start, self.whole, self.folder = verb, start, whole, folder
        self.printed = folder.with_name("printed.txt")

    def run(self, number: signal.Signals, moment: float, begun: Callable[[list[str], Path], int]) -> tuple[str, list[str]]:
        """How it ended, and what is wrong with that."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.start, self.folder)
        arguments = self.verb.arguments(self.folder)
        pid = begun(arguments, self.printed)
        wait_until_it_listens(pid)
        time.sleep(moment)
        os.kill(pid, number)
        code = wait(pid)
        faults = self.looked_at(code, number)
        if not (code == 0 and not self.verb.again):
            if (then := wait(begin(arguments, self.printed))) != 0:
                faults.append(f"again: exit code {then}: {self.printed.read_text()[-600:]}")
            faults += [f"left over at last: {name}" for name in left_over(self.folder)]
            found = content(self.folder)
            names = sorted(name for name in found.keys() | self.whole.keys() if found.get(name) != self.whole.get(name))
            faults += [f"other bytes: {', '.join(names)}"] if names else []
        return ("ended" if code == 0 else "stopped"), faults

    def looked_at(self, code: int, number: signal.Signals) -> list[str]:
        said = self.printed.read_text()
        faults = []
        if code not in (0, CODES[number]):
            faults.append(f"exit code {code}")
        if "Traceback" in said or len(said.splitlines()) > 1:
            faults.append(f"printed: {said[-600:]}")
        if number != signal.SIGKILL:
            faults += [f"left over: {name}" for name in left_over(self.folder)]
            if code and not said.startswith("ffmem: stopped"):
                faults.append(f"not told: {said!r}")
        return faults


def furnished(shop: Path) -> None:
    """In a fork: no thread of what is done here is to be in the forks that follow."""
    if not os.fork():
        code = 1
        try:
            places = furnish(shop)
            (shop / "long.txt").write_text(some_text(200), "utf-8")
            shutil.copytree(FAIRSEQ, shop / "fairseq")
            (shop / "start").mkdir()
            places["run"].rename(shop / "start" / "run")
            code = 0
        finally:
            os._exit(code)
    if code := os.waitstatus_to_exitcode(os.wait()[1]):
        sys.exit(code)


def kills() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="runs of a command in forks")
    parser.add_argument("--scratch", type=int, default=0, help="runs of a command in a Python of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one command")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in IMPORTED:
        import_module(f"ffmem.{module}")
    recipe.SIZES["small"] = RECIPE
    rows: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory(prefix="ffmem-kills-") as name:
        shop, folder = Path(name), Path(name) / "here"
        furnished(shop)
        for name, verb in verbs(shop).items():
            if options.only not in (None, name):
                continue
            start = shop / "start"
            shutil.copytree(start, folder)
            began = time.monotonic()
            if code := wait(begin(verb.arguments(folder), shop / "printed.txt")):
                print(f"{name}: {code}: {(shop / 'printed.txt').read_text()}")
                return 1
            took = time.monotonic() - began
            trial = Trial(verb, start, content(folder), folder)
            chooser, row = Random(f"{options.seed} {name}"), rows.setdefault(name, Counter())
            scratch = 0 if name == "train" else options.scratch
            for number, begun in enumerate([begin] * options.count + [begin_from_scratch] * scratch):
                moment = chooser.uniform(0, took + (3 if begun is begin_from_scratch else 0))
                sent = chooser.choice(SIGNALS)
                ended, faults = trial.run(sent, moment, begun)
                row.update(["runs", ended, *(fault.partition(":")[0] for fault in faults)])
                for fault in faults:
                    print(f"{name} {number} {begun.__name__} {sent.name} after {moment:.3f} s: {fault}", flush=True)
            shutil.rmtree(folder)
    print(counted(rows, ["runs", "stopped", "ended"]))
    return int(any(set(row) - {"runs", "stopped", "ended"} for row in rows.values()))


if __name__ == "__main__":
    sys.exit(kills())
