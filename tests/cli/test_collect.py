from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.data.datasets import describe_dataset, episodes_of, load_dataset
from rollwright.envs import GymEnv


def collected(env: GymEnv, seed: int, frames: int, **options):
    collector = Collector(env, None, frames_per_batch=frames, total_frames=frames, **options)
    collector.set_seed(seed)
    with collector:
        return collector.next()


def assert_equal(found, expected):
    expected_items = dict(expected.items(True, True))
    found_items = dict(found.items(True, True))
    assert found_items.keys() == expected_items.keys()
    for key, value in expected_items.items():
        assert torch.equal(found_items[key], value), key


@pytest.mark.parametrize("num_envs", [1, 3])
def test_writes_what_a_collector_delivers(run, tmp_path, num_envs):
    out = tmp_path / "out"
    result = run(
        *("collect", "CartPole-v1", "--frames", 600, "--frames-per-batch", 60, "--num-envs", num_envs),
        *("--seed", 3, "--output", out),
    )
    assert result.status == 0, result.err
    env = GymEnv("CartPole-v1", **({"num_envs": num_envs} if num_envs > 1 else {}))
    expected = collected(env, 3, 600)
    frames = load_dataset(out)
    assert frames.batch_size == expected.batch_size
    assert frames.names[-1] == "time"
    assert_equal(frames, expected)


def test_describes_the_dataset(run, tmp_path):
    out = tmp_path / "out"
    assert run("collect", "CartPole-v1", "--frames", 300, "--seed", 0, "--num-envs", 2, "--output", out).status == 0
    description = json.loads((out / "dataset.json").read_text())
    frames = load_dataset(out)
    episodes, unfinished = episodes_of(frames)
    assert description["complete"] is True
    assert (description["frames"], description["batch_size"]) == (300, [2, 150])
    assert description["source"] == {
        "env": "CartPole-v1",
        "env_kwargs": {},
        "num_envs": 2,
        "categorical_actions": False,
        "max_frames_per_traj": None,
        "policy": "random",
        "seed": 0,
        "frames": 300,
        "frames_per_batch": 300,
        "device": None,
    }
    counts = description["episodes"]
    assert (counts["count"], counts["unfinished"]) == (len(episodes.returns), unfinished)
    assert counts["return"]["mean"] == pytest.approx(episodes.returns.mean())
    entries = {tuple(entry["key"]): (entry["shape"], entry["dtype"]) for entry in description["entries"]}
    assert entries["observation",] == ([4], "float32")
    assert entries["next", "done"] == ([1], "bool")
    assert set(description["versions"]) == {"rollwright", "torch", "tensordict", "gymnasium", "python"}


def test_same_seed_same_frames_and_a_drawn_seed_is_written_down(run, tmp_path):
    def collect(name: str, *seed: object):
        assert run("collect", "CartPole-v1", "--frames", 100, "--output", tmp_path / name, *seed).status == 0
        return load_dataset(tmp_path / name), describe_dataset(tmp_path / name)["source"]["seed"]

    first, seed = collect("first")
    again, _ = collect("again", "--seed", seed)
    assert_equal(again, first)


def test_prints_lines_where_stdout_is_no_terminal(run, tmp_path):
    result = run("collect", "CartPole-v1", "--frames", 200, "--seed", 0, "--output", tmp_path / "out")
    assert result.err == ""
    start, progress, saved, hint = result.out.splitlines()
    assert start.startswith("collecting 200 frames of CartPole-v1 in 1 environment (policy random, seed 0) into")
    assert progress.startswith("200 / 200 frames, ")
    assert "frames/s, " in progress
    assert " episodes, mean return " in progress
    assert saved.startswith("saved 200 frames, ")
    assert hint == f"look at it: rollwright inspect {tmp_path / 'out'}"


def test_quiet_prints_nothing(run, tmp_path):
    result = run("collect", "CartPole-v1", "--frames", 100, "--output", tmp_path / "out", "--quiet")
    assert result == (0, "", "")


def test_announces_rounding_in_a_line(run, tmp_path):
    result = run(
        *("collect", "CartPole-v1", "--frames", 100, "--frames-per-batch", 30, "--num-envs", 4),
        *("--output", tmp_path / "out"),
    )
    note = next(line for line in result.out.splitlines() if line.startswith("note: "))
    assert "frames_per_batch=30 becomes 32" in note
    assert "total_frames=100 becomes 128" in note
    assert "saved 128 frames" in result.out
    assert "Warning" not in result.out + result.err


def test_max_frames_per_traj_truncates(run, tmp_path):
    out = tmp_path / "out"
    run("collect", "Pendulum-v1", "--frames", 100, "--max-frames-per-traj", 20, "--output", out)
    frames = load_dataset(out)
    assert frames["next", "truncated"].flatten().nonzero().flatten().tolist() == [19, 39, 59, 79, 99]
    assert describe_dataset(out)["episodes"]["truncated"] == 5


