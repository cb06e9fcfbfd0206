"""A service replaces its own dumps alone, whatever else lies in its folder."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from rollwright.data import ListStorage, ReplayBuffer
from rollwright.data.replay_buffers.service.serving.dumps import Dumps


def test_folders_and_files_of_others_stay(tmp_path):
    (tmp_path / "dump-1").mkdir()
    (tmp_path / "dump-1" / "notes").write_text("mine")
    buffer = ReplayBuffer(storage=ListStorage(10))
    keeper, dumps = SimpleNamespace(buffer=buffer, changes=[], records={}), Dumps(str(tmp_path), 1)
    for count in (1, 2, 3):
        buffer.extend(torch.arange(2))
        dumps.when_due(keeper)
        if count == 2:
            (tmp_path / "dump-3" / "policy.pt").write_text("mine")
    assert (tmp_path / "dump-1" / "notes").read_text() == "mine"
    assert [file.name for file in (tmp_path / "dump-3").iterdir()] == ["policy.pt"]
    assert not (tmp_path / "dump-2").exists()
    restored = ReplayBuffer(storage=ListStorage(10))
    Dumps(str(tmp_path), 1).restore(restored)
    assert len(restored) == 6
