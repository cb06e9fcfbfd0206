"""Groups of environments that are stepped in turn (``env_groups``) give what one group gives."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from tests.collectors.workers.processes import left_behind
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Collector, Interruptor, MultiSyncCollector
from rollwright.collectors.utils import restore_next
from rollwright.data import LazyTensorStorage, ReplayBuffer, Unbounded
from rollwright.envs import GymWrapper, ParallelEnv, SerialEnv, TransformedEnv
from rollwright.envs.batched.rows import HostedRows
from rollwright.envs.transforms import Compose, InitTracker, RewardSum, StepCounter, TensorDictPrimer
from rollwright.errors import EnvError, PolicyError
from rollwright.modules import RandomPolicy

Make = Callable[..., Any]


class Walk(gymnasium.Env):
    """Episodes of 2 to 6 steps that both end and are cut; ``fails_at`` and ``dies_at`` count steps of its life."""

    def __init__(self, fails_at: int = -1, dies_at: int = -1) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.fails_at, self.dies_at, self.steps = fails_at, dies_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = self.np_random.random(3).astype(np.float32)
        self.left = int(self.np_random.integers(2, 7))
        return self.at.copy(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError(f"failed at step {self.steps}")
        if self.steps == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.at[:2] += action
        self.at[2] = self.np_random.random()
        self.left -= 1
        return self.at.copy(), float(self.at[0]), self.left == 0 and action[0] > 0, self.left == 0, {}


def walk(**options: Any) -> Callable[[], Any]:
    return lambda: GymWrapper(Walk(**options))


def walks(number: int = 5, **options: Any) -> Callable[[], Any]:
    return lambda: ParallelEnv(number, walk(), num_processes=2, **options)


def booked(size: int = 7) -> Any:
    books = Compose(InitTracker(), StepCounter(max_steps=5), RewardSum(), TensorDictPrimer(h=Unbounded((size,))))
    return TransformedEnv(walks()(), books)


def batched() -> Any:
    return ParallelEnv(4, lambda: SerialEnv(2, walk()), num_processes=2)


def exact(x: torch.Tensor) -> torch.Tensor:
    """An action from single numbers: the same bits whatever the number of rows."""
    return torch.stack([x[..., 0] * 0.5 - x[..., 2], x[..., 1] * x[..., 2]], -1).clamp(-1, 1)


def deterministic() -> Any:
    return TensorDictModule(exact, ["observation"], ["action"])


def recurrent() -> Any:
    def remember(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = h * 0.5 + x[..., :1]
        return (h[..., :2] * x[..., 1:]).clamp(-1, 1), h, h[..., 0]

    return TensorDictModule(remember, ["observation", "h"], ["action", ("next", "h"), "_first"])


def scripted() -> Any:
    class ByName(nn.Module):
        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return exact(observation), observation[..., 0]

    return ByName()


def random() -> Any:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal, return_log_prob=True
        ),
    )


@pytest.fixture
def collect() -> Iterator[Make]:
    """Makes a collector, seeded, that is shut down at the end."""
    made: list[Any] = []

    def make(groups: int, env: Any = None, policy: Any = None, **options: Any) -> Any:
        torch.manual_seed(0)
        options = {"frames_per_batch": 50, "env_groups": groups, **options}
        collector = Collector(env or walks(), deterministic() if policy is None else policy, **options)
        made.append(collector)
        collector.set_seed(3)
        assert ("take turns" in collector.stats()["paths"]["env"]) == (groups > 1)
        return collector

    yield make
    for collector in made:
        collector.shutdown()


def assert_same(one: TensorDictBase, other: TensorDictBase) -> None:
    assert one.batch_size == other.batch_size
    assert one.names == other.names
    leaves = set(one.keys(True, True))
    assert leaves == set(other.keys(True, True))
    for key in leaves:
        left, right = one.get(key), other.get(key)
        if isinstance(left, TensorDictBase):
            assert_same(left, right)
        elif isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype, key
            assert torch.equal(left, right), key


CASES: dict[str, dict[str, Any]] = {
    "plain options": {},
    "versions": {"track_policy_version": True},
    "compact": {"compact_obs": True},
    "random first": {"init_random_frames": 50},
    "one step": {"frames_per_batch": 5},
    "cut": {"set_truncated": True},
    "anew": {"reset_at_each_iter": True},
    "one memory": {"return_same_td": True},
    "no ids": {"track_traj_ids": False},
    "by name": {"policy": scripted},
    "random actions": {"policy": RandomPolicy, "compile_policy": True},
    "whole": {"trajs_per_batch": 3, "traj_format": "cat"},
    "books": {"env": booked},
    "recurrent": {"env": booked, "policy": recurrent, "compact_obs": True},
    "batches": {"env": batched, "frames_per_batch": 56, "compact_obs": True},
    "limit": {"max_frames_per_traj": 3},
}


@pytest.mark.parametrize(("name", "number"), in_turn(CASES, (2, 3)))
def test_bits_are_those_of_one_group(collect: Make, name: str, number: int) -> None:
    runs = []
    for groups in (1, number):
        options = dict(CASES[name])
        policy = options.pop("policy", deterministic)()
        collector = collect(groups, policy=policy, **options)
        batches = [collector.next().clone() for _ in range(3)]
        collector.update_policy_weights_() if name == "versions" else None
        batches.append(collector.next().clone())
        runs.append((batches, collector._carrier, collector._traj_pool.state_dict(), torch.get_rng_state()))
        collector.shutdown()
    for batches, carrier, pool, numbers in runs[1:]:
        for one, other in zip(runs[0][0], batches, strict=True):
            assert_same(one, other)
        assert_same(runs[0][1], carrier)
        assert runs[0][2] == pool
        assert torch.equal(runs[0][3], numbers)


@pytest.mark.parametrize("compile_policy", [False, True])
def test_random_policy_does_not_depend_on_the_length_of_batches(collect: Make, compile_policy: bool) -> None:
    policy = random()
    long = collect(2, policy=policy, frames_per_batch=60, compile_policy=compile_policy).next()
    short = collect(2, policy=policy, frames_per_batch=15, compile_policy=compile_policy)
    assert_same(long, torch.cat([short.next() for _ in range(4)], -1))
    assert ("NumPy program" in short.stats()["paths"]["policy"]) == compile_policy
    assert long["action"].unique().numel() == long["action"].numel()


def test_whole_of_a_compact_batch_comes_back(collect: Make) -> None:
    whole, compact = collect(1).next(), collect(2, compact_obs=True).next()
    assert torch.equal(restore_next(compact)["next", "observation"], whole["next", "observation"])


def test_buffers_hold_the_same_by_step_and_by_batch(collect: Make) -> None:
    for extend in (False, True):
        held = []
        for groups in (1, 2):
            buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=4)
            collector = collect(groups, replay_buffer=buffer, extend_buffer=extend)
            for _ in range(2):
                collector.next()
            held.append(buffer[:])
        assert_same(*held)


def test_resumes_between_batches(collect: Make) -> None:
    first = collect(2, env=booked, policy=recurrent())
    first.next()
    state = first.state_dict()
    expected = first.next()
    for groups in (1, 2, 3):
        other = collect(groups, env=booked, policy=recurrent())
        other.next()
        other.load_state_dict(state)
        again = other.next()
        ids = ("collector", "traj_ids")
        assert_same(again.exclude(ids), expected.exclude(ids))


def test_some_are_reset_between_batches(collect: Make) -> None:
    batches = []
    for groups in (1, 2):
        collector = collect(groups)
        collector.next()
        collector.reset([1, 4])
        batches.append(collector.next())
    assert_same(*batches)


def test_interrupted_rollout_is_taken_as_far_by_all_groups(collect: Make) -> None:
    class AfterThree(Interruptor):
        asked = 0

        def collection_stopped(self) -> bool:
            self.asked += 1
            return self.asked == 3

    one, two = (collect(groups, interruptor=AfterThree()) for groups in (1, 2))
    first = two.next()
    assert_same(one.next(), first)
    assert (first["collector", "traj_ids"][:, 3:] == -1).all()
    assert_same(one.next(), two.next())


def test_policy_acts_while_the_other_group_steps(collect: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each call but the first ones, the steps of all other groups are in progress."""
    in_progress: list[int] = []
    steps = Counter[str]()

    def watching(x: torch.Tensor) -> torch.Tensor:
        in_progress.append(steps["post_step"] - steps["receive_step"])
        return exact(x)

    def counted(name: str) -> None:
        call = getattr(HostedRows, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            steps[name] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(HostedRows, name, counting)

    env = walks(6)()
    collector = collect(3, env=env, policy=TensorDictModule(watching, ["observation"], ["action"]), frames_per_batch=24)
    counted("post_step")
    counted("receive_step")
    del in_progress[:]
    collector.next()
    assert in_progress == [0, 1, 2] + [2] * 9


def test_one_version_acts_in_all_groups_of_a_step() -> None:
    weight = nn.Parameter(torch.zeros(()), requires_grad=False)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return (observation[..., :2] * 0 + self.weight) * 1e-3

    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000, ndim=2), batch_size=4)
    collector = Collector(
        walks(6), Weighted(), frames_per_batch=60, env_groups=3, track_policy_version=True, replay_buffer=buffer
    )
    written = threading.Event()
    collector.post_collect_hook = lambda batch: written.set() if len(buffer) > 50 else None
    try:
        collector.start()
        count = 0
        while not written.is_set():
            count += 1
            collector.update_policy_weights_(weights={"weight": torch.tensor(float(count))})
        collector.async_shutdown()
        held = buffer[:]
    finally:
        collector.shutdown()
    versions = held["policy_version"]
    assert versions.unique().numel() > 2
    torch.testing.assert_close(held["action"][..., 0], versions.float() * 1e-3)
    same = (versions == versions[:, :1]).all() if versions.shape[1] == 6 else (versions == versions[:1]).all()
    assert same


