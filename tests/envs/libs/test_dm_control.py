"""Environments of dm_control."""

from __future__ import annotations

import os
import pickle
import sys

os.environ.setdefault("MUJOCO_GL", "disabled")  # before dm_control is imported; nothing here is rendered

import numpy as np
import pytest
import torch

from rollwright.collectors import Collector, Evaluator, MultiSyncCollector
from rollwright.envs import (
    DMControlEnv,
    DMControlWrapper,
    DoubleToFloat,
    GymWrapper,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.errors import EnvError, MissingExtraError

suite = pytest.importorskip("dm_control.suite")
dm_env = pytest.importorskip("dm_env")
try:
    suite.load("cartpole", "balance")
except AttributeError as error:
    pytest.skip(f"dm_control does not know this version of mujoco: {error}", allow_module_level=True)

TASKS = [("cartpole", "balance"), ("cheetah", "run"), ("walker", "walk"), ("humanoid", "stand"), ("reacher", "easy")]


@pytest.mark.parametrize(("domain", "task"), TASKS)
def test_frames_are_those_of_the_environment(domain, task):
    env = DMControlEnv(domain, task)
    check_env_specs(env)
    env.set_seed(5)
    frames = env.rollout(10)
    theirs = suite.load(domain, task, task_kwargs={"random": 5})
    found = theirs.reset()
    for frame in frames.unbind(0):
        for key, value in found.observation.items():
            assert frame[key].dtype == torch.float64
            assert np.array_equal(frame[key].numpy(), np.atleast_1d(value))
        found = theirs.step(frame["action"].numpy())
        assert frame["next", "reward"].dtype == torch.float64
        assert frame["next", "reward"].shape == (1,)
        assert frame["next", "reward"].item() == found.reward
    assert frames["action"].dtype == torch.float64


@pytest.mark.parametrize(("domain", "task"), TASKS)
def test_a_seed_gives_the_same_episodes_again(domain, task):
    env = DMControlEnv(domain, task)
    firsts = []
    for _ in range(2):
        env.set_seed(3)
        firsts.append(env.reset())
    assert (firsts[0] == firsts[1]).all()
    assert not (firsts[0] == env.reset()).all()
    assert (firsts[0] == DMControlEnv(domain, task, seed=3).reset()).all()


class Countdown(dm_env.Environment):
    """Ends after three steps, with a discount that is given."""

    def __init__(self, discount):
        self.discount = discount
        self.random_state = np.random.RandomState(0)

    def reset(self):
        self.left = 3
        return dm_env.restart(self.left)

    def step(self, action):
        assert np.shape(action) == ()
        self.left -= 1
        if not self.left:
            return dm_env.TimeStep(dm_env.StepType.LAST, 1.0, self.discount, self.left)
        return dm_env.transition(0.5, self.left)

    def observation_spec(self):
        return dm_env.specs.DiscreteArray(4)

    def action_spec(self):
        return dm_env.specs.BoundedArray((), np.float32, -1, 1)


@pytest.mark.parametrize(("discount", "terminated"), [(0.0, True), (1.0, False), (0.9, False)])
def test_the_last_discount_tells_terminated_from_truncated(discount, terminated):
    env = DMControlWrapper(Countdown(discount), categorical_action_encoding=True)
    frames = env.rollout(10)
    assert frames.shape == (3,)
    assert frames["next", "terminated"][:, 0].tolist() == [False, False, terminated]
    assert frames["next", "truncated"][:, 0].tolist() == [False, False, not terminated]
    assert frames["next", "observation"].tolist() == [2, 1, 0]
    assert frames["next", "reward"][:, 0].tolist() == [0.5, 0.5, 1.0]


def test_time_limits_truncate_and_frames_are_skipped():
    env = DMControlEnv("cartpole", "balance", task_kwargs={"time_limit": 0.1}, frame_skip=2)
    frames = env.rollout(100)
    assert frames.shape == (5,)
    assert frames["next", "truncated"][-1]
    assert not frames["next", "terminated"].any()
    assert (frames["next", "reward"] > 1).all()


def stack(env):
    transforms = (StepCounter(30), RewardSum(), DoubleToFloat(in_keys=["velocity"], out_keys=["velocity"]))
    for transform in transforms:
        env = TransformedEnv(env, transform)
    return env


def batches(env, **options):
    collector = Collector(env, None, frames_per_batch=50, total_frames=100, **options)
    try:
        collector.set_seed(1)
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


class Plain(DMControlEnv):
    """Overrides a step, and has no array form for it."""

    def _step(self, tensordict):
        return super()._step(tensordict)


@pytest.mark.parametrize("wrap", [lambda env: env, stack], ids=["bare", "transforms"])
@pytest.mark.parametrize(("domain", "task"), [("walker", "walk"), ("reacher", "easy")])
def test_arrays_are_equal_to_tensordicts(domain, task, wrap):
    arrays = batches(wrap(DMControlEnv(domain, task)))
    plain = batches(wrap(Plain(domain, task)))
    for ours, theirs in zip(arrays, plain, strict=True):
        assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
        for key in ours.keys(True, True):
            assert ours[key].dtype == theirs[key].dtype
            assert torch.equal(ours[key], theirs[key]), key


def test_it_runs_on_arrays():
    from rollwright.envs.arrays import array_form

    array_form(DMControlEnv("humanoid", "stand"))


def make():
    return suite.load("cheetah", "run")


@pytest.mark.parametrize(
    "given",
    [lambda: make(), lambda: make, lambda: DMControlEnv("cheetah", "run")],
    ids=["env", "function", "ours"],
)
def test_environments_go_wherever_environments_go(given):
    collector = Collector(given(), frames_per_batch=10, total_frames=20)
    collector.set_seed(2)
    assert [batch["position"].dtype for batch in collector] == [torch.float64] * 2
    collector.shutdown()
    env = SerialEnv(2, make)
    assert env.rollout(3)["velocity"].shape == (2, 3, 9)
    env.close()
    Evaluator(given(), num_trajectories=1, max_steps=5).shutdown()


def test_workers_and_processes():
    env = ParallelEnv(2, make, num_processes=1)  # each of these imports the package
    assert env.rollout(3)["next", "reward"].shape == (2, 3, 1)
    env.close()
    collector = MultiSyncCollector([make], frames_per_batch=20, total_frames=20)
    assert next(iter(collector))["action"].numel() == 20 * 6
    collector.shutdown()


def test_a_copy_by_pickle_goes_on_alike():
    env = DMControlEnv("cheetah", "run")
    env.set_seed(4)
    copy = pickle.loads(pickle.dumps(env))
    assert (copy.reset() == env.reset()).all()


def test_attributes_are_those_of_the_environment():
    env = DMControlEnv("cheetah", "run")
    assert env.physics is env.dm_env.physics
    assert repr(env) == "DMControlEnv(env=cheetah, task=run, batch_size=[], device=None)"
    assert ("cheetah", ["run"]) in DMControlEnv.available_envs
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = env.nothing_such


def test_bad_input_is_named(monkeypatch):
    with pytest.raises(EnvError, match=r"env_name: dm_control has no domain 'cheeta'.*cheetah"):
        DMControlEnv("cheeta", "run")
    with pytest.raises(EnvError, match=r"task_name: 'cheetah' has no task 'walk'. It has run"):
        DMControlEnv("cheetah", "walk")
    with pytest.raises(EnvError, match="unexpected keyword argument 'nothing'"):
        DMControlEnv("cheetah", "run", task_kwargs={"nothing": 1})
    with pytest.raises(TypeError, match=r"env: expected a dm_env.Environment, got builtins.str"):
        DMControlWrapper("cheetah")
    with pytest.raises(TypeError, match=r"DMControlWrapper"):
        GymWrapper(make())
    without = Countdown(0.0)
    del without.random_state
    with pytest.raises(EnvError, match="no generator to seed"):
        DMControlWrapper(without).set_seed(1)
    monkeypatch.setitem(sys.modules, "dm_control", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rollwright\[dm_control\]'"):
        DMControlEnv("cheetah", "run")
