"""Ctrl-C at any moment in environments of processes and of threads: what is asked next is answered, and right."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.patience import patient

from rollwright.envs import AsyncEnvPool, GymWrapper, ParallelEnv
from rollwright.envs.arrays import array_form
from rollwright.testing.mocking_classes import CountingEnv

NUM_ENVS = 3
STUCK_S = 120.0  # what waits for something that does not come fails after this
LET_GO = threading.Event()

pytestmark = [
    pytest.mark.timeout(120, method="thread"),  # the other method needs the alarm clock, which rings here
    # Python swallows an interrupt of a finaliser, and says so: that is not ours to mend.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Echoing(gymnasium.Env):
    """Observes how many steps it took, and the last action; episodes of 3 steps."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Box(-1e9, 1e9, (1,), np.float32)

    def __init__(self, step: Callable[[], Any] | None = None, close: Callable[[], Any] | None = None) -> None:
        self.on_step, self.on_close = step, close

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.on_step is not None:
            self.on_step()
        self.count += 1
        return np.array([self.count, action.item()], np.float32), action.item(), self.count >= 3, False, {}

    def close(self) -> None:
        if self.on_close is not None:
            self.on_close()


def echo(*args: Any) -> GymWrapper:
    return GymWrapper(Echoing(*args))


@pytest.fixture(autouse=True)
def alarms() -> Iterator[None]:
    """SIGALRM sends SIGINT."""
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    LET_GO.clear()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    LET_GO.set()


def interrupted(call: Callable[[], Any], after_s: float) -> bool:
    """Do something, with SIGINT after a while; whether it did not come to its end."""
    try:
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, after_s))
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


class Caller:
    """Steps environments with actions that no step had before, and tests what comes back."""

    def __init__(self, env: Any) -> None:
        self.env, self.sent = env, 0.0

    def actions(self) -> torch.Tensor:
        self.sent += NUM_ENVS
        return self.sent + torch.arange(NUM_ENVS).unsqueeze(-1)

    def receive_rest(self) -> None:
        """What an interrupted call in halves has sent."""
        if isinstance(self.env, AsyncEnvPool) and self.env.busy:
            self.env.async_step_and_maybe_reset_recv(min_get=len(self.env.busy))

    def together(self) -> None:
        env = self.env
        self.receive_rest()
        root = env.reset()
        assert root["observation"].tolist() == [[0.0, 0.0]] * NUM_ENVS
        assert "reward" not in root  # what a reset returns, and not what a step would
        for count in (1, 2, 3, 1):
            action = self.actions()
            data, root = env.step_and_maybe_reset(root.set("action", action))
            right = [[count, value] for value in action.squeeze(-1).tolist()]
            assert data["next", "observation"].tolist() == right
            assert data["next", "reward"].tolist() == action.tolist()
            assert root["observation"].tolist() == ([[0.0, 0.0]] * NUM_ENVS if count == 3 else right)

    def in_groups(self) -> None:
        groups = array_form(self.env).groups(2)
        roots = [group.reset(None) for group in groups]
        for count in (1, 2):
            action = self.actions().numpy()
            parts = action[:1], action[1:]
            for group, root, part in zip(groups, roots, parts, strict=True):
                group.send({**root, "action": part}, {})
            roots = [group.receive() for group in groups]
            for out, part in zip(roots, parts, strict=True):
                assert out["observation"].tolist() == np.insert(part, 0, count, axis=1).tolist()

    def in_halves(self) -> None:
        env = self.env
        self.receive_rest()
        root = env.reset()
        for count in (1, 2, 3, 1):
            action = self.actions()
            env.async_step_and_maybe_reset_send(root.set("action", action))
            data, root = env.async_step_and_maybe_reset_recv(min_get=NUM_ENVS)
            order = data["env_index"].argsort()
            assert data[order]["next", "observation"].tolist() == [
                [count, value] for value in action.squeeze(-1).tolist()
            ]
            root = root[order]


KINDS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "parallel": (lambda makers, **kwargs: ParallelEnv(NUM_ENVS, makers, **kwargs), ("together", "in_groups")),
    "threads": (AsyncEnvPool, ("together", "in_halves")),
    "processes": (
        lambda makers, **kwargs: AsyncEnvPool(makers, backend="multiprocessing", **kwargs),
        ("together", "in_halves"),
    ),
}