def test_env_kwargs_and_categorical_actions(run, tmp_path):
    out = tmp_path / "out"
    result = run(
        *("collect", "FrozenLake-v1", "--env-kwargs", '{"is_slippery": false}', "--categorical-actions"),
        *("--frames", 50, "--output", out),
    )
    assert result.status == 0, result.err
    assert load_dataset(out)["action"].dtype == torch.int64
    assert load_dataset(out)["action"].shape == (50,)


def test_default_output_is_named_after_the_environment(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("collect", "CartPole-v1", "--frames", 20).status == 0
    assert load_dataset("rollwright-data/CartPole-v1").batch_size == (20,)


class Speaking(gymnasium.Env):
    """Says a word with every number."""

    observation_space = gymnasium.spaces.Dict(
        {"number": gymnasium.spaces.Box(0, 10, (1,)), "word": gymnasium.spaces.Text(10)}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"number": np.zeros(1, np.float32), "word": "begin"}, {}

    def step(self, action):
        return {"number": np.ones(1, np.float32), "word": "go"}, 1.0, bool(action), False, {}


@pytest.fixture
def speaking():
    gymnasium.register("Speaking-v0", entry_point=Speaking)
    yield "Speaking-v0"
    gymnasium.registry.pop("Speaking-v0")


def test_what_is_no_tensor_is_left_out_and_named(run, tmp_path, speaking):
    out = tmp_path / "out"
    result = run("collect", speaking, "--frames", 40, "--output", out)
    assert result.status == 0, result.err
    assert "left out, since they are no tensors" in result.out
    assert "word" in result.out
    assert load_dataset(out)["number"].shape == (40, 1)
    assert ["word"] in describe_dataset(out)["left_out"]
    assert "left out" in run("inspect", out).out


# Refusals ------------------------------------------------------------------------------------------

WRONG = {
    "no command": ([], "required: COMMAND"),
    "unknown command": (["colect"], "invalid choice"),
    "no environment": (["collect"], "required: ENV_ID"),
    "unknown environment": (["collect", "CartPol-v1"], "Did you mean: `CartPole`?"),
    "unknown version": (["collect", "CartPole-v99"], "VersionNotFound"),
    "zero frames": (["collect", "CartPole-v1", "--frames", "0"], "--frames: expected a whole number of at least 1"),
    "half a frame": (["collect", "CartPole-v1", "--frames", "1.5"], "--frames: expected a whole number"),
    "word for frames": (["collect", "CartPole-v1", "--frames", "many"], "got 'many'"),
    "no envs": (["collect", "CartPole-v1", "--num-envs", "0"], "--num-envs: expected a whole number"),
    "negative seed": (["collect", "CartPole-v1", "--seed=-1"], "--seed: expected a whole number from 0"),
    "kwargs no JSON": (["collect", "CartPole-v1", "--env-kwargs", "{g: 1}"], "expected a JSON object"),
    "kwargs a list": (["collect", "CartPole-v1", "--env-kwargs", "[1]"], "expected a JSON object"),
    "unknown kwargs": (["collect", "CartPole-v1", "--env-kwargs", '{"a": 1}'], "unexpected keyword argument 'a'"),
    "reserved kwargs": (["collect", "CartPole-v1", "--env-kwargs", '{"num_envs": 2}'], "has an option of its own"),
    "unknown format": (["collect", "CartPole-v1", "--format", "csv"], "invalid choice"),
    "id without minari": (["collect", "CartPole-v1", "--dataset-id", "a-v0"], "add --format minari"),
    "unknown device": (["collect", "CartPole-v1", "--device", "tpu?"], "device: expected a device"),
    "policy without colon": (["collect", "CartPole-v1", "--policy", "best"], "expected random, MODULE:FACTORY"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_refused_in_a_line_or_two(run, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err
    said = [line for line in result.err.splitlines() if line.startswith("rollwright")]
    assert len(said) == 1
    assert not list(tmp_path.iterdir())


def test_missing_package_is_named(run, tmp_path, monkeypatch):
    def make(*_, **__):
        raise gymnasium.error.DependencyNotInstalled('Box2D is missing, run `pip install "gymnasium[box2d]"`')

    monkeypatch.setattr(gymnasium, "make", make)
    result = run("collect", "CartPole-v1", "--output", tmp_path / "out")
    assert result.status == 2
    assert 'pip install "gymnasium[box2d]"' in result.err


@pytest.mark.parametrize("what", ["file", "other files", "dataset"])
def test_existing_output_is_refused(run, tmp_path, what):
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    elif what == "other files":
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    else:
        assert run("collect", "CartPole-v1", "--frames", 50, "--output", out).status == 0
    result = run("collect", "CartPole-v1", "--frames", 20, "--output", out)
    assert result.status == 2
    expected = {"file": "is a file", "other files": "no rollwright dataset", "dataset": "--overwrite"}[what]
    assert expected in result.err
    if what == "dataset":
        assert load_dataset(out).batch_size == (50,)


def test_overwrite_replaces_datasets_only(run, tmp_path):
    out = tmp_path / "out"
    run("collect", "CartPole-v1", "--frames", 50, "--output", out)
    assert run("collect", "CartPole-v1", "--frames", 20, "--output", out, "--overwrite").status == 0
    assert load_dataset(out).batch_size == (20,)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    assert run("collect", "CartPole-v1", "--frames", 20, "--output", mine, "--overwrite").status == 2
    assert (mine / "notes.txt").read_text() == "mine"


def test_overwrite_keeps_the_old_dataset_until_there_are_frames(run, tmp_path, module):
    out = tmp_path / "out"
    run("collect", "CartPole-v1", "--frames", 50, "--output", out)
    name = module("def make():\n    def act(td):\n        raise ValueError('not today')\n    return act\n")
    result = run("collect", "CartPole-v1", "--output", out, "--overwrite", "--policy", f"{name}:make")
    assert result.status == 1
    assert "not today" in result.err
    assert load_dataset(out).batch_size == (50,)


def test_unwritable_output(run, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("collect", "CartPole-v1", "--output", tmp_path / "file" / "below")
    assert result.status == 2
    assert "--output: " in result.err
    assert "Not a directory" in result.err


# Failures on the way -------------------------------------------------------------------------------


def test_full_disk_is_said_and_complete_batches_stay(run, tmp_path, monkeypatch):
    from rollwright.data.datasets import writer

    write_all, calls = writer.write_all, []

    def fill_up(file, offset, data):
        calls.append(offset)
        if len(calls) > 30:  # in the third batch of eleven entries
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, offset, data)

    monkeypatch.setattr(writer, "write_all", fill_up)
    out = tmp_path / "out"
    result = run(*("collect", "CartPole-v1", "--frames", 100, "--frames-per-batch", 20, "--seed", 0, "--output", out))
    assert result.status == 1
    first, second = result.err.splitlines()
    assert "No space left on device" in first
    assert second.startswith("saved 40 of 100 frames, ")
    assert describe_dataset(out)["complete"] is False
    assert_equal(load_dataset(out), collected(GymEnv("CartPole-v1"), 0, 100)[:40])


def test_failing_policy_keeps_complete_batches(run, tmp_path, module):
    name = module(
        """
import torch
def make():
    steps = iter(range(45))
    def act(td):
        if next(steps, None) is None:
            raise RuntimeError("the policy broke\\nin two lines")
        return td.set("action", torch.tensor([1, 0]))
    return act
"""
    )
    out = tmp_path / "out"
    arguments = ["collect", "CartPole-v1", "--frames", 100, "--frames-per-batch", 20, "--policy", f"{name}:make"]
    result = run(*arguments, "--output", out)
    assert result.status == 1
    assert "RuntimeError: the policy broke in two lines" in result.err
    assert "saved 40 of 100 frames" in result.err
    assert "Traceback" not in result.err
    assert load_dataset(out).batch_size == (40,)
    with pytest.raises(RuntimeError, match="the policy broke"):
        run(*arguments, "--output", tmp_path / "other", "--debug")
    assert load_dataset(tmp_path / "other").batch_size == (40,)


def test_wrong_kind_of_action_names_the_option(run, tmp_path, module):
    name = module("import torch\ndef make():\n    return lambda td: td.set('action', torch.tensor(1))\n")
    result = run("collect", "CartPole-v1", "--policy", f"{name}:make", "--output", tmp_path / "out")
    assert result.status == 1
    assert "--categorical-actions" in result.err
    assert not (tmp_path / "out").exists()


def test_dataset_is_a_plain_memory_mapped_tensordict(run, tmp_path):
    run("collect", "CartPole-v1", "--frames", 50, "--num-envs", 2, "--output", tmp_path / "out")
    frames = TensorDict.load_memmap(tmp_path / "out" / "frames")
    assert frames.batch_size == (2, 25)
    assert Path(frames["next", "reward"].filename).parts[-2:] == ("next", "reward.memmap")


@pytest.mark.parametrize("arguments", [(), ("--workers", 2)])
def test_prints_json_and_nothing_else(run, tmp_path, arguments):
    result = run("collect", "CartPole-v1", "--frames", 40, "--output", tmp_path / "data", "--json", *arguments)
    assert (result.status, result.err) == (0, "")
    found = json.loads(result.out)
    assert (found["path"], found["frames"], found["error"]) == (str(tmp_path / "data"), 40, None)
    assert found["seconds"] > 0
