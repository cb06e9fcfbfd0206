"""What ``split_trajectories(as_nested=True)`` gives: rows of their own length, entries as nested tensors."""

from __future__ import annotations

import copy
import io
import pickle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.collectors.utils import split_trajectories
from rollwright.data.layout import MASK, NestedTrajectories, join_trajectories
from rollwright.envs import GymEnv, GymWrapper
from rollwright.testing.mocking_classes import CountingEnvWithString, EnvWithDynamicSpec, NestedCountingEnv


class Pixels(gymnasium.Env):
    """Images, and episodes of three, four, five... steps."""

    observation_space = spaces.Box(0, 255, (3, 8, 8), np.uint8)
    action_space = spaces.Discrete(2)
    episodes = 2

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.episodes = self.episodes + 1
        return self.observation_space.sample(), {}

    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), 1.0, self.left == 0, False, {}


ENVS = {
    "vectors": lambda: GymEnv("CartPole-v1", num_envs=2),
    "images": lambda: GymWrapper(Pixels()),
    "nested": lambda: NestedCountingEnv(max_steps=3),
}


def collected(name, frames=80):
    with Collector(ENVS[name], frames_per_batch=frames, total_frames=frames) as collector:
        return collector.next()


@pytest.mark.parametrize("name", ENVS)
def test_every_entry_can_be_read_and_padded(name):
    batch = collected(name)
    nested, padded = split_trajectories(batch, as_nested=True), split_trajectories(batch)
    mask = padded[MASK]
    assert nested.batch_size[0] == len(padded) > 1
    for key in batch.keys(True, True):
        for value in (
            nested[key],
            nested.get(key),
            nested[key[:1]][key[1:]] if isinstance(key, tuple) else nested[key],
        ):
            assert value.is_nested
            assert value.dtype == batch[key].dtype
            assert torch.equal(value.to_padded_tensor(0.0), padded[key])
            assert torch.equal(value.values(), padded[key][mask])
    whole = nested.to_padded_tensor(mask_key=MASK)
    assert whole.names == padded.names
    assert whole.batch_size == padded.batch_size
    assert (whole == padded).all()
    sevens = nested.to_padded_tensor(7)
    assert all((value[~mask] == 7).all() for value in sevens.values(True, True) if value.dtype != torch.bool)


def test_entries_fit_each_other():
    batch = collected("vectors")
    nested, padded = split_trajectories(batch, as_nested=True), split_trajectories(batch)
    moved = nested["next", "observation"] - nested["observation"]
    assert torch.equal(moved.to_padded_tensor(0.0), padded["next", "observation"] - padded["observation"])
    returns = (nested["next", "reward"] * ~nested["next"]["terminated"]).sum(1)
    assert returns.shape == (len(nested), 1)
    assert [len(row) for row in nested["observation"].unbind(0)] == [len(row) for row in nested]


def test_rows_of_one_length_are_nested_too():
    batch = TensorDict({"x": torch.arange(4.0), "collector": {"traj_ids": torch.tensor([0, 0, 1, 1])}}, [4])
    for batch_of in (batch, batch[:2]):
        value = split_trajectories(batch_of, as_nested=True)["x"]
        assert value.is_nested
        assert value.to_padded_tensor(0.0).flatten().tolist() == batch_of["x"].tolist()


SAME = {
    "clone": lambda nested: nested.clone(),
    "copy": lambda nested: nested.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda nested: pickle.loads(pickle.dumps(nested)),
    "save": lambda nested: torch.load(_saved(nested), weights_only=False),
    "to": lambda nested: nested.to("cpu"),
    "apply": lambda nested: nested.apply(lambda value: value),
    "select": lambda nested: nested.select("x", ("next", "done")),
    "exclude": lambda nested: nested.exclude("other"),
    "slice": lambda nested: nested[:],
    "list": lambda nested: nested[[0, 1, 2]],
    "mask": lambda nested: nested[torch.tensor([True, True, True])],
    "lock": lambda nested: nested.clone().lock_(),
}


def _saved(nested):
    file = io.BytesIO()
    torch.save(nested, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", SAME)
def test_what_is_made_of_it_can_be_read_too(name):
    ids = torch.tensor([0, 1, 1, 2, 2, 2])
    entries = {"x": torch.arange(6), "next": {"done": ids > 0}, "collector": {"traj_ids": ids}, "other": ids}
    made = SAME[name](split_trajectories(TensorDict(entries, [6]), as_nested=True))
    for _ in range(2):
        assert isinstance(made, NestedTrajectories)
        assert made["x"].to_padded_tensor(-1).tolist() == [[0, -1, -1], [1, 2, -1], [3, 4, 5]]
        assert made["next", "done"].to_padded_tensor(0).tolist() == [[False] * 3, [True, True, False], [True] * 3]
    assert made[1:]["next"]["done"].values().all()
    assert join_trajectories(made)["x"].tolist() == list(range(6))


def test_gradients_pass_and_rows_are_views():
    x = torch.ones(3, requires_grad=True)
    batch = TensorDict({"x": x, "y": torch.zeros(3), "collector": {"traj_ids": torch.tensor([0, 0, 1])}}, [3])
    nested = split_trajectories(batch, as_nested=True)
    (nested["x"] * nested["x"]).values().sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    nested[1]["y"].fill_(5)
    assert nested["y"].values().tolist() == batch["y"].tolist() == [0, 0, 5]


def test_objects_missing_entries_and_shapes_that_vary():
    with Collector(CountingEnvWithString(max_steps=2), frames_per_batch=7) as collector:
        words = split_trajectories(collector.next(), as_nested=True)
    assert [len(row) for row in words["string"]] == [len(row) for row in words]
    assert words["observation"].is_nested
    assert words.get("nothing", None) is None
    with pytest.raises(KeyError):
        words["nothing"]
    with Collector(EnvWithDynamicSpec(max_count=3), frames_per_batch=8) as collector:
        grows = split_trajectories(collector.next(), as_nested=True)
    assert grows["next", "done"].to_padded_tensor(0).shape[:2] == (3, 3)
    rows = [TensorDict({"x": torch.ones(n, n)}, [n]) for n in (1, 2)]
    with pytest.raises(RuntimeError, match="stack"):
        NestedTrajectories.of(rows)["x"]
    assert [value.shape for value in NestedTrajectories.of(rows).get("x", as_list=True)] == [(1, 1), (2, 2)]
