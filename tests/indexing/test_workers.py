"""Parts of a corpus, read by one worker or by several, make the same bytes; each may be read again at any time."""

import os
import sys
import time
from dataclasses import replace

import pytest
import torch

from ffmem import build_index
from ffmem.errors import CorpusError, FfmemError, ModelError, RunError
from ffmem.indexing import checkpoint
from ffmem.indexing.worker import Worker
from ffmem.run.folder import RunFolder
from tests.indexing.parts import COUNT, InParts
from tests.indexing.reference import SETTINGS, content
from tests.tiny import some_sentences

CPU = {"device": "cpu"}


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr("ffmem.indexing.build.Corpus", InParts)


def test_triggers_of_a_corpus_in_parts_find_their_sentences(gpt2, tmp_path, in_parts):
    sentences = some_sentences(120, seed=8)
    settings = {"unit": "line", "shard_tokens": 30, "top": 9, "quiet": True}
    index = build_index(gpt2, sentences, out=tmp_path / "run", **settings)
    assert index.counts.sentences == index.counts.records == 120
    found = set()
    for view in list(index)[::29]:
        for trigger in view.triggers:
            words = sentences[trigger.sentence].split()
            assert trigger.prefix == " ".join(words[: trigger.position])
            found.add(trigger.sentence * COUNT // 120)
    assert len(found) == COUNT  # of all parts
    again = build_index(gpt2, sentences, out=tmp_path / "run", **settings)
    assert again.manifest == index.manifest


def test_parts_give_the_triggers_and_statistics_of_the_whole(gpt2, tmp_path, monkeypatch):
    sentences = some_sentences(80, seed=6)
    settings = {"unit": "line", "stats": "full", "quiet": True}
    whole = build_index(gpt2, sentences, out=tmp_path / "whole", **settings)
    monkeypatch.setattr("ffmem.indexing.build.Corpus", InParts)
    parts = build_index(gpt2, sentences, out=tmp_path / "parts", **settings)
    assert parts.counts.shards >= COUNT > whole.counts.shards
    assert replace(parts.counts, shards=1, padding_share=0.0) == replace(whole.counts, padding_share=0.0)
    for name in ("L1D1", "L2D50", "L3D127"):
        pairs = list(zip(parts[name].triggers, whole[name].triggers, strict=True))
        assert all(a.coefficient == pytest.approx(b.coefficient, abs=2e-5) for a, b in pairs)
        assert sum((a.sentence, a.position) == (b.sentence, b.position) for a, b in pairs) >= len(pairs) - 2  # near ties
        assert parts[name].stats.active == whole[name].stats.active
        assert parts[name].stats.mean == pytest.approx(whole[name].stats.mean, abs=1e-6)


def test_parts_without_text_are_no_error_where_others_have_some(gpt2, tmp_path, in_parts):
    index = build_index(gpt2, ["the king .", "", " ", "", "the queen ."], out=tmp_path / "run", quiet=True)
    assert (index.counts.sentences, index.counts.records) == (2, 2)
    assert index.counts.shards > 2  # some parts have nothing to read
    with pytest.raises(CorpusError, match="expected text in iterable, found none"):
        build_index(gpt2, ["", ""], out=tmp_path / "none", quiet=True)
    assert not RunFolder(tmp_path / "none").parts("work")


@pytest.mark.parametrize("limit", [40, 113, 400])
def test_a_limit_on_tokens_falls_in_some_part(gpt2, tmp_path, limit, in_parts, monkeypatch):
    sentences = some_sentences(60, seed=5)
    settings = {"unit": "line", "limit_tokens": limit, "shard_tokens": 20, "quiet": True}
    parts = build_index(gpt2, sentences, out=tmp_path / "parts", **settings)
    assert build_index(gpt2, sentences, out=tmp_path / "parts", **settings).manifest == parts.manifest
    monkeypatch.undo()
    whole = build_index(gpt2, sentences, out=tmp_path / "whole", **settings)
    for name in ("records", "sentences", "tokens"):
        assert getattr(parts.counts, name) == getattr(whole.counts, name)


@pytest.fixture
def stopped(gpt2, long_text, tmp_path, in_parts, monkeypatch):
    """A run of two states with three finished shards, of which one's sentences are damaged."""
    run = tmp_path / "run"
    save = checkpoint.save

    def saving(*arguments):
        save(*arguments)
        if len(list(run.glob("work/shard-*.arrow"))) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", saving)
        with pytest.raises(KeyboardInterrupt):
            build_index(gpt2, long_text, out=run, **SETTINGS)
    os.rename(run / "work" / "state-0.safetensors", run / "work" / "state-3.safetensors")
    path = run / "work" / "shard-00000-000001.arrow"
    path.write_bytes(path.read_bytes()[:-3])
    return run


@pytest.mark.slow
def test_any_worker_goes_on_with_what_others_have_left(gpt2, long_text, stopped, tmp_path):
    build_index(gpt2, long_text, out=stopped, **SETTINGS)
    build_index(gpt2, long_text, out=tmp_path / "whole", **SETTINGS)
    assert content(stopped) == content(tmp_path / "whole")


def test_what_is_left_to_be_chosen_agrees_with_what_was_chosen(gpt2, long_text, stopped):
    settings = {name: value for name, value in SETTINGS.items() if name not in ("shard_tokens", "batch_tokens")}
    assert build_index(gpt2, long_text, out=stopped, **settings).manifest.settings.shard_tokens == 500
    assert build_index(gpt2, long_text, out=stopped, **settings).manifest.settings.batch_tokens == 256


def test_a_part_that_is_read_again_reads_nothing_that_is_kept(gpt2, long_text, stopped, monkeypatch):
    """As where Ray asks a worker again that was lost when it had read a part, before anybody heard of it."""
    folder = RunFolder(stopped)
    manifest = folder.manifest()
    damaged = [f"work/shard-00000-000001.{ending}" for ending in ("arrow", "safetensors")]
    assert checkpoint.mend(folder, manifest.provenance) == damaged
    elsewhere = checkpoint.coverage(folder)["3"]
    assert len(elsewhere) == 3
    made = []
    monkeypatch.setattr("ffmem.indexing.build.Corpus", lambda *a, **k: made.append(InParts(*a, **k)) or made[-1])
    monkeypatch.setattr("ffmem.indexing.full_pass.Pass.make", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build_index(gpt2, long_text, out=stopped, **SETTINGS)
    read = []
    for _ in range(2):
        worker = Worker(gpt2, folder, manifest, "0")
        shards = worker.read(made[0], made[0].parts()[:3], elsewhere)
        read.append({(shard.part, shard.number) for shard, _ in shards})
        worker.wait()
        worker.close()
    assert (0, 1) in read[0]  # the damaged one
    assert not read[0] & (elsewhere - {(0, 1)})
    assert read[1] == set()
    assert not checkpoint.coverage(folder)["0"] & elsewhere


def test_a_worker_looks_at_no_state_that_another_may_be_replacing(gpt2, stopped):
    folder = RunFolder(stopped)
    path = stopped / "work" / "state-1.safetensors"
    path.write_bytes((stopped / "work" / "state-3.safetensors").read_bytes()[:50])  # as where a header has grown meanwhile
    workers = [Worker(gpt2, folder, folder.manifest(), name) for name in ("0", "3")]
    assert [len(worker.covered) for worker in workers] == [0, 3]
    for worker in workers:
        worker.close()


def test_a_state_that_grew_meanwhile_is_not_read_twice(gpt2, long_text, stopped, monkeypatch):
    coverage = checkpoint.coverage
    monkeypatch.setattr(checkpoint, "coverage", lambda folder: {name: {(0, 0)} for name in coverage(folder)})
    with pytest.raises(RunError, match=r"another process has written shard 1 of part 0 meanwhile"):
        build_index(gpt2, long_text, out=stopped, **SETTINGS)


def test_a_disk_that_is_full_is_one_clear_line(gpt2, long_text, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ffmem.indexing.checkpoint.write_table", full)
    with pytest.raises(
        RunError, match=r"work/shard-\d+-\d+\.arrow: cannot be written: No space left.* give the same command again"
    ):
        build_index(gpt2, long_text, out=tmp_path / "run", **SETTINGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "at least 1 worker"),
        ({"workers": 2, "devices": "cpu"}, "a device for each of 2 workers, found 1"),
        ({"device_map": "auto", "device": "cpu"}, "spreads a model over all GPUs, found device 'cpu' too"),
        ({"address": "auto", "devices": "cuda:0"}, "--devices is for workers on this machine"),
    ],
)
def test_settings_that_make_no_sense_are_refused(gpt2_folder, long_text, tmp_path, settings, message):
    with pytest.raises(FfmemError, match=message):
        build_index(gpt2_folder, long_text, out=tmp_path / "run", **settings)


def test_what_is_in_memory_has_one_worker(gpt2, gpt2_folder, long_text, tmp_path):
    with pytest.raises(ModelError, match="give its name or its folder"):
        build_index(gpt2, long_text, out=tmp_path / "run", workers=2)
    with pytest.raises(CorpusError, match="give files or a list, not an iterator"):
        build_index(gpt2_folder, iter(["the king ."]), out=tmp_path / "run", workers=2)
    assert not (tmp_path / "run").exists()


def test_without_ray_the_extra_is_named(gpt2_folder, text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for settings in ({"workers": 2}, {"address": "auto"}):
        with pytest.raises(FfmemError, match=r"^several workers need the ray package: pip install 'ffmem\[ray\]'$"):
            build_index(gpt2_folder, text_file, out=tmp_path / "run", **settings)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_workers_on_one_gpu_make_the_bytes_of_one(gpt2_folder, long_text, tmp_path, in_parts):
    settings = SETTINGS | {"dtype": "bfloat16"}
    build_index(gpt2_folder, long_text, out=tmp_path / "one", device="cuda", **settings)
    build_index(gpt2_folder, long_text, out=tmp_path / "two", devices="cuda:0,cuda:0", **settings)
    assert content(tmp_path / "two") == content(tmp_path / "one")


@pytest.mark.slow
def test_shards_that_are_read_while_others_are_written_are_held_and_kept_together(gpt2, long_text, tmp_path, monkeypatch):
    """As on a GPU, which does not wait for the disk."""
    build_index(gpt2, long_text, out=tmp_path / "whole", **SETTINGS)
    made, saved, save = Worker.__init__, [], checkpoint.save

    def making(worker, *arguments):
        made(worker, *arguments)
        worker.holds = True

    def saving(folder, worker, covered, finished, *more):
        time.sleep(0.3)
        save(folder, worker, covered, finished, *more)
        saved.append((worker, len(finished)))

    monkeypatch.setattr(Worker, "__init__", making)
    monkeypatch.setattr(checkpoint, "save", saving)
    index = build_index(gpt2, long_text, out=tmp_path / "held", **SETTINGS)
    assert content(tmp_path / "held") == content(tmp_path / "whole")
    assert sum(count for _, count in saved) == index.counts.shards > len(saved)
    assert [worker for worker, _ in saved[-2:]] == ["0", None]  # the last state is not written, tables are made from it
