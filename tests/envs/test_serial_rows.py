"""SerialEnv on arrays around environments of gymnasium, each of which writes its row."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch

from rollwright.collectors import Collector
from rollwright.envs import GymEnv, GymWrapper, SerialEnv
from rollwright.errors import EnvError


class Odd(gymnasium.Env):
    """Returns what is correct in another form: NumPy numbers as rewards and flags, lists as observations."""

    observation_space = gymnasium.spaces.Dict(
        {"place": gymnasium.spaces.Box(-9, 9, (2,)), "kind": gymnasium.spaces.Discrete(3)}
    )

    def __init__(self, actions, number=0):
        self.action_space, self.seen, self.t, self.number = actions, [], 0, number

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observed(), {}

    def _observed(self):
        place = np.full(2, self.t, np.float32)
        return {"place": place if self.t % 2 else place.tolist(), "kind": self.t % 3}

    def step(self, action):
        self.seen.append(action)
        self.t += 1
        reward = 0.1 * self.t + 10 * self.number
        return (
            self._observed(),
            np.float64(reward) if self.t % 2 else float(reward),
            (bool, np.bool_)[self.t % 2](self.t == 3),
            False,
            {},
        )


SPACES = {
    "choice": gymnasium.spaces.Discrete(4, start=1),
    "choices": gymnasium.spaces.MultiDiscrete([2, 3]),
    "box": gymnasium.spaces.Box(-1, 1, (2,)),
    "number": gymnasium.spaces.Box(-1, 1, ()),
    "dictionary": gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2), "b": gymnasium.spaces.Box(-1, 1, (1,))}),
    "nest": gymnasium.spaces.Tuple(
        (
            gymnasium.spaces.Discrete(2),
            gymnasium.spaces.Dict({"b": gymnasium.spaces.MultiBinary(2), "a": gymnasium.spaces.Box(-1, 1, ())}),
        )
    ),
}


@pytest.mark.parametrize("space", SPACES)
def test_the_actions_of_all_rows_are_converted_at_once(space, monkeypatch):
    alone = []
    monkeypatch.setattr(GymWrapper, "step_values", lambda env, given: alone.append(env))
    env = SerialEnv(2, [partial(GymWrapper, Odd(SPACES[space], number)) for number in range(2)])
    collector = Collector(env, None, frames_per_batch=20, total_frames=20)
    collector.next()
    assert not alone
    collector.shutdown()


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("space", SPACES)
def test_rows_of_environments_of_gymnasium_have_the_bits_of_the_plain_path(space, one_hot):
    found, seen = [], []
    for options in ({}, {"use_buffers": False}):
        inside = [Odd(SPACES[space], number) for number in range(2)]
        env = SerialEnv(2, [partial(GymWrapper, one, categorical_action_encoding=not one_hot) for one in inside])
        torch.manual_seed(0)
        collector = Collector(env, None, frames_per_batch=20, total_frames=20, **options)
        found.append(collector.next())
        seen.append([[(type(action), str(action)) for action in one.seen] for one in inside])
        assert collector.stats()["paths"]["env"].startswith("plain" if options else "native")
        collector.shutdown()
    assert seen[0] == seen[1]
    assert set(found[0].keys(True, True)) == set(found[1].keys(True, True))
    for key in found[0].keys(True, True):
        assert torch.equal(found[0][key], found[1][key]), key
        assert found[0][key].dtype == found[1][key].dtype


class Faulty(Odd):
    def step(self, action):
        observation, reward, *_ = super().step(action)
        return {**observation, "place": np.zeros(3, np.float32)}, reward, False, False, {}


@pytest.mark.parametrize(
    ("make", "policy", "message"),
    [
        (Faulty, lambda td: td.set("action", torch.zeros(2, dtype=torch.int64)), r"SerialEnv\[1\].*'place' has shape"),
        (Odd, lambda td: td.set("action", torch.tensor([0, 7])), r"SerialEnv\[1\].*'action' must lie in 0 .. 3"),
    ],
)
def test_the_environment_of_a_row_that_is_wrong_is_named(make, policy, message):
    space = SPACES["choice"]
    env = SerialEnv(
        2, [partial(GymWrapper, one, categorical_action_encoding=True) for one in (Odd(space), make(space))]
    )
    with pytest.raises(EnvError, match=message):
        Collector(env, policy, frames_per_batch=20, total_frames=20).next()


# Steps on TensorDicts, taken on arrays ------------------------------------------------------------------


def cartpoles(count=3, **options):
    return [GymEnv("CartPole-v1", **options) for _ in range(count)]


def test_a_step_is_that_of_each_environment_by_itself():
    together, apart = SerialEnv(3, lambda: GymEnv("CartPole-v1")), cartpoles()
    together.set_seed(5)
    for i, env in enumerate(apart):
        env.set_seed(5 + i)
    td, rows = together.reset(), [env.reset() for env in apart]
    for _ in range(60):
        td = together.rand_action(td)
        rows = [row.set("action", td["action"][i]) for i, row in enumerate(rows)]
        td, following = together.step_and_maybe_reset(td)
        pairs = [env.step_and_maybe_reset(row) for env, row in zip(apart, rows, strict=True)]
        expected = torch.stack([stepped for stepped, _ in pairs])
        assert set(td.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert torch.equal(td[key], expected[key])
            assert td[key].dtype == expected[key].dtype
        td, rows = following, [row for _, row in pairs]


def test_what_a_step_returned_is_never_written_again():
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    td = env.rand_action(env.reset())
    first = env.step(td)["next"].clone(False)
    kept = first.clone()
    env.step(env.rand_action(td.clone()))
    assert all(torch.equal(first[key], kept[key]) for key in kept.keys(True, True))


def test_a_reader_of_info_that_comes_later_is_heard():
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    env.step(env.rand_action(env.reset()))
    for i in range(2):
        worker = getattr(env, f"worker{i}")
        worker.set_info_dict_reader(lambda info, td: td.set("noted", torch.ones(1)))
    assert "noted" in env.step(env.rand_action(env.reset()))["next"].keys()  # noqa: SIM118


def test_wrong_actions_are_named_with_the_place():
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1", categorical_action_encoding=True))
    td = env.reset().set("action", torch.tensor([0, 7]))
    with pytest.raises(EnvError, match=r"SerialEnv\[1\]: .*must lie in 0"):
        env.step(td)
