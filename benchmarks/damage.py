"""Damage finished and unfinished runs in a thousand ways and see what becomes of it.

    python -m benchmarks.damage --count 1000 --seed 0

A finished run must open to the very same cells and results, or be refused in one line that names a file. An unfinished run
must be continued to the very same bytes, or be refused in one line. Anything else is told, with what to do it again.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ffmem import FfmemError, build_index, load_model, open_index, values
from ffmem.experiments import run_experiments
from ffmem.run.pages import cell_text
from ffmem.run.reader import Index
from ffmem.run.results import load_result, saved_results
from tests.indexing.reference import content
from tests.tiny import some_sentences, tiny_model, word_tokenizer

SETTINGS: dict[str, Any] = {"shard_tokens": 80, "batch_tokens": 256, "top": 5, "quiet": True}


FINE = ("noticed", "the same")


class Stopped(BaseException):
    """Stands for the moment of a kill."""


def flip(data: bytearray, chance: random.Random, _: bytes) -> bytearray:
    at = chance.randrange(len(data))
    data[at] ^= 1 << chance.randrange(8)
    return data


def cut(data: bytearray, chance: random.Random, _: bytes) -> bytearray:
    return data[: chance.randrange(len(data))]


def lengthen(data: bytearray, chance: random.Random, _: bytes) -> bytearray:
    return data + chance.randbytes(chance.choice([1, 8, 4096]))


def blank(data: bytearray, chance: random.Random, _: bytes) -> bytearray:
    at = chance.randrange(len(data))
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    return data


def scramble(data: bytearray, chance: random.Random, _: bytes) -> bytearray:
    at = chance.randrange(len(data))
    data[at : at + 16] = chance.randbytes(len(data[at : at + 16]))
    return data


def digits(data: bytearray, chance: random.Random, _: bytes) -> bytearray:
    """Another digit in the place of one, as a person would change a number in a text file."""
    found = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    if found:
        data[chance.choice(found)] = ord(chance.choice("0123456789"))
    return data


def swap(_: bytearray, __: random.Random, other: bytes) -> bytearray:
    """Another file of the run, or the same one of another run."""
    return bytearray(other)


HARMS: list[Callable[[bytearray, random.Random, bytes], bytearray]] = [
    flip,
    flip,
    cut,
    lengthen,
    blank,
    scramble,
    digits,
    swap,
]


def harm(run: Path, other: Path, chance: random.Random) -> str:
    """Damage one file of a run; says which, and how."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "log.jsonl" and path.stat().st_size)
    path = chance.choice(files)
    name = path.relative_to(run)
    if chance.random() < 0.05 and name.parts[0] != "results":
        path.unlink()
        return f"delete {name}"
    like = [(other / name), *(one for one in files if one.suffix == path.suffix and one != path)]
    theirs = chance.choice([one for one in like if one.is_file()] or [path]).read_bytes()
    how = chance.choice(HARMS)
    path.write_bytes(how(bytearray(path.read_bytes()), chance, theirs))
    return f"{how.__name__} {name}"


def seen(index: Index) -> list[str]:
    """All that a reader may see of a run."""
    found = [cell_text(view) for view in index]
    return [*found, *(str(load_result(index, name).as_dict()) for name in saved_results(index))]


def judge(work: Callable[[], Any], expected: Any) -> str:
    """What became of it: noticed, harmless, or what must not be."""
    try:
        found = work()
    except FfmemError as error:
        return "noticed" if "\n" not in str(error) and len(str(error)) < 1000 else f"LONG LINE {str(error)[:200]!r}"
    except Exception as error:
        return f"TRACEBACK {type(error).__name__}: {str(error)[:200]}"
    return "the same" if found == expected else "SILENTLY WRONG"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="damages, half of them of unfinished runs")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ffmem-damage-") as folder:
        report(trial(Path(folder), asked.count, asked.seed))


def trial(folder: Path, count: int, seed: int) -> dict[str, Counter[str]]:
    """Damage and look, `count` times; how often each end was met, by kind of run."""
    model = load_model(tiny_model("gpt2"), tokenizer=word_tokenizer())
    texts = {name: some_sentences(60, seed=number) for number, name in enumerate(("one", "other"))}

    def build(name: str, run: Path) -> Index:
        return build_index(model, texts[name], out=run, **SETTINGS)

    finished, begun = folder / "finished", folder / "begun"
    for name in texts:
        values(build(name, finished / name), model, top=5, quiet=True)
        index = open_index(finished / name, model=model)
        list(run_experiments(index, ["agreement", "activity"], model=model, examples=10, quiet=True))
        shutil.copytree(begin(build, name, folder / "stopping" / name), begun / name)
    whole = content(build("one", folder / "whole").path)
    expected = seen(open_index(finished / "one"))
    found: dict[str, Counter[str]] = {"finished": Counter(), "unfinished": Counter()}
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        kind = ("finished", "unfinished")[number % 2]
        source = finished if kind == "finished" else begun
        run = Path(shutil.copytree(source / "one", folder / f"damaged-{number}"))
        what = harm(run, source / "other", chance)
        if kind == "finished":
            end = judge(lambda run=run: seen(open_index(run)), expected)
        else:
            end = judge(lambda run=run: content(build("one", run).path), whole)
        found[kind][end if end in FINE else end.partition(":")[0]] += 1
        if end not in FINE:
            print(f"--seed {seed}, number {number}: {what}: {end}", flush=True)
        shutil.rmtree(run)
    return found


def begin(build: Callable[[str, Path], Index], name: str, run: Path) -> Path:
    """A run that was stopped when it had several shards."""
    from ffmem.indexing import checkpoint

    save = checkpoint.save

    def stopping(folder: Any, worker: Any, covered: list[int], *rest: Any) -> None:
        save(folder, worker, covered, *rest)
        if len(covered) == 3:
            raise Stopped

    checkpoint.save = stopping
    try:
        build(name, run)
    except Stopped:
        return run
    finally:
        checkpoint.save = save
    raise AssertionError("the run was not stopped: it has too few shards")


def report(found: dict[str, Counter[str]]) -> None:
    print(time.strftime("%Y-%m-%d"))
    for kind, ends in found.items():
        told = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
        print(f"{kind}: {ends.total():,} damages: {told}")


if __name__ == "__main__":
    main()
