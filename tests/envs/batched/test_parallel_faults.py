"""Environments of ParallelEnv that raise, die or are stuck: reported within seconds, or made anew honestly."""

from __future__ import annotations

import os
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
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.envs import EnvBase, GymWrapper, StepCounter, TransformedEnv
from rollwright.envs.arrays import array_form
from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.errors import EnvError, WorkerError
from rollwright.modules import RandomPolicy
from rollwright.testing.mocking_classes import HeterogeneousCountingEnv

TIMEOUT_S = 1.0


class Faulty(gymnasium.Env):
    """Observes its steps in this episode and in all; does something else in one of these, or in a reset."""

    observation_space = spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, at: int = -1, what: str = "", resets: bool = False) -> None:
        self.at, self.what, self.resets, self.total, self.begun = at, what, resets, 0, 0

    def _seen(self) -> np.ndarray:
        return np.array([self.count, self.total], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        self.begun += 1
        if self.resets and self.begun == self.at:
            self._fail()
        self.drawn = self.np_random.random()
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        self.total += 1
        if not self.resets and self.total == self.at:
            self._fail()
        return self._seen(), 1.0, self.count >= 8, False, {}

    def _fail(self) -> None:
        if self.what == "raise":
            raise ValueError("boom")
        if self.what == "stuck":
            threading.Event().wait()
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "exit":
            os._exit(3)
        raise SystemExit(4)


def faulty(*args: Any, **kwargs: Any) -> Callable[[], EnvBase]:
    return lambda: GymWrapper(Faulty(*args, **kwargs), categorical_action_encoding=True)


def batch(*makers: Callable[[], EnvBase], **kwargs: Any) -> Any:
    return ParallelEnv(len(makers), list(makers), **{"num_processes": 2, "env_step_timeout": TIMEOUT_S, **kwargs})


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < patient(60)


def rollout(env: EnvBase, steps: int, *, native: bool) -> dict[str, np.ndarray]:
    """Steps with resets of what has ended: ``[steps, envs, *]`` of everything below ``"next"``."""
    frames = []
    if native:
        arrays = array_form(env)
        root = arrays.reset(None)
        for _ in range(steps):
            out = arrays.step({**root, "action": np.zeros(env.batch_size, np.int64)}, {})
            frames.append(out)
            root, ended = out, out["done"]
            if ended.any():
                fresh = arrays.reset(ended)
                root = {key: np.where(ended[:, None], value, out[key]) for key, value in fresh.items()}
    else:
        data = env.rollout(steps, break_when_any_done=False)["next"]
        for step in data.unbind(-1):
            keys = ("reward", "done", "terminated", "truncated")
            frames.append({key: step[key].squeeze(-1).numpy() for key in keys})
            frames[-1]["observation"] = step["observation"].numpy()
    return {key: np.stack([frame[key] for frame in frames]) for key in frames[0]}


HOW = {
    "raise": r"ParallelEnv\[1\]: GymWrapper.* raised in step: ValueError: boom",
    "kill": r"ParallelEnv\[1\]: its process was killed by SIGKILL, in step.* \[1, 3\]",
    "exit": r"ParallelEnv\[1\]: its process exited with status 3, in step",
    "sysexit": r"ParallelEnv\[1\]: its process has failed, in step",
    "stuck": r"ParallelEnv\[1\]: its process did not come back within 1 s and was killed, in step",
}


@pytest.mark.parametrize(("what", "native"), in_turn(HOW, [False, True]))
def test_failure_is_an_error_that_names_the_environment(what: str, native: bool) -> None:
    env = batch(faulty(), faulty(4, what), faulty(), faulty())
    begun = time.monotonic()
    with pytest.raises(EnvError, match=HOW[what]) as caught:
        rollout(env, 6, native=native)
    assert time.monotonic() - begun < patient(10 * TIMEOUT_S)
    if what in ("raise", "sysexit"):
        assert isinstance(caught.value.__cause__, WorkerError)
        assert "_fail" in str(caught.value.__cause__.__cause__)  # the traceback from there
    if what in ("kill", "exit"):
        with pytest.raises(EnvError, match=HOW[what].split(", in")[0]):  # and goes on saying so
            env.reset()
    env.close()


@pytest.mark.parametrize(("what", "native"), in_turn(["raise", "kill", "stuck"], [False, True]))
def test_environment_is_made_anew_and_its_trajectory_ends(what: str, native: bool) -> None:
    env = batch(faulty(), faulty(4, what), faulty(), faulty(), on_env_failure="recreate")
    with pytest.warns(RuntimeWarning, match=r"ParallelEnv\[1\] was recreated, and its trajectory ends as truncated"):
        data = rollout(env, 6, native=native)
    counts = data["observation"][..., 0].T.tolist()
    spared, hit = [1, 2, 3, 4, 5, 6], [1, 2, 3, 3, 1, 2]
    shares = what != "raise"  # the process was replaced, with both of its environments, the other one not stepped
    assert counts == [spared, hit, spared, hit if shares else spared]
    assert env.recreations == [0, 1, 0, 1 if shares else 0]
    cut = np.zeros((6, 4), bool)
    cut[3, [1, 3] if shares else [1]] = True
    assert np.array_equal(data["truncated"], cut)
    assert np.array_equal(data["done"], cut)
    assert not data["terminated"].any()
    assert np.array_equal(data["reward"], 1.0 - cut)
    assert data["observation"][4:, 1, 1].tolist() == [1, 2]  # a new one, which has not lived before
    env.close()


@pytest.mark.parametrize("native", [False, True])
def test_neighbour_that_has_stepped_keeps_its_frame(native: bool) -> None:
    env = batch(faulty(), faulty(), faulty(), faulty(4, "kill"), on_env_failure="recreate")
    with pytest.warns(RuntimeWarning, match=r"ParallelEnv\[3\] was recreated"):
        data = rollout(env, 6, native=native)
    assert data["observation"][:, 1, 0].tolist() == [1, 2, 3, 4, 1, 2]  # stepped before its process was lost
    assert data["reward"][:, 1].tolist() == [1] * 6
    assert data["truncated"][:, 1].tolist() == [False, False, False, True, False, False]
    assert data["observation"][:, 3, 0].tolist() == [1, 2, 3, 3, 1, 2]
    env.close()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("what", ["raise", "kill"])
def test_failure_in_a_reset(what: str, native: bool) -> None:
    env = batch(faulty(), faulty(2, what, resets=True), on_env_failure="recreate", num_processes=1)
    with pytest.warns(RuntimeWarning, match=r"ParallelEnv\[1\] was recreated"):
        data = rollout(env, 10, native=native)
    assert data["observation"][7:, 1, 0].tolist() == [8, 1, 2]
    assert data["terminated"][7].all()  # their real ends
    assert env.recreations == ([0, 1] if what == "raise" else [1, 1])
    env.close()


def test_neighbour_of_a_failed_reset_is_cut_at_its_next_step() -> None:
    env = batch(faulty(), faulty(2, "kill", resets=True), on_env_failure="recreate", num_processes=1)
    td = env.rand_step(env.reset())
    td = env._step_mdp(td)
    td["_reset"] = torch.tensor([[False], [True]])
    with pytest.warns(RuntimeWarning, match=r"ParallelEnv\[1\] was recreated"):
        td = env.reset(td)
    assert td["observation"][:, 0].tolist() == [1, 0]
    outcome = env.rand_step(td)["next"]
    assert outcome["observation"][:, 0].tolist() == [1, 1]
    assert outcome["truncated"].squeeze(-1).tolist() == [True, False]
    assert outcome["reward"].squeeze(-1).tolist() == [0, 1]
    env.close()


def test_failure_between_the_halves_of_a_step() -> None:
    env = batch(faulty(), faulty(), faulty(2, "kill"), faulty(), on_env_failure="recreate", num_processes=1)
    parts = array_form(env).groups(2)
    roots = [part.reset(None) for part in parts]
    action = {"action": np.zeros(2, np.int64)}
    for _ in range(2):
        for part, root in zip(parts, roots, strict=True):
            part.send({**root, **action}, {})
        first = parts[0].receive()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            outs = roots = [first, parts[1].receive()]
    assert [str(one.message).split(",")[0] for one in told] == ["ParallelEnv[2] was recreated"]
    assert outs[1]["observation"][:, 0].tolist() == [1, 1]
    assert outs[1]["truncated"].tolist() == [True, True]
    assert outs[0]["observation"][:, 0].tolist() == [2, 2]  # stepped, and then their process was lost
    assert outs[0]["truncated"].tolist() == [False, False]  # which their group hears with its next step
    parts[1].reset(None)
    outs[0] = parts[0].step({**roots[0], **action}, {})
    assert outs[0]["observation"][:, 0].tolist() == [2, 2]
    assert outs[0]["truncated"].tolist() == [True, True]
    env.close()


def test_environment_that_always_fails_is_an_error() -> None:
    env = batch(faulty(1, "raise"), faulty(), on_env_failure="recreate")
    with pytest.warns(RuntimeWarning), pytest.raises(EnvError, match=r"ParallelEnv\[0\]: .*boom"):
        rollout(env, 20, native=True)
    assert env.recreations[0] == 3
    env.close()
    env = batch(faulty(1, "exit"), faulty(), on_env_failure="recreate")
    with pytest.warns(RuntimeWarning), pytest.raises(EnvError, match=r"ParallelEnv\[0\]: .*3 processes before it"):
        rollout(env, 20, native=True)
    env.close()


def test_factory_that_fails_the_second_time_is_an_error() -> None:
    made = []

    def make() -> EnvBase:
        made.append(1)
        if len(made) > 1:
            raise OSError("no more licences")
        return faulty(2, "raise")()

    env = batch(make, faulty(), on_env_failure="recreate")
    with pytest.raises(EnvError, match="create_env_fn of worker 0 raised OSError: no more licences"):
        rollout(env, 4, native=True)
    env.close()


def test_new_environments_are_seeded() -> None:
    runs = []
    for _ in range(2):
        env = batch(*[lambda: TransformedEnv(faulty(3, "raise")(), StepCounter())] * 2, on_env_failure="recreate")
        env.set_seed(1)
        with pytest.warns(RuntimeWarning):
            env.rollout(5, break_when_any_done=False)
        runs.append(env.drawn)
        env.close()
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_unlike_environments_are_made_anew() -> None:
    class Failing(HeterogeneousCountingEnv):
        def _step(self, tensordict: Any) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 2:
                raise ValueError("boom")
            return super()._step(tensordict)

    env = batch(HeterogeneousCountingEnv, Failing, on_env_failure="recreate")
    with pytest.warns(RuntimeWarning, match="boom"):
        data = env.rollout(3, break_when_any_done=False)
    row = data[1]["next"]
    group = env.done_groups[0]
    assert bool(row[1].get(group.done).all())
    assert bool(row[1].get(group.truncated).all())
    assert not bool(data[0]["next"][1].get(group.done).any())
    flags = ("done", "terminated", "truncated")
    before, after = (row[t].get("lazy").tensordicts[0].exclude(*flags) for t in (0, 1))
    assert (before["camera"] == 1).all()  # the only step that it took
    assert (before == after).all()
    env.close()


def test_collector_gives_new_ids_where_environments_are_made_anew() -> None:
    env = batch(faulty(), faulty(4, "kill"), faulty(), faulty(), on_env_failure="recreate")
    collector = Collector(env, RandomPolicy(), frames_per_batch=24, total_frames=24)
    with pytest.warns(RuntimeWarning, match="recreated"):
        data = next(iter(collector))
    ids = data["collector", "traj_ids"]
    assert (ids[0] == ids[0, 0]).all()
    assert (ids[1, :4] == ids[1, 0]).all()
    assert (ids[1, 4:] == ids[1, 4]).all()
    assert len(ids.unique()) == 6
    assert data["next", "truncated"][1, 3]
    collector.shutdown()


def test_close_does_not_wait_for_a_stuck_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.envs.batched.processes.CLOSE_S", 1.0)

    class Stuck(Faulty):
        def close(self) -> None:
            threading.Event().wait()

    env = batch(lambda: GymWrapper(Stuck()), faulty())
    with pytest.warns(RuntimeWarning, match=r"environments \[0\] was terminated"):
        env.close()


def test_interrupted_step_leaves_the_batch_in_order() -> None:
    env = batch(faulty(), faulty(), env_step_timeout=None)
    td = env.rand_action(env.reset())
    process = env._processes.pids()[0]
    os.kill(process, signal.SIGSTOP)
    threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            env.step(td.copy())
    finally:
        os.kill(process, signal.SIGCONT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert env.step(td)["next", "observation"][:, 0].tolist() == [2, 2]
        env.close()


def test_process_that_a_signal_has_stopped_is_lost_where_a_step_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.envs.batched.processes.STOPPED_S", 1.0)
    env = batch(faulty(), faulty(), env_step_timeout=None)
    td = env.rand_action(env.reset())
    os.kill(env._processes.pids()[1], signal.SIGSTOP)
    with pytest.raises(EnvError, match=r"ParallelEnv\[1\].*was stopped by a signal, did not go on for 1 s"):
        env.step(td)
