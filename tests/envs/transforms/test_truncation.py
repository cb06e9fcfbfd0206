"""RandomTruncationTransform: lengths, rows, state."""

from __future__ import annotations

import pytest
import torch

from rollwright.envs import (
    Compose,
    GymEnv,
    RandomTruncationTransform,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.testing.mocking_classes import NestedCountingEnv


def push(td):
    return td.set("action", torch.full((*td.batch_size, 1), 0.5))


def pendulum(*args, num_envs=None):
    env = GymEnv("Pendulum-v1", num_envs=num_envs)
    return TransformedEnv(env, Compose(StepCounter(), RandomTruncationTransform(*args)))


def lengths(done):
    ends = done.flatten().nonzero().flatten().tolist()
    return [end - start for start, end in zip([-1, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((5, 20), [5, 20, 20, 20, 20, 20, 20, 20, 20, 20]),
        ((5, 20, 0.5), [5, 20, 5, 16, 12, 8, 7, 12, 20, 17, 20, 12, 19, 20]),
        ((5, 20, 1.0, 0.0), [5, 20, 5, 16, 12, 8, 7, 12, 13, 17, 6, 12, 19, 6, 14, 13, 9, 5]),
    ],
)
def test_lengths_are_those_of_torchrl(args, expected):
    env = pendulum(*args)
    torch.manual_seed(0)
    td = env.rollout(200, push, break_when_any_done=False)
    assert lengths(td["next", "done"]) == expected
    assert torch.equal(td["next", "done"], td["next", "truncated"])
    assert not td["next", "terminated"].any()


def test_rows_have_lengths_of_their_own():
    check_env_specs(pendulum(5, 20, num_envs=8))
    env = pendulum(5, 20, num_envs=8)
    torch.manual_seed(0)
    td = env.rollout(61, push, break_when_any_done=False)
    first = [lengths(row)[0] for row in td["next", "done"]]
    assert len(set(first)) > 3
    assert max(first) <= 20
    assert [lengths(row)[1] for row in td["next", "done"]] == [20] * 8


def test_a_reset_of_all_draws_again():
    env = pendulum(5, 20)
    torch.manual_seed(0)
    assert len(env.rollout(200, push)) == 5
    assert len(env.rollout(200, push)) == 20


def test_groups_of_flags():
    env = TransformedEnv(NestedCountingEnv(max_steps=50), Compose(StepCounter(), RandomTruncationTransform(2, 4)))
    check_env_specs(env)
    other = RandomTruncationTransform(2, 4)
    other.load_state_dict(env.transform[1].state_dict())
    assert torch.equal(other.horizons_0, env.transform[1].horizons_0)


MAKERS = {
    "one": lambda: pendulum(3, 9, 0.5),
    "vector": lambda: pendulum(3, 9, 0.5, 1.0, num_envs=8),
    "several": lambda: TransformedEnv(
        SerialEnv(3, lambda: GymEnv("CartPole-v1")), Compose(StepCounter(), RandomTruncationTransform(3, 30, 0.5))
    ),
    "each": lambda: SerialEnv(3, lambda: pendulum(3, 9)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=96, batches=3)
    assert td["next", "truncated"].sum() > 5


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: RandomTruncationTransform(0, 5), ValueError, "min_horizon: expected an integer of at least 1, got 0"),
        (lambda: RandomTruncationTransform(6, 5), ValueError, "min_horizon: expected at most max_horizon=5, got 6"),
        (lambda: RandomTruncationTransform(1, 5, 1.5), ValueError, "prob: expected a probability"),
        (lambda: RandomTruncationTransform(1, 5, 0.5, -1), ValueError, "first_episode_prob: expected a probability"),
        (lambda: RandomTruncationTransform(1, 5, done_key="over"), ValueError, "done_key: expected 'done'"),
        (
            lambda: TransformedEnv(GymEnv("Pendulum-v1"), RandomTruncationTransform(1, 5)).done_spec,
            KeyError,
            r"no count 'step_count'. Put StepCounter\(\) before it",
        ),
    ],
)
def test_mistakes_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make()
