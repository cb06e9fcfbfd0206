"""A collector makes its environment anew when it raises: in one process and in workers, on every path."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from rollwright.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from rollwright.collectors.utils import restore_next
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import (
    EnvBase,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from rollwright.errors import EnvError


class Walk(gymnasium.Env):
    """Observes its steps in this episode, in all, and a random number; ends after 8; may raise."""

    observation_space = spaces.Box(-1e9, 1e9, (3,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, step: int = -1, reset: int = -1) -> None:
        self.fails, self.total, self.begun = (step, reset), 0, 0

    def _seen(self) -> np.ndarray:
        return np.array([self.count, self.total, self.np_random.random()], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count, self.begun = 0, self.begun + 1
        if self.begun == self.fails[1]:
            raise ValueError("boom")
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.count, self.total = self.count + 1, self.total + 1
        if self.count == self.fails[0]:
            raise ValueError("boom")
        return self._seen(), 1.0, self.count >= 8, False, {}


def walk(*args: Any, **kwargs: Any) -> Callable[[], EnvBase]:
    return lambda: GymWrapper(Walk(*args, **kwargs), categorical_action_encoding=True)


def recreating(create_env_fn: Any, *args: Any, cls: Any = Collector, **options: Any) -> Any:
    return cls(create_env_fn, *args, on_env_failure="recreate", **{"frames_per_batch": 12, **options})


def frames_of(collector: Any, batches: int = 1) -> TensorDictBase:
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return torch.cat([collector.next() for _ in range(batches)], -1)


def function(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))


# Every path -----------------------------------------------------------------------------------------------

PATHS: dict[str, dict[str, Any]] = {
    "native": {},
    "plain": {"use_buffers": False},
    "same memory": {"return_same_td": True},
    "function": {"policy": function},
    "compact": {"compact_obs": True},
    "random": {"policy": function, "init_random_frames": 12},
}


@pytest.mark.parametrize("path", PATHS)
def test_trajectory_ends_where_the_environment_is_made_anew(path: str) -> None:
    options = dict(PATHS[path])
    policy = options.pop("policy", None)
    collector = recreating(walk(5), policy, **options)
    with pytest.warns(RuntimeWarning, match=r"create_env_fn: the environment was recreated, .*boom.*env_recreations"):
        data = collector.next()
    data = restore_next(data) if path == "compact" else data
    assert data["observation"][:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert data["next", "observation"][:, 0].tolist() == [1, 2, 3, 4, 4, 1, 2, 3, 4, 4, 1, 2]
    assert torch.equal(data["next", "observation"][4], data["observation"][4])
    ends = [t in (4, 9) for t in range(12)]
    assert data["next", "truncated"].flatten().tolist() == ends
    assert data["next", "done"].flatten().tolist() == ends
    assert not data["next", "terminated"].any()
    assert data["next", "reward"].flatten().tolist() == [float(not end) for end in ends]
    ids = data["collector", "traj_ids"]
    assert ids.diff().tolist() == [int(end) for end in ends[:-1]]
    stats = json.loads(json.dumps(collector.stats()))
    assert stats["env_recreations"] == 2
    assert stats["episodes"] == 2
    collector.shutdown()


def test_paths_give_the_same_bits() -> None:
    found = []
    for options in ({}, {"use_buffers": False}):
        collector = recreating(walk(3, reset=2), max_frames_per_traj=4, **options)
        collector.set_seed(7)
        how = collector.stats()["paths"]["env"]
        assert how.startswith("plain" if options else "native")
        found.append(frames_of(collector, 3))
        assert collector.stats()["env_recreations"] > 3
    assert (found[0] == found[1]).all()
    assert "step_count" in found[0]


def chain(env: EnvBase) -> EnvBase:
    return TransformedEnv(TransformedEnv(env, StepCounter(step_count_key="steps")), RewardSum())


@pytest.mark.parametrize("native", [True, False])
def test_transforms_around_the_environment(native: bool) -> None:
    options = {"max_frames_per_traj": 4, "set_truncated": True} if native else {"use_buffers": False}
    data = frames_of(recreating(lambda: chain(walk(3)()), frames_per_batch=10, **options))
    outcome = data["next"]
    ends = [t in (2, 5, 8) or (native and t == 9) for t in range(10)]
    assert outcome["truncated"].flatten().tolist() == ends
    assert outcome["steps"].flatten().tolist() == [1, 2, 2, 1, 2, 2, 1, 2, 2, 1]  # the last ones once more
    assert outcome["episode_reward"].flatten().tolist() == [1, 2, 2, 1, 2, 2, 1, 2, 2, 1]
    if native:
        assert outcome["step_count"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_first_steps_are_marked() -> None:
    data = frames_of(recreating(lambda: TransformedEnv(walk(3)(), InitTracker())))
    assert data["is_init"].flatten().tolist() == [t % 3 == 0 for t in range(12)]


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}])
def test_failure_in_a_reset(options: dict[str, Any]) -> None:
    collector = recreating(walk(reset=2), frames_per_batch=20, **options)
    data = frames_of(collector)
    assert data["observation"][:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7] * 2 + [0, 1, 2, 3]
    assert data["next", "terminated"].flatten().nonzero().flatten().tolist() == [7, 15]
    assert not data["next", "truncated"].any()
    assert collector.stats()["env_recreations"] == 2


def test_batches_are_made_anew_as_a_whole_or_one_by_one() -> None:
    makers = [walk(), walk(5)]
    whole = recreating(lambda: SerialEnv(2, makers), frames_per_batch=24)
    alone = Collector(lambda: SerialEnv(2, makers, on_env_failure="recreate"), frames_per_batch=24)
    for collector, cut, count in ((whole, [[4, 9], [4, 9]], 2), (alone, [[], [4, 9]], 2)):
        data = frames_of(collector)
        truncated = data["next", "truncated"].squeeze(-1)
        assert [row.nonzero().flatten().tolist() for row in truncated] == cut
        assert torch.equal(data["collector", "traj_ids"].diff() > 0, data["next", "done"].squeeze(-1)[:, :-1])
        assert collector.stats()["env_recreations"] == count


def test_batch_whose_process_is_lost_between_two_batches() -> None:
    with recreating(lambda: ParallelEnv(2, walk(), num_processes=1), frames_per_batch=20) as collector:
        collector.next()
        os.kill(collector.env.base_env._processes.pids()[0], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match="killed by SIGKILL"):
            data = collector.next()
        assert data["next", "observation"][0, :, 0].tolist() == [2, 1, 2, 3, 4, 5, 6, 7, 8, 1]
        assert data["next", "truncated"][..., 0].nonzero().tolist() == [[0, 0], [1, 0]]
        assert collector.stats()["env_recreations"] == 1


def test_whole_trajectories_into_a_buffer() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    collector = recreating(walk(5), frames_per_batch=10, total_frames=40, trajs_per_batch=1, replay_buffer=buffer)
    with collector, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert all(batch is None for batch in collector)
    data = buffer[:]
    assert len(data) == 40
    assert data["next", "observation"][:, 0].tolist() == [1, 2, 3, 4, 4] * 8


# Errors -----------------------------------------------------------------------------------------------------


def test_environment_that_always_fails_is_an_error() -> None:
    with recreating(walk(1)) as collector:
        with (
            pytest.warns(RuntimeWarning),
            pytest.raises(EnvError, match=r"recreated 3 times without a step in between: .*boom") as caught,
        ):
            collector.next()
        assert isinstance(caught.value.__cause__.__cause__, ValueError)
        assert collector.stats()["env_recreations"] == 3
    never = recreating(walk(reset=1))
    with never, pytest.warns(RuntimeWarning), pytest.raises(EnvError, match=r"3 times.*raised in reset"):
        never.next()


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        (walk()(), {}, r"expected a function that makes the environment, got GymWrapper.*lambda"),
        ([walk()()], {}, r"expected a function that makes the environment, got GymWrapper"),
        (
            walk(),
            {"on_env_failure": "ignore"},
            r"on_env_failure: expected one of \('raise', 'recreate'\), got 'ignore'",
        ),
        (walk(), {"reset_when_done": False}, r"reset_when_done=False goes on after the end.*Drop one"),
        (
            lambda: ParallelEnv(2, walk(), num_processes=1),
            {"env_groups": 2},
            r"env_groups=2 steps its parts in turn\. Pass on_env_failure to ParallelEnv",
        ),
    ],
)
def test_what_cannot_be_is_refused(env: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Collector(env, frames_per_batch=10, **{"on_env_failure": "recreate", **options})


def test_nothing_is_around_the_environment_without_the_option() -> None:
    with Collector(walk(5), frames_per_batch=10) as collector:
        assert type(collector.env) is GymWrapper
        with pytest.raises(EnvError, match="boom"):
            collector.next()
        assert collector.stats()["env_recreations"] == 0


# Seeds and state ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}])
def test_same_seed_same_bits_and_other_seeds_for_new_environments(options: dict[str, Any]) -> None:
    found = []
    with recreating(walk(5), **options) as collector, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for seed in (3, 3, 4):  # the second time in the middle of a trajectory
            collector.set_seed(seed)
            data = torch.cat([collector.next(), collector.next()])
            found.append(data["observation"][:, ::2])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    first = found[0][:, 0] == 0
    assert len(found[0][first, 1].unique()) == int(first.sum()) == 5


@pytest.mark.parametrize("options", [{}, {"use_buffers": False}])
def test_goes_on_from_a_saved_state(options: dict[str, Any]) -> None:
    def make() -> Any:
        return recreating(walk(5), max_frames_per_traj=6, frames_per_batch=7, **options)

    with make() as collector, make() as other, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        collector.set_seed(3)
        collector.next()
        collector.next()  # which ends before the step that fails
        state = collector.state_dict()
        assert state["unsaved"] == []
        expected = [collector.next() for _ in range(3)]
        other.load_state_dict(state)
        assert other.stats()["env_recreations"] == 2
        assert all((other.next() == batch).all() for batch in expected)


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_batch_that_makes_its_own_anew_goes_on_from_a_saved_state(cls: Any) -> None:
    options = {"num_processes": 1} if cls is ParallelEnv else {}

    def make() -> Any:
        return Collector(lambda: cls(2, [walk(), walk(5)], on_env_failure="recreate", **options), frames_per_batch=14)

    with make() as collector, make() as other, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        collector.set_seed(3)
        collector.next()
        state = collector.state_dict()
        assert state["unsaved"] == []
        expected = [collector.next() for _ in range(2)]
        other.load_state_dict(state)
        assert all((other.next() == batch).all() for batch in expected)
        assert other.stats()["env_recreations"] == collector.stats()["env_recreations"] == 4


def test_those_made_anew_inside_of_what_was_made_anew_stay_counted() -> None:
    makers = [walk(4), walk()]
    with recreating(lambda: SerialEnv(2, makers, on_env_failure="recreate"), frames_per_batch=24) as collector:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            collector.next()
            inner = collector.env.base_env
            assert collector.stats()["env_recreations"] == sum(inner.recreations) == 3
            inner.close()  # which is a failure of all of it
            collector.next()
        assert collector.env.base_env is not inner
        assert collector.stats()["env_recreations"] == 3 + 1 + sum(collector.env.base_env.recreations)


# Workers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_in_workers(cls: Any) -> None:
    with recreating([walk(), walk(5)], cls=cls, frames_per_batch=20 if cls is MultiSyncCollector else 10) as collector:
        rows: list[TensorDictBase] = []
        while len(rows) < 4 or collector.stats()["env_recreations"] < 2:
            batch = collector.next()
            rows += list(batch.unbind(0)) if batch.ndim == 2 else [batch]
        for row in rows:
            outcome, ids = row["next"], row["collector", "traj_ids"]
            hurt = int(ids[0]) % 2 == 1  # ids of the second worker are odd
            assert torch.equal(ids.diff() != 0, outcome["done"].flatten()[:-1])
            assert torch.equal(outcome["truncated"].flatten(), (row["observation"][:, 0] == 4) & hurt)
            assert row["observation"][:, 0].max() <= (4 if hurt else 7)
        stats = collector.stats()
        assert stats["workers"][0]["env_recreations"] == stats["restarts"] == 0
        assert stats["env_recreations"] == stats["workers"][1]["env_recreations"] >= 2


def test_objects_are_refused_for_workers() -> None:
    with pytest.raises(ValueError, match="expected a function that makes the environment"):
        recreating([walk()()], cls=MultiSyncCollector)
