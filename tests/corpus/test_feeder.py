"""A process that feeds: the same shards as a thread's, errors told, and nobody left behind."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ffmem.corpus import plan
from ffmem.corpus.feeder import Feeder, can_feed
from ffmem.corpus.files import TextFile
from ffmem.corpus.sources import Texts
from ffmem.errors import CorpusError
from tests.tiny import some_text

pytestmark = pytest.mark.skipif(not can_feed(), reason="needs memory that can be handed to another process")


@pytest.fixture(autouse=True)
def small_text_too(monkeypatch):
    monkeypatch.setattr(plan, "SMALL", 0)


@pytest.fixture
def text(file):
    return file("a.txt", some_text(400).encode())


@pytest.fixture(scope="module")
def long_text(tmp_path_factory):
    """Enough for a feeder to have readers of its own."""
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_text(some_text(70_000), "utf-8")
    return path


def children() -> set[int]:
    """Processes of this one, and theirs, but for the server that others are forked from."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    mine, grown = {os.getpid()}, 0
    while len(mine) > grown:
        grown = len(mine)
        mine |= {int(pid) for pid, parent, _ in rows if int(parent) in mine}
    server = {int(pid) for pid, _, args in rows if "resource_tracker" in args or "ps -e" in args}
    return mine - server - {os.getpid()}


def assert_only_the_server_is_left(before: set[int]) -> None:
    """It stays, for the next."""
    deadline = time.monotonic() + 20
    while len(left := children() - before) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all("forkserver" in Path(f"/proc/{pid}/cmdline").read_text() for pid in left)
    assert len(left) <= 1


def flat(shards):
    """Shards as they are compared: all of a shard's arrays, its place and its batches."""
    names = ("text", "sizes", "ids", "lengths", "ends")
    return [
        (
            shard.number,
            shard.since,
            shard.after,
            shard.last,
            *(getattr(shard.sentences, name).tolist() for name in names),
            [rows.tolist() for rows in shard.planned(64, 1)],
        )
        for shard in shards
    ]


@pytest.mark.parametrize("limit_tokens", [None, 500])
def test_a_process_gives_the_shards_that_a_thread_gives(corpus_of, text, limit_tokens):
    corpus = corpus_of(text, shard_tokens=300, limit_tokens=limit_tokens)
    expected = flat(corpus.shards_ahead())
    assert not corpus.is_fed
    corpus.workers = 2
    assert corpus.is_fed
    found = list(corpus.shards_ahead(None, (64, 1)))
    assert all((64, 1) in shard._planned for shard in found)
    assert flat(found) == expected
    assert len(found) > 1


def test_what_is_done_is_left_out_and_a_change_is_noticed(corpus_of, text):
    corpus = corpus_of(text, shard_tokens=300)
    corpus.workers = 2
    shards = list(corpus.shards_ahead())
    done = {shard.number: plan.Span(shard.since, shard.after, shard.last) for shard in shards[:2]}
    assert flat(corpus.shards_ahead(done)) == flat(shards[2:])
    text.write_text(text.read_text().replace("the", "a"))
    with pytest.raises(CorpusError, match="the corpus has changed"):
        list(corpus.shards_ahead(done))


def test_an_error_comes_behind_the_shards_before_it(corpus_of, file):
    path = file("a.txt", some_text(6000).encode() + b"\xff\n")
    corpus = corpus_of(path, shard_tokens=5000)
    corpus.workers = 2
    found = []
    with pytest.raises(CorpusError, match="expected UTF-8, found byte 0xff"):
        found.extend(corpus.shards_ahead())
    assert len(found) >= 1


def test_a_process_that_is_gone_is_told_of_and_its_readers_go_too(corpus_of, long_text):
    corpus = corpus_of(long_text, shard_tokens=50)
    corpus.workers = 2
    before = children()
    shards = corpus.shards_ahead()
    next(shards)
    assert len(children() - before) >= 3, "itself and its readers"
    shards.process.kill()
    with pytest.raises(CorpusError, match="was ended from outside"):
        list(shards)
    assert_only_the_server_is_left(before)


