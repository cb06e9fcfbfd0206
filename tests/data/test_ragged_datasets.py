"""Datasets of frames with text, objects and ragged entries."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorClass, TensorDict, lazy_stack

from rollwright.cli.inspect import run
from rollwright.cli.parser import build_parser
from rollwright.data.datasets import DatasetWriter, describe_dataset, episodes_of, load_dataset, remove_dataset
from rollwright.errors import DamagedFileError


class Chat(TensorClass):
    role: str
    content: str


def turn(env: int, step: int) -> TensorDict:
    data = {
        "serial": torch.tensor(100 * env + step),
        "text": "é" * step,
        "tokens": torch.arange(step + env),
        "meta": NonTensorData({"turns": [step, None, ("a",)]}),
        "chat": Chat(role="user", content=str(step)),
        "next": {"done": torch.tensor([step % 3 == 2]), "reward": torch.tensor([1.0])},
    }
    if step % 2:
        data["odd"] = torch.ones(step)
    return TensorDict(data)


def turns(env_shape: tuple[int, ...], start: int, steps: int) -> LazyStackedTensorDict:
    if not env_shape:
        return lazy_stack([turn(0, t) for t in range(start, start + steps)])
    each = [lazy_stack([turn(env, t) for env in range(env_shape[0])]) for t in range(start, start + steps)]
    return lazy_stack(each, 1)


def check(frame: TensorDict, env: int, step: int) -> None:
    expected = turn(env, step)
    assert set(frame.keys(True, True)) == set(expected.keys(True, True))
    assert int(frame["serial"]) == int(expected["serial"])
    assert frame["text"] == expected["text"]
    assert torch.equal(frame["tokens"], expected["tokens"])
    assert frame["meta"] == {"turns": [step, None, ("a",)]}
    assert type(frame["chat"]) is Chat
    assert frame["chat"].content == str(step)
    if step % 2:
        assert torch.equal(frame["odd"], torch.ones(step))


@pytest.fixture
def folder(tmp_path):
    with DatasetWriter(tmp_path / "out", steps=7, source={"model": "tiny"}) as target:
        target.write(turns((), 0, 4))
        target.write(turns((), 4, 5), steps=3)
    return tmp_path / "out"


@pytest.mark.parametrize("env_shape", [(), (2,)])
def test_frames_come_back_whole_and_in_slices(tmp_path, env_shape):
    with DatasetWriter(tmp_path / "out", steps=9) as target:
        for start, steps in ((0, 4), (4, 1), (5, 4)):
            target.write(turns(env_shape, start, steps))
            assert load_dataset(tmp_path / "out").batch_size[-1] == target.steps
    for start, stop in ((0, 9), (2, 5), (8, 9)):
        found = load_dataset(tmp_path / "out", start=start, stop=stop)
        assert isinstance(found, LazyStackedTensorDict)
        assert found.batch_size == (*env_shape, stop - start)
        assert found.names[-1] == "time"
        for t in range(start, stop):
            step = found[..., t - start]
            for env in range(env_shape[0]) if env_shape else [0]:
                check(step[env] if env_shape else step, env, t)
    description = describe_dataset(tmp_path / "out")
    assert (description["complete"], description["steps"], description["data"]) == (True, 9, "rows")


def test_episodes_are_counted(folder):
    assert describe_dataset(folder)["episodes"]["count"] == 2
    found, unfinished = episodes_of(load_dataset(folder))
    assert (found.returns.tolist(), unfinished) == ([3.0, 3.0], 1)


def test_slices_of_a_dataset_of_tensors(tmp_path):
    with DatasetWriter(tmp_path / "out", steps=5) as target:
        target.write(TensorDict({"x": torch.arange(5)}, [5]))
    assert load_dataset(tmp_path / "out", start=2, stop=4)["x"].tolist() == [2, 3]
    for start, stop in ((2, 2), (-1, 3), (0, 6)):
        with pytest.raises(ValueError, match="start, stop: expected some of the 5 steps"):
            load_dataset(tmp_path / "out", start=start, stop=stop)


def test_a_ragged_batch_after_one_of_tensors_is_refused(tmp_path):
    with DatasetWriter(tmp_path / "out", steps=9) as target:
        target.write(TensorDict({"x": torch.arange(5)}, [5]))
        with pytest.raises(ValueError, match=r"those of the first batch did not.*dataset of its own"):
            target.write(turns((), 0, 2))
    assert load_dataset(tmp_path / "out")["x"].tolist() == [0, 1, 2, 3, 4]


def test_a_batch_of_tensors_after_a_ragged_one_is_kept(tmp_path):
    with DatasetWriter(tmp_path / "out", steps=9) as target:
        target.write(turns((), 0, 2))
        target.write(TensorDict({"x": torch.arange(2)}, [2]))
        with pytest.raises(ValueError, match="expected environments"):
            target.write(turns((2,), 0, 2))
    assert int(load_dataset(tmp_path / "out", start=3)[0]["x"]) == 1


def test_what_cannot_be_kept_is_named(tmp_path):
    with (
        DatasetWriter(tmp_path / "out", steps=9) as target,
        pytest.raises(TypeError, match=r"batch: expected .* got an object of type builtins.object in 'odd'"),
    ):
        target.write(lazy_stack([TensorDict({"odd": NonTensorData(object())})]))
    with DatasetWriter(tmp_path / "without", steps=9, leave_out_objects=True) as target:
        target.write(turns((), 0, 4))
    assert sorted(map(str, target.left_out)) == ["chat", "meta", "text"]
    assert set(load_dataset(tmp_path / "without")[1].keys()) == {"serial", "tokens", "next", "odd"}


def test_damage_is_noticed(folder):
    rows, index = folder / "rows" / "frames.rows", folder / "rows" / "frames.index"
    whole, numbers = rows.read_bytes(), index.read_bytes()

    def refused(match: str) -> None:
        with pytest.raises(DamagedFileError, match=match):
            load_dataset(folder)
        rows.write_bytes(whole)
        index.write_bytes(numbers)

    for at in range(0, len(whole), 97):
        rows.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        refused("does not have the checksum")
    for at in range(0, 7 * 24, 5):
        index.write_bytes(numbers[:at] + bytes([numbers[at] ^ 4]) + numbers[at + 1 :])
        refused("damaged")
    rows.write_bytes(whole[:-3])
    refused("frame 6 lies at byte")
    index.write_bytes(numbers[:-3])
    refused("bytes, expected at least")
    rows.unlink()
    refused("it is missing")
    index.unlink()
    refused("it is missing")
    for t, frame in enumerate(load_dataset(folder)):
        check(frame, 0, t)


def test_an_older_version_is_told_that_it_cannot_read_it(folder):
    assert json.loads((folder / "dataset.json").read_text())["version"] == 2


def test_it_is_replaced_and_removed_whole(folder):
    with DatasetWriter(folder, steps=2, overwrite=True) as target:
        target.write(TensorDict({"x": torch.arange(2)}, [2]))
    assert not (folder / "rows").exists()
    with DatasetWriter(folder, steps=2, overwrite=True) as target:
        target.write(turns((), 0, 2))
    assert not (folder / "frames").exists()
    remove_dataset(folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("options", [[], ["--json"], ["--check"]])
def test_inspect_describes_it(folder, options, capsys):
    run(build_parser().parse_args(["inspect", str(folder), *options]))
    shown = capsys.readouterr().out
    assert "tokens" in shown
    assert "text" in shown
