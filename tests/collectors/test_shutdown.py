"""The end: shutdown in every state, and programs that exit at once, whatever happened."""

from __future__ import annotations

import json
import signal
import time

import pytest
from tests.patience import patient

from rollwright.collectors import Collector
from rollwright.envs import GymEnv
from rollwright.testing.mocking_classes import CountingEnv


class Closing(CountingEnv):
    """Counts how often it is closed."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.closings = 0

    def close(self, **kwargs):
        super().close(**kwargs)
        self.closings += 1


def test_the_context_manager_shuts_down():
    env = Closing()
    with Collector(env, frames_per_batch=2, total_frames=4) as collector:
        assert isinstance(collector, Collector)
        list(collector)
        assert not env.is_closed
    assert env.is_closed


def test_the_context_manager_shuts_down_on_an_error_and_lets_it_out():
    env = Closing()
    with pytest.raises(KeyError, match="wrong"), Collector(env, frames_per_batch=2) as collector:
        raise KeyError(collector.next(), "wrong")
    assert env.is_closed


def test_shutdown_may_be_called_again():
    env = Closing()
    collector = Collector(env, frames_per_batch=2)
    collector.next()
    for _ in range(3):
        collector.shutdown()
    collector.async_shutdown(timeout=1.0)
    assert env.closings == 1


@pytest.mark.parametrize("state", ["new", "in the middle", "finished", "failed"])
def test_shutdown_in_every_state(state):
    env = Closing()
    fails = state == "failed"
    collector = Collector(env, (lambda td: 1 / 0) if fails else None, frames_per_batch=2, total_frames=6)
    if state == "in the middle":
        next(iter(collector))
    elif state == "finished":
        list(collector)
    elif fails:
        with pytest.raises(ZeroDivisionError):
            collector.next()
    collector.shutdown()
    assert env.closings == 1


def test_close_env_false_leaves_the_environment_open():
    env = Closing()
    Collector(env, frames_per_batch=2).shutdown(close_env=False)
    assert not env.is_closed
    env.close()


def test_an_environment_that_was_closed_before_is_no_error():
    env = GymEnv("CartPole-v1")
    collector = Collector(env, frames_per_batch=2)
    env.close()
    collector.shutdown()


class Stubborn(CountingEnv):
    def close(self, **kwargs):
        raise OSError("the window does not close")


def test_errors_of_close_are_raised_unless_told_otherwise():
    with pytest.raises(OSError, match="the window does not close"):
        Collector(Stubborn(), frames_per_batch=2).shutdown()
    Collector(Stubborn(), frames_per_batch=2).shutdown(raise_on_error=False)


def test_an_error_in_the_body_is_not_hidden_by_one_of_close():
    with pytest.raises(KeyError, match="wrong"), Collector(Stubborn(), frames_per_batch=2):
        raise KeyError("wrong")


def test_after_shutdown_collecting_is_an_error():
    collector = Collector(CountingEnv(), frames_per_batch=2, total_frames=8)
    iterator = iter(collector)
    next(iterator)
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        next(iterator)
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.rollout()


def test_after_shutdown_what_was_collected_can_be_read():
    collector = Collector(CountingEnv(), frames_per_batch=2, total_frames=8)
    batch = collector.next()
    collector.shutdown()
    assert collector.stats()["frames"] == 2
    assert "traj_pool" in collector.state_dict()
    assert batch["observation"].shape == (2, 1)
    assert "Collector" in repr(collector)


def test_an_error_in_the_environment_leaves_a_collector_that_goes_on():
    """The failed rollout is dropped whole: what follows begins new trajectories."""

    class Flaky(CountingEnv):
        broken = False

        def _step(self, tensordict):
            if self.broken:
                raise OSError("connection lost")
            return super()._step(tensordict)

    env = Flaky(max_steps=100)
    with Collector(env, frames_per_batch=3, total_frames=9) as collector:
        before = collector.next()
        env.broken = True
        with pytest.raises(RuntimeError, match=r"Flaky.*connection lost") as error:
            collector.next()
        assert isinstance(error.value.__cause__, OSError)
        env.broken = False
        after = collector.next()
    assert after["observation"][0].item() == 0
    assert int(after["collector", "traj_ids"].min()) > int(before["collector", "traj_ids"].max())


# Programs. Each says when its last statement is over; from there to its end only seconds may pass.

PROGRAM = """
import sys, time
from rollwright.collectors import Collector
from rollwright.envs import GymEnv

def policy(td):
    if state == "failing policy" and int(collector.stats()["frames"]):
        raise ValueError("no idea")
    return collector.env.rand_action(td)

state = sys.argv[1]
collector = Collector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=20, total_frames=-1)
try:
    if state == "in the middle":
        iterator = iter(collector)
        next(iterator)
    elif state == "after shutdown":
        next(iter(collector))
        collector.shutdown()
    elif state == "failing policy":
        for _ in collector:
            pass
    elif state == "profiling":
        collector.enable_profile(num_rollouts=9, save_path=sys.argv[2], activities=["cpu"])
        collector.next()
        collector.next()
    elif state == "endless":
        for number, _ in enumerate(collector):
            if number == 0:
                print("collecting", flush=True)
    elif state == "endless, caught":
        try:
            for number, _ in enumerate(collector):
                if number == 0:
                    print("collecting", flush=True)
        except KeyboardInterrupt:
            frames = collector.stats()["frames"]
            collector.shutdown()
            print("saved", frames, flush=True)
finally:
    print("over", time.monotonic(), flush=True)
"""
BOUND_S = 10.0


@pytest.fixture
def start(programs, tmp_path):
    return lambda state: programs.start("-W", "error", "-c", PROGRAM, state, tmp_path / "trace.json")


def finish(process):
    """Output, errors, and seconds from the last statement to the end of the process."""
    out, err = process.communicate(timeout=patient(60))
    ended = time.monotonic()
    over = [line for line in out.splitlines() if line.startswith("over")]
    assert over, err
    return out, err, ended - float(over[-1].split()[1])


EXITS = {"in the middle": 0, "after shutdown": 0, "profiling": 0, "failing policy": 1}


def test_programs_exit_within_seconds_from_every_state(start, tmp_path):
    running = {state: start(state) for state in EXITS}
    for state, process in running.items():
        _, err, seconds = finish(process)
        assert process.returncode == EXITS[state], (state, err)
        assert seconds < patient(BOUND_S * len(EXITS)), state  # they share two cores
        if state == "failing policy":
            assert "ValueError: no idea" in err
        elif state == "profiling":  # torch's profiler talks on stderr
            assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        else:
            assert err == "", state


@pytest.mark.parametrize("state", ["endless", "endless, caught"])
def test_control_c_ends_a_program_within_seconds(start, state):
    process = start(state)
    assert process.stdout.readline() == "collecting\n"
    process.send_signal(signal.SIGINT)
    pressed = time.monotonic()
    out, err, seconds = finish(process)
    assert time.monotonic() - pressed < patient(BOUND_S)
    assert seconds < patient(BOUND_S)
    if state == "endless":
        assert "KeyboardInterrupt" in err
        assert process.returncode != 0
    else:
        assert process.returncode == 0, err
        saved = int(next(line for line in out.splitlines() if line.startswith("saved")).split()[1])
        assert saved >= 20
        assert saved % 20 == 0  # whole batches
