"""state_dict names what it cannot save, and a restored collector does without it."""

from __future__ import annotations

import threading

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.envs import GymEnv, GymWrapper, SerialEnv, StepCounter, TransformedEnv
from rollwright.testing.mocking_classes import CountingEnv


class Guarded(gymnasium.Wrapper):
    """Cannot be pickled."""

    def __init__(self, env):
        super().__init__(env)
        self.lock = threading.Lock()


def half_guarded():
    """Two environments, one of which cannot be saved."""
    makers = [lambda: GymEnv("CartPole-v1"), lambda: GymWrapper(Guarded(gymnasium.make("CartPole-v1")))]
    return TransformedEnv(SerialEnv(2, makers), StepCounter())


def test_an_environment_that_cannot_be_saved_is_named_once_and_begins_anew(make):
    first = make(half_guarded, frames_per_batch=60)
    used = int(first.next()["collector", "traj_ids"].max())
    told = r"begins its environment anew, with new trajectory ids\. GymWrapper\(CartPole-v1\) \[worker 1\]: cannot be"
    with pytest.warns(UserWarning, match=told):
        first.state_dict()
    state = first.state_dict()  # no second warning
    (line,) = state["unsaved"]
    assert "lock" in line
    second = make(half_guarded, frames_per_batch=60)
    second.load_state_dict(state)
    batch = second.next()
    assert bool((batch["step_count"][:, 0] == 0).all())
    assert int(batch["collector", "traj_ids"].min()) > used
    assert second.stats()["episodes"] == first.stats()["episodes"] + int(batch["next", "done"].sum())


class Unpicklable:
    """An object that a batch can hold, and a file cannot."""

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("it stays here")


def test_objects_in_the_carrier_that_cannot_be_pickled_are_named(make, count):
    env = CountingEnv()
    act = count(env)

    def policy(td):
        return act(td).set_non_tensor("held", Unpicklable())

    first = make(env, policy, frames_per_batch=4)
    first.next()
    with pytest.warns(UserWarning, match="anew.*objects in the carrier: cannot be pickled: TypeError: it stays"):
        state = first.state_dict()
    assert state["trajectories"] is None


# What a policy keeps to itself ------------------------------------------------------------------------------


class Counting:
    """A policy that is no module, and remembers."""

    def __init__(self):
        self.calls = 0

    def __call__(self, td):
        self.calls += 1
        return td.set("action", torch.ones(1, dtype=torch.int32))

    def act(self, td):
        return self(td)


class Drawing(nn.Module):
    """A module with generators of its own, saved or not."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()
        self.others = nn.ModuleList([nn.Identity()])
        self.others[0].rng = np.random.default_rng(0)

    def forward(self, observation):
        return torch.ones(1, dtype=torch.int32)


class Saved(Drawing):
    def __init__(self):
        super().__init__()
        del self.others[0].rng

    def get_extra_state(self):
        return self.generator.get_state()

    def set_extra_state(self, state):
        self.generator.set_state(state)


@pytest.mark.parametrize("policy", [Counting(), Counting().act])
def test_what_a_policy_that_is_no_module_holds_is_named(make, policy):
    collector = make(CountingEnv(), policy, frames_per_batch=4)
    with pytest.warns(UserWarning, match="goes on without it. policy .*: it has 'calls', and is no nn.Module"):
        state = collector.state_dict()
    second = make(CountingEnv(), policy, frames_per_batch=4)
    second.load_state_dict(state)
    assert second.next()["collector", "traj_ids"].tolist() == [0] * 4


def test_generators_of_a_module_are_named_unless_it_saves_them(make):
    def wrapped(module):
        return TensorDictModule(module, ["observation"], ["action"])

    collector = make(CountingEnv(), wrapped(Drawing()), frames_per_batch=4)
    with pytest.warns(
        UserWarning, match=r"it has 'module.generator', 'module.others.0.rng', which state_dict\(\) leaves"
    ):
        collector.state_dict()
    assert make(CountingEnv(), wrapped(Saved()), frames_per_batch=4).state_dict()["unsaved"] == []


def test_functions_are_taken_to_hold_nothing(make, count):
    env = CountingEnv()
    assert make(env, count(env), frames_per_batch=4).state_dict()["unsaved"] == []
