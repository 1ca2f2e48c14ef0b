"""One writer at a time, in a folder by the system's lock, in an object store by a file that its writer renews."""

import errno
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ffmem import build_index
from ffmem.errors import RunError
from ffmem.progress import Reporter
from ffmem.run import lock
from ffmem.run.folder import RunFolder
from ffmem.run.lock import WRITER, WriterFile
from ffmem.run.store import ObjectStore, store_at
from tests.shelf import BUCKET, s3_store

RENEWED_EVERY, GONE_AFTER = 0.1, 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lock, "RENEWED_EVERY", RENEWED_EVERY)
    monkeypatch.setattr(lock, "GONE_AFTER", GONE_AFTER)


@pytest.fixture(scope="module")
def server():
    with s3_store() as running:
        yield running


@pytest.fixture(params=["memory", "s3"])
def url(request):
    name = re.sub(r"\W+", "-", request.node.name)
    if request.param == "memory":
        return f"memory://locks/{name}"
    request.getfixturevalue("server")
    return f"s3://{BUCKET}/locks/{name}"


def written(folder, name, text):
    with folder.writing(name) as path:
        path.write_text(text)


def left_behind(url, told=b'{"host": "far", "process": 7, "id": "other", "renewals": 3}'):
    """What a writer leaves that was killed."""
    store_at(url).put(WRITER, told)


def taken_over(folder, url, monkeypatch):
    """What a writer finds that was out of reach for so long that another took over; its last sign of life is in time."""
    monkeypatch.setattr(folder._writer_file.store, "put", lambda *_: None)
    time.sleep(2 * RENEWED_EVERY)
    left_behind(url)


def test_in_a_folder_the_second_writer_is_refused(tmp_path):
    with RunFolder(tmp_path).locked(), pytest.raises(RunError, match="another process is writing this run"):
        RunFolder(tmp_path).locked().__enter__()
    with RunFolder(tmp_path).locked():
        pass


def test_in_a_store_the_second_writer_sees_that_the_first_lives_and_is_refused(url):
    one, two = RunFolder(url), RunFolder(url)
    with one.locked():
        began = time.monotonic()
        with pytest.raises(RunError, match=r"another process is writing this run \(process \d+ on .+\); wait for it"):
            two.locked().__enter__()
        assert time.monotonic() - began < GONE_AFTER
        written(one, "work/a.txt", "mine")  # the first goes on
    assert one.names("") == ["work/a.txt"]  # nothing is left of the lock
    with two.locked():
        pass


def test_the_lock_is_given_back_when_writing_fails_or_is_stopped(url):
    for error in (RunError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), RunFolder(url).locked():
            raise error
        assert not RunFolder(url).exists(WRITER)


@pytest.mark.parametrize("told", [b'{"host": "far", "process": 7, "id": "other", "renewals": 3}', b"not json", b"[1]"])
def test_a_lock_that_a_killed_writer_left_is_taken_over_after_a_while(url, told, monkeypatch, capsys):
    monkeypatch.setattr("ffmem.progress.PATIENCE", 0.0)
    monkeypatch.setattr("ffmem.progress.PLAIN_EVERY", 0.0)
    left_behind(url, told)
    began = time.monotonic()
    folder = RunFolder(url)
    with folder.locked():
        assert time.monotonic() - began >= GONE_AFTER
        assert json.loads(folder.read_bytes(WRITER))["id"] != "other"
        written(folder, "a.txt", "mine")
    assert folder.names("") == ["a.txt"]
    who = "process 7 on far" if b"far" in told else "another one"
    assert f"{who} was writing this run: looking whether it lives" in capsys.readouterr().err


def test_a_lock_that_is_given_back_meanwhile_is_free_at_once(url):
    left_behind(url)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (time.sleep(2 * RENEWED_EVERY), store_at(url).remove(WRITER)))
        began = time.monotonic()
        with RunFolder(url).locked():
            assert time.monotonic() - began < GONE_AFTER


def test_of_many_that_come_at_once_one_becomes_the_writer(url):
    writers = [WriterFile(store_at(url)) for _ in range(8)]

    def takes(writer):
        return writer.take(Reporter("waiting", quiet=True))

    with ThreadPoolExecutor(len(writers)) as pool:
        assert sum(pool.map(takes, writers)) == 1
    for writer in writers:
        writer.release()
    assert not RunFolder(url).exists(WRITER)


@pytest.mark.parametrize("own", [True, False], ids=["held", "left-behind"])
def test_of_many_that_wait_for_the_same_lock_one_becomes_the_writer(url, own, monkeypatch):
    """However slow the store is at removing what was left behind, and whenever they came."""
    remove = ObjectStore.remove

    def slow(store, name):
        time.sleep(RENEWED_EVERY / 8)
        remove(store, name)

    monkeypatch.setattr(ObjectStore, "remove", slow)
    held = WriterFile(store_at(url))
    if own:
        held.take(Reporter("waiting", quiet=True))
    else:
        left_behind(url)
    writers = [WriterFile(store_at(url)) for _ in range(6)]

    def takes(number):
        time.sleep(number * RENEWED_EVERY / 40)
        return writers[number].take(Reporter("waiting", quiet=True))

    with ThreadPoolExecutor(len(writers)) as pool:
        assert sum(pool.map(takes, range(len(writers)))) == (0 if own else 1)
    for writer in (held, *writers):
        writer.release()
    assert not RunFolder(url).exists(WRITER)


