"""A service replaces its own dumps alone, whatever else lies in its folder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.data.test_full_disk import files_of_at_most

from rollwright.data import ListStorage, ReplayBuffer
from rollwright.data.replay_buffers.service import dumps as dumps_module
from rollwright.data.replay_buffers.service.dumps import Dumps


def keeper_of(buffer):
    return SimpleNamespace(buffer=buffer, changes=[], records={}, note_promises=lambda: None)


def test_folders_and_files_of_others_stay(tmp_path):
    (tmp_path / "dump-1").mkdir()
    (tmp_path / "dump-1" / "notes").write_text("mine")
    buffer = ReplayBuffer(storage=ListStorage(10))
    keeper, dumps = keeper_of(buffer), Dumps(str(tmp_path), 1)
    for count in (1, 2, 3):
        buffer.extend(torch.arange(2))
        dumps.save(keeper)
        if count == 2:
            (tmp_path / "dump-3" / "policy.pt").write_text("mine")
    assert (tmp_path / "dump-1" / "notes").read_text() == "mine"
    assert [file.name for file in (tmp_path / "dump-3").iterdir()] == ["policy.pt"]
    assert not (tmp_path / "dump-2").exists()
    restored = ReplayBuffer(storage=ListStorage(10))
    Dumps(str(tmp_path), 1).restore(restored)
    assert len(restored) == 6


@pytest.fixture
def clock(monkeypatch):
    """``clock.now``: the time for dumps."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(dumps_module, "time", clock)
    return clock


@pytest.mark.parametrize("limit", [8, 3000])  # the first file, and the one that names the folder of the dump
def test_a_dump_that_fails_is_tried_again_in_growing_pauses_and_leaves_the_last_one(tmp_path, clock, limit):
    buffer = ReplayBuffer(storage=ListStorage(10_000))
    keeper, dumps = keeper_of(buffer), Dumps(str(tmp_path), 1)
    buffer.extend(torch.arange(2))
    dumps.save(keeper)
    buffer.extend(torch.arange(1000))
    if limit > 1000:
        keeper.changes = list(range(limit))
        buffer.empty()
        buffer.extend(torch.arange(3))
    tried, begun = [], clock.now
    with files_of_at_most(limit):
        for _ in range(100):
            before = dumps._again_at
            dumps.save(keeper)
            if dumps._again_at != before:
                tried.append(clock.now - begun)
            assert dumps.failure is not None
            clock.now += 1
        with pytest.raises(OSError, match="File too large"):
            dumps.finish(keeper)
    assert tried == [0, 1, 3, 7, 15, 31, 63]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dump-1", "service.pt"]
    restored = ReplayBuffer(storage=ListStorage(10_000))
    Dumps(str(tmp_path), 1).restore(restored)
    assert len(restored) == 2
    clock.now += 1000
    dumps.save(keeper)
    assert dumps.failure is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dump-2", "service.pt"]
