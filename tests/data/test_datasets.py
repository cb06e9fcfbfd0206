from __future__ import annotations

import json
import re
import warnings

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from rollwright.collectors import Collector
from rollwright.data.datasets import (
    DatasetWriter,
    describe_dataset,
    episodes_of,
    load_dataset,
    remove_dataset,
    writer,
)
from rollwright.data.datasets.episodes import EpisodeScan, FrameColumns
from rollwright.data.layout import split_trajectories
from rollwright.testing.mocking_classes import IncrementingEnv


def batch(env_shape, steps, *, seed=0, **entries):
    """Frames of several dtypes and shapes, in which values are never zero."""
    torch.manual_seed(seed)
    shape = (*env_shape, steps)
    return TensorDict(
        {
            "pixels": torch.randint(1, 255, (*shape, 4, 3), dtype=torch.uint8),
            "scalar": torch.rand(shape) + 1,
            "half": torch.rand(*shape, 2).bfloat16() + 1,
            "nothing": torch.zeros(*shape, 0),
            "a/b c": torch.rand(*shape, 1) + 1,
            "nest": {"deep": {"flag": torch.rand(*shape, 1) < 0.5, "wide": torch.rand(*shape, 5).double() + 1}},
            "next": {"done": torch.rand(*shape, 1) < 0.2, "reward": torch.rand(*shape, 1)},
            **entries,
        },
        shape,
        names=[*[None] * len(env_shape), "time"],
    )


def assert_same(found, expected):
    assert found.batch_size == expected.batch_size
    expected_items = dict(expected.items(True, True))
    found_items = dict(found.items(True, True))
    assert found_items.keys() == expected_items.keys()
    for key, value in expected_items.items():
        assert found_items[key].dtype == value.dtype, key
        assert torch.equal(found_items[key], value), key


# Writing and loading -------------------------------------------------------------------------------


@pytest.mark.parametrize("env_shape", [(), (3,), (2, 2)])
def test_batches_become_one_long_batch(tmp_path, env_shape):
    batches = [batch(env_shape, steps, seed=steps) for steps in (5, 2, 7)]
    with DatasetWriter(tmp_path / "out", steps=14) as target:
        for each in batches:
            target.write(each)
            assert describe_dataset(tmp_path / "out")["steps"] == target.steps
    found = load_dataset(tmp_path / "out")
    assert_same(found, torch.cat(batches, -1))
    assert found.names == [*[None] * len(env_shape), "time"]
    description = describe_dataset(tmp_path / "out")
    assert description["complete"] is True
    assert description["frames"] == target.frames == found.numel()


@pytest.mark.parametrize("env_shape", [(), (3,)])
def test_what_was_not_collected_takes_no_space(tmp_path, env_shape):
    first, second = batch(env_shape, 5), batch(env_shape, 6, seed=1)
    with DatasetWriter(tmp_path / "out", steps=10**6) as target:
        target.write(first)
        target.write(second, steps=4)
    assert_same(load_dataset(tmp_path / "out"), torch.cat([first, second[..., :4]], -1))
    assert describe_dataset(tmp_path / "out")["complete"] is False
    assert sum(file.stat().st_size for file in (tmp_path / "out").rglob("*.memmap")) < 10_000
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dataset.json", "frames-compact"]


def test_every_moment_on_disk_is_a_dataset(tmp_path):
    """What a process that is killed between two calls leaves behind."""
    batches = [batch((2,), 5, seed=i) for i in range(3)]
    target = DatasetWriter(tmp_path / "out", steps=100)
    with pytest.raises(ValueError, match="before its first batch was complete"):
        load_dataset(tmp_path / "out")
    for i, each in enumerate(batches):
        target.write(each)
        assert_same(load_dataset(tmp_path / "out"), torch.cat(batches[: i + 1], -1))
        assert describe_dataset(tmp_path / "out")["complete"] is False
    target.close()


