"""Random actions in batches of environments keep to the masks that the environments set."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tests.variants import in_turn

from rollwright.collectors import Collector, RandomPolicy
from rollwright.data import Bounded, Categorical, Composite, Unbounded
from rollwright.data.specs.discrete import DiscreteSpec
from rollwright.envs import (
    ActionMask,
    AsyncEnvPool,
    EnvBase,
    GymWrapper,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from rollwright.envs.checkpoint import load_env, save_env

N = 5


class OneAllowed(EnvBase):
    """Allows the action ``(place + steps) % 5`` alone, in its spec and in ``"allowed"``; episodes of seven steps.

    Args:
        place: where it begins.
        sets: whether it sets the mask itself.
    """

    def __init__(self, place: int = 0, *, sets: bool = True, n: int = N) -> None:
        super().__init__(batch_size=())
        self.place, self.sets, self.now, self.n = place, sets, 0, n
        self.observation_spec = Composite(
            allowed=Categorical(2, (n,), dtype=torch.bool), wanted=Unbounded((1,), dtype=torch.int64)
        )
        self.action_spec = Categorical(n, ())
        self.reward_spec = Bounded(0.0, 1.0, (1,))

    def _seen(self) -> dict[str, torch.Tensor]:
        wanted = (self.place + self.now) % self.n
        allowed = torch.arange(self.n) == wanted
        if self.sets:
            self.full_action_spec["action"].update_mask(allowed)
        return {"allowed": allowed, "wanted": torch.tensor([wanted])}

    def _reset(self, tensordict=None, **kwargs):
        self.now = 0
        return TensorDict(self._seen())

    def _step(self, tensordict):
        reward = (tensordict["action"] == (self.place + self.now) % self.n).float().reshape(1)
        self.now += 1
        ended = torch.tensor([self.now == 7])
        return TensorDict({**self._seen(), "reward": reward, "done": ended, "terminated": ended.clone()})

    def _set_seed(self, seed):
        return None


def masked(place: int) -> TransformedEnv:
    return TransformedEnv(OneAllowed(place, sets=False), ActionMask(mask_key="allowed"))


def relaid(place: int) -> TransformedEnv:
    env = TransformedEnv(OneAllowed(place), StepCounter())
    assert env.full_action_spec is not None
    env.empty_cache()  # its specs are others from now on
    return env


def makers(make=OneAllowed, count: int = 3):
    return [partial(make, place) for place in range(count)]


BATCHES = {
    "serial": lambda: SerialEnv(3, makers()),
    "serial, action mask": lambda: SerialEnv(3, makers(masked)),
    "serial, other specs": lambda: SerialEnv(3, makers(relaid)),
    "serial, transformed": lambda: TransformedEnv(SerialEnv(3, makers()), StepCounter()),
    "serial, recreated": lambda: SerialEnv(3, makers(), on_env_failure="recreate"),
    "serial, nested": lambda: SerialEnv(2, [partial(SerialEnv, 3, makers()), partial(SerialEnv, 3, makers())]),
    "serial, unlike": lambda: SerialEnv(2, [partial(OneAllowed, 0), partial(OneAllowed, 1, n=4)]),
    "serial, view": lambda: SerialEnv(3, makers())[1:],
    "serial, copied": lambda: copy.deepcopy(SerialEnv(3, makers())),
    "serial, pickled": lambda: cloudpickle.loads(
        cloudpickle.dumps(TransformedEnv(SerialEnv(3, makers()), StepCounter()))
    ),
    "parallel": lambda: ParallelEnv(3, makers(), num_processes=2),
    "parallel, action mask": lambda: ParallelEnv(3, makers(masked), num_processes=2),
    "parallel, view": lambda: ParallelEnv(3, makers(), num_processes=2)[1:],
    "pool, threads": lambda: AsyncEnvPool(makers(), backend="threading"),
    "pool, processes": lambda: AsyncEnvPool(makers(), backend="multiprocessing"),
}


def check(data) -> None:
    rows = data.unbind(0) if hasattr(data, "tensordicts") else [data]
    assert sum(row.numel() for row in rows) > 0
    for row in rows:
        assert (row["next", "reward"] == 1).all()


@pytest.mark.parametrize("name", [name for name in BATCHES if not name.startswith("pool")])
def test_rollouts_keep_to_the_masks_of_the_environments(name):
    env = BATCHES[name]()
    try:
        check(env.rollout(20, break_when_any_done=False))
    finally:
        env.close()


COLLECTED = [name for name in BATCHES if "view" not in name and "unlike" not in name]


@pytest.mark.parametrize(("name", "use_buffers"), in_turn(COLLECTED, [True, False]))
def test_collected_random_actions_keep_to_the_masks_of_the_environments(name, use_buffers):
    collector = Collector(BATCHES[name](), None, frames_per_batch=36, total_frames=72, use_buffers=use_buffers)
    try:
        for batch in collector:
            check(batch)
    finally:
        collector.shutdown()


@pytest.mark.parametrize(
    ("given", "sync"), in_turn(["random", "policy of another environment", "made in the worker"], [True, False])
)
def test_workers_keep_to_the_masks_of_their_environments(given, sync):
    other = SerialEnv(3, makers())
    other.rollout(3)
    make = partial(RandomPolicy, other.full_action_spec)
    options: dict[str, Any] = {"policy_factory": make} if given == "made in the worker" else {}
    policy = make() if given == "policy of another environment" else None
    env = partial(SerialEnv, 3, makers())
    with Collector(
        env, policy, num_collectors=2, sync=sync, frames_per_batch=36, total_frames=72, **options
    ) as workers:
        for batch in workers:
            check(batch)


@pytest.mark.parametrize("given", ["batch", "one"])
def test_random_policies_of_another_environment_keep_to_the_masks_of_the_collectors(given):
    other = SerialEnv(3, makers()) if given == "batch" else OneAllowed()
    other.rollout(3)
    policy = RandomPolicy(other.full_action_spec)
    env = BATCHES["serial"] if given == "batch" else OneAllowed
    collector = Collector(env, policy, frames_per_batch=36, total_frames=72)
    try:
        for batch in collector:
            check(batch)
    finally:
        collector.shutdown()


def test_frames_before_the_policy_acts_keep_to_the_masks():
    collector = Collector(
        BATCHES["serial"](),
        lambda td: td.set("action", td["wanted"].squeeze(-1)),
        frames_per_batch=36,
        total_frames=72,
        init_random_frames=36,
    )
    try:
        for batch in collector:
            check(batch)
    finally:
        collector.shutdown()


class Numbers(gymnasium.Env):
    """As :class:`OneAllowed`, of gymnasium."""

    observation_space = spaces.Dict(allowed=spaces.Box(0, 1, (N,), bool))
    action_space = spaces.Discrete(N)

    def __init__(self, place: int) -> None:
        self.place, self.now = place, 0

    def _seen(self):
        return {"allowed": np.arange(N) == (self.place + self.now) % N}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = 0
        return self._seen(), {}

    def step(self, action):
        reward = float(action == (self.place + self.now) % N)
        self.now += 1
        return self._seen(), reward, self.now == 7, False, {}


def numbers(place: int) -> TransformedEnv:
    return TransformedEnv(GymWrapper(Numbers(place), categorical_action_encoding=True), ActionMask(mask_key="allowed"))


@pytest.mark.parametrize("env_groups", [1, 2])
@pytest.mark.parametrize("acts", ["at random", "at random first"])
def test_groups_that_take_turns_keep_to_the_masks(env_groups, acts):
    policy = None
    if acts == "at random first":
        policy = TensorDictModule(lambda allowed: allowed.int().argmax(-1), ["allowed"], ["action"])
    env = ParallelEnv(4, makers(numbers, count=4), num_processes=2)
    options = {} if policy is None else {"init_random_frames": 40}
    collector = Collector(env, policy, frames_per_batch=40, total_frames=80, env_groups=env_groups, **options)
    try:
        for batch in collector:
            check(batch)
    finally:
        collector.shutdown()


def test_a_batch_has_no_mask_where_no_environment_sets_one():
    env = SerialEnv(3, partial(OneAllowed, sets=False))
    assert env.action_spec.mask is None
    env.action_spec.update_mask(torch.arange(N) == 2)  # the user's own stays
    assert (env.rollout(5, break_when_any_done=False)["action"] == 2).all()


def test_masks_that_some_environments_set_leave_the_others_free():
    env = SerialEnv(2, [partial(OneAllowed, 3), partial(OneAllowed, sets=False)])
    env.reset()
    assert env.action_spec.mask.tolist() == [[place == 3 for place in range(N)], [True] * N]


def test_specs_that_are_copied_keep_the_mask_of_then():
    env = SerialEnv(2, makers(count=2))
    td = env.reset()
    kept = env.action_spec.clone()
    env.step(env.rand_action(td))
    assert kept.mask.int().argmax(-1).tolist() == [0, 1]
    assert env.action_spec.mask.int().argmax(-1).tolist() == [1, 2]
    assert cloudpickle.loads(cloudpickle.dumps(kept)).mask.equal(kept.mask)


def test_no_mask_is_looked_for_where_no_spec_has_had_one(monkeypatch):
    monkeypatch.setattr(DiscreteSpec, "_are_masked", False)
    spec = Categorical(N, shape=())
    spec.follow_mask(pytest.fail)
    assert spec.mask is None
    other = Categorical(N, shape=())
    other.update_mask([True] * N)
    spec.follow_mask(lambda: other.mask)
    assert spec.mask.all()


def test_masks_of_specs_from_another_process_are_looked_for(monkeypatch):
    spec = Categorical(N, shape=())
    spec.update_mask([True] * N)
    pickled = pickle.dumps(spec)
    monkeypatch.setattr(DiscreteSpec, "_are_masked", False)
    found, follower = pickle.loads(pickled), Categorical(N, shape=())
    follower.follow_mask(lambda: found.mask)
    assert follower.mask.all()


def test_specs_that_were_pickled_when_their_mask_was_an_attribute_keep_it():
    spec, mask = Categorical(N, shape=()), torch.eye(N, dtype=torch.bool)[2]
    spec.__setstate__({**{name: value for name, value in vars(spec).items() if name != "_mask"}, "mask": mask})
    assert torch.equal(spec.mask, mask)
    assert spec.rand() == 2


@pytest.mark.parametrize("saved", ["none", "theirs"])
def test_masks_go_on_to_follow_after_a_state_of_all_masks_was_loaded(saved, monkeypatch):
    def make():
        return TransformedEnv(SerialEnv(2, [partial(OneAllowed, place) for place in (0, 1)]), StepCounter())

    env = make()
    env.rollout(3)
    with monkeypatch.context() as before:
        before.setattr(DiscreteSpec, "follows_mask", False)  # as in versions whose batches had no masks, or shared them
        state = save_env(env).state
    if saved == "none":
        followed = save_env(env).state["masks"]
        state["masks"] = {name: followed.get(name) for name in state["masks"]}
    other = make()
    load_env(other, state)
    data = other.rollout(5)
    assert torch.equal(data["action"], data["allowed"].long().argmax(-1))
    other.base_env.action_spec.update_mask([True] * N)
    third = make()
    load_env(third, save_env(other).state)
    assert third.base_env.action_spec.mask.all()
