from __future__ import annotations

import json
import struct
import sys

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tests.patience import patient

from rollwright.collectors import Collector
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from rollwright.data.datasets import DatasetWriter, episodes_of, load_dataset
from rollwright.envs import GymEnv


@pytest.fixture
def dataset(run, tmp_path):
    out = tmp_path / "runs" / "cartpole"
    assert run("collect", "CartPole-v1", "--frames", 600, "--num-envs", 3, "--seed", 0, "--output", out).status == 0
    return out


@pytest.fixture
def rollout():
    env = GymEnv("CartPole-v1")
    env.set_seed(0)
    torch.manual_seed(0)
    yield env.rollout(100, break_when_any_done=False)
    env.close()


def test_shows_entries_and_episodes(run, dataset):
    result = run("inspect", dataset)
    assert (result.status, result.err) == (0, "")
    episodes, _ = episodes_of(load_dataset(dataset))
    lines = result.out.splitlines()
    assert lines[0] == f"{dataset}: 600 frames [3, 200], complete"
    assert lines[1].startswith("  env CartPole-v1, num_envs 3, policy random, seed 0, ")
    assert " by rollwright " in lines[2]
    assert lines[4].split() == ["entry", "shape", "dtype", "size"]
    table = [" ".join(line.split()) for line in lines]
    assert "next.reward [3, 200, 1] float32 2.4 kB" in table
    assert "collector.traj_ids [3, 200] int64 4.8 kB" in table
    count = len(episodes.returns)
    assert f"episodes   {count} complete ({count} terminated, 0 truncated), 3 unfinished" in lines
    last = next(line for line in lines if line.startswith("returns"))
    assert f"mean {episodes.returns.mean():.1f}" in last
    assert "█" in last


def test_json_says_the_same(run, dataset):
    result = run("inspect", dataset, "--json")
    report = json.loads(result.out)
    episodes, unfinished = episodes_of(load_dataset(dataset))
    assert report["complete"] is True
    assert (report["frames"], report["batch_size"]) == (600, [3, 200])
    assert report["source"]["env"] == "CartPole-v1"
    assert report["bytes"] == sum(entry["bytes"] for entry in report["entries"]) == 600 * 66
    counts = report["episodes"]
    assert (counts["count"], counts["unfinished"]) == (len(episodes.returns), unfinished)
    assert counts["return"]["max"] == episodes.returns.max()
    assert sum(counts["length"]["histogram"]) == counts["count"]


