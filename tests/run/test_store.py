"""A run at a URL is a run: the same files, pages, tables and results, and one clear line where the store says no."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import fsspec
import pytest
import s3fs

from ffmem import build_index, export, open_index, report, values
from ffmem.cli.app import main
from ffmem.errors import FfmemError, RunError
from ffmem.run import store as room
from ffmem.run.folder import RunFolder, folder_of
from ffmem.run.results import Result, load_result, saved_results
from ffmem.run.store import store_at
from tests.reports.made import paper_results
from tests.shelf import BUCKET, s3_store
from tests.tiny import some_sentences


@pytest.fixture(scope="module")
def server():
    with s3_store() as running:
        yield running


@pytest.fixture
def own(request):
    """A name for what this test writes."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def s3(server, own):
    return f"s3://{BUCKET}/runs/{own}"


@pytest.fixture(params=["memory", "s3"])
def url(request, own):
    return f"memory://runs/{own}" if request.param == "memory" else request.getfixturevalue("s3")


@pytest.fixture(params=["local", "memory", "s3"])
def place(request, own, tmp_path):
    """A place for a run, which nothing lies at yet: the same tests for all kinds."""
    if request.param == "local":
        return tmp_path / "run"
    return f"memory://runs/{own}" if request.param == "memory" else request.getfixturevalue("s3")


def put(folder, name, data):
    with folder.writing(name) as path:
        path.write_bytes(data)


def copied(run: Path, url: str) -> str:
    """A run put into a store, its manifest last."""
    folder = RunFolder(url)
    for path in sorted(run.rglob("*"), key=lambda path: path.name == "manifest.json"):
        if path.is_file():
            put(folder, path.relative_to(run).as_posix(), path.read_bytes())
    return url


def called(capsys, *arguments):
    try:
        main([str(argument) for argument in arguments])
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    found = capsys.readouterr()
    return code, found.out, found.err


def test_files_are_written_listed_read_and_deleted_by_name(place):
    folder = RunFolder(place)
    assert folder.names("work") == []
    assert not folder.exists("work/b")
    for name in ("work/b", "work/a/c", "worked", "work/a.arrow"):
        put(folder, name, name.encode())
    assert folder.names("work") == ["work/a.arrow", "work/a/c", "work/b"]
    assert folder.names("") == ["work/a.arrow", "work/a/c", "work/b", "worked"]
    assert folder.exists("work/b")
    assert folder.read_bytes("work/b") == b"work/b"
    assert folder.file("work/a/c").read_bytes() == b"work/a/c"
    with folder.reading("work/a/c") as path:
        assert path.read_bytes() == b"work/a/c"
    assert folder.size("worked") == 6
    assert folder.disk_use() == 6 + 8 + 12 + 6
    folder.remove("work/b")
    folder.remove("work/b")
    assert folder.names("work") == ["work/a.arrow", "work/a/c"]
    folder.remove("work/a.arrow", "work/a/c")
    folder.remove("work/a.arrow", "work/a/c")
    assert folder.names("") == ["worked"]
    assert folder.store.entries() == {"worked"}
    for ask in (folder.file, folder.read_bytes, folder.size, lambda name: folder.reading(name).__enter__()):
        with pytest.raises(FileNotFoundError):
            ask("work/b")


def test_a_file_appears_whole_or_not_at_all_and_then_in_place_of_the_one_before(place):
    folder = RunFolder(place)
    with pytest.raises(TypeError), folder.writing("results/a.txt") as path:
        path.write_text(f"half{path.write_text('half')}" + 1)
    assert folder.names("") == []
    put(folder, "results/a.txt", b"first")
    first = folder.file("results/a.txt")
    held = first.open("rb")
    put(folder, "results/a.txt", b"other")  # as long as the first
    assert folder.file("results/a.txt").read_bytes() == b"other"
    assert RunFolder(place).file("results/a.txt").read_bytes() == b"other"
    assert held.read() == b"first"  # a table that is mapped stays as it was
    held.close()


def test_a_file_is_fetched_once(url, monkeypatch):
    folder = RunFolder(url)
    put(folder, "work/a", b"1")
    fs, _ = fsspec.core.url_to_fs(url, use_listings_cache=False)
    asked = []
    monkeypatch.setattr(fs, "get_file", lambda *names, get=fs.get_file: (asked.append(names), get(*names)))
    for _ in range(2):
        assert folder.file("work/a").read_bytes() == b"1"
        assert RunFolder(url).file("work/a").read_bytes() == b"1"
    assert len(asked) == 1
    put(folder, "manifest.json", b"{}")
    assert folder.file("manifest.json").read_bytes() == b"{}"
    assert len(asked) == 1  # its writer has it