def test_stages_are_told_apart(collect: Make) -> None:
    collector = collect(2)
    for _ in range(3):
        collector.next()
    seconds = collector._rollout.timer.seconds
    assert all(value > 0 for value in seconds.values()), seconds


# What goes wrong ----------------------------------------------------------------------------------------------------


def test_error_of_a_group_leaves_the_others_in_order(collect: Make) -> None:
    makers = [walk(), walk(fails_at=7), walk(), walk(fails_at=7)]
    collector = collect(2, env=lambda: ParallelEnv(4, makers, num_processes=2), frames_per_batch=40)
    with pytest.raises(EnvError, match=r"ParallelEnv\[1\].*failed at step 7"):
        collector.next()
    batch = collector.next()
    ids = batch["collector", "traj_ids"]
    assert batch.shape == (4, 10)
    assert (ids.diff(dim=1) >= 0).all()
    assert torch.equal(ids.diff(dim=1) > 0, batch["next", "done"][:, :-1, 0])


@pytest.mark.parametrize("fault", ["fails_at", "dies_at"])
def test_environments_are_made_anew_in_groups(collect: Make, fault: str) -> None:
    makers = [walk(), walk(**{fault: 4}), walk(), walk()]

    def env() -> Any:
        return ParallelEnv(4, makers, num_processes=2, on_env_failure="recreate")

    collector = collect(2, env=env, frames_per_batch=80, compact_obs=True)
    with pytest.warns(RuntimeWarning, match="was recreated"):
        batch = restore_next(collector.next())
    ids, ended = batch["collector", "traj_ids"], batch["next", "done"][..., 0]
    assert batch["next", "truncated"][1, 3]
    assert torch.equal(ids.diff(dim=1) > 0, ended[:, :-1])
    going = ~ended[:, :-1]
    assert torch.equal(batch["next", "observation"][:, :-1][going], batch["observation"][:, 1:][going])


