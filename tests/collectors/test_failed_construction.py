"""A construction that fails leaves nothing running: no environment that a function made, no process, no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.collectors.workers.processes import left_behind
from torch import nn

from rollwright.collectors import Collector, Evaluator, MultiCollector
from rollwright.envs import AsyncEnvPool, EnvBase, ParallelEnv, SerialEnv, TransformedEnv
from rollwright.testing.mocking_classes import CountingEnv

made: list[EnvBase] = []


class Recorded(CountingEnv):
    """Counted from its construction to its end."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        made.append(self)


class NoCut(Recorded):
    """Cannot be recreated: it cannot tell a cut from an end."""

    def add_truncated_keys(self) -> Any:
        raise ValueError("cannot be cut")


def raises() -> EnvBase:
    raise ValueError("no environment")


def of_two() -> EnvBase:
    return Recorded(batch_size=[2])


def no_cut() -> EnvBase:
    return NoCut()


def other_kind() -> Any:
    return object()


def in_processes() -> EnvBase:
    """An environment that holds a process."""
    return ParallelEnv(1, CountingEnv)


@pytest.fixture(autouse=True)
def none_made() -> None:
    made.clear()


def check_nothing_left(threads: set[threading.Thread], error: BaseException) -> None:
    """While ``error``, which holds the frames of the construction, is alive."""
    new = set(threading.enumerate()) - threads
    for thread in new:
        thread.join(5.0)
    assert [thread.name for thread in new if thread.is_alive()] == [], error
    assert [env for env in made if not env.is_closed] == [], error
    assert left_behind(2.0) == [], error


BATCHES: dict[str, Callable[[], Any]] = {
    "serial: the second raises": lambda: SerialEnv(2, [Recorded, raises]),
    "serial: the second holds no environment": lambda: SerialEnv(2, [in_processes, other_kind]),
    "serial: batch sizes differ": lambda: SerialEnv(2, [Recorded, of_two]),
    "serial: cannot be recreated": lambda: SerialEnv(2, [Recorded, no_cut], on_env_failure="recreate"),
    "serial: policy": lambda: SerialEnv(1, Recorded, policy=3),
    "parallel: the second raises": lambda: ParallelEnv(2, [in_processes, raises]),
    "parallel: batch sizes differ": lambda: ParallelEnv(2, [CountingEnv, of_two]),
    "parallel: cannot be recreated": lambda: ParallelEnv(1, no_cut, on_env_failure="recreate"),
    "parallel: device": lambda: ParallelEnv(1, CountingEnv, device="nowhere"),
    "parallel: policy": lambda: ParallelEnv(1, CountingEnv, policy=3),
    "threads: the second raises": lambda: AsyncEnvPool([Recorded, raises]),
    "threads: batch sizes differ": lambda: AsyncEnvPool([Recorded, of_two]),
    "threads: policy": lambda: AsyncEnvPool([Recorded], policy=3),
    "processes: the second raises": lambda: AsyncEnvPool([in_processes, raises], backend="multiprocessing"),
    "processes: batch sizes differ": lambda: AsyncEnvPool([CountingEnv, of_two], backend="multiprocessing"),
    "processes: policy": lambda: AsyncEnvPool([CountingEnv], backend="multiprocessing", policy=3),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_environments_that_cannot_be_made_closes_those_that_were(name: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        BATCHES[name]()
    check_nothing_left(threads, caught.value)


def test_a_users_own_environment_stays_open() -> None:
    env = Recorded()
    with pytest.raises(TypeError):
        TransformedEnv(env, transform=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        TransformedEnv(env, policy=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reward_key"):
        Evaluator(env, reward_key="other")
    assert not env.is_closed
    env.close()


def bad_policy() -> Any:
    return 3


COLLECTORS: dict[str, Callable[[], Any]] = {
    "policy": lambda: Collector(Recorded, bad_policy()),
    "policy_factory": lambda: Collector(in_processes, policy_factory=bad_policy),
    "cannot be recreated": lambda: Collector(no_cut, on_env_failure="recreate"),
    "weight_updater": lambda: Collector(Recorded, weight_updater=raises),  # type: ignore[arg-type]
    "workers: policy_factory": lambda: MultiCollector([in_processes], policy_factory=bad_policy),
    "workers: the second raises": lambda: MultiCollector([CountingEnv, raises]),
    "workers: weight_updater": lambda: MultiCollector([CountingEnv], nn.Linear(1, 1), weight_updater=raises),
    "evaluator: policy_factory": lambda: Evaluator(Recorded, policy_factory=bad_policy),
    "evaluator: policy_factory, held process": lambda: Evaluator(in_processes, policy_factory=bad_policy),
    "evaluator: reward_key": lambda: Evaluator(Recorded, reward_key="other"),
    "evaluator: reward_key, process": lambda: Evaluator(in_processes, reward_key="other", backend="process"),
}


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_collector_that_cannot_be_made_closes_what_functions_made(name: str) -> None:
    threads = set(threading.enumerate())
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        COLLECTORS[name]()
    check_nothing_left(threads, caught.value)
