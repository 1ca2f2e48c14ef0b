"""Shared work: in order, whoever did it; errors and ends of workers are told."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ffmem.corpus.workers import shared
from ffmem.errors import CorpusError
from tests.tiny import some_text

NUMBERS = [str(number) for number in range(40)]


def doubled(factor: int, number: str) -> int:
    return factor * int(number)


def gone(_: int, number: str) -> int:
    if number == "7":
        os._exit(9)
    return int(number)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 40])
@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items(count, workers):
    assert list(shared(doubled, 2, NUMBERS[:count], workers=workers)) == [2 * number for number in range(count)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_the_work_reaches_the_caller(workers):
    with pytest.raises(ValueError, match="invalid literal"):
        list(shared(doubled, 2, [*NUMBERS[:20], "six"], workers=workers))


def test_a_worker_that_was_ended_is_an_error_and_not_a_wait():
    with pytest.raises(CorpusError, match="was ended from outside"):
        list(shared(gone, 2, NUMBERS, workers=2))


def test_items_are_read_only_a_little_ahead():
    read = 0

    def items():
        nonlocal read
        for number in NUMBERS:
            read += 1
            yield number

    results = shared(doubled, 2, items(), workers=2)
    next(results)
    assert read < 25
    results.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("good", [2, 20])
def test_an_error_of_the_items_comes_behind_the_results_before_it(workers, good):
    def items():
        yield from NUMBERS[:good]
        raise OSError("the disk is gone")

    results = shared(doubled, 1, items(), workers=workers)
    assert [next(results) for _ in range(good)] == list(range(good))
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)


def tell_whether_ctrl_c_is_held_back(pipe) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    pipe.send(bool(int(status["SigBlk"], 16) >> (signal.SIGINT - 1) & 1))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux which signals a process holds back")
@pytest.mark.slow
def test_ctrl_c_is_held_back_in_every_process_from_its_start_the_first_one_too(tmp_path):
    script = tmp_path / "script.py"  # in a process that has started none before
    script.write_text(
        "from multiprocessing import get_context\n"
        "from ffmem.corpus.workers import hidden_main\n"
        "from tests.corpus.test_workers import tell_whether_ctrl_c_is_held_back\n"
        "context = get_context('spawn')\n"
        "for _ in range(2):\n"
        "    mine, theirs = context.Pipe()\n"
        "    process = context.Process(target=tell_whether_ctrl_c_is_held_back, args=(theirs,))\n"
        "    with hidden_main():\n"
        "        process.start()\n"
        "    print(mine.recv())\n"
        "    process.join()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "True\nTrue\n"


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from ffmem.corpus.workers import shared\n"
        "print('here')\n"
        "print(list(shared(str.join, '-', [['a', 'b']] * 20, workers=2)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == f"here\n{['a-b'] * 20}\n"


@pytest.mark.parametrize("unit", ["sentence", "line", "window:5"])
def test_the_plan_of_a_corpus_is_the_same_for_any_number_of_workers(unit, tokenizer, tmp_path, corpus_of, monkeypatch):
    monkeypatch.setattr("ffmem.corpus.plan.CHUNK", 300)
    path = Path(tmp_path / "text.txt")
    path.write_text(some_text(80) + "the river and the city " * 40 + "\n", "utf-8")

    def plan(workers):
        corpus = corpus_of(path, unit=unit, shard_tokens=200, limit=24)
        corpus.workers = workers
        return [
            (shard.after, [(s.text, s.ids.tolist(), None if s.ends is None else s.ends.tolist()) for s in shard.sentences])
            for shard in corpus.shards()
        ]

    assert plan(2) == plan(1)
    assert sum(len(sentences) for _, sentences in plan(1)) > 40