def test_giving_back_space_can_be_interrupted_or_fail(tmp_path, monkeypatch):
    for name, interrupted in {"interrupted": lambda: True, "failed": lambda: False}.items():
        target = DatasetWriter(tmp_path / name, steps=100)
        target.write(batch((2,), 5))
        if name == "failed":
            monkeypatch.setattr(writer, "copy_bytes", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        target.close(interrupted)
        assert_same(load_dataset(tmp_path / name), batch((2,), 5))
        assert not (tmp_path / name / "frames-compact").exists()


def test_failed_write_leaves_what_was_complete(tmp_path, monkeypatch):
    write_all = writer.write_all
    target = DatasetWriter(tmp_path / "out", steps=20)
    target.write(batch((2,), 5))

    def fail(file, offset, data):
        if "reward" in file.name:
            raise OSError("no space")
        write_all(file, offset, data)

    monkeypatch.setattr(writer, "write_all", fail)
    with pytest.raises(OSError, match="no space"):
        target.write(batch((2,), 5, seed=1))
    monkeypatch.undo()
    target.write(batch((2,), 5, seed=2))
    target.close()
    assert_same(load_dataset(tmp_path / "out"), torch.cat([batch((2,), 5), batch((2,), 5, seed=2)], -1))


def test_trajectories_are_contiguous(tmp_path):
    env = IncrementingEnv(max_steps=4, batch_size=[3])
    collector = Collector(env, frames_per_batch=9, total_frames=45)
    with collector, DatasetWriter(tmp_path / "out", steps=15) as target:
        for each in collector:
            target.write(each)
    frames = load_dataset(tmp_path / "out")
    split = split_trajectories(frames)
    lengths = split["collector", "mask"].sum(-1)
    counts = describe_dataset(tmp_path / "out")["episodes"]
    assert len(lengths) == counts["count"] + counts["unfinished"]
    assert counts["length"] == {"mean": 5, "min": 5, "max": 5}


def test_loading_copies_nothing_and_files_stay_as_they_are(tmp_path):
    with DatasetWriter(tmp_path / "out", steps=5) as target:
        target.write(batch((), 5))
    assert load_dataset(tmp_path / "out")["pixels"].filename.endswith("pixels.memmap")


def test_batches_of_another_layout_are_refused(tmp_path):
    target = DatasetWriter(tmp_path / "out", steps=100)
    first = batch((2,), 5)
    target.write(first)
    wrong = {
        "'scalar' was float32 [] in the first batch and is now float64 []": first.clone().set(
            "scalar", torch.rand(2, 5).double()
        ),
        "'scalar' was float32 [] in the first batch and is now absent": first.exclude("scalar"),
        "'more' was absent in the first batch and is now float32 [1]": first.clone().set("more", torch.rand(2, 5, 1)),
        "expected environments [2]": batch((3,), 5),
        "at most 95 more steps": batch((2,), 96),
    }
    for message, each in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            target.write(each)
    target.close()
    with pytest.raises(ValueError, match="closed"):
        target.write(first)
    target.close()
    assert_same(load_dataset(tmp_path / "out"), first)


def test_objects_are_kept_or_left_out_as_asked(tmp_path):
    frames = batch((), 3).set("word", NonTensorData("hello", batch_size=[3]))
    with DatasetWriter(tmp_path / "kept", steps=3) as target:
        target.write(frames)
    assert list(load_dataset(tmp_path / "kept")["word"]) == ["hello"] * 3
    with DatasetWriter(tmp_path / "out", steps=3, leave_out_objects=True) as target:
        target.write(frames)
    assert target.left_out == ["word"]
    assert_same(load_dataset(tmp_path / "out"), batch((), 3))


def test_too_little_space_is_announced(tmp_path):
    target = DatasetWriter(tmp_path / "large", steps=10**11)
    with pytest.warns(UserWarning, match="are free at"):
        target.write(batch((), 3))
    target.close()
    target = DatasetWriter(tmp_path / "too_large", steps=10**18)
    with pytest.warns(UserWarning, match="are free at"), pytest.raises(OSError, match="cannot make files"):
        target.write(batch((), 3))
    target.close()
    assert not (tmp_path / "too_large").exists()


def test_targets(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file"):
        DatasetWriter(tmp_path / "file", steps=1)
    with pytest.raises(FileExistsError, match="no rollwright dataset"):
        DatasetWriter(tmp_path, steps=1, overwrite=True)
    with DatasetWriter(tmp_path / "deep" / "out", steps=3) as target:
        target.write(batch((), 3))
    with pytest.raises(FileExistsError, match="overwrite=True"):
        DatasetWriter(tmp_path / "deep" / "out", steps=1)
    with DatasetWriter(tmp_path / "deep" / "out", steps=2, overwrite=True) as target:
        target.write(batch((), 2))
    assert load_dataset(tmp_path / "deep" / "out").batch_size == (2,)
    with pytest.raises(ValueError, match="at least 1"):
        DatasetWriter(tmp_path / "new", steps=0)
    with pytest.raises(FileNotFoundError, match=r"dataset\.json"):
        load_dataset(tmp_path / "nowhere")


def test_removing_spares_what_is_not_ours(tmp_path):
    with DatasetWriter(tmp_path / "out", steps=3) as target:
        target.write(batch((), 3))
    (tmp_path / "out" / "notes.txt").write_text("mine")
    remove_dataset(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    with pytest.raises(FileNotFoundError):
        remove_dataset(tmp_path / "out")


@pytest.mark.parametrize("name", ["frames", "frames-compact"])
def test_what_users_put_beside_the_frames_is_spared(tmp_path, name):
    """By a writer that gives back space, by one that replaces the dataset, and by removing it."""
    mine = tmp_path / "out" / name / "plots" / "loss.png"
    for steps in (3, 5):
        with DatasetWriter(tmp_path / "out", steps=steps, overwrite=True) as target:
            target.write(batch((), 2))
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text(str(steps))
        assert load_dataset(tmp_path / "out").batch_size == (2,)
        assert mine.read_text() == str(steps)
    remove_dataset(tmp_path / "out")
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [mine]


def test_a_writer_without_batches_leaves_nothing(tmp_path):
    DatasetWriter(tmp_path / "out", steps=3).close()
    assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    DatasetWriter(tmp_path / "there", steps=3).close()
    assert not list((tmp_path / "there").iterdir())


def test_description_is_json_whatever_the_rewards(tmp_path):
    frames = batch((), 4)
    frames["next", "done"][:] = True
    frames["next", "reward"][1] = float("nan")
    with DatasetWriter(tmp_path / "out", steps=4) as target:
        target.write(frames)
    text = (tmp_path / "out" / "dataset.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["episodes"]["return"]["mean"] is None


# Episodes ------------------------------------------------------------------------------------------


def plain_episodes(rewards, done, terminated, ids=None, taken=None):
    """The same counts by a loop over frames."""
    found, unfinished = [], 0
    for row in range(rewards.shape[0]):
        total, length, last_id = 0.0, 0, None
        for t in range(rewards.shape[1]):
            here = taken is None or taken[row, t]
            identity = (here, None if ids is None else ids[row, t])
            if identity != last_id and length:
                unfinished += 1
                total, length = 0.0, 0
            last_id = identity
            if not here:
                continue
            total, length = total + rewards[row, t], length + 1
            if done[row, t]:
                found.append((total, length, bool(terminated[row, t]), t))
                total, length = 0.0, 0
        unfinished += length > 0
    return found, unfinished


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 11])
def test_scan_equals_a_loop(with_ids, with_mask, pieces):
    generator = np.random.default_rng(pieces)
    for _ in range(20):
        shape = (3, 33)
        rewards = generator.integers(0, 9, shape).astype(float)
        done = generator.random(shape) < 0.2
        terminated = done & (generator.random(shape) < 0.5)
        ids = np.cumsum(generator.random(shape) < 0.1, 1) if with_ids else None
        taken = generator.random(shape) < 0.8 if with_mask else np.ones(shape, bool)
        expected, unfinished = plain_episodes(rewards, done, terminated, ids, taken)
        scan, found = EpisodeScan(), []
        for columns in np.array_split(np.arange(33), pieces):
            part = [None if each is None else each[:, columns] for each in (rewards, done, terminated, ids, taken)]
            found += list(zip(*(each.tolist() for each in scan.update(FrameColumns(*part, True))), strict=True))
        assert sorted(found) == sorted(expected)
        assert scan.unfinished == unfinished


def test_one_nan_spoils_one_return():
    done = torch.tensor([0, 1, 0, 1], dtype=torch.bool)
    reward = torch.tensor([float("nan"), 1, 2, 3])
    episodes, _ = episodes_of(TensorDict({"next": {"reward": reward, "done": done}}, [4]))
    assert np.isnan(episodes.returns[0])
    assert episodes.returns[1] == 5


def test_episodes_of_padded_batches_and_nested_flags():
    rollout = IncrementingEnv(max_steps=3).rollout(10, break_when_any_done=False)
    padded = split_trajectories(rollout)
    assert padded.batch_size == (3, 4)
    for frames in (padded, rollout):
        episodes, unfinished = episodes_of(frames)
        assert (episodes.lengths.tolist(), unfinished) == ([4, 4], 1)
    done = torch.tensor([[False, False], [False, True], [True, True]])
    nested = TensorDict({"next": {"agents": TensorDict({"done": done, "terminated": done}, [3, 2])}}, [3])
    episodes, unfinished = episodes_of(nested)
    assert episodes.lengths.tolist() == [2, 1]
    assert unfinished == 0


def test_pieces_agree_with_the_whole(monkeypatch):
    from rollwright.data.datasets import episodes as module

    frames = batch((3,), 50)
    whole, unfinished = episodes_of(frames)
    monkeypatch.setattr(module, "_CHUNK", 21)
    again, still = episodes_of(frames)
    assert sorted(whole.returns) == pytest.approx(sorted(again.returns))
    assert sorted(zip(whole.ends, whole.lengths, strict=True)) == sorted(zip(again.ends, again.lengths, strict=True))
    assert unfinished == still


def test_frames_without_flags():
    with pytest.raises(KeyError, match="'done'"):
        episodes_of(TensorDict({"x": torch.zeros(3)}, [3]))
    with pytest.raises(KeyError, match="'done'"):
        episodes_of(TensorDict({"next": {"x": torch.zeros(3)}}, [3]))
    assert len(episodes_of(batch((), 3)[:0])[0].returns) == 0


def test_writer_counts_nothing_without_flags(tmp_path):
    with warnings.catch_warnings(), DatasetWriter(tmp_path / "out", steps=3) as target:
        target.write(TensorDict({"x": torch.ones(3)}, [3]))
    assert describe_dataset(tmp_path / "out")["episodes"]["count"] == 0
