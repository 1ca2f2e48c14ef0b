"""Killed anywhere, a run continues and ends with the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ffmem import build_index
from ffmem.corpus import record
from ffmem.corpus.corpus import Corpus
from ffmem.corpus.readers import CAN_FORK
from ffmem.corpus.wikitext import is_heading
from ffmem.errors import CorpusError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing.checkpoint import mend
from ffmem.run.folder import RunFolder
from tests.indexing.reference import SETTINGS, content


@pytest.fixture(scope="module")
def whole(gpt2, long_text, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    index = build_index(gpt2, long_text, out=run, **SETTINGS)
    assert index.counts.shards > 5
    return content(run)


class Crash(BaseException):
    """Stands for the moment of a kill."""


@pytest.mark.parametrize("fed", [False, pytest.param(True, marks=pytest.mark.skipif(not CAN_FORK, reason="needs forks"))])
@pytest.mark.slow
def test_a_crash_at_any_write_leaves_a_run_that_continues_to_the_same_bytes(
    gpt2, long_text, whole, tmp_path, monkeypatch, fed
):
    if fed:  # as with a GPU: a process reads the text
        monkeypatch.setattr(record, "CHUNK", 400)
        monkeypatch.setattr(Corpus, "workers", property(lambda _: 2, lambda _, count: None))
    replace = os.replace
    writes = 0
    run = tmp_path / "run"
    crashes = 0
    for crash_at in (1, 2, 3, 4, 5, 4, 3, 2, 6, 2, 3):
        writes = 0

        def dying(source, target, crash_at=crash_at):
            nonlocal writes
            writes += 1
            if writes == crash_at:
                raise Crash
            replace(source, target)

        monkeypatch.setattr(os, "replace", dying)
        try:
            build_index(gpt2, long_text, out=run, **SETTINGS)
            break
        except Crash:
            crashes += 1
    monkeypatch.setattr(os, "replace", replace)
    build_index(gpt2, long_text, out=run, **SETTINGS)
    assert crashes > 5
    assert content(run) == whole


@pytest.mark.slow
def test_the_same_call_again_opens_a_complete_run_and_changes_nothing(gpt2, long_text, whole, tmp_path):
    run = tmp_path / "run"
    for _ in range(2):
        build_index(gpt2, long_text, out=run, **SETTINGS)
    assert content(run) == whole


def stop_behind_two_shards(monkeypatch):
    save = checkpoint.save

    def dying(folder, worker, covered, *rest):
        save(folder, worker, covered, *rest)
        if len(covered) == 2:
            raise Crash

    monkeypatch.setattr(checkpoint, "save", dying)


@pytest.fixture
def interrupted(gpt2, long_text, tmp_path, monkeypatch):
    """A run with two finished shards."""
    stop_behind_two_shards(monkeypatch)
    with pytest.raises(Crash):
        build_index(gpt2, long_text, out=tmp_path / "run", **SETTINGS)
    monkeypatch.undo()
    return tmp_path / "run"


def test_an_unfinished_run_cannot_be_opened_and_says_what_to_do(interrupted):
    from ffmem import open_index

    with pytest.raises(RunError, match="not finished; give the same ffmem index command again"):
        open_index(interrupted)


@pytest.mark.slow
def shards_read(monkeypatch) -> list[tuple[int, int]]:
    """The shards that are read from now on, in order, each by its part and number."""
    from ffmem.indexing import worker

    seen, read = [], worker.read_shard

    def reading(model, shard, *arguments, **more):
        seen.append((shard.part, shard.number))
        return read(model, shard, *arguments, **more)

    monkeypatch.setattr(worker, "read_shard", reading)
    return seen


def test_finished_shards_are_not_computed_again(interrupted, gpt2, long_text, whole, monkeypatch):
    seen = shards_read(monkeypatch)
    build_index(gpt2, long_text, out=interrupted, **SETTINGS)
    assert seen[0] == (1, 0)  # a part has two shards
    assert content(interrupted) == whole


@pytest.mark.slow
def test_documents_are_those_of_a_run_that_was_never_stopped(gpt2, long_text, tmp_path, monkeypatch):
    lines = [line for line in long_text.read_text("utf-8").splitlines() if line.strip() and not is_heading(line)]
    text = tmp_path / "articles.txt"  # of several shards each
    text.write_text("\n".join(line if number % 30 else f" = {number} = " for number, line in enumerate(lines)), "utf-8")
    settings = {**SETTINGS, "distinct": "document"}
    whole = build_index(gpt2, text, out=tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        stop_behind_two_shards(patch)
        with pytest.raises(Crash):
            build_index(gpt2, text, out=tmp_path / "run", **settings)
    build_index(gpt2, text, out=tmp_path / "run", **settings)
    assert content(tmp_path / "run") == content(tmp_path / "whole")
    articles = -(-len(lines) // 30)
    assert 1 < articles < min(SETTINGS["top"], whole.counts.shards)
    assert max(len(view.triggers) for view in whole) == articles


def test_a_corpus_that_changed_before_the_stop_is_refused(interrupted, gpt2, long_text, tmp_path):
    text = long_text.read_text()
    changed = text.replace("The", "Two", 1)
    try:
        long_text.write_text(changed)
        with pytest.raises(CorpusError, match="the corpus has changed since the run began"):
            build_index(gpt2, long_text, out=interrupted, **SETTINGS)
    finally:
        long_text.write_text(text)


@pytest.mark.slow
def test_every_flipped_bit_of_the_work_is_noticed_and_costs_its_own_file_alone(interrupted):
    folder = RunFolder(interrupted)
    origin, chance = folder.manifest().provenance, random.Random(5)
    assert mend(folder, origin) == []
    names = folder.names("work")
    assert len(names) == 5
    whole = {name: (interrupted / name).read_bytes() for name in names}
    for name in names:
        last = len(whole[name]) - 1
        for at in [0, 7, 8, 20, last, *(chance.randrange(last) for _ in range(12))]:
            damaged = bytearray(whole[name])
            damaged[at] ^= 1 << chance.randrange(8)
            (interrupted / name).write_bytes(damaged)
            assert name in mend(folder, origin), (name, at)
            for lost in set(names) - set(folder.names("work")):
                (interrupted / lost).write_bytes(whole[lost])
    assert mend(folder, origin) == []


def test_work_that_cannot_be_read_now_is_an_error_and_stays(interrupted, monkeypatch):
    folder = RunFolder(interrupted)
    before = content(interrupted)

    @contextmanager
    def refused(name):
        raise OSError(5, "Input/output error")
        yield

    monkeypatch.setattr(folder, "reading", refused)
    with pytest.raises(OSError, match="Input/output error"):
        mend(folder, folder.manifest().provenance)
    assert content(interrupted) == before


def test_of_two_states_that_cover_one_shard_one_goes(interrupted):
    folder = RunFolder(interrupted)
    shutil.copy(interrupted / "work" / "state-0.safetensors", interrupted / "work" / "state-1.safetensors")
    assert mend(folder, folder.manifest().provenance) == ["work/state-1.safetensors"]


def test_work_of_another_shard_or_another_run_is_not_taken_for_ones_own(interrupted):
    folder = RunFolder(interrupted)
    manifest = folder.manifest()
    first, second = (f"work/shard-00000-00000{number}.safetensors" for number in (0, 1))
    shutil.copy(interrupted / first, interrupted / second)
    assert second in mend(folder, manifest.provenance)
    other = replace(manifest, model=replace(manifest.model, hash="0" * 64))
    assert "work/state-0.safetensors" in mend(folder, other.provenance)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("state-0.safetensors", [(0, 0), (0, 1), (1, 0)]),
        ("shard-00000-000001.arrow", [(0, 1), (1, 0)]),
        ("shard-00000-000000.safetensors", [(0, 0), (1, 0)]),
    ],
)
@pytest.mark.slow
def test_a_damaged_file_of_the_work_costs_what_it_held_and_not_the_run(
    interrupted, gpt2, long_text, whole, monkeypatch, capsys, name, read
):
    path = interrupted / "work" / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    seen = shards_read(monkeypatch)
    build_index(gpt2, long_text, out=interrupted, **(SETTINGS | {"quiet": False}))
    assert seen[: len(read)] == read
    assert content(interrupted) == whole
    told = capsys.readouterr().err
    assert "damaged and left out: " in told
    assert f"work/{name}" in told
    assert "what they held is read again" in told


def test_other_settings_do_not_continue_a_run(interrupted, gpt2, long_text):
    with pytest.raises(RunError, match="was made with shard-tokens 500, now it is 600"):
        build_index(gpt2, long_text, out=interrupted, **(SETTINGS | {"shard_tokens": 600}))


@pytest.mark.slow
def test_a_run_killed_by_the_system_at_random_moments_ends_with_the_same_bytes(gpt2_folder, long_text, tmp_path):
    command = [sys.executable, "-m", "ffmem", "index", str(gpt2_folder), str(long_text)]
    command += ["--shard-tokens", "300", "--batch-tokens", "128", "--top", "5", "-q"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    began = time.monotonic()
    subprocess.run([*command, "-o", str(undisturbed)], check=True, env=environment)
    duration = time.monotonic() - began
    chooser = random.Random(4)
    kills = 0
    for _ in range(3):
        process = subprocess.Popen([*command, "-o", str(killed)], env=environment)
        # Most of the time goes into imports; a kill is worth making once there is something to lose.
        while process.poll() is None and not (killed / "manifest.json").exists() and time.monotonic() - began < 300:
            time.sleep(0.01)
        time.sleep(chooser.uniform(0, duration / 20))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
    subprocess.run([*command, "-o", str(killed)], check=True, env=environment)
    assert kills
    assert content(killed) == content(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=str)
@pytest.mark.slow
def test_being_stopped_says_how_to_continue_and_being_killed_says_nothing(
    gpt2_folder, long_text, tmp_path, number, code, workers
):
    command = [sys.executable, "-m", "ffmem", "index", str(gpt2_folder), str(long_text), "-o", str(tmp_path / "run")]
    command += ["--shard-tokens", "20", "--batch-tokens", "16", "--device", "cpu", "--workers", str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    while process.poll() is None and not (tmp_path / "run" / "work").exists():
        time.sleep(0.01)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)  # until the last worker that could say something is gone
    assert process.returncode == code
    assert ("Give the same command again to continue" in errors) == (number != signal.SIGKILL)
    assert "Traceback" not in errors