def test_an_abandoned_feeder_ends_with_its_readers(corpus_of, long_text):
    corpus = corpus_of(long_text, shard_tokens=50)
    corpus.workers = 2
    before = children()
    shards = corpus.shards_ahead()
    shard = next(shards)
    kept = shard.sentences.ids.copy()
    assert len(children() - before) >= 3, "itself and its readers"
    shards.close()
    assert_only_the_server_is_left(before)
    assert np.array_equal(shard.sentences.ids, kept), "what was given stays"


SCRIPT = """
import os, signal, sys
from pathlib import Path
from ffmem.corpus import plan
from ffmem.corpus.sentences import Unit
from ffmem.corpus.sources import open_sources
from ffmem.corpus.tokens import Encoder
from tests.tiny import word_tokenizer

plan.SMALL = 0
corpus = plan.Corpus(open_sources(Path(sys.argv[1])), Encoder(word_tokenizer(), 50), Unit("sentence"), "en", 50, workers=2)
shards = corpus.shards_ahead()
print(next(shards).tokens > 0, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["left", "killed"])
@pytest.mark.slow
def test_a_program_that_ends_in_the_middle_leaves_nobody_behind(long_text, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    mark = f"FFMEM_TEST_MARK={tmp_path.name}-{os.getpid()}"
    environment = os.environ | {"PYTHONPATH": str(root)} | dict([mark.split("=")])
    done = subprocess.run(
        [sys.executable, str(script), str(long_text), how], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "True\n", done.stderr

    def alive():
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(folder.name)
            except OSError:
                continue
        return found

    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive()


class Told(TextFile):
    """A source that tells what its process was told."""

    def records(self, skipped):
        yield os.environ.get("FFMEM_TEST_WORD", "nothing")


class Odd(TextFile):
    """A source that fails in its own way."""

    def records(self, skipped):
        raise KeyError(os.getpid())


def test_the_process_has_todays_environment_and_its_own_errors_come_with_their_name(corpus_of, text, monkeypatch):
    corpus = corpus_of(text)
    corpus.workers = 2
    assert len(list(corpus.shards_ahead())) > 0, "there is a server now"
    monkeypatch.setenv("FFMEM_TEST_WORD", "the king")
    corpus.sources = [Odd(text)]
    with pytest.raises(RuntimeError, match=r"in the process that reads the text: KeyError: \d+") as error:
        list(corpus.shards_ahead())
    assert str(os.getpid()) not in str(error.value)
    corpus.sources = [Told(text)]
    (shard,) = corpus.shards_ahead()
    assert [sentence.text for sentence in shard.sentences] == ["the king"]


def test_behind_the_end_there_is_nothing_and_a_close_takes_no_time(corpus_of, text, long_text):
    corpus = corpus_of(text)
    corpus.workers = 2
    shards = corpus.shards_ahead()
    assert list(shards)
    assert list(shards) == []
    slow = corpus_of(long_text, shard_tokens=10**9)
    slow.workers = 2
    begun = slow.shards_ahead()
    began = time.monotonic()
    begun.close()
    assert time.monotonic() - began < 3
    assert list(begun) == []


def test_a_source_that_cannot_be_sent_is_read_here(corpus_of, text):
    corpus = corpus_of(text, shard_tokens=300)
    expected = flat(corpus.shards_ahead())
    corpus.workers = 2
    corpus.sources[0].lock = threading.Lock()
    shards = corpus.shards_ahead()
    assert not isinstance(shards, Feeder)
    assert flat(shards) == expected


def test_texts_in_memory_and_classes_of_a_script_stay_in_this_process(corpus_of, text):
    corpus = corpus_of(text)
    corpus.workers = 2
    assert corpus.is_fed
    corpus.sources = [Texts(["the river"])]
    assert not corpus.is_fed
    corpus.sources = [type("Other", (), {"__module__": "__main__", "size": lambda self: 1})()]
    assert not corpus.is_fed
