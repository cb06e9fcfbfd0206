from __future__ import annotations

import signal

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollwright.cli import minari as export
from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
from rollwright.data.datasets import load_dataset
from rollwright.envs import GymEnv

minari = pytest.importorskip("minari")
pytest.importorskip("h5py")

ID = "rollwright/cartpole-v1/random-v0"


@pytest.fixture
def load(tmp_path, monkeypatch):
    def call(dataset_id, root="out"):
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / root))
        dataset = minari.load_dataset(dataset_id)
        monkeypatch.delenv("MINARI_DATASETS_PATH")
        return dataset

    return call


def batch_of(env, seed, frames):
    collector = Collector(env, frames_per_batch=frames, total_frames=frames)
    collector.set_seed(seed)
    with collector:
        batch = collector.next()
    return batch if batch.ndim == 2 else batch.unsqueeze(0)


def episodes_in(batch):
    """Whole episodes of ``[env, T]`` as slices, environment by environment."""
    for row in batch:
        start = 0
        for stop in (row["next", "done"].flatten().nonzero().flatten() + 1).tolist():
            yield row[start:stop]
            start = stop


def test_the_output_folder_may_be_a_relative_path(run, load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("collect", "CartPole-v1", "--frames", 100, "--format", "minari", "--output", "out")
    assert result.status == 0, result.err
    assert f"MINARI_DATASETS_PATH={tmp_path / 'out'}" in result.out
    assert load(ID).total_episodes > 0


@pytest.mark.parametrize("num_envs", [1, 3])
def test_minari_loads_the_episodes_that_were_collected(run, load, tmp_path, num_envs):
    result = run(
        *("collect", "CartPole-v1", "--frames", 600, "--num-envs", num_envs, "--seed", 11),
        *("--format", "minari", "--output", tmp_path / "out"),
    )
    assert result.status == 0, result.err
    batch = batch_of(GymEnv("CartPole-v1", **({"num_envs": num_envs} if num_envs > 1 else {})), 11, 600)
    expected = list(episodes_in(batch))
    dataset = load(ID)
    assert dataset.total_episodes == len(expected)
    for found, episode in zip(dataset, expected, strict=True):
        observations = torch.cat([episode["observation"], episode["next", "observation"][-1:]])
        np.testing.assert_array_equal(found.observations, observations)
        np.testing.assert_array_equal(found.actions, episode["action"].argmax(-1))
        for name, key in {"rewards": "reward", "terminations": "terminated", "truncations": "truncated"}.items():
            np.testing.assert_array_equal(getattr(found, name), episode["next", key].squeeze(-1))
        assert "total_steps" in repr(found)
    kept = dataset.total_steps
    assert f"left out: {num_envs} unfinished episode{'' if num_envs == 1 else 's'}, {600 - kept} frames" in result.out
    assert f"minari.load_dataset('{ID}')" in result.out
    assert not (tmp_path / "out" / ".rollwright").exists()
    assert dataset.recover_environment().spec.id == "CartPole-v1"
    seeds = [metadata.get("seed") for metadata in dataset.storage.get_episode_metadata(range(len(expected)))]
    assert [seed for seed in seeds if seed is not None] == [11 + i for i in range(num_envs)]


def test_truncations_are_marked(run, load, tmp_path):
    run(
        *("collect", "Pendulum-v1", "--frames", 90, "--max-frames-per-traj", 20),
        *("--format", "minari", "--dataset-id", "short/pendulum-v3", "--output", tmp_path / "out"),
    )
    dataset = load("short/pendulum-v3")
    assert [len(episode) for episode in dataset] == [20] * 4
    for episode in dataset:
        assert episode.truncations.tolist() == [False] * 19 + [True]
        assert not episode.terminations.any()
        assert episode.observations.shape == (21, 3)
        assert episode.actions.dtype == np.float32


class Everything(gymnasium.Env):
    """Spaces within spaces; what it shows is the number of the step."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (40, 40, 3), np.uint8),
            "pair": spaces.Tuple([spaces.Discrete(5, start=2), spaces.MultiDiscrete([9, 3])]),
            "deep": spaces.Dict({"bits": spaces.MultiBinary(3)}),
        }
    )
    action_space = spaces.Dict({"left": spaces.Discrete(3, start=-1), "right": spaces.Box(-1, 1, (2,))})

    def _seen(self):
        t = self.t
        image = np.arange(40 * 40 * 3, dtype=np.uint8).reshape(40, 40, 3) + np.uint8(t)
        bits = np.array([t % 2, 1, 0], np.int8)
        return {"image": image, "pair": (2 + t % 5, np.array([t, t % 3])), "deep": {"bits": bits}}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.t += 1
        return self._seen(), float(self.t), self.t == 4, False, {}


@pytest.fixture
def everything():
    gymnasium.register("Everything-v0", entry_point=Everything)
    yield "Everything-v0"
    gymnasium.registry.pop("Everything-v0")


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_nested_spaces_come_back_in_their_own_form(run, load, tmp_path, everything, num_envs, categorical):
    arguments = ["--categorical-actions"] if categorical else []
    result = run(
        *("collect", everything, "--frames", 20, "--num-envs", num_envs, *arguments),
        *("--format", "minari", "--output", tmp_path / "out", "--seed", 0),
    )
    assert result.status == 0, result.err
    assert "note: Minari cannot write down how to make this environment" in result.out
    dataset = load("rollwright/everything-v0/random-v0")
    assert dataset.total_steps == (20 if num_envs == 1 else 16)
    env = Everything()
    for episode in dataset:
        seen = [env.reset()[0]]
        for t in range(4):
            action = {name: values[t] for name, values in episode.actions.items()}
            assert env.action_space.contains({"left": np.int64(action["left"]), "right": action["right"]})
            seen.append(env.step({"left": np.int64(action["left"]), "right": action["right"]})[0])
        assert isinstance(episode.observations["pair"], tuple)
        np.testing.assert_array_equal(episode.observations["image"], [each["image"] for each in seen])
        np.testing.assert_array_equal(episode.observations["pair"][0], [each["pair"][0] for each in seen])
        np.testing.assert_array_equal(episode.observations["pair"][1], [each["pair"][1] for each in seen])
        np.testing.assert_array_equal(episode.observations["deep"]["bits"], [each["deep"]["bits"] for each in seen])
        assert episode.rewards.tolist() == [1, 2, 3, 4]


def test_honours_minaris_own_folder(run, load, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "own"))
    result = run("collect", "CartPole-v1", "--frames", 200, "--format", "minari")
    assert result.status == 0, result.err
    assert result.out.splitlines()[-1] == f"load it: minari.load_dataset('{ID}')"
    assert minari.load_dataset(ID).total_episodes > 0


def test_existing_id_is_refused_and_replaced_on_demand(run, load, tmp_path):
    arguments = ["collect", "CartPole-v1", "--format", "minari", "--output", tmp_path / "out", "--seed", 0, "--frames"]
    assert run(*arguments, 200).status == 0
    before = load(ID).total_steps
    result = run(*arguments, 400)
    assert result.status == 2
    assert f"{ID!r} exists already" in result.err
    assert load(ID).total_steps == before
    assert run(*arguments, 400, "--overwrite").status == 0
    assert load(ID).total_steps > before


@pytest.mark.parametrize("place", [".", "data"])
def test_overwriting_deletes_no_files_of_others(run, load, tmp_path, place):
    arguments = ["collect", "CartPole-v1", "--format", "minari", "--output", tmp_path / "out", "--frames", 200]
    assert run(*arguments).status == 0
    mine = tmp_path / "out" / ID / place / "notes.txt"
    mine.write_text("mine")
    result = run(*arguments, "--overwrite")
    assert result.status == 2
    assert f"{mine.relative_to(tmp_path / 'out' / ID)}, which Minari did not write" in result.err
    assert mine.read_text() == "mine"
    assert load(ID).total_steps > 0


@pytest.mark.parametrize("dataset_id", ["no-version", "spaces in-v0", "/v0"])
def test_malformed_ids(run, tmp_path, dataset_id):
    result = run(
        "collect", "CartPole-v1", "--format", "minari", "--dataset-id", dataset_id, "--output", tmp_path / "out"
    )
    assert result.status == 2
    assert "--dataset-id: expected [NAMESPACE/]NAME-vN" in result.err


def test_without_a_complete_episode_frames_are_kept(run, tmp_path):
    result = run("collect", "Pendulum-v1", "--frames", 50, "--format", "minari", "--output", tmp_path / "out")
    assert result.status == 1
    assert "No episode ended within 50 frames" in result.err
    kept = tmp_path / "out" / ".rollwright" / "rollwright.pendulum-v1.random-v0"
    assert str(kept) in result.err
    assert load_dataset(kept).batch_size == (50,)
    assert run("inspect", kept).status == 0


def test_text_is_refused_before_anything_is_collected(run, tmp_path):
    space = spaces.Dict({"word": spaces.Text(5)})

    class Talking(gymnasium.Env):
        observation_space, action_space = space, spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"word": "a"}, {}

    gymnasium.register("Talking-v0", entry_point=Talking)
    try:
        result = run("collect", "Talking-v0", "--format", "minari", "--output", tmp_path / "out")
    finally:
        gymnasium.registry.pop("Talking-v0")
    assert result.status == 2
    assert "'word' is of the space Text" in result.err


def test_missing_package_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    result = run("collect", "CartPole-v1", "--format", "minari", "--output", tmp_path / "out")
    assert result.status == 2
    assert "pip install 'rollwright[minari]'" in result.err
    assert not (tmp_path / "out").exists()


def test_failure_of_minari_keeps_frames(run, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk gone")

    monkeypatch.setattr(minari, "create_dataset_from_buffers", fail)
    result = run("collect", "CartPole-v1", "--frames", 100, "--format", "minari", "--output", tmp_path / "out")
    assert result.status == 1
    assert "disk gone" in result.err
    assert load_dataset(tmp_path / "out" / ".rollwright" / ID.replace("/", ".")).batch_size == (100,)


def test_ctrl_c_writes_complete_episodes(run, load, tmp_path, module):
    name = module(
        """
import signal, torch
def make():
    calls = iter(range(10**9))
    def act(td):
        if next(calls) == 60:
            signal.raise_signal(signal.SIGINT)
        return td.set("action", torch.tensor([1, 0]))
    return act
"""
    )
    result = run(
        *("collect", "CartPole-v1", "--frames", "1e8", "--frames-per-batch", 50, "--policy", f"{name}:make"),
        *("--format", "minari", "--output", tmp_path / "out", "--dataset-id", "stopped-v0"),
    )
    assert result.status == 130
    assert result.err.startswith("interrupted: collected 61 of 100,000,000 frames")
    assert load("stopped-v0").total_episodes >= 5


def test_second_ctrl_c_leaves_the_frames(run, tmp_path, monkeypatch):
    buffers = export._episodes

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield from buffers(*arguments)

    monkeypatch.setattr(export, "_episodes", interrupted)
    result = run("collect", "CartPole-v1", "--frames", 100, "--format", "minari", "--output", tmp_path / "out")
    assert "the Minari dataset was not written" in result.err
    assert not (tmp_path / "out" / ID).exists()
    assert load_dataset(tmp_path / "out" / ".rollwright" / ID.replace("/", ".")).batch_size == (100,)


# Reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_envs", [1, 3])
def test_frames_read_from_minari_are_those_that_were_collected(run, tmp_path, monkeypatch, num_envs):
    out = tmp_path / "out"
    arguments = ("collect", "CartPole-v1", "--frames", 600, "--num-envs", num_envs, "--seed", 11)
    assert run(*arguments, "--format", "minari", "--output", out).status == 0
    batch = batch_of(GymEnv("CartPole-v1", **({"num_envs": num_envs} if num_envs > 1 else {})), 11, 600)
    expected = torch.cat(list(episodes_in(batch)))
    frames = load_dataset(out / ID)
    shared = [key for key in frames.keys(True, True) if key != ("collector", "traj_ids")]
    assert set(shared) <= set(expected.keys(True, True))
    assert (frames.select(*shared) == expected.select(*shared)).all()
    assert frames["collector", "traj_ids"].unique_consecutive().tolist() == list(range(len(list(episodes_in(batch)))))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(out))
    assert (load_dataset(f"minari:{ID}") == frames).all()
    assert (load_dataset(out / ID, start=5, stop=9) == frames[5:9]).all()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1_000), batch_size=8)
    buffer.extend(frames)
    assert buffer.sample()["action"].shape == (8, 2)


def test_spaces_within_spaces_are_read_under_the_keys_of_the_environment(run, tmp_path, everything):
    out = tmp_path / "out"
    run("collect", everything, "--frames", 30, "--seed", 0, "--output", tmp_path / "frames")
    run("collect", everything, "--frames", 30, "--seed", 0, "--format", "minari", "--output", out)
    [folder] = {path.parent.parent for path in out.rglob("metadata.json")}
    found, expected = load_dataset(folder), load_dataset(tmp_path / "frames")
    assert len(found)
    for key, value in found.items(True, True):
        if key != ("collector", "traj_ids"):
            assert (value == expected[: len(found)].get(key)).all(), key


def test_inspect_shows_a_dataset_of_minari(run, tmp_path):
    out = tmp_path / "out"
    run("collect", "CartPole-v1", "--frames", 300, "--seed", 0, "--format", "minari", "--output", out)
    for path in (out / ID, out / ID / "data"):
        result = run("inspect", path, "--check")
        assert result.status == 0, result.err
        assert "check      passed" in result.out
        assert " complete (" in result.out
    missing = run("inspect", "minari:not/there-v0")
    assert missing.status == 2
    assert "Download it with: minari download not/there-v0" in missing.err
