"""What goes wrong in a step reaches the user alike on both paths, and the collector begins anew after it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import distributions as D
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import GymEnv, GymWrapper, SerialEnv, TransformedEnv
from rollwright.envs.transforms import StepCounter
from rollwright.errors import EnvError

BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
TWO = spaces.Discrete(2)


@pytest.fixture
def attempt(force_plain):
    """``attempt(env, policy)``: what each of three batches brought, on arrays and on TensorDicts."""

    def one(env, policy):
        made = env()
        torch.manual_seed(0)
        collector = Collector(made, policy(made), frames_per_batch=12)
        collector.set_seed(3)
        how, batches, errors = collector.stats()["paths"]["env"], [], []
        for _ in range(3):
            try:
                batches.append(collector.next())
                errors.append(None)
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)
        collector.shutdown()
        return SimpleNamespace(how=how, batches=batches, errors=errors)

    def compare(env, policy):
        arrays = one(env, policy)
        forced = force_plain()
        plain = one(env, policy)
        forced.undo()
        assert "NumPy arrays" in arrays.how
        assert "a test" in plain.how
        return arrays, plain

    return compare


def described(errors):
    """What users see of errors."""
    return [(type(error), str(error), type(getattr(error, "__cause__", None))) for error in errors]


FAILURES = {
    "raises": {"failure": ValueError("boom")},
    "is interrupted": {"failure": KeyboardInterrupt()},
    "returns another shape": {"bad": np.zeros(4, np.float32)},
    "returns another dtype": {"bad": np.zeros(3, np.float64)},
    "returns text": {"bad": "text"},
}
PLACES = {
    "single": lambda toy: lambda: GymWrapper(toy()),
    "sync": lambda toy: lambda: GymWrapper(SyncVectorEnv([toy, toy])),
    "serial": lambda toy: lambda: SerialEnv(2, lambda: GymWrapper(toy())),
    "transformed": lambda toy: lambda: TransformedEnv(GymWrapper(toy()), StepCounter()),
    "nested": lambda toy: lambda: SerialEnv(1, lambda: TransformedEnv(SerialEnv(2, lambda: GymWrapper(toy())))),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("place", PLACES)
def test_environment_fails_in_the_middle_of_a_batch(attempt, lab, place, failure):
    def policy(env):
        return lab.build(env, "one-hot")

    arrays, plain = attempt(PLACES[place](lambda: lab.Toy(BOX, TWO, fails_at=4, **FAILURES[failure])), policy)
    if (place, failure) == ("sync", "returns another dtype"):
        assert arrays.errors == [None] * 3  # gymnasium's vector environments cast
        return
    assert arrays.errors[0] is not None
    assert described(arrays.errors) == described(plain.errors)
    for one, two in zip(arrays.batches, plain.batches, strict=True):
        lab.assert_equal(one.exclude("collector"), two.exclude("collector"))
    # Of several environments, each fails once; the ids of a batch that failed are not seen again.
    assert all(int(batch["collector", "traj_ids"].min()) > 0 for batch in arrays.batches)


@pytest.mark.parametrize("reward", [np.zeros(2), "x", None])
def test_environment_returns_no_reward(attempt, lab, reward):
    class Unrewarding(lab.Toy):
        def step(self, action):
            seen, right, *rest = super().step(action)
            return seen, reward if self.steps == 7 else right, *rest

    arrays, plain = attempt(lambda: GymWrapper(Unrewarding(BOX, TWO)), lambda env: lab.build(env, "one-hot"))
    assert isinstance(arrays.errors[0], EnvError)
    assert str(arrays.errors[0]) == str(plain.errors[0])


@pytest.mark.parametrize("place", ["single", "sync", "serial", "transformed"])
def test_environment_fails_in_a_reset(attempt, lab, place):
    class Stuck(lab.Toy):
        resets = 0

        def reset(self, **kwargs):
            self.resets += 1
            if self.resets == 3:
                raise RuntimeError("no reset")
            return super().reset(**kwargs)

    arrays, plain = attempt(PLACES[place](lambda: Stuck(BOX, TWO)), lambda env: lab.build(env, "one-hot"))
    assert [str(error) for error in arrays.errors] == [str(error) for error in plain.errors]
    assert "no reset" in str(arrays.errors)


class At(nn.Module):
    """One-hot actions, but for one call."""

    def __init__(self, call, what):
        super().__init__()
        self.call, self.what, self.calls = call, what, 0

    def forward(self, observation):
        self.calls += 1
        action = nn.functional.one_hot((observation[..., 0] > 0).long(), 2)
        return self.what(action) if self.calls == self.call else action


def raises(action):
    raise ZeroDivisionError("in the policy")


def interrupted(action):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("call", "what"),
    [(5, raises), (5, interrupted), (1, raises), (5, lambda a: a * torch.nan), (1, lambda a: a[..., :1])],
    ids=["raises", "interrupted", "raises at once", "NaN", "too short at once"],
)
@pytest.mark.parametrize("wrapped", [True, False], ids=["TensorDictModule", "module"])
@pytest.mark.parametrize("place", ["single", "sync", "serial"])
def test_policy_fails(attempt, lab, place, wrapped, call, what):
    def policy(env):
        module = At(call, what)
        return TensorDictModule(module, ["observation"], ["action"]) if wrapped else module

    arrays, plain = attempt(PLACES[place](lambda: lab.Toy(BOX, TWO)), policy)
    assert arrays.errors[0] is not None
    assert (type(arrays.errors[0]), str(arrays.errors[0])) == (type(plain.errors[0]), str(plain.errors[0]))
    assert arrays.errors[1:] == plain.errors[1:] == [None, None]
    for one, two in zip(arrays.batches, plain.batches, strict=True):
        lab.assert_equal(one.exclude("collector"), two.exclude("collector"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_action_that_is_no_number(attempt, value):
    class Lost(nn.Module):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            return observation[..., :1] + (value if self.calls == 5 else 0.0)

    arrays, plain = attempt(lambda: GymEnv("Pendulum-v1"), lambda env: Lost())
    assert isinstance(arrays.errors[0], EnvError)
    assert str(arrays.errors[0]) == str(plain.errors[0])


@pytest.mark.parametrize("kind", [D.Categorical, D.OneHotCategorical, D.Normal], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scored", [True, False], ids=["with log-prob", "without"])
def test_parameters_of_a_distribution_that_are_no_numbers_never_pass(attempt, lab, kind, value, scored):
    class Diverged(nn.Module):
        calls = 0

        def forward(self, observation):
            self.calls += 1
            wrong = torch.full_like(observation[..., :2], value)
            right = observation[..., :2]
            if kind is D.Normal:
                return (wrong if self.calls == 5 else right)[..., :1], torch.ones_like(right[..., :1])
            return wrong if self.calls == 5 else right

    def policy(env):
        names = ["loc", "scale"] if kind is D.Normal else ["logits"]
        return ProbabilisticTensorDictSequential(
            TensorDictModule(Diverged(), ["observation"], names),
            ProbabilisticTensorDictModule(names, ["action"], distribution_class=kind, return_log_prob=scored),
        )

    env = (lambda: GymEnv("Pendulum-v1")) if kind is D.Normal else lab.toy(BOX, TWO, categorical=kind is D.Categorical)
    for failed in attempt(env, policy):
        assert isinstance(failed.errors[0], (RuntimeError, ValueError))  # ours, or those of torch
        assert failed.errors[1:] == [None, None]


@pytest.mark.parametrize("place", PLACES)
def test_closed_environment_is_not_stepped(attempt, lab, place):
    def policy(env):
        class Closing(At):
            def forward(self, observation):
                action = super().forward(observation)
                if self.calls == 5:
                    env.close()
                return action

        return Closing(0, None)

    arrays, plain = attempt(PLACES[place](lambda: lab.Toy(BOX, TWO)), policy)
    assert "step after close()" in str(arrays.errors[0])
    assert arrays.errors[1] is None  # a reset opens them again
    assert [str(error) for error in arrays.errors] == [str(error) for error in plain.errors]
