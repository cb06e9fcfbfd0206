"""Options and calls of batched environments that programs written for TorchRL use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, dense_stack_tds

from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import AsyncEnvPool, EnvBase, GymEnv, ParallelEnv, SerialEnv, TransformedEnv, check_env_specs
from rollwright.envs._results import merge_reset
from rollwright.envs.transforms import StepCounter
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import EnvWithDynamicSpec, HeterogeneousCountingEnv

KINDS = {
    "serial": SerialEnv,
    "parallel": ParallelEnv,
    "threads": lambda n, fn, **kwargs: AsyncEnvPool([fn] * n, backend="threading", **kwargs),
    "processes": lambda n, fn, **kwargs: AsyncEnvPool([fn] * n, backend="multiprocessing", **kwargs),
}
kinds = pytest.mark.parametrize("kind", KINDS)
batches = pytest.mark.parametrize("kind", ["serial", "parallel"])


class Starts(EnvBase):
    """Counts up from where a reset says; ends two steps later."""

    def __init__(self) -> None:
        super().__init__()
        self.resets = 0
        self.observation_spec = Composite(count=Unbounded((1,)))
        self.action_spec = Categorical(2, shape=(1,))

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(
        self, tensordict: TensorDictBase | None = None, start: float = 0.0, offset: float = 0.0
    ) -> TensorDictBase:
        self.resets += 1
        self.first = self.count = torch.tensor([start + offset])
        return TensorDict({"count": self.count})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count = self.count + 1
        return TensorDict({"count": self.count, "reward": 1.0, "done": self.count >= self.first + 2})

    def threads(self) -> int:
        return torch.get_num_threads()


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def build(kind: str, *args: Any, **kwargs: Any) -> Any:
        made.append(KINDS[kind](*args, **kwargs))
        return made[-1]

    yield build
    for env in made:
        env.close(raise_if_closed=False)


# Options -----------------------------------------------------------------------------------------


@batches
def test_options_that_other_packages_need(make: Any, kind: str) -> None:
    for use_buffers in (None, True, False):
        env = make(kind, 2, Starts, use_buffers=use_buffers, consolidate=False, non_blocking=True, num_sub_threads=1)
        assert env.rollout(2)["next", "count"].tolist() == [[[1.0], [2.0]]] * 2


def test_option_of_pools_that_other_packages_need(make: Any) -> None:
    assert make("processes", 2, Starts, exchange="shm").reset()["count"].tolist() == [[0.0], [0.0]]


def test_threads_of_torch(make: Any) -> None:
    before = torch.get_num_threads()
    try:
        env = make("parallel", 2, Starts, num_threads=before + 1, num_sub_threads=3)
        assert torch.get_num_threads() == before + 1
        assert env.threads() == [3, 3]
    finally:
        torch.set_num_threads(before)
    assert make("parallel", 2, Starts).threads() == [1, 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["num_threads", "num_sub_threads"])
def test_number_of_threads_that_is_none(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected a number of at least 1, got 0"):
        ParallelEnv(2, Starts, **{name: 0})


# Calls -------------------------------------------------------------------------------------------


@kinds
def test_reset_arguments_for_one_environment_each(make: Any, kind: str) -> None:
    env = make(kind, 2, Starts)
    root = env.reset(offset=0.5, list_of_kwargs=[{"start": 3.0}, {"offset": 1.0}])
    assert root["count"].tolist() == [[3.5], [1.0]]
    root["_reset"] = torch.tensor([[False], [True]])
    assert env.reset(root, list_of_kwargs=[{"start": 7.0}, {"start": 8.0}])["count"].tolist() == [[3.5], [8.0]]
    with pytest.raises(EnvError, match=r"list_of_kwargs: expected one dictionary for each of the 2 .*, got 1"):
        env.reset(list_of_kwargs=[{}])
    assert TransformedEnv(env, StepCounter()).reset(list_of_kwargs=[{}, {"start": 2.0}])["count"].tolist() == [[0], [2]]


@batches
def test_reset_arguments_on_arrays(make: Any, kind: str) -> None:
    env = make(kind, 2, lambda: GymEnv("CartPole-v1"))
    seeds = [{"seed": 3}, {"seed": 5}]
    plain = env.reset(list_of_kwargs=seeds)["observation"]
    native = env._array_form().reset(None, list_of_kwargs=seeds)["observation"]
    assert torch.equal(plain, torch.as_tensor(native))
    assert not torch.equal(plain[0], plain[1])


@kinds
def test_data_of_the_next_step(make: Any, kind: str) -> None:
    env = make(kind, 2, Starts)
    stepped = env.step(env.rand_action(env.reset()).set("mine", torch.ones(2)))
    root = env.step_mdp(stepped)
    assert root["count"].tolist() == [[1.0], [1.0]]
    assert {"count", "done", "mine", "action"} <= set(root.keys())
    assert not {"next", "reward"} & set(root.keys())
    with pytest.raises(EnvError, match="step_mdp expected data with 'next'"):
        env.step_mdp(root)


def test_ways_to_check_specs() -> None:
    for stops, resets in ((True, 1), (False, 2), ("both", 3), (None, 2)):
        env = Starts()
        env.check_env_specs(break_when_any_done=stops)
        assert env.resets == resets
    env = Starts()
    check_env_specs(env, tensordict=env.reset(), break_when_any_done=True)
    assert env.resets == 1


def test_most_results_below_the_least(make: Any) -> None:
    pool = make("threads", 2, Starts)
    pool.async_reset_send()
    for limits in ({"min_get": 2, "max_get": 1}, {"min_get": 0}):
        with pytest.raises(ValueError, match="async_reset_recv: expected to wait for at least 1 result"):
            pool.async_reset_recv(**limits)
    assert len(pool.async_reset_recv(min_get=2, max_get=2)) == 2


# Shapes that vary --------------------------------------------------------------------------------


@kinds
def test_growing_entries_begin_anew_with_their_own_shape(make: Any, kind: str) -> None:
    env = make(kind, 2, EnvWithDynamicSpec)
    td = env.reset()
    for _ in range(2):
        td = env.step_mdp(env.step(env.rand_action(td)))
    td["_reset"] = torch.tensor([[True], [False]])
    fresh = env.reset(td)
    assert fresh[0]["observation"].shape == (3, 1, 2)
    assert fresh[1]["observation"].shape == (3, 3, 2)


@pytest.mark.parametrize("kind", ["serial", "parallel"])
def test_growing_entries_in_batches_of_batches(make: Any, kind: str) -> None:
    env = make(kind, 2, lambda: SerialEnv(2, [lambda: EnvWithDynamicSpec(4), lambda: EnvWithDynamicSpec(6)]))
    rollout = env.rollout(9, break_when_any_done=False)
    for i, sizes in enumerate(([1, 2, 3, 4, 1, 2, 3, 4, 1], [1, 2, 3, 4, 5, 6, 1, 2, 3])):
        assert [len(step["observation"][0]) for step in rollout[1, i].unbind(0)] == sizes


def test_agents_of_two_shapes_in_one_tensor() -> None:
    env = Starts()
    old, fresh = TensorDict({"x": torch.zeros(2, 3)}), TensorDict({"x": torch.ones(2, 1)})
    with pytest.raises(EnvError, match=r"'x' has shape \[2, 1\] for agents that begin anew, and \[2, 3\]"):
        merge_reset(env, old, fresh, {(): torch.tensor([[True], [False]])})


@batches
def test_rollouts_of_unlike_agents_as_lazy_stacks(make: Any, kind: str) -> None:
    env = make(kind, 2, HeterogeneousCountingEnv)
    rollout = env.rollout(3, return_contiguous=False)
    assert rollout.names == [None, "time"]
    assert dense_stack_tds(rollout)["lazy"][0][..., 0]["tensor_0"].squeeze(-1).tolist() == [0, 1, 2]
