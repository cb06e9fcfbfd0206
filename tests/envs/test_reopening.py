"""Batches of environments open again with the first reset after close()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollwright.collectors import Collector
from rollwright.envs import AsyncEnvPool, GymEnv, ParallelEnv, SerialEnv, StepCounter, TransformedEnv
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import CountingEnv


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1")


Make = Callable[[Any], EnvBase]
BATCHES: dict[str, Make] = {
    "serial": lambda maker: SerialEnv(2, maker),
    "serial that recreates": lambda maker: SerialEnv(2, maker, on_env_failure="recreate"),
    "parallel": lambda maker: ParallelEnv(2, maker, num_processes=1),
    "threads": lambda maker: AsyncEnvPool([maker] * 2),
    "processes": lambda maker: AsyncEnvPool([maker] * 2, backend="multiprocessing"),
}


@pytest.fixture(params=BATCHES)
def batch(request: pytest.FixtureRequest) -> Make:
    made = []

    def make(maker: Any) -> EnvBase:
        made.append(BATCHES[request.param](maker))
        return made[-1]

    yield make
    for env in made:
        env.close(raise_if_closed=False)


def test_a_reset_opens_it_again(batch: Make) -> None:
    env = batch(cartpole)
    env.set_seed(3)
    before = env.rollout(5)
    env.close()
    assert env.is_closed
    with pytest.raises(EnvError, match=r"step after close\(\)"):
        env.step(before[..., -1].exclude("next"))
    env.set_seed(3)
    assert not env.is_closed
    again = env.rollout(5)
    assert torch.equal(again["observation"], before["observation"])
    env.close()
    assert env.reset()["observation"].shape == (2, 4)
    assert not env.is_closed
    env.close()
    with pytest.raises(EnvError, match="already closed"):
        env.close()


def test_with_transforms_and_in_a_collector(batch: Make) -> None:
    env = TransformedEnv(batch(cartpole), StepCounter())
    for _ in range(2):  # the collector closes what it was given
        with Collector(env, frames_per_batch=8) as collector:
            collector.set_seed(0)
            assert collector.next()["step_count"].squeeze(-1).tolist() == [[0, 1, 2, 3]] * 2
        assert env.is_closed
    env.reset()
    assert not env.is_closed


def test_a_collector_goes_on_after_its_environment_was_closed(batch: Make) -> None:
    env = batch(cartpole)
    with Collector(env, frames_per_batch=8) as collector:
        collector.next()
        env.close()
        collector.reset()
        assert collector.next()["next", "observation"].shape == (2, 4, 4)


def test_a_device_is_kept(batch: Make) -> None:
    env = batch(cartpole).to("cpu")
    env.close()
    assert env.reset()["observation"].device == torch.device("cpu")
    assert env.device == torch.device("cpu")


def test_a_reset_of_some_does_not_open_it() -> None:
    env = SerialEnv(2, cartpole)
    td = env.reset()
    env.close()
    td["_reset"] = torch.tensor([[True], [False]])
    with pytest.raises(EnvError, match=r"reset after close\(\)"):
        env.reset(td)


def test_environments_that_cannot_be_made_again_are_named() -> None:
    kept = [CountingEnv(), CountingEnv()]
    env = SerialEnv(2, [lambda: kept[0], lambda: kept[1]])
    env.reset()
    env.close()
    with pytest.raises(EnvError, match=r"SerialEnv\[0\]: a reset after close\(\).*the one that was closed"):
        env.reset()
    assert env.is_closed
    makers = iter([cartpole, lambda: GymEnv("Pendulum-v1")])
    env = SerialEnv(1, lambda: next(makers)())
    env.close()
    with pytest.raises(EnvError, match=r"one of other specs, GymEnv\(env=Pendulum-v1"):
        env.reset()


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_a_step_after_close_says_that_a_reset_opens_it_again(kind: str) -> None:
    env = BATCHES[kind](cartpole)
    collector = Collector(env, frames_per_batch=4)
    collector.next()
    env.close()
    with pytest.raises(EnvError, match=r"step after close\(\)\. Reset it first"):
        collector.next()
    assert collector.next() is not None  # which begins with a reset
    collector.shutdown()


def test_a_closed_environment_that_cannot_be_opened_is_refused_at_construction() -> None:
    env = TransformedEnv(CountingEnv(), StepCounter())
    env.close()
    with pytest.raises(EnvError, match=r"create_env_fn: .* is closed\. Make a new environment\."):
        Collector(env, frames_per_batch=4)


def test_an_environment_of_gymnasium_goes_on_after_close() -> None:
    env = TransformedEnv(cartpole(), StepCounter())
    for _ in range(2):
        assert env.rollout(3)["step_count"].squeeze(-1).tolist() == [0, 1, 2]
        env.close()
        env.close()
    with Collector(env, frames_per_batch=4) as collector:
        assert collector.next().shape == (4,)