def test_dead_process_is_an_error(collect: Make) -> None:
    makers = [walk(), walk(), walk(dies_at=5), walk()]
    collector = collect(2, env=lambda: ParallelEnv(4, makers, num_processes=2), frames_per_batch=40)
    with pytest.raises(EnvError, match=r"ParallelEnv\[2\]: its process"):
        collector.next()


def test_policy_that_raises_leaves_no_step_under_way(collect: Make) -> None:
    calls = 0

    def failing(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise ZeroDivisionError("at call 8")
        return exact(x)

    collector = collect(2, policy=TensorDictModule(failing, ["observation"], ["action"]))
    with pytest.raises(ZeroDivisionError):
        collector.next()
    assert collector.next().shape == (5, 10)


def test_policy_that_varies_is_an_error(collect: Make) -> None:
    calls = 0

    def varying(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        return exact(x), x[..., : 1 + (calls > 6)]

    collector = collect(2, policy=TensorDictModule(varying, ["observation"], ["action", "more"]))
    with pytest.raises(PolicyError, match=r"'more' varies in shape or dtype.*leave env_groups out"):
        collector.next()


def test_outputs_that_are_no_arrays_end_the_turns_with_a_warning(collect: Make) -> None:
    class Half(nn.Module):
        def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return exact(observation), observation.bfloat16()

    collector = collect(2, policy=Half())
    with pytest.warns(RuntimeWarning, match=r"env_groups: .*one group from now on \(policy: NumPy has no such output"):
        batch = collector.next()
    assert batch["output1"].dtype == torch.bfloat16
    assert torch.equal(batch["action"], collect(1).next()["action"])


def test_actions_of_a_wrong_size_are_an_error(collect: Make) -> None:
    collector = collect(2, policy=TensorDictModule(lambda x: x[..., :1], ["observation"], ["action"]))
    with pytest.raises(PolicyError, match=r"shape \[5, 1\].*expects \[5, 2\]"):
        collector.next()


REFUSED = {
    "serial": ({"create_env_fn": lambda: SerialEnv(2, walk())}, "2 groups .*stepped in this process"),
    "single": ({"create_env_fn": walk()}, "2 groups .*stepped in this process"),
    "few": ({"env_groups": 6}, "5 environments, which do not make 6 groups"),
    "primed by size": ({"create_env_fn": lambda: booked(2)}, r"'h' of shape \[5, 2\] would be \[2\] in a group of 2"),
    "goes on": ({"reset_when_done": False}, "reset_when_done=False"),
    "policy": ({"policy": lambda td: td.set("action", exact(td["observation"]))}, "policy: function is no TensorDict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_groups_is_an_error_at_construction(name: str) -> None:
    given, message = REFUSED[name]
    options = {"create_env_fn": walks(), "policy": deterministic(), "frames_per_batch": 50, "env_groups": 2, **given}
    with pytest.raises(ValueError, match=rf"env_groups: .*{message}.*leave env_groups out"):
        Collector(options.pop("create_env_fn"), options.pop("policy"), **options)
    assert left_behind(2.0) == []


@pytest.mark.parametrize("number", [0, -1, True, 1.5, None])
def test_bad_numbers(number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="env_groups: expected an integer of at least 1"):
        Collector(walks(), deterministic(), frames_per_batch=50, env_groups=number)


def test_hook_that_comes_later_ends_the_turns_with_a_warning(collect: Make) -> None:
    one, two = collect(1, policy=deterministic()), collect(2, policy=deterministic())
    assert_same(one.next(), two.next())
    two.policy.register_forward_hook(lambda module, args, output: None)
    with pytest.warns(RuntimeWarning, match="env_groups: .*one group from now on .*hooks"):
        batch = two.next()
    assert_same(one.next(), batch)
    assert "take turns" not in two.stats()["paths"]["env"]


# Elsewhere ------------------------------------------------------------------------------------------------------------


def test_groups_in_workers() -> None:
    batches = []
    for groups in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collector = MultiSyncCollector(
                [walks(4)] * 2, deterministic(), frames_per_batch=80, total_frames=160, env_groups=groups
            )
        try:
            collector.set_seed(0)
            batches.append(torch.cat([batch.clone() for batch in collector], -1))
        finally:
            collector.shutdown()
    assert_same(*batches)