def test_the_parts_of_a_run_are_listed_once(url, monkeypatch):
    folder = RunFolder(url)
    for name in ("triggers.arrow", "work/state-0.safetensors", "results/activity.json", "mine.txt"):
        put(folder, name, b"x")
    fs, _ = fsspec.core.url_to_fs(url, use_listings_cache=False)
    asked = []
    monkeypatch.setattr(
        fs, "find", lambda *names, find=fs.find, **options: (asked.append(names), find(*names, **options))[1]
    )
    assert folder.parts() == ["results/activity.json", "triggers.arrow", "work/state-0.safetensors"]
    assert len(asked) == 1


def test_the_first_bytes_of_a_file_are_read_alone(place):
    folder = RunFolder(place)
    put(folder, "work/a", bytes(range(100)))
    assert folder.read_bytes("work/a", 3) == b"\0\1\2"
    assert folder.read_bytes("work/a", 1000) == folder.read_bytes("work/a") == bytes(range(100))


def test_what_others_write_is_seen_at_once(url):
    folder = RunFolder(url)
    put(folder, "work/a", b"1")
    assert (folder.names(""), folder.size("work/a"), folder.exists("work/b")) == (["work/a"], 1, False)
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    for name in ("work/a", "work/b"):
        fs.pipe_file(f"{root}/{name}", b"22")
    assert (folder.names("work"), folder.size("work/a"), folder.exists("work/b")) == (["work/a", "work/b"], 2, True)
    assert folder.disk_use() == 4


def test_a_folder_can_be_sent_to_another_process(place):
    put(RunFolder(place), "work/a", b"1")
    assert pickle.loads(pickle.dumps(RunFolder(place))).read_bytes("work/a") == b"1"


def test_the_log_grows_by_a_line(place):
    folder = RunFolder(place)
    put(folder, "manifest.json", b"{}")
    for event in ("started", "finished"):
        folder.log(event, shards=1)
    lines = [json.loads(line) for line in folder.read_bytes("log.jsonl").splitlines()]
    assert [(line["event"], line["shards"]) for line in lines] == [("started", 1), ("finished", 1)]


def test_clearing_deletes_the_run_and_nothing_else(place):
    folder = RunFolder(place)
    folder.clear()
    shards = ["work/state-0.safetensors", "work/shard-000000.arrow", "work/shard-000000.safetensors"]
    parts = ["triggers.arrow", *shards, "results/activity.json", "figures/fig3.svg", "report.html", "log.jsonl"]
    mine = ["figures/mine.svg", "manifest.json", "mine.txt", "results/thesis.csv", "work/a", "working/a"]
    for name in [*parts, *mine]:
        put(folder, name, b"x")
    folder.clear("work")
    assert set(folder.names("")) == {*parts, *mine} - set(shards)
    folder.clear()
    assert folder.names("") == mine


def test_a_place_that_holds_something_else_is_refused(place):
    folder = RunFolder(place)
    folder.check_own()
    put(folder, "results/thesis.csv", b"x")
    for overwrite in (False, True):
        with pytest.raises(RunError, match=r"exists and is not an ffmem run \(results is in it\): choose another folder"):
            folder.check_own(overwrite=overwrite)
    put(folder, "manifest.json", b'{"name": "an app"}')
    with pytest.raises(RunError, match=r"its manifest.json is none of ffmem's\): choose another folder"):
        folder.check_own(overwrite=True)


def test_what_is_no_run_is_told(url):
    with pytest.raises(RunError, match=f"{url}: expected a run folder .*, found nothing; make one with ffmem index"):
        open_index(url)
    put(RunFolder(url), "other.txt", b"x")
    with pytest.raises(RunError, match="found an empty folder or other files"):
        open_index(url)


def test_a_run_at_a_url_reads_as_the_one_it_was_copied_from(built, url, tmp_path, capsys):
    copied(built, url)
    here, there = open_index(built), open_index(f"{url}/")
    assert there.path == url
    assert url in repr(there)
    assert url in there._repr_html_()
    assert there.manifest == here.manifest
    for name in ("triggers", "cells", "sentences", "tokens", "values"):
        assert there.table(name).equals(here.table(name))
    assert str(there["L2D7"]) == str(here["L2D7"])
    export(there, "triggers", out=tmp_path / "there.jsonl")
    export(here, "triggers", out=f"file://{tmp_path}/here.jsonl")
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
    export(url, "cells", format="parquet", out=f"{url}-tables/cells.parquet")
    folder, name = folder_of(f"{url}-tables/cells.parquet")
    assert folder.read_bytes(name)[:4] == b"PAR1"
    assert called(capsys, "show", url, "L2D7") == called(capsys, "show", built, "L2D7")
    code, out, _ = called(capsys, "info", url)
    assert (code, url in out) == (0, True)


