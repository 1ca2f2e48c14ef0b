"""The way to a worker in a process of its own."""

import os

import pytest

from ffmem.indexing import lane as room
from ffmem.indexing.lane import Lost, Nobody, ProcessLane


def test_a_silent_end_is_noticed(monkeypatch):
    monkeypatch.setattr(room, "_serve", os._exit)
    lane = ProcessLane("none", {}, 1)
    lane.process.kill()
    lane.process.join()
    with pytest.raises(Lost, match="signal 9"):
        lane.answer()
    lane.close()


def test_nobody_answers_and_has_read_nothing():
    nobody = Nobody()
    nobody.call("read", None)
    assert nobody.answer() is None
    assert nobody.read_so_far() == 0
    nobody.close()
