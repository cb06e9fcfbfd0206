"""Views of a batch of environments: env[1:3]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.envs import EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv
from rollwright.envs.transforms import StepCounter
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import CountingEnv, CountingEnvWithString, EnvWithDynamicSpec

KINDS = {"serial": SerialEnv, "parallel": ParallelEnv}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def build(kind: str, num_workers: int = 4, maker: Any = CountingEnv, **kwargs: Any) -> Any:
        made.append(KINDS[kind](num_workers, maker, **kwargs))
        return made[-1]

    yield build
    for env in made:
        env.close(raise_if_closed=False)


def counts(env: Any) -> list[int]:
    return [int(count) for count in env.count]


def ones(env: EnvBase) -> TensorDict:
    return TensorDict({"action": env.full_action_spec["action"].one()}, env.batch_size)


INDICES = {
    "number": (2, [2]),
    "negative": (-1, [3]),
    "slice": (slice(1, 3), [1, 2]),
    "list": ([3, 0], [3, 0]),
    "array": (np.array([0, 3]), [0, 3]),
    "tensor": (torch.tensor([1, 3]), [1, 3]),
}


@kinds
@pytest.mark.parametrize("case", INDICES)
def test_a_step_of_a_view_is_one_of_its_environments_alone(kind: str, case: str, make: Any) -> None:
    index, rows = INDICES[case]
    env = make(kind)
    env.reset()
    view = env[index]
    assert (view.num_workers, view.batch_size) == (len(rows), (len(rows),))
    outcome = view.step(ones(view))["next"]
    assert outcome["observation"].flatten().tolist() == [1] * len(rows)
    assert counts(env) == [int(row in rows) for row in range(4)]
    assert counts(view) == [1] * len(rows)
    assert env.step(ones(env))["next", "observation"].flatten().tolist() == [1 + int(row in rows) for row in range(4)]


@kinds
def test_a_view_keeps_the_order_of_its_index(kind: str, make: Any) -> None:
    env = make(kind)
    env.reset()
    td = ones(env)
    td["action"] = torch.arange(4).reshape(4, 1) % 2  # of which environments 1 and 3 count
    env.step(td)
    view = env[[3, 0, 1]]
    assert counts(view) == counts(view[:]) == [1, 0, 1]
    assert counts(view[::2]) == [1, 1]
    td = ones(view)
    td["action"] = torch.tensor([[1], [0], [0]])
    assert view.step(td)["next", "observation"].flatten().tolist() == [2, 0, 1]
    assert counts(env) == [0, 1, 0, 2]


@kinds
def test_a_view_resets_its_environments_alone(kind: str, make: Any) -> None:
    env = make(kind)
    for _ in range(2):
        env.step(ones(env)) if env.num_uses else env.reset()
    view = env[1:]
    assert view.reset()["observation"].flatten().tolist() == [0, 0, 0]
    assert counts(env) == [1, 0, 0, 0]
    td = view.step_mdp(view.step(ones(view)))
    td["_reset"] = torch.tensor([[False], [True], [False]])
    assert view.reset(td)["observation"].flatten().tolist() == [1, 0, 1]
    assert counts(env) == [1, 1, 0, 1]


@kinds
def test_a_view_is_an_environment(kind: str, make: Any) -> None:
    view = make(kind, maker=lambda: GymEnv("CartPole-v1"))[1:3]
    view.check_env_specs()
    assert view.set_seed(5) == 6
    alone = make("serial", 2, lambda: GymEnv("CartPole-v1"))
    alone.set_seed(5)
    rollouts = [env.rollout(30, break_when_any_done=False, policy=_follow(env)) for env in (view, alone)]
    assert (rollouts[0] == rollouts[1]).all()
    assert view.env_name == ["CartPole-v1"] * 2
    counted = TransformedEnv(view, StepCounter())
    assert Collector(counted, frames_per_batch=8, total_frames=8).next().shape == (2, 4)


def _follow(env: EnvBase) -> Any:
    def act(td: Any) -> Any:
        right = (td["observation"][..., 2] > 0).long()
        return td.set("action", torch.nn.functional.one_hot(right, 2))

    return act


@kinds
@pytest.mark.parametrize("maker", [CountingEnvWithString, EnvWithDynamicSpec])
def test_rows_of_other_shapes_and_texts(kind: str, maker: Any, make: Any) -> None:
    env = make(kind, 3, maker)
    env.reset()
    view = env[1:]
    assert view.rollout(3, return_contiguous=False).shape == (2, 3)
    env.rollout(2, return_contiguous=False)


@kinds
def test_arguments_of_a_reset_reach_the_environments_of_the_view(kind: str, make: Any) -> None:
    view = make(kind, maker=Starts)[[2, 0]]
    assert view.reset(list_of_kwargs=[{"start": 3}, {"start": 7}])["observation"].flatten().tolist() == [3, 7]
    assert view.reset(start=1)["observation"].flatten().tolist() == [1, 1]
    with pytest.raises(EnvError, match="list_of_kwargs: expected one dictionary for each of the 2"):
        view.reset(list_of_kwargs=[{}] * 4)


class Starts(CountingEnv):
    def _reset(self, tensordict: Any = None, start: int = 0, **kwargs: Any) -> Any:
        super()._reset(tensordict, **kwargs)
        self.count += start
        return TensorDict({"observation": self.count.clone()})

    def add(self, number: int) -> int:
        self.count += number
        return int(self.count)


@kinds
def test_methods_are_called_in_the_environments_of_the_view(kind: str, make: Any) -> None:
    env = make(kind, 3, Starts)
    env.reset()
    assert env[1:].add(2) == [2, 2]
    assert env[0].add(1) == [1]
    assert counts(env) == [1, 2, 2]
    with pytest.raises(AttributeError, match="subtract"):
        env[1:].subtract(1)


@kinds
def test_a_view_ends_with_its_batch_and_not_the_other_way_round(kind: str, make: Any) -> None:
    env = make(kind)
    env.reset()
    view, other = env[1:], env[:1]
    view.close()
    assert view.is_closed
    assert not env.is_closed
    with pytest.raises(EnvError, match=r"reset after close.*Index the batch again"):
        view.reset()
    with pytest.raises(EnvError, match="already closed"):
        view.close()
    env.rand_step()
    env.close()
    with pytest.raises(EnvError, match="after close"):
        other.rand_step()
    with pytest.raises(EnvError, match="indexed after close"):
        env[0]
    env.reset()  # makes others
    with pytest.raises(EnvError, match="after close"):
        other.reset()
    with pytest.raises(EnvError, match=r"is closed.*Index the batch again"):
        other.set_seed(0)
    assert env[:1].reset().shape == (1,)


def test_a_view_keeps_its_batch_alive(make: Any) -> None:
    env = SerialEnv(3, CountingEnv)[:1]
    assert env.rollout(2).shape == (1, 2)


BAD = {
    "mask": (torch.ones(4, dtype=torch.bool), TypeError, "Of a mask"),
    "name": ("a", TypeError, "expected a number, a slice"),
    "outside": (4, IndexError, "from -4 to 3, got 4"),
    "twice": ([1, 1, -3], IndexError, "that differ"),
    "none": (slice(0, 0), IndexError, "at least one"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_index(case: str, make: Any) -> None:
    index, kind, message = BAD[case]
    env = make("serial")
    for batch in (env, env[[3, 2, 1, 0]]):
        with pytest.raises(kind, match=message):
            batch[index]
