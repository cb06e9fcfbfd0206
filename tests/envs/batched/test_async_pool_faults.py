"""AsyncEnvPool: what goes wrong reaches the caller, others are not hurt, and every end is bounded."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tests.patience import patient
from tests.programs import Programs

from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import EnvBase, GymEnv
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.errors import EnvError, RemoteTraceback

BACKENDS = ["threading", "multiprocessing"]
backends = pytest.mark.parametrize("backend", BACKENDS)
CALLS = ["step", "step_and_maybe_reset"]
LET_GO = threading.Event()


class Faulty(EnvBase):
    """Calls ``what`` in a step whose action is negative; episodes of 2 steps, and ``what`` again at a marked reset."""

    def __init__(self, what: Callable[[], None] | None = None, closed: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.what, self.closed, self.count = what, closed, 0
        self.observation_spec = Composite(count=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if kwargs.get("fails"):
            self.what()  # type: ignore[misc]
        self.count = 0
        return TensorDict({"count": torch.zeros(1)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.what is not None and tensordict["action"] < 0:
            self.what()
        self.count += 1
        count = torch.tensor([float(self.count)])
        return TensorDict({"count": count, "reward": torch.ones(1), "done": count >= 2})

    def close(self, *, raise_if_closed: bool = True) -> None:
        super().close(raise_if_closed=raise_if_closed)
        if self.closed is not None:
            self.closed()


def fail() -> None:
    raise ZeroDivisionError("the floor is gone")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stick() -> None:
    LET_GO.wait(60.0)


def sleep() -> None:
    time.sleep(60.0)


@pytest.fixture
def make() -> Iterator[Callable[..., AsyncEnvPool]]:
    made: list[AsyncEnvPool] = []

    def maker(*args: Any, **kwargs: Any) -> AsyncEnvPool:
        made.append(AsyncEnvPool(*args, **kwargs))
        return made[-1]

    LET_GO.clear()
    yield maker
    LET_GO.set()
    for pool in made:
        pool.shutdown()


def acting(pool: AsyncEnvPool, *actions: float) -> TensorDictBase:
    """Data of all environments with these actions."""
    return pool.reset().set("action", torch.tensor(actions).unsqueeze(-1))


def ones(td: TensorDictBase) -> TensorDictBase:
    return td.set("action", torch.ones(*td.shape, 1))


# In a step -----------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("call", CALLS)
def test_one_that_raises_does_not_hurt_others(make: Any, backend: str, call: str) -> None:
    pool = make([lambda: Faulty(fail)] * 3, backend=backend)
    getattr(pool, f"async_{call}_send")(acting(pool, 1.0, -1.0, 1.0))
    recv = getattr(pool, f"async_{call}_recv")
    with pytest.raises(EnvError, match=r"AsyncEnvPool\[1\].*the floor is gone") as caught:
        recv(min_get=3)
    if backend == "multiprocessing":
        assert isinstance(caught.value.__cause__.__cause__, RemoteTraceback)
        assert "in fail" in str(caught.value.__cause__.__cause__)
    found = recv(min_get=2)
    stepped = found[0] if isinstance(found, tuple) else found
    assert sorted(stepped["env_index"].tolist()) == [0, 2]
    assert pool.busy == []
    assert pool.rollout(5, ones).shape == (3, 2)  # it begins anew, as after any reset


@backends
def test_error_in_a_reset(make: Any, backend: str) -> None:
    pool = make([lambda: Faulty(fail)] * 2, backend=backend)
    pool.async_reset_send(env_index=0, fails=True)
    with pytest.raises(EnvError, match=r"AsyncEnvPool\[0\].*the floor is gone"):
        pool.async_reset_recv()
    pool.async_reset_send()
    assert len(pool.async_reset_recv(min_get=2)) == 2


@backends
def test_errors_of_steps_of_all(make: Any, backend: str) -> None:
    pool = make([lambda: Faulty(fail)] * 2, backend=backend)
    with pytest.raises(EnvError, match=r"AsyncEnvPool\[1\].*the floor is gone"):
        pool.step(acting(pool, 1.0, -1.0))
    assert pool.rollout(5, ones).shape == (2, 2)


@pytest.mark.parametrize("call", CALLS)
def test_killed_process(make: Any, call: str) -> None:
    pool = make([lambda: Faulty(kill)] * 2, backend="multiprocessing")
    send, recv = getattr(pool, f"async_{call}_send"), getattr(pool, f"async_{call}_recv")
    root = acting(pool, -1.0, 1.0)
    begun = time.monotonic()
    send(root)
    with pytest.raises(EnvError, match=r"AsyncEnvPool\[0\]: its process was killed by SIGKILL, in step"):
        recv(min_get=2)
    assert time.monotonic() - begun < patient(5.0)
    recv(min_get=1)
    send(root[1], env_index=1)  # the other goes on
    recv(min_get=1)
    send(root[0], env_index=0)
    with pytest.raises(EnvError, match=r"AsyncEnvPool\[0\]: its process was killed by SIGKILL.* Make the pool anew"):
        recv(min_get=1)


def test_stuck_process_is_killed(make: Any) -> None:
    pool = make([lambda: Faulty(sleep)] * 2, backend="multiprocessing", env_step_timeout=0.5)
    pool.async_step_send(acting(pool, -1.0, 1.0))
    begun = time.monotonic()
    assert pool.async_step_recv()["env_index"].tolist() == [1]
    with pytest.raises(
        EnvError, match=r"AsyncEnvPool\[0\]: its process did not come back within 0\.5 s and was killed"
    ):
        pool.async_step_recv()
    assert time.monotonic() - begun < patient(5.0)


def test_stuck_thread(make: Any) -> None:
    pool = make([lambda: Faulty(stick)] * 2, env_step_timeout=0.3)
    root = acting(pool, -1.0, 1.0)
    pool.async_step_send(root)
    assert pool.async_step_recv()["env_index"].tolist() == [1]
    with pytest.raises(EnvError, match=r"AsyncEnvPool\[0\] did not come back within 0\.3 s"):
        pool.async_step_recv()
    pool.async_reset_send(env_index=0)
    with pytest.raises(EnvError, match=r"AsyncEnvPool\[0\] is still busy with a call"):
        pool.async_reset_recv()
    LET_GO.set()
    until = time.monotonic() + patient(10.0)
    while pool._slots._lost and time.monotonic() < until:
        pool._pump(0.02)
    pool.async_reset_send(env_index=0)
    assert pool.async_reset_recv()["env_index"].tolist() == [0]  # it came back


@backends
def test_interrupted_call(make: Any, backend: str, monkeypatch: Any) -> None:
    pool = make([lambda: Faulty()] * 2, backend=backend)
    root = acting(pool, 1.0, 1.0)
    wait = pool._slots.wait

    def interrupted(timeout_s: float) -> Any:
        monkeypatch.setattr(pool._slots, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._slots, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.step(root.clone())
    assert pool.step(root)["next", "count"].tolist() == [[2.0], [2.0]]  # not what the lost step came to


def test_calls_wait_for_what_an_interrupted_one_has_left(make: Any, monkeypatch: Any) -> None:
    pool = make([lambda: Faulty(stick)] * 2)
    root = acting(pool, -1.0, 1.0)
    wait = pool._slots.wait

    def interrupted(timeout_s: float) -> Any:
        monkeypatch.setattr(pool._slots, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool._slots, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.step(root)
    threading.Timer(0.3, LET_GO.set).start()
    pool.set_seed(0)  # not in the middle of a step
    assert LET_GO.is_set()


# Misuse --------------------------------------------------------------------------------------------


@backends
def test_sending_to_a_busy_one(make: Any, backend: str) -> None:
    pool = make([lambda: Faulty()] * 2, backend=backend)
    root = acting(pool, 1.0, 1.0)
    pool.async_step_send(root[0], env_index=0)
    with pytest.raises(RuntimeError, match=r"environments \[0\] have not been received from"):
        pool.async_step_send(root)
    with pytest.raises(RuntimeError, match=r"expected to wait for 1 to 1 results.* min_get=2"):
        pool.async_step_recv(min_get=2)
    with pytest.raises(RuntimeError, match=r"async_reset_recv: expected to wait for 1 to 0 results"):
        pool.async_reset_recv()
    for call in (pool.reset, lambda: pool.step(root), lambda: pool.set_seed(0)):
        with pytest.raises(RuntimeError, match=r"environments \[0\] have been sent something"):
            call()
    assert len(pool.async_step_recv()) == 1
    pool.step(root)


def test_unclear_environments(make: Any) -> None:
    pool = make([lambda: Faulty()] * 3)
    root = acting(pool, 1.0, 1.0, 1.0)
    for td, index, match in (
        (root[:2], None, r"got 2 of 3 environments, and not which. Pass env_index="),
        (root[0], None, r"got 1 of 3 environments, and not which"),
        (root, [0, 1], r"names 2 environments, and there is data of 3"),
        (root[:2], [1, 1], r"expected different numbers from 0 to 2, got \[1, 1\]"),
        (root[0], 3, r"expected different numbers from 0 to 2, got \[3\]"),
        (TensorDict({}, [3, 2]), None, r"expected data of batch size \['n'\], or \[\]"),
    ):
        with pytest.raises(ValueError, match=match):
            pool.async_step_send(td, index)
    with pytest.raises(TypeError, match="expected a TensorDict, got dict"):
        pool.async_step_send({})
    assert pool.busy == []


@pytest.mark.parametrize(
    ("kind", "match", "arguments"),
    [
        (ValueError, "backend: expected one of", {"backend": "asyncio"}),
        (ValueError, "stack: expected one of", {"stack": "thick"}),
        (ValueError, "min_get: expected a number from 1 to 2", {"min_get": 3}),
        (ValueError, "env_step_timeout: expected seconds above 0", {"env_step_timeout": 0}),
        (ValueError, "mp_start_method: expected one of", {"mp_start_method": "thread"}),
        (ValueError, "env_makers: expected at least one", {"env_makers": []}),
        (TypeError, r"env_makers\[0\]: expected a name, a callable or an environment, got int", {"env_makers": [3]}),
        (ValueError, "create_env_kwargs: expected 2", {"create_env_kwargs": [{}]}),
        (TypeError, r"env_makers\[0\]: got an environment", {"env_makers": Faulty(), "backend": "multiprocessing"}),
        (ValueError, r"env_makers\[1\]: got the same environment twice", {"env_makers": [Faulty()] * 2}),
    ],
)
def test_wrong_arguments(kind: Any, match: str, arguments: dict[str, Any]) -> None:
    makers = arguments.pop("env_makers", [Faulty, Faulty])
    with pytest.raises(kind, match=match):
        AsyncEnvPool(makers, **arguments)


@backends
def test_factory_that_fails(backend: str) -> None:
    closed = threading.Event()
    makers = [lambda: Faulty(closed=closed.set), fail] if backend == "threading" else [Faulty, fail]
    with pytest.raises(EnvError, match="create_env_fn of worker 1 raised ZeroDivisionError: the floor is gone"):
        AsyncEnvPool(makers, backend=backend)
    assert backend == "multiprocessing" or closed.wait(10.0)


# The end -------------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("state", ["idle", "busy", "ready"])
def test_close(make: Any, backend: str, state: str) -> None:
    pool = make([lambda: Faulty()] * 2, backend=backend)
    root = acting(pool, 1.0, 1.0)
    if state != "idle":
        pool.async_step_send(root)
    if state == "ready":
        pool.async_step_recv()
    pids = pool._slots.pids() if backend == "multiprocessing" else []
    threads = [] if pids else pool._slots._places
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < patient(5.0)
    pool.shutdown()
    with pytest.raises(EnvError, match="already closed"):
        pool.close()
    for call in (lambda: pool.async_step_send(root), pool.async_step_recv, lambda: pool.step(root)):
        with pytest.raises(EnvError, match=r"after close\(\)"):
            call()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not any(thread.running for thread in threads)


def test_close_with_a_stuck_thread(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("rollwright.envs.batched.async_slots.CLOSE_S", 0.2)
    pool = make([lambda: Faulty(stick)] * 2)
    pool.async_step_send(acting(pool, -1.0, 1.0))
    with pytest.warns(RuntimeWarning, match="the thread of environment 0 is left behind"):
        pool.close()


def test_thread_that_comes_back_too_late_closes_its_environment(make: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("rollwright.envs.batched.async_slots.CLOSE_S", 0.1)
    closed = threading.Event()
    pool = make([lambda: Faulty(stick, closed.set)])
    pool.async_step_send(acting(pool, -1.0))
    with pytest.warns(RuntimeWarning, match="is left behind"):
        pool.close()
    assert not closed.is_set()
    LET_GO.set()
    assert closed.wait(10.0)


def test_nothing_piles_up_where_results_wait(make: Any) -> None:
    pool = make([Faulty] * 2)
    td = ones(pool.reset())
    pool.async_step_and_maybe_reset_send(td)
    for _ in range(20):
        while len(pool._slots._outbox) < 2:  # the policy is slower than the environments
            pass
        pool.async_step_and_maybe_reset_send(ones(pool.async_step_and_maybe_reset_recv(min_get=1)[1]))
    assert pool._slots._bell.qsize() <= 2


def test_error_in_close(make: Any) -> None:
    closed = threading.Event()
    pool = make([lambda: Faulty(closed=fail), lambda: Faulty(closed=closed.set)])
    with pytest.raises(ZeroDivisionError):
        pool.close()
    assert closed.is_set()


def test_forgotten_pool_ends() -> None:
    pool = AsyncEnvPool([lambda: GymEnv("CartPole-v1")] * 2)
    threads = [place._thread for place in pool._slots._places]
    del pool
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()


SCRIPT = """
import sys
from rollwright.envs import GymEnv
from rollwright.envs.batched.async_pool import AsyncEnvPool

pool = AsyncEnvPool([lambda: GymEnv("Pendulum-v1")] * 2, backend=sys.argv[1])
pool.async_step_send(pool.rand_action(pool.reset()))
pool.async_step_recv()
print("ready", flush=True)
"""


@backends
def test_end_of_the_program_without_close(programs: Programs, backend: str) -> None:
    program = programs.start("-c", SCRIPT, backend)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    begun = time.monotonic()
    _, errors = program.communicate(timeout=patient(30.0))
    assert time.monotonic() - begun < patient(20.0)
    assert (program.returncode, errors) == (0, "")