def make(kind: str, makers: Any = None, **kwargs: Any) -> Any:
    return KINDS[kind][0](makers or [echo] * NUM_ENVS, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_interrupts_at_random_moments(kind: str) -> None:
    env = make(kind, env_step_timeout=STUCK_S)
    caller = Caller(env)
    draw = random.Random(0)
    calls = [getattr(caller, name) for name in KINDS[kind][1]]
    hits = 0
    for call in calls:  # the first of all, whose answers are unlike those that follow
        hits += interrupted(call, 2e-3)
        begun = time.monotonic()
        call()
        span = time.monotonic() - begun
        for _ in range(25):
            hits += interrupted(call, draw.uniform(0.0, span))
            if draw.random() < 0.3:
                call()
        call()
    assert hits > 12
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.close()
    assert time.monotonic() - begun < patient(20.0)


def test_interrupts_while_a_process_is_replaced() -> None:
    env = make("parallel", on_env_failure="recreate", num_processes=2, env_step_timeout=STUCK_S)
    caller = Caller(env)
    draw = random.Random(0)
    caller.together()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was recreated", category=RuntimeWarning)
        for round_ in range(4):
            pid = env._processes.pids()[round_ % 2]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            interrupted(env.reset, draw.uniform(0.0, 0.1))
            env.reset()
            caller.together()
    assert sum(env.recreations) >= 4
    env.close()


def test_interrupt_while_a_process_does_not_read() -> None:
    env = make("parallel", num_processes=2, env_step_timeout=STUCK_S)
    caller = Caller(env)
    pids = env._processes.pids()
    lets_go = threading.Timer(1.5, os.kill, (pids[0], signal.SIGCONT))  # or it would be waited for until STUCK_S
    os.kill(pids[0], signal.SIGSTOP)
    lets_go.start()
    begun = time.monotonic()
    assert interrupted(lambda: env.reset(options={"load": bytes(4 << 20)}), 0.1)
    assert time.monotonic() - begun < patient(1.0)
    lets_go.cancel()
    os.kill(pids[0], signal.SIGCONT)
    caller.together()  # what was on its way has been read, and answered
    assert env._processes.pids() == pids
    env.close()


# Interrupted ends ----------------------------------------------------------------------------------


def sleep() -> None:
    time.sleep(STUCK_S)


def wait_for_let_go() -> None:
    LET_GO.wait(STUCK_S)


@pytest.mark.parametrize("kind", ["parallel", "processes"])
def test_close_after_an_interrupted_close(kind: str) -> None:
    env = make(kind, [lambda: echo(None, sleep), echo, echo])
    pids = (env._processes if kind == "parallel" else env._slots).pids()
    assert interrupted(env.close, 0.3)  # it waits for the first one
    begun = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"environments \[0.* was terminated"):
        env.close()
    assert time.monotonic() - begun < patient(9.0)  # less than an uninterrupted one waits
    assert not any(pid is not None and os.path.exists(f"/proc/{pid}") for pid in pids)
    env.close(raise_if_closed=False)


def test_close_of_threads_after_an_interrupted_close() -> None:
    closed = [threading.Event() for _ in range(NUM_ENVS)]
    env = make("threads", [lambda at=at: echo(wait_for_let_go, at.set) for at in closed])
    env.async_step_send(env.reset().set("action", torch.zeros(NUM_ENVS, 1)))
    threads = env._slots._places
    assert interrupted(env.close, 0.5)  # it waits for all of them
    assert not any(one.is_set() for one in closed)  # none is closed in the middle of its step
    LET_GO.set()
    env.close()
    assert all(one.is_set() for one in closed)
    assert not any(thread.running for thread in threads)
    env.shutdown()


def test_interrupted_construction_leaves_nothing_behind() -> None:
    threads = threading.active_count()

    class Slow(CountingEnv):
        def __init__(self) -> None:
            LET_GO.wait(STUCK_S)
            super().__init__()

    assert interrupted(lambda: make("threads", [Slow] * NUM_ENVS), 0.3)
    LET_GO.set()
    until = time.monotonic() + patient(STUCK_S)
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= threads