def test_a_run_that_is_built_at_a_url_has_the_bytes_of_a_local_one(llama, url, tmp_path):
    text = some_sentences(40, seed=3)
    for place in (tmp_path / "run", url):
        for overwrite in (False, False, True):
            built = build_index(
                llama, text, out=place, unit="line", top=4, shard_tokens=100, overwrite=overwrite, quiet=True
            )
        values(built, llama, top=5, quiet=True)
    folder = RunFolder(url)
    assert folder.names("") == RunFolder(tmp_path / "run").names("")
    for name in set(folder.names("")) - {"log.jsonl"}:
        assert folder.read_bytes(name) == (tmp_path / "run" / name).read_bytes()


def test_info_fetches_no_table(built, url, monkeypatch, capsys):
    copied(built, url)
    monkeypatch.setattr(room.ObjectStore, "file", None)
    assert called(capsys, "info", url)[0] == 0


@pytest.mark.parametrize("name", ["triggers.arrow", "values.arrow"])
def test_damage_is_noticed_and_named_by_its_url(built, url, name):
    folder = RunFolder(copied(built, url))
    whole = (built / name).read_bytes()
    put(folder, name, whole[:-7])
    with pytest.raises(RunError, match=f"{url}/{name}: truncated or altered"):
        open_index(url)
    put(folder, name, whole[:-700] + bytes([whole[-700] ^ 1]) + whole[-699:])
    with pytest.raises(RunError, match=f"{url}/{name}: altered since it was written"):
        open_index(url).table(name.removesuffix(".arrow"))
    folder.remove(name)
    with pytest.raises(RunError, match=f"{url}/{name}: missing from the run"):
        open_index(url)
    put(folder, "manifest.json", b"{")
    with pytest.raises(RunError, match=f"{url}/manifest.json: damaged"):
        open_index(url)


def test_values_that_were_made_anew_elsewhere_are_fetched_anew(built, llama, url, tmp_path):
    copied(built, url)
    before = open_index(url)
    assert before["L2D7"].value.kept == 12
    values(shutil.copytree(built, tmp_path / "run"), llama, top=5, quiet=True)
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)  # as if from another machine
    for name in ("values-2.arrow", "manifest.json"):
        fs.put_file(str(tmp_path / "run" / name), f"{root}/{name}")
    assert open_index(url)["L2D7"].value.kept == 5
    assert before["L2D7"].value.kept == 12  # what was open stays as it was


def test_results_and_report_are_kept_beside_the_run(built, url, capsys):
    index = open_index(copied(built, url))
    assert saved_results(index) == []
    result = paper_results(3)["activity"]
    Result(**vars(result)).saved(index)
    assert saved_results(index) == ["activity"]
    assert load_result(index, "activity").rows == result.rows
    with pytest.raises(RunError, match=f"{url} has no result agreement: make it with ffmem experiments {url}"):
        load_result(index, "agreement")
    assert report(index) == f"{url}/report.html"
    assert index.folder.names("figures") == ["figures/fig7.png", "figures/fig7.svg"]
    code, _, err = called(capsys, "report", url, "-o", f"{url}-pages/mine.html")
    assert (code, err.startswith(f"ffmem: {url}-pages/mine.html (")) == (0, True)
    pages = RunFolder(f"{url}-pages")
    assert pages.names("") == ["mine-figures/fig7.png", "mine-figures/fig7.svg", "mine.html"]
    assert pages.read_bytes("mine.html") == index.folder.read_bytes("report.html")


def test_commands_that_load_the_model_work_on_a_bucket(gpt2_folder, s3, tmp_path, text_file, capsys):
    """In processes of their own, with no more than the environment; they leave no fetched file behind."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    where = os.environ | {"TMPDIR": str(scratch)}

    def typed(*arguments):
        command = [sys.executable, "-m", "ffmem", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=where)
        assert done.returncode == 0, done.stderr
        return done

    assert called(capsys, "index", gpt2_folder, text_file, "-o", tmp_path / "run", "--top", "5", "-q")[0] == 0
    copied(tmp_path / "run", s3)
    assert f"{s3}: values of 384 cells. Next: ffmem show {s3} L3D0" in typed("values", s3, "--top", 12).stderr
    assert "promotes" in typed("show", s3, "L2D7").stdout
    done = typed("experiments", s3, "activity", "--examples", 4)
    assert f"kept in {s3}/results" in done.stderr
    assert "activity" in done.stdout
    assert s3 in typed("trace", gpt2_folder, "the king", "--run", s3, "--json").stdout
    assert RunFolder(s3).names("results") == ["results/activity.json", "results/activity.parquet"]
    assert list(scratch.iterdir()) == []


def test_many_processes_write_files_of_one_run_at_the_same_time(s3, tmp_path):
    code = """
