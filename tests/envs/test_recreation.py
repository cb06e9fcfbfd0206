"""Environments are recreated by one mechanism: in this process and in others, with what they hand on."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tests.envs.test_serial_recreation import rollout, walk

from rollwright.collectors.evaluation.episodes import freeze
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, ParallelEnv, SerialEnv, TransformedEnv, VecNorm
from rollwright.envs.arrays import array_form
from rollwright.envs.checkpoint import load_env, save_env
from rollwright.errors import EnvError, EnvKeyError

CLASSES: list[Any] = [SerialEnv, ParallelEnv]
both = pytest.mark.parametrize("cls", CLASSES)
natively = pytest.mark.parametrize("native", [False, True])


class Draws(EnvBase):
    """Observes random numbers of its own; raises in its third step, or in all resets but the first."""

    def __init__(self, in_reset: bool = False) -> None:
        super().__init__()
        self.observation_spec = Composite(x=Unbounded((1,)))
        self.action_spec = Categorical(2, shape=())
        self.generator, self.count, self.in_reset = torch.Generator(), 0, in_reset

    def _drawn(self) -> torch.Tensor:
        return torch.rand(1, generator=self.generator)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if self.in_reset and self.count:
            raise ValueError("boom")
        return TensorDict({"x": self._drawn()})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.count += 1
        if self.count == 3:
            raise ValueError("boom")
        return TensorDict({"x": self._drawn(), "reward": 0.0, "terminated": self.in_reset})

    def _set_seed(self, seed: int | None) -> None:
        self.generator.manual_seed(seed)  # type: ignore[arg-type]


def normed() -> EnvBase:
    return TransformedEnv(Draws(), VecNorm(in_keys=["x"]))


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Any] = []

    def build(cls: Any, *makers: Any) -> Any:
        options = {"num_processes": 1} if cls is ParallelEnv else {}
        made.append(cls(len(makers), list(makers), on_env_failure="recreate", **options))
        return made[-1]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was recreated", RuntimeWarning)
        yield build
    for env in made:
        env.close(raise_if_closed=False)


def drawn(env: EnvBase, steps: int = 9) -> list[float]:
    numbers: list[float] = env.rollout(steps, break_when_any_done=False)["next", "x"].flatten().tolist()
    return numbers


# Seeds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "static"), [(5, False), (-5, False), (5, True)])
def test_seeds_of_new_environments(make: Any, seed: int, static: bool) -> None:
    found = []
    for cls in CLASSES:
        env = make(cls, Draws, Draws)
        for _ in range(2):  # the second time, in an object that has renewed environments before
            env.set_seed(seed, static)
            found.append(drawn(env))
    assert all(numbers == found[0] for numbers in found)
    assert (found[0][:9] == found[0][9:]) == static


def test_process_that_is_replaced_knows_what_was_handed_on(make: Any) -> None:
    env, twin = make(ParallelEnv, Draws), make(SerialEnv, Draws)
    for one in (env, twin):
        one.set_seed(1)
        drawn(one, 7)
        assert one.recreations == [2]
    os.kill(env._processes.pids()[0], signal.SIGKILL)
    with pytest.raises(EnvError, match="was replaced"):
        env.count  # noqa: B018
    env.reset()
    twin.worker0.recreate(EnvError("lost with its process"))
    twin.reset()
    assert drawn(env) == drawn(twin)
    assert env.recreations == twin.recreations == [6]


def test_lost_ones_stay_ended_until_they_are_reset(make: Any) -> None:
    env, twin = (make(ParallelEnv, walk(), walk()) for _ in range(2))
    td = env.rand_step(env.reset())
    os.kill(env._processes.pids()[0], signal.SIGKILL)
    for one in (env, env, twin):
        if one is twin:
            load_env(twin, save_env(env).state)
        td = one.rand_step(env._step_mdp(td))
        assert td["next", "observation"][:, 0].tolist() == [1, 1]
        assert td["next", "truncated"].all()
    td = env.rand_step(env.maybe_reset(env._step_mdp(td)))
    assert not td["next", "done"].any()
    assert env.recreations == [1, 1]


# State --------------------------------------------------------------------------------------------------------


@both
@natively
def test_goes_on_from_a_checkpoint(make: Any, cls: Any, native: bool) -> None:
    env, twin = (make(cls, walk(4), walk(5)) for _ in range(2))
    env.set_seed(3)
    rollout(env, 6, native=native)
    checkpoint = save_env(env)
    assert checkpoint.unsaved == []
    load_env(twin, checkpoint.state)
    assert twin.recreations == [1, 1]
    expected, found = (rollout(one, 9, native=native) for one in (env, twin))
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
    assert twin.recreations == env.recreations == [3, 3]


@both
def test_copies_go_their_own_way(make: Any, cls: Any) -> None:
    env = make(cls, Draws)
    env.set_seed(0)
    drawn(env, 4)
    twin = copy.deepcopy(env)
    assert drawn(env) == drawn(twin)
    assert env.recreations == twin.recreations == [4]
    twin.close()


@both
def test_attributes_and_state_are_those_of_the_environments(make: Any, cls: Any) -> None:
    env = make(cls, normed)
    drawn(env, 2)
    assert env.count == [2]
    assert list(env.state_dict()) == [f"worker0.transform.{name}_0" for name in ("weight", "mean", "spread")]
    env.load_state_dict(env.state_dict())
    drawn(env, 2)
    assert env.recreations == [1]


# Failures -------------------------------------------------------------------------------------------------------


@both
def test_reset_that_fails_is_tried_as_often(make: Any, cls: Any) -> None:
    made: list[int] = []

    def create() -> EnvBase:
        made.append(1)
        return walk(reset=2 if len(made) == 1 else 1)()

    env = make(cls, create)
    with pytest.raises(EnvError, match=r"\[0\]: recreated 3 times without a step in between: .*raised in reset"):
        env.rollout(9, break_when_any_done=False)
    assert env.recreations == [3]


@both
def test_step_without_an_action_is_the_callers_mistake(make: Any, cls: Any) -> None:
    env = make(cls, walk(), walk())
    td = env.reset()
    with pytest.raises(EnvKeyError, match=r"\[0\]: .*action"):
        env.step(td)
    assert env.recreations == [0, 0]


def test_step_without_an_action_on_arrays(make: Any) -> None:
    arrays = array_form(make(SerialEnv, walk())._envs[0])
    with pytest.raises(EnvKeyError, match="found no 'action'"):
        arrays.step(arrays.reset(None), {})
    assert arrays.env.recreations == 0  # type: ignore[attr-defined]


def test_what_cannot_take_the_place_is_closed(make: Any) -> None:
    made: list[EnvBase] = []

    def create() -> EnvBase:
        made.append(walk(2)() if not made else Draws())
        return made[-1]

    env = make(SerialEnv, create)
    for _ in range(2):
        with pytest.raises(EnvError, match="differs in"):
            env.rollout(3)
    assert len(made) == 3
    assert all(one.is_closed for one in made)


@pytest.mark.parametrize("policy", ["recreate", "bogus"])
def test_single_one_in_this_process_keeps_the_option(policy: str) -> None:
    def single() -> Any:
        return ParallelEnv(1, walk(3), serial_for_single=True, num_processes=1, on_env_failure=policy)

    if policy == "bogus":
        with pytest.raises(ValueError, match="on_env_failure: expected one of"):
            single()
        return
    with pytest.warns(RuntimeWarning, match=r"SerialEnv\[0\] was recreated"):
        assert single().rollout(6, break_when_any_done=False).shape == (1, 6)


# Frozen statistics ------------------------------------------------------------------------------------------------


def statistics(env: EnvBase) -> dict[str, Any]:
    return {key: value for key, value in env.state_dict().items() if "worker0" in key and "transform" in key}


@both
def test_frozen_statistics_hold_still_when_recreated(make: Any, cls: Any) -> None:
    env = make(cls, normed)
    env.set_seed(0)
    drawn(env, 2)
    before = statistics(freeze(env))
    assert before
    drawn(env, 5)
    assert env.recreations == [2]
    after = statistics(env)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_frozen_statistics_that_are_lost_are_an_error(make: Any) -> None:
    env = make(ParallelEnv, normed)
    env.rollout(2)
    freeze(env)
    os.kill(env._processes.pids()[0], signal.SIGKILL)
    with pytest.raises(EnvError, match="has no statistics of 'x'"):
        env.rollout(2)