def test_a_writer_that_was_taken_for_dead_finds_out_before_it_writes_and_leaves_the_others_lock(url, monkeypatch):
    folder = RunFolder(url)
    written(folder, "manifest.json", "whole")
    taken = r"process 7 on far writes this run now, so this process has ended"
    with folder.locked(), monkeypatch.context() as patch:
        taken_over(folder, url, patch)
        with pytest.raises(RunError, match=taken):
            written(folder, "manifest.json", "torn")
        with pytest.raises(RunError, match=taken):
            folder.log("started")
    assert folder.read_bytes("manifest.json") == b"whole"
    assert json.loads(folder.read_bytes(WRITER))["id"] == "other"
    with folder.locked():
        folder.remove(WRITER)
        with pytest.raises(RunError, match=r"writer.json is gone, so this process has ended"):
            written(folder, "manifest.json", "torn")


def test_a_writer_that_was_taken_for_dead_ends_at_its_next_sign_of_life_even_if_it_puts_no_file(url, monkeypatch):
    folder = RunFolder(url)
    with folder.locked():
        taken_over(folder, url, monkeypatch)
        time.sleep(GONE_AFTER / 2)
        with pytest.raises(RunError, match="process 7 on far writes this run now"):
            folder.check_writer()


def test_workers_write_in_the_name_of_whoever_leads_and_no_longer(url, tmp_path, monkeypatch):
    folder, worker = RunFolder(url), RunFolder(url)
    with folder.locked():
        worker.write_as(folder.writer)
        written(worker, "work/state-0", "mine")
        taken_over(folder, url, monkeypatch)
        with pytest.raises(RunError, match="process 7 on far writes this run now"):
            written(worker, "work/state-0", "torn")
    assert folder.read_bytes("work/state-0") == b"mine"
    with RunFolder(tmp_path).locked():
        assert RunFolder(tmp_path).writer is None  # the system's lock knows no names


def test_a_first_try_whose_answer_was_lost_is_this_writers_own(url, monkeypatch):
    create = ObjectStore.create
    monkeypatch.setattr(ObjectStore, "create", lambda store, *told: create(store, *told) and create(store, *told))
    with RunFolder(url).locked():
        written(RunFolder(url), "a.txt", "mine")


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "A header that is not implemented"), ValueError("no such mode")])
@pytest.mark.parametrize("there", [False, True])
def test_a_store_that_cannot_put_on_a_condition_is_asked_whether_there_is_a_writer(monkeypatch, error, there):
    store = store_at(f"memory://locks/without-conditions-{there}")
    if there:
        store.put(WRITER, b"{}")

    def without_conditions(fs, *arguments, mode="overwrite", put=MemoryFileSystem.pipe_file):
        if mode == "create":
            raise error
        return put(fs, *arguments)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", without_conditions)
    assert store.create(WRITER, b"{}") is not there
    assert store.size(WRITER) == 2
    store.remove(WRITER)


def test_a_writer_that_cannot_be_reached_for_long_ends_even_if_it_puts_no_file(url, monkeypatch):
    folder = RunFolder(url)
    with folder.locked():
        monkeypatch.setattr(folder._writer_file.store, "read_bytes", failing)
        folder.check_writer()  # not for long yet
        time.sleep(GONE_AFTER + 2 * RENEWED_EVERY)
        with pytest.raises(RunError, match="the network is down"):
            folder.check_writer()
        monkeypatch.undo()
    assert folder.exists(WRITER) is False


def test_leaving_waits_for_no_store_that_hangs(url, monkeypatch):
    folder = RunFolder(url)
    with folder.locked():
        hanging = threading.Event()
        monkeypatch.setattr(folder._writer_file.store, "read_bytes", lambda name: hanging.wait(20) and b"{}")
        time.sleep(2 * RENEWED_EVERY)
        began = time.monotonic()
    assert time.monotonic() - began < 10 * RENEWED_EVERY
    hanging.set()


def failing(*_):
    raise RunError("the network is down")


def test_a_store_that_fails_for_a_moment_loses_nobody_the_lock(url, monkeypatch):
    folder = RunFolder(url)
    with folder.locked():
        writer = folder._writer_file
        put = writer.store.put
        failures = iter([True, True])

        def unsure(name, data):
            if next(failures, False):
                failing()
            put(name, data)

        monkeypatch.setattr(writer.store, "put", unsure)
        before = json.loads(folder.read_bytes(WRITER))["renewals"]
        deadline = time.monotonic() + 5
        while json.loads(folder.read_bytes(WRITER))["renewals"] < before + 3 and time.monotonic() < deadline:
            time.sleep(RENEWED_EVERY)
        assert next(failures, None) is None
        written(folder, "a.txt", "mine")


def test_a_run_that_another_process_writes_is_refused_before_anything_is_changed(gpt2, url):
    texts = ["a cat sat on the mat", "a dog ran"]
    with RunFolder(url).locked():
        with pytest.raises(RunError, match="another process is writing this run"):
            build_index(gpt2, texts, out=url, quiet=True)
        assert RunFolder(url).names("") == [WRITER]
    index = build_index(gpt2, texts, out=url, quiet=True)
    assert not index.folder.exists(WRITER)
