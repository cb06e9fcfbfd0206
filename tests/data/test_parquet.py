"""Parquet files: frames come back as they were, and other programs read them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.data.datasets import load_dataset, save_parquet
from rollwright.envs import GymEnv
from rollwright.errors import MissingExtraError


def batch():
    with Collector(GymEnv("CartPole-v1", num_envs=2), frames_per_batch=40) as collector:
        return collector.next()


def test_frames_come_back_as_they_were(tmp_path):
    pytest.importorskip("pyarrow")
    frames = batch()
    frames["pixels"] = torch.randint(256, (2, 20, 4, 3, 3), dtype=torch.uint8)
    frames["half"] = torch.rand(2, 20).half()
    save_parquet(frames, tmp_path / "frames.parquet")
    found = load_dataset(tmp_path / "frames.parquet")
    assert (found.shape, found.names) == (frames.shape, frames.names)
    assert {key: value.dtype for key, value in found.items(True, True)} == {
        key: value.dtype for key, value in frames.items(True, True)
    }
    assert (found == frames).all()
    assert (load_dataset(tmp_path / "frames.parquet", start=3, stop=5) == frames[:, 3:5]).all()
    assert [path.name for path in tmp_path.iterdir()] == ["frames.parquet"]


def test_other_programs_find_a_row_for_each_frame(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    frames = batch()
    save_parquet(frames, tmp_path / "frames.parquet")
    rows = parquet.read_table(tmp_path / "frames.parquet").to_pylist()
    assert len(rows) == 40
    assert rows[21]["observation"] == frames["observation"][1, 1].tolist()
    assert rows[21]["next.reward"] == 1.0


def test_files_of_other_programs_are_read(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "other.parquet"
    parquet.write_table(arrow.table({"state": [[1.0, 2.0], [3.0, 4.0]], "next.reward": [0.5, 1.5]}), path)
    found = load_dataset(path)
    assert found["state"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert found["next", "reward"].tolist() == [0.5, 1.5]
    parquet.write_table(arrow.table({"text": ["a", "b"]}), path)
    with pytest.raises(ValueError, match="'text': expected a column of numbers"):
        load_dataset(path)


def test_what_parquet_has_not_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path: expected a path that ends in .parquet, got 'frames.csv'"):
        save_parquet(batch(), "frames.csv")
    pytest.importorskip("pyarrow")
    odd = TensorDict({"x": torch.zeros(3, dtype=torch.bfloat16)}, [3])
    with pytest.raises(ValueError, match=r"'x': expected a tensor of numbers that Parquet has, got torch.bfloat16"):
        save_parquet(odd, tmp_path / "x.parquet")


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rollwright\[parquet\]'"):
        save_parquet(batch(), tmp_path / "frames.parquet")


def test_a_folder_of_hugging_face_is_read(tmp_path):
    """As ``Dataset.save_to_disk()`` writes it: streams of Arrow in shards, listed in ``state.json``."""
    arrow = pytest.importorskip("pyarrow")
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for n, name in enumerate(names):
        table = arrow.table({"observation": [[1.0 + n, 2.0], [3.0, 4.0]], "next.reward": [0.5, 1.5 + n]})
        with arrow.OSFile(str(tmp_path / name), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (tmp_path / "dataset_info.json").write_text("{}")
    frames = load_dataset(tmp_path)
    assert frames["observation"].tolist() == [[1.0, 2.0], [3.0, 4.0], [2.0, 2.0], [3.0, 4.0]]
    assert frames["next", "reward"].tolist() == [0.5, 1.5, 0.5, 2.5]
    assert load_dataset(tmp_path, start=1, stop=3)["next", "reward"].tolist() == [1.5, 0.5]
