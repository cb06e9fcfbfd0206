"""Every class around gymnasium equals a plain gymnasium loop, step by step and to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import envpool
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tests.variants import in_turn

from rollwright.envs.base import EnvBase
from rollwright.envs.libs import EnvPoolEnv, GymEnv, GymWrapper
from rollwright.envs.serial import SerialEnv

SEED = 7
# For each environment: observation, reward, terminated, truncated and next observation, stacked over time.
Frames = tuple[np.ndarray, ...]
OPTIONS: dict[str, dict[str, int]] = {"CartPole-v1": {}, "Pendulum-v1": {"max_episode_steps": 50}}  # ends soon
NAMES = ("observation", "reward", "terminated", "truncated", "next observation")


def actions_for(task: str, num_steps: int, num_envs: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if task == "CartPole-v1":
        return rng.integers(0, 2, (num_steps, num_envs))
    return rng.uniform(-2, 2, (num_steps, num_envs, 1)).astype(np.float32)


def stacked(frames: list[tuple]) -> Frames:
    return tuple(np.stack(column) for column in zip(*frames, strict=True))


def plain_loop(task: str, seed: int, actions: np.ndarray) -> Frames:
    """One environment, as anybody would step it by hand."""
    env = gymnasium.make(task, **OPTIONS[task])
    frames = []
    obs, _ = env.reset(seed=seed)
    for action in actions:
        following, reward, terminated, truncated, _ = env.step(action)
        frames.append((obs, np.float32(reward), terminated, truncated, following))
        obs = env.reset()[0] if terminated or truncated else following
    env.close()
    return stacked(frames)


def collected(env: EnvBase, task: str, actions: np.ndarray) -> list[Frames]:
    """The same from one of our environments, for each row of its batch."""
    frames = []
    shape = env.full_action_spec["action"].shape
    td = env.reset()
    for action in actions:
        given = torch.from_numpy(action)
        if task == "CartPole-v1":
            given = torch.nn.functional.one_hot(given, 2)
        frame, td = env.step_and_maybe_reset(td.set("action", given.reshape(shape)))
        outcome = frame["next"]
        assert (outcome["done"] == outcome["terminated"] | outcome["truncated"]).all()
        values = (frame["observation"], *(outcome[key] for key in ("reward", "terminated", "truncated", "observation")))
        frames.append(tuple(value.reshape(actions.shape[1], -1).numpy() for value in values))
    env.close()
    columns = stacked(frames)
    return [
        tuple(column[:, i, 0] if 0 < j < 4 else column[:, i] for j, column in enumerate(columns))
        for i in range(actions.shape[1])
    ]


def assert_same(got: Frames, expected: Frames) -> None:
    assert (expected[2] | expected[3]).sum() > 3
    for name, ours, plain in zip(NAMES, got, expected, strict=True):
        np.testing.assert_array_equal(ours, plain, err_msg=name)


@pytest.mark.parametrize(("task", "num_steps"), [("CartPole-v1", 1_000), ("Pendulum-v1", 250)])
def test_single_environment(task: str, num_steps: int) -> None:
    actions = actions_for(task, num_steps, 1)
    env = GymEnv(task, **OPTIONS[task])
    env.set_seed(SEED)
    (got,) = collected(env, task, actions)
    assert_same(got, plain_loop(task, SEED, actions[:, 0]))


def vector(cls: type, mode: AutoresetMode, **kwargs: Any) -> Callable[[str, int], EnvBase]:
    def make(task: str, num_envs: int) -> EnvBase:
        return GymWrapper(
            cls([lambda: gymnasium.make(task, **OPTIONS[task])] * num_envs, autoreset_mode=mode, **kwargs)
        )

    return make


MAKERS: dict[str, Callable[[str, int], EnvBase]] = {
    "num_envs": lambda task, n: GymEnv(task, num_envs=n, **OPTIONS[task]),
    "num_envs, async": lambda task, n: GymEnv(task, num_envs=n, vectorization_mode="async", **OPTIONS[task]),
    "sync, same step": vector(SyncVectorEnv, AutoresetMode.SAME_STEP),
    "sync, next step": vector(SyncVectorEnv, AutoresetMode.NEXT_STEP),
    "sync, disabled, no copy": vector(SyncVectorEnv, AutoresetMode.DISABLED, copy=False),
    "async, same step": vector(AsyncVectorEnv, AutoresetMode.SAME_STEP),
    "async, next step": vector(AsyncVectorEnv, AutoresetMode.NEXT_STEP),
    "async, same step, no shared memory": vector(AsyncVectorEnv, AutoresetMode.SAME_STEP, shared_memory=False),
    "serial": lambda task, n: SerialEnv(n, lambda: GymEnv(task, **OPTIONS[task])),
    "serial of vectors": lambda task, n: SerialEnv(n // 2, lambda: GymEnv(task, num_envs=2, **OPTIONS[task])),
}


@cache
def single_loops(task: str, num_steps: int, num_envs: int) -> list[Frames]:
    actions = actions_for(task, num_steps, num_envs)
    return [plain_loop(task, SEED + i, actions[:, i]) for i in range(num_envs)]


def assert_batch_equals_single_loops(maker: str, task: str, num_steps: int) -> None:
    num_envs = 4
    env = MAKERS[maker](task, num_envs)
    assert env.set_seed(SEED) == SEED + num_envs - 1
    seen = collected(env, task, actions_for(task, num_steps, num_envs))
    for got, expected in zip(seen, single_loops(task, num_steps, num_envs), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize(("maker", "task"), in_turn(MAKERS, [*OPTIONS]))
def test_batch_equals_single_loops(maker: str, task: str) -> None:
    assert_batch_equals_single_loops(maker, task, 250)


@pytest.mark.slow
@pytest.mark.parametrize("maker", MAKERS)
def test_batch_equals_single_loops_for_long(maker: str) -> None:
    assert_batch_equals_single_loops(maker, "CartPole-v1", 10_000)


@pytest.mark.parametrize(("task", "num_steps"), [("CartPole-v1", 500), ("Pendulum-v1", 850)])
def test_envpool_equals_raw_envpool(task: str, num_steps: int) -> None:
    actions = actions_for(task, num_steps, 4)
    env = EnvPoolEnv(task, 4)
    env.set_seed(SEED)
    raw = env._env._make([SEED + i for i in range(4)])
    for ours, plain in zip(collected(env, task, actions), raw_pool_loops(raw, actions), strict=True):
        assert_same(ours, plain)


def raw_pool_loops(pool: Any, actions: np.ndarray) -> list[Frames]:
    """A pool that resets itself, less the steps that it spends on resets."""
    num_steps, num_envs = actions.shape[:2]
    frames: list[list[tuple]] = [[] for _ in range(num_envs)]
    obs, _ = pool.reset()
    ended = np.zeros(num_envs, bool)
    while min(map(len, frames)) < num_steps:
        taken = np.array([actions[min(len(kept), num_steps - 1), i] for i, kept in enumerate(frames)])
        following, reward, terminated, truncated, _ = pool.step(taken)
        for i, kept in enumerate(frames):
            if not ended[i] and len(kept) < num_steps:
                kept.append((obs[i], reward[i], terminated[i], truncated[i], following[i].copy()))
        ended = terminated | truncated
        obs = following.copy()
    return [stacked(kept) for kept in frames]


def test_envpool_seeds_its_environments_like_envpool() -> None:
    env = EnvPoolEnv("CartPole-v1", 3)
    env.set_seed(5)
    raw = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=5)
    with pytest.warns(UserWarning, match="precision lowered"):
        first = raw.reset()[0]
    np.testing.assert_array_equal(env.reset()["observation"].numpy(), first)
