"""A file or folder is written whole or not at all, and nothing else is touched by it."""

import errno
import os
import subprocess
import sys
import threading

import pytest
import torch

from ffmem.atomic import atomic_file, atomic_folder, is_unfinished, sweep
from ffmem.errors import RunError
from ffmem.indexing.sealed import save_sealed

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="devices and locks as on Linux")


def put(target, text):
    with atomic_file(target) as path:
        path.write_text(text)


def put_half(target, error):
    before = target.read_text()
    with atomic_file(target) as path:
        path.write_text("half")
        assert target.read_text() == before
        raise error


def mode_of(path):
    return path.stat().st_mode & 0o777


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "a.txt"
    put(target, "first")
    with pytest.raises(ZeroDivisionError):
        put_half(target, ZeroDivisionError())
    assert target.read_text() == "first"
    put(target, "other")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "other")]


@LINUX
def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    put(pipe, "through")
    reader.join(5)
    assert read == ["through"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@LINUX
def test_a_device_is_written_to_and_stays(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    put(tmp_path / "null", "nothing")
    assert (tmp_path / "null").is_char_device()
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"full: cannot be written: No space left on device; make room there"):
        put(tmp_path / "full", "too much")
    assert (tmp_path / "full").is_char_device()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path, there):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "a.txt", tmp_path / "link.txt"
    if there:
        target.write_text("before")
    link.symlink_to("disk/a.txt")
    put(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_that_is_there_keeps_its_mode(tmp_path, mode):
    target = tmp_path / "a.txt"
    target.write_text("secret")
    target.chmod(mode)
    with atomic_file(target) as path:
        path.write_text("still")
        assert mode_of(path.parent) & 0o077 == 0  # nobody else may read it meanwhile
    assert (mode_of(target), target.read_text()) == (mode, "still")


def test_a_new_file_has_the_mode_of_any_new_file_whoever_wrote_it(tmp_path, umask):
    put(tmp_path / "a.txt", "new")
    with atomic_file(tmp_path / "a.safetensors") as path:
        save_sealed(path, {"a": torch.zeros(3)}, {})
    assert [mode_of(tmp_path / name) for name in ("a.txt", "a.safetensors")] == [0o640, 0o640]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_is_not_replaced(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("kept")
    target.chmod(0o444)
    with pytest.raises(RunError, match=r"a.txt: cannot be written: Permission denied"):
        put(target, "other")
    assert target.read_text() == "kept"


def test_two_who_write_the_same_file_are_not_in_each_others_way(tmp_path):
    target = tmp_path / "a.txt"
    (tmp_path / "a.txt.tmp").write_text("somebody's")
    with atomic_file(target) as one, atomic_file(target) as two:
        one.write_text("one")
        two.write_text("two")
    assert target.read_text() == "one"  # who ends last
    assert (tmp_path / "a.txt.tmp").read_text() == "somebody's"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "expected a file, found a folder at"),
        ("none/a.txt", "a.txt: cannot be written: No such file or directory; make its folder first"),
        ("file/a.txt", "a.txt: cannot be written: Not a directory"),
        ("loop", "loop: cannot be written: Too many levels of symbolic links"),
        ("x" * 300, "cannot be written: File name too long"),
    ],
)
def test_what_cannot_be_a_file_is_one_line(tmp_path, name, message):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RunError, match=message) as told:
        put(tmp_path / name, "x")
    assert "\n" not in str(told.value)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("before")
    for error in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(RunError, match=r"a.txt: cannot be written: .*; make room there and give the same command again"):
            put_half(target, OSError(error, "a library's own words"))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "before")]


def test_what_is_told_of_another_file_stays_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"corpus.txt"), atomic_file(tmp_path / "a.txt"):
        (tmp_path / "corpus.txt").read_text()


@LINUX
@pytest.mark.parametrize("kind", ["table", "tensors"])
def test_every_library_that_writes_is_heard_when_the_disk_is_full(tmp_path, kind):
    code = f"""
import resource, sys, numpy as np, pyarrow as pa, torch
from pathlib import Path
from ffmem.indexing.sealed import save_sealed
from ffmem.run.folder import write_table
from ffmem.atomic import atomic_file
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
with atomic_file(Path({str(tmp_path / "a.bin")!r})) as path:
    if {kind!r} == "table":
        batch = pa.RecordBatch.from_arrays([pa.array(np.zeros(99_999))], ["a"])
        write_table(path, batch.schema, [batch])
    else:
        save_sealed(path, {{"a": torch.zeros(99_999)}}, {{}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(f"RunError: {tmp_path / 'a.bin'}: cannot be written: File too large\n")
    assert list(tmp_path.iterdir()) == []


@LINUX
def test_what_a_killed_process_left_is_swept_and_what_is_in_use_is_not(tmp_path):
    code = f"""
import os, signal, sys
from pathlib import Path
from ffmem.atomic import atomic_file
with atomic_file(Path({str(tmp_path / "a.txt")!r})) as path:
    path.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    (left,) = tmp_path.iterdir()
    assert is_unfinished(left.name)
    (tmp_path / "b.ffmem-tmp").write_text("somebody's")
    with atomic_file(tmp_path / "b.txt") as path:
        path.write_text("whole")
        sweep(tmp_path)
        assert not left.exists()
    sweep(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b.txt": "whole", "b.ffmem-tmp": "somebody's"}
    sweep(tmp_path / "none")


def put_folder(target, *steps):
    with atomic_folder(target) as folder:
        (folder / "part").mkdir()
        (folder / "part" / "a").write_text("mine")
        for step in steps:
            step()


def files_under(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "above" / "model"
    with pytest.raises(ZeroDivisionError):
        put_folder(target, lambda: 1 / 0)
    assert list(target.parent.iterdir()) == []
    seen = []
    put_folder(target, lambda: seen.append(target.exists()), lambda: sweep(target.parent))  # as another process would
    assert seen == [False]
    assert files_under(tmp_path) == {"above/model/part/a": "mine"}


def test_a_folder_takes_the_place_of_nothing(tmp_path):
    target = tmp_path / "model"
    with pytest.raises(OSError, match="not empty"):
        put_folder(target, target.mkdir, lambda: (target / "theirs").write_text("theirs"))
    assert files_under(tmp_path) == {"model/theirs": "theirs"}
    assert list(tmp_path.iterdir()) == [target]


@LINUX
def test_a_folder_has_the_mode_of_any_new_folder(tmp_path, umask):
    with atomic_folder(tmp_path / "model"):
        pass
    assert mode_of(tmp_path / "model") == 0o750