def test_plot_leaves_a_picture(run, dataset, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.png"
    result = run("inspect", dataset, "--plot", picture)
    assert result.status == 0, result.err
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 500
    assert height > 400
    assert result.out.splitlines()[-1] == f"picture: {picture}"


def test_plot_shows_the_mean_of_few_episodes(run, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    out = tmp_path / "few"
    assert run("collect", "CartPole-v1", "--frames", 200, "--seed", 0, "--output", out).status == 0
    episodes, _ = episodes_of(load_dataset(out))
    drawn = []
    monkeypatch.setattr(figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))
    run("inspect", out, "--plot", tmp_path / "picture.png")
    dots, mean = drawn[0].axes[0].get_lines()
    count = len(episodes.returns)
    assert 2 < count < 100
    assert len(mean.get_xdata()) == len(dots.get_xdata()) == count
    assert mean.get_label() == f"mean of the last {count}"
    assert mean.get_ydata()[[0, -1]] == pytest.approx([episodes.returns[0], episodes.returns.mean()])


def test_plot_without_matplotlib(run, dataset, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("inspect", dataset, "--plot", tmp_path / "picture.png")
    assert result.status == 2
    assert "pip install 'rollwright[plot]'" in result.err


@pytest.mark.parametrize("name", ["picture.docx", "missing/picture.png"])
def test_plot_that_cannot_be_written(run, dataset, tmp_path, name):
    pytest.importorskip("matplotlib")
    result = run("inspect", dataset, "--plot", tmp_path / name)
    assert result.status == 2
    assert "--plot: cannot write" in result.err


def test_plot_without_episodes(run, tmp_path):
    run("collect", "Pendulum-v1", "--frames", 20, "--output", tmp_path / "out")
    result = run("inspect", tmp_path / "out", "--plot", tmp_path / "picture.png")
    assert result.status == 1
    assert "no episode ended" in result.err


def test_plain_memory_mapped_folders_and_files(run, tmp_path, rollout):
    rollout.memmap(tmp_path / "folder")
    torch.save(rollout.clone(), tmp_path / "file.pt")
    episodes, _ = episodes_of(rollout)
    for path in (tmp_path / "folder", tmp_path / "file.pt"):
        result = run("inspect", path, "--json")
        assert result.status == 0, result.err
        report = json.loads(result.out)
        assert report["complete"] is None
        assert report["episodes"]["count"] == len(episodes.returns) > 1
        assert report["episodes"]["return"]["mean"] == pytest.approx(episodes.returns.mean())
        assert run("inspect", path).status == 0


def test_frames_without_flags_time_or_one_shape(run, tmp_path):
    cases = {
        "no_flags": (TensorDict({"x": torch.zeros(5)}, [5]), "there is no flag ('next', 'done')"),
        "no_time": (TensorDict({"x": torch.zeros(5)}), "there is no dimension of time"),
        "ragged": (
            LazyStackedTensorDict(
                *[
                    TensorDict({"x": torch.zeros(n, 1), "next": {"done": torch.zeros(n, 1, dtype=torch.bool)}}, [n])
                    for n in (2, 3)
                ]
            ),
            "frames differ in shape",
        ),
    }
    for name, (frames, why) in cases.items():
        frames.memmap(tmp_path / name)
        result = run("inspect", tmp_path / name)
        assert result.status == 0, result.err
        assert f"episodes   unknown: {why}" in result.out


def test_dataset_without_a_complete_batch(run, tmp_path):
    DatasetWriter(tmp_path / "out", steps=10)  # as a killed process leaves it
    result = run("inspect", tmp_path / "out")
    assert result.status == 0
    assert "0 frames" in result.out
    assert "INCOMPLETE" in result.out
    assert json.loads(run("inspect", tmp_path / "out", "--json").out)["frames"] == 0


def test_wrong_paths(run, tmp_path, dataset):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.pt").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "minari" / "data").mkdir(parents=True)
    (tmp_path / "minari" / "data" / "metadata.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "dataset.json").write_text("{")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dataset.json").write_text("{}")
    (tmp_path / "later").mkdir()
    later = json.loads((dataset / "dataset.json").read_text()) | {"version": 99}
    (tmp_path / "later" / "dataset.json").write_text(json.dumps(later))
    expected = {
        "missing": "there is no",
        "empty": "holds neither a dataset.json, a memory-mapped TensorDict, a replay buffer nor a dataset of Minari",
        "text.pt": "text.pt is damaged, or was not written by torch.save",
        "list.pt": "holds a list, expected a TensorDict",
        "minari": "holds neither a dataset.json, a memory-mapped TensorDict, a replay buffer nor a dataset of Minari",
        "broken": "no readable JSON",
        "other": "describes no rollwright dataset",
        "later": "format version 99",
    }
    for name, message in expected.items():
        result = run("inspect", tmp_path / name)
        assert result.status in (1, 2), name
        assert message in result.err
        assert len(result.err.splitlines()) == 1


def test_damaged_frames(run, dataset):
    reward = dataset / "frames" / "next" / "reward.memmap"
    reward.write_bytes(reward.read_bytes()[:100])
    result = run("inspect", dataset)
    assert result.status == 1
    assert "has 100 bytes, expected 2400" in result.err
    reward.unlink()
    assert "next/reward.memmap is missing" in run("inspect", dataset).err
    assert not reward.exists()


def test_ascii_terminals_get_ascii_bars(dataset, capsys, monkeypatch):
    import io

    from rollwright.cli import main

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["inspect", str(dataset)]) == 0
    out.flush()
    assert b"returns" in out.buffer.getvalue()


def test_reader_of_a_pipe_may_leave(spawn, dataset):
    process = spawn("inspect", dataset)
    process.stdout.close()
    assert process.wait(timeout=patient(60)) == 0
    assert process.stderr.read() == ""


@pytest.mark.parametrize("kind", ["rows", "files", "list", "two dimensions", "empty"])
def test_a_saved_replay_buffer(run, tmp_path, kind):
    storages = {
        "rows": lambda: LazyTensorStorage(150),
        "files": lambda: LazyMemmapStorage(150, scratch_dir=tmp_path / "buffer"),
        "list": lambda: ListStorage(150),
        "two dimensions": lambda: LazyTensorStorage(400, ndim=2),
        "empty": lambda: LazyTensorStorage(150),
    }
    buffer = TensorDictReplayBuffer(storage=storages[kind](), batch_size=8)
    if kind != "empty":
        options = {} if kind == "two dimensions" else {"trajs_per_batch": 1}
        env = GymEnv("CartPole-v1", num_envs=2)
        with Collector(env, replay_buffer=buffer, frames_per_batch=100, total_frames=300, **options) as collector:
            collector.set_seed(0)
            for _ in collector:
                pass
    buffer.dumps(tmp_path / "buffer")
    result = run("inspect", tmp_path / "buffer", "--check", "--json")
    report = json.loads(result.out)
    assert result.status == 0
    assert report["frames"] == len(buffer)
    assert report["buffer"]["written"] == buffer.write_count
    assert not [finding for finding in report["findings"] if finding["is_error"]]
    if kind != "empty":
        assert report["episodes"]["count"] > 3
        assert f"written {buffer.write_count}" in run("inspect", tmp_path / "buffer").out


def test_a_check_of_a_saved_replay_buffer_finds_a_broken_boundary(run, tmp_path):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(150), batch_size=8)
    with Collector(GymEnv("CartPole-v1"), replay_buffer=buffer, frames_per_batch=100, total_frames=100) as collector:
        for _ in collector:
            pass
    frame = buffer[5]
    frame["next", "observation"] += 1
    buffer[5] = frame
    buffer.dumps(tmp_path / "buffer")
    result = run("inspect", tmp_path / "buffer", "--check")
    assert result.status == 1
    assert "first at frame [5]" in result.out