import sys
from ffmem.run.folder import RunFolder
folder = RunFolder(sys.argv[1])
for number in range(int(sys.argv[2]), 12, 3):
    with folder.writing(f"work/shard-{number:05d}.arrow") as path:
        path.write_bytes(bytes([number]) * 100_000)
"""
    for place in (s3, str(tmp_path / "run")):
        running = [subprocess.Popen([sys.executable, "-c", code, place, str(at)]) for at in range(3)]
        assert [process.wait() for process in running] == [0, 0, 0]
        folder = RunFolder(place)
        names = [f"work/shard-{number:05d}.arrow" for number in range(12)]
        assert folder.names("work") == names
        assert [folder.read_bytes(name)[-1] for name in names] == list(range(12))


def test_an_upload_that_fails_in_the_middle_leaves_nothing(s3, monkeypatch):
    folder = RunFolder(s3)
    real = s3fs.S3FileSystem._call_s3

    async def broken(self, method, *args, **kwargs):
        if kwargs.get("PartNumber") == 2:
            raise OSError("the line is cut")
        return await real(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", broken)
    with pytest.raises(RunError, match=rf"^{s3}/triggers.arrow: cannot be written: the line is cut$"):
        put(folder, "triggers.arrow", bytes(120 << 20))
    assert folder.names("") == []
    assert not folder.exists("triggers.arrow")
    monkeypatch.undo()
    put(folder, "triggers.arrow", bytes(120 << 20))
    assert folder.size("triggers.arrow") == 120 << 20


def test_a_missing_bucket_is_one_line(server, built, tmp_path, capsys):
    url = "s3://no-such-bucket/run"
    code, _, err = called(capsys, "info", url)
    assert (code, err.count("\n")) == (1, 1)
    assert f"{url}: expected a run folder (with manifest.json), found nothing" in err
    RunFolder(url).clear()
    with pytest.raises(RunError, match=rf"^{url}/a: cannot be written: .*bucket does not exist; make the bucket first$"):
        put(RunFolder(url), "a", b"x")


def test_what_the_store_refuses_is_one_line_with_advice(s3, monkeypatch):
    folder = RunFolder(s3)
    errors = {
        PermissionError("Access Denied"): r"Access Denied; check the credentials and what they allow \(AWS_PROFILE",
        ValueError("Unable to locate credentials\nmore"): "Unable to locate credentials; check the credentials",
        OSError(28, "No space left on device"): "No space left on device; make room in .* or set TMPDIR",
        ConnectionError("Could not connect to the endpoint"): r"check the network \(AWS_ENDPOINT_URL",
        RuntimeError(): "RuntimeError$",
    }
    for error, message in errors.items():

        async def refuse(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", refuse)
        for ask in (folder.file, folder.exists, folder.read_bytes, folder.names):
            with pytest.raises(RunError, match=rf"^{s3}/work: cannot be (read|listed): .*{message}"):
                ask("work")


def test_a_missing_package_and_an_unknown_kind_are_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)
    code, _, err = called(capsys, "info", "s3://bucket/run")
    expected = "s3://bucket/run/manifest.json: needs a package that is not installed: pip install 'ffmem[s3]'"
    assert (code, err) == (1, f"ffmem: error: {expected}\n")
    with pytest.raises(RunError, match="Protocol not known: swamp; give a folder or a URL such as s3://"):
        open_index("swamp://run")


@pytest.mark.parametrize("place", ["s3:/bucket/run", "S3:/bucket/run", "gs:/bucket/run", "s3:/"])
def test_a_url_with_one_slash_is_no_folder_here(place, gpt2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match=f"expected a folder, or a URL as a string such as .*, found {place}$"):
        build_index(gpt2, ["a text"], out=place, quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["s3://", "s3:///", "gs://"])
def test_a_url_without_a_bucket_is_told(place):
    with pytest.raises(RunError, match=f"expected a URL with a bucket, such as .*, found {place}$"):
        RunFolder(place)


def test_workers_leave_nothing_of_what_they_fetched(gpt2_folder, text_file, s3, tmp_path, short_folder, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", short_folder)
    build_index(gpt2_folder, text_file, out=s3, workers=2, device="cpu", quiet=True, shard_tokens=50)
    left = set(tmp_path.glob("ffmem-*"))
    assert len(left) == 1  # of this process, which goes on
    room.forget()
    assert not any(path.exists() for path in left)


def test_a_url_that_became_a_path_is_told(server):
    with pytest.raises(RunError, match=r"or a URL as a string such as .*, found s3:/bucket/run"):
        open_index(Path("s3://bucket/run"))
    assert store_at("file:///tmp/run").path == Path("/tmp/run")
    with pytest.raises(FfmemError, match="expected a file in a bucket or folder"):
        folder_of("s3://bucket")
    with pytest.raises(RunError, match=r"expected a URL without \* \? \[ \], found s3://bucket/\*"):
        open_index("s3://bucket/*")
