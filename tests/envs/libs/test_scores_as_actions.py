"""Where actions are one-hot, other numbers stand for their largest: in every environment of gymnasium's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import EnvBase, GymEnv, GymWrapper, ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from rollwright.errors import EnvError

INF = torch.inf
WARNING = "'action' is not one-hot.*largest element is played.*OneHotCategorical.*categorical_action_encoding=True"


class Echo(gymnasium.Env):
    """Observes its last action."""

    def __init__(self, action_space: spaces.Space) -> None:
        self.action_space, size = action_space, action_space.shape or (1,)
        self.observation_space = spaces.Box(-9, 9, size, np.int64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        return np.full(self.observation_space.shape, -9), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action), (action, type(action))
        return np.asarray(action).reshape(self.observation_space.shape), 1.0, False, False, {}


@pytest.mark.parametrize(
    ("space", "action", "played"),
    [
        (spaces.Discrete(3), [0.1, -0.2, 0.3], [2]),
        (spaces.Discrete(3), [-3.0, -1.0, -2.0], [1]),
        (spaces.Discrete(3), [-INF, 0.0, -INF], [1]),  # masked logits
        (spaces.Discrete(3), [0.5, 0.5, 0.0], [0]),
        (spaces.Discrete(3), [2, 0, 7], [2]),
        (spaces.Discrete(3), [False, True, True], [1]),
        (spaces.Discrete(3), [0, 0, 0], [0]),
        (spaces.Discrete(3, start=5), [0.1, -0.2, 0.3], [7]),
        (spaces.MultiDiscrete([2, 3]), [0.3, 0.1, 0.0, 0.2, 0.1], [0, 1]),
        (spaces.MultiDiscrete([2, 3]), [0, 1, 0.0, 0.1, 0.2], [1, 2]),  # one of the two is one-hot
    ],
)
def test_the_largest_element_is_played(space: spaces.Space, action: list, played: list) -> None:
    env = GymWrapper(Echo(space))
    given = torch.tensor(action)
    with pytest.warns(UserWarning, match=WARNING):
        td = env.step(env.reset().set("action", given))
    assert td["next", "observation"].tolist() == played
    assert td["action"] is given


def test_the_warning_comes_once() -> None:
    env = GymEnv("CartPole-v1")
    scores = torch.tensor([0.25, 0.5])
    with pytest.warns(UserWarning, match=WARNING) as caught:
        env.rollout(6, lambda td: td.set("action", scores))
    assert len(caught) == 1
    with pytest.warns(UserWarning, match=WARNING):  # another environment
        GymEnv("CartPole-v1").rollout(3, lambda td: td.set("action", scores))


def test_the_warning_as_an_error_refuses_each_time() -> None:
    env = GymEnv("CartPole-v1")
    td = env.reset().set("action", torch.tensor([0.25, 0.5]))
    for _ in range(2):
        with pytest.raises(EnvError, match=WARNING):
            env.step(td)


def test_one_hot_actions_are_no_reason_to_warn() -> None:
    GymEnv("CartPole-v1").rollout(6)
    GymEnv("CartPole-v1", num_envs=2).rollout(6)


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


ENVS: dict[str, Callable[[], EnvBase]] = {
    "one": cartpole,
    "steps counted": lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter()),
    "num_envs": lambda: GymEnv("CartPole-v1", num_envs=2),
    "num_envs, async": lambda: GymEnv("CartPole-v1", num_envs=2, vectorization_mode="async"),
    "serial": lambda: SerialEnv(2, cartpole),
    "serial of vectors": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=2)),
    "parallel": lambda: ParallelEnv(2, cartpole),
}


class Scores(nn.Module):
    """Scores of CartPole's two actions; with ``one_hot``, the larger as one-hot vectors of the same dtype."""

    def __init__(self, one_hot: bool) -> None:
        super().__init__()
        self.linear, self.one_hot = nn.Linear(4, 2), one_hot
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(8.0).reshape(2, 4).sin())

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        scores = self.linear(observation)
        return nn.functional.one_hot(scores.argmax(-1), 2).to(scores.dtype) if self.one_hot else scores


def collected(make: Callable[[], EnvBase], one_hot: bool, **options: Any) -> TensorDict:
    torch.manual_seed(0)
    policy = TensorDictModule(Scores(one_hot), ["observation"], ["action"])
    collector = Collector(make(), policy, frames_per_batch=80, total_frames=160, **options)
    collector.set_seed(1)
    with warnings.catch_warnings():
        if not one_hot:
            warnings.filterwarnings("ignore", "action " + WARNING, UserWarning)
        batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return torch.cat(batches, -1)


@pytest.mark.parametrize(("env", "options"), in_turn(ENVS, [{}, {"use_buffers": False}]))
def test_collected_scores_are_recorded_and_their_largest_is_played(env: str, options: dict) -> None:
    scores, one_hot = collected(ENVS[env], False, **options), collected(ENVS[env], True, **options)
    assert scores["next", "done"].any()
    assert scores["action"].dtype == torch.float32
    assert (scores["action"].sum(-1) != 1).all()
    largest = scores["action"].argmax(-1)
    assert torch.equal(nn.functional.one_hot(largest, 2).float(), one_hot["action"])
    for key in one_hot.exclude("action").keys(True, True):
        assert torch.equal(scores[key], one_hot[key]), key


@pytest.mark.parametrize("env", ENVS)
def test_buffers_do_not_change_a_bit(env: str) -> None:
    first, second = collected(ENVS[env], False), collected(ENVS[env], False, use_buffers=False)
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key in second.keys(True, True):
        assert torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("env", ENVS)
def test_nan_among_scores_is_an_error(env: str) -> None:
    def act(td: TensorDict) -> TensorDict:
        return td.set("action", torch.full((*td.batch_size, 2), torch.nan))

    with pytest.raises(EnvError, match=r"CartPole-v1.*'action' must be one-hot.*finite, got .*nan"):
        Collector(ENVS[env](), act, frames_per_batch=8, total_frames=8).next()
