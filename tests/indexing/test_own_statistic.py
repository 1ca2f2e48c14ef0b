"""A statistic of another package, by one class: it is in the run, also after a kill, and with several workers."""

import shutil

import pytest
import torch

from ffmem import build_index, open_index
from ffmem.errors import FfmemError
from ffmem.indexing.collect import LayerCollector
from ffmem.indexing.estimate import estimate, state_bytes
from ffmem.indexing.layer_statistics import installed_statistics, statistics_named
from ffmem.indexing.statistics import BUILT_IN
from tests.indexing.reference import SETTINGS, content
from tests.indexing.test_statistics import add, batch, tokens_of
from tests.packages import install as put
from tests.tiny import some_sentences

TOY = '''"""A statistic of another package."""

import pyarrow as pa
import torch

from ffmem.indexing.statistics import Statistic


class Strong(Statistic):
    """How many tokens have a coefficient above 0.1, in the column `strong`."""

    schema = pa.schema([("strong", pa.int64())])

    def __init__(self, cells, device):
        self.strong = torch.zeros(cells, dtype=torch.int64, device=device)

    def add(self, found):
        for m in found.unpadded:
            self.strong += (m > 0.1).sum((0, 1))

    def columns(self, measured):
        return [pa.array(self.strong.cpu().numpy())]


class Short(Strong):
    """A mistake: an array of one cell whatever the number of cells."""

    def columns(self, measured):
        return [pa.array([5])]


class Active(Strong):
    """A mistake: a column that ffmem has itself."""

    schema = pa.schema([("active", pa.int64())])
'''


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a package in this process, with an entry point for one of the classes above."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    yield lambda target, name="strong": put(site, {"toy_strong.py": TOY}, {"ffmem.statistics": {name: target}})
    shutil.rmtree(site)


class Crash(BaseException):
    """Stands for the moment of a kill."""


@pytest.mark.slow
def test_its_column_is_in_the_run_also_after_a_kill_and_in_what_shows_a_cell(
    gpt2, long_text, install, tmp_path, monkeypatch
):
    plain = build_index(gpt2, long_text, out=tmp_path / "plain", **SETTINGS)
    install("toy_strong:Strong")
    whole = build_index(gpt2, long_text, out=tmp_path / "whole", **SETTINGS)
    assert whole.manifest.settings.statistics == ["strong"]
    known = plain.table("cells").column_names
    assert whole.table("cells").column_names == [*known, "strong"]
    assert whole.table("cells").select(known).equals(plain.table("cells"))
    strong = whole.table("cells").column("strong").to_numpy()
    assert 0 < strong.sum() < whole.table("cells").column("active").to_numpy().sum()

    end_shard, ends = LayerCollector.end_shard, []

    def dying(self):
        ends.append(self.layer)
        if ends.count(1) == 3:
            raise Crash
        end_shard(self)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCollector, "end_shard", dying)
        with pytest.raises(Crash):
            build_index(gpt2, long_text, out=tmp_path / "run", **SETTINGS)
    build_index(gpt2, long_text, out=tmp_path / "run", **SETTINGS)
    assert content(tmp_path / "run") == content(tmp_path / "whole")

    cell = whole["L2D9"]
    assert cell.stats.others == {"strong": strong[cell.row]}
    assert cell.stats.as_dict()["strong"] == strong[cell.row]
    assert f"{strong[cell.row]:,}" in cell.stats._repr_html_()


def test_two_workers_that_each_read_a_part_find_what_one_finds(install):
    install("toy_strong:Strong")
    kinds = statistics_named(["strong"])

    def collector() -> LayerCollector:
        settings = {"t": 3, "distinct": "text", "negative": False, "every": 1, "device": torch.device("cpu")}
        return LayerCollector(1, 5, **settings, statistics=kinds)

    parts = [batch(4, 9, seed) for seed in range(3)]
    one, first, second = collector(), collector(), collector()
    for number, part in enumerate(parts):
        for found in (one, second if number == 1 else first):
            add(found.statistics, *part)
    restarted = collector()
    restarted.load({name: tensor.clone() for name, tensor in second.state().items()})
    restarted.merge(first)
    expected = sum((tokens_of(*part) > 0.1).sum(0) for part in parts)
    assert one.statistics.each["strong"].strong.tolist() == expected.tolist()
    left, right = restarted.state(), one.state()
    assert left.keys() == right.keys() >= {"L1/strong/strong"}
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_an_estimate_counts_it_too(install):
    before = estimate(1000, cells=10, t=5, signs=1, stats=True)
    state = state_bytes(5, 1, True)
    install("toy_strong:Strong")
    after = estimate(1000, cells=10, t=5, signs=1, stats=True)
    assert after.run_bytes - before.run_bytes == 8 * 10
    assert state_bytes(5, 1, True) - state == 8
    assert state_bytes(5, 1, False) == 28 * 5


def test_a_run_goes_on_only_where_its_statistics_are(gpt2, install, tmp_path, monkeypatch):
    install("toy_strong:Strong")
    monkeypatch.setattr(LayerCollector, "end_shard", lambda self: (_ for _ in ()).throw(Crash))
    with pytest.raises(Crash):
        build_index(gpt2, some_sentences(5), out=tmp_path / "run", **SETTINGS)
    assert list(installed_statistics()) == ["strong"]
    (tmp_path / "site" / "toy-1.0.dist-info" / "entry_points.txt").unlink()
    assert statistics_named([]) == BUILT_IN
    with pytest.raises(FfmemError, match="the run gathers the statistic strong, found no package that has it"):
        statistics_named(["strong"])


@pytest.mark.parametrize(
    ("target", "name", "why"),
    [
        ("toy_strong:Short", "strong", "expected a row a cell, found 1 for 2 cells"),
        ("toy_strong:Active", "strong", "found 'active', which is another's"),
        ("toy_strong:Strong", "moments", "found 'moments', which is another's"),
        ("toy_strong:TOY", "strong", "has no attribute 'TOY'"),
        ("torch:Tensor", "strong", "expected a Statistic, found <class 'torch.Tensor'>"),
        ("toy_missing:Strong", "strong", "No module named 'toy_missing'"),
    ],
)
def test_one_that_cannot_be_used_is_told_before_any_work_in_one_line(gpt2, install, tmp_path, target, name, why):
    install(target, name)
    with pytest.raises(FfmemError, match=f"the statistic {name} of toy cannot be used .*{why}") as told:
        build_index(gpt2, some_sentences(5), out=tmp_path / "run", **SETTINGS)
    assert "\n" not in str(told.value)
    build_index(gpt2, some_sentences(5), out=tmp_path / "run", stats="off", **SETTINGS)
    assert open_index(tmp_path / "run").table("cells").num_columns == 5
