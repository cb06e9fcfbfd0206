"""Evaluator: what goes wrong reaches the caller within seconds, and every end is bounded."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from tests.patience import patient
from tests.programs import Programs
from torch import nn

from rollwright.collectors.evaluation.evaluator import Evaluator
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import EnvBase
from rollwright.errors import EnvError, RemoteTraceback, WorkerError

backends = pytest.mark.parametrize("backend", ["thread", "process"])
LET_GO = threading.Event()


class Faulty(EnvBase):
    """Episodes of 5 steps; in its ``at``-th step it calls ``what``."""

    def __init__(self, at: int = -1, what: Callable[[], None] | None = None, step_s: float = 0.0) -> None:
        super().__init__()
        self.at, self.what, self.steps, self.count, self.step_s = at, what, 0, 0, step_s
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.count = 0
        return TensorDict({"observation": torch.ones(1)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        self.count += 1
        time.sleep(self.step_s)
        if self.steps == self.at and self.what is not None:
            self.what()
        return TensorDict(
            {"observation": torch.ones(1), "reward": torch.ones(1), "done": torch.tensor([self.count > 4])}
        )


def fail() -> None:
    raise ZeroDivisionError("the floor is gone")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stick() -> None:
    LET_GO.wait(60.0)


def sleep() -> None:
    time.sleep(60.0)


@pytest.fixture
def make() -> Iterator[Callable[..., Evaluator]]:
    made: list[Evaluator] = []

    def maker(*args: Any, **kwargs: Any) -> Evaluator:
        made.append(Evaluator(*args, num_trajectories=kwargs.pop("num_trajectories", 2), **kwargs))
        return made[-1]

    LET_GO.clear()
    yield maker
    LET_GO.set()
    for evaluator in made:
        evaluator.shutdown(timeout=5.0, raise_on_error=False)


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + patient(10.0)
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().split(")")[1].split()[0] == "Z":
                return
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")


# Errors in an evaluation -------------------------------------------------------------------------


@backends
def test_error_of_an_environment(make: Any, backend: str) -> None:
    evaluator = make(lambda: Faulty(3, fail), backend=backend)
    with pytest.raises(EnvError, match="the floor is gone") as caught:
        evaluator.evaluate()
    if backend == "process":
        assert isinstance(caught.value, WorkerError)
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert "in fail" in str(caught.value.__cause__)
    assert evaluator.evaluate()["eval/lengths"] == [5, 5]  # it goes on


@backends
@pytest.mark.parametrize("call", ["wait", "poll", "trigger_eval", "evaluate", "shutdown"])
def test_error_is_raised_at_the_next_call_once(make: Any, backend: str, call: str) -> None:
    evaluator = make(lambda: Faulty(3, fail), backend=backend)
    evaluator.trigger_eval()
    until = time.monotonic() + patient(20.0)
    while evaluator.pending and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(EnvError, match="the floor is gone"):
        getattr(evaluator, call)()
    if call != "shutdown":
        assert evaluator.evaluate()["eval/lengths"] == [5, 5]


def test_killed_process(make: Any) -> None:
    evaluator = make(lambda: Faulty(3, kill), backend="process")
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL in the middle of an evaluation, after 2 frames"):
        evaluator.evaluate()
    assert time.monotonic() - begun < patient(5.0)
    for call in (evaluator.evaluate, evaluator.trigger_eval, evaluator.poll, evaluator.wait):
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL\. Make a new Evaluator"):
            call()
    assert evaluator.stats()["alive"] is False
    evaluator.shutdown(raise_on_error=False)


def test_process_killed_while_idle(make: Any) -> None:
    evaluator = make(lambda: Faulty(), backend="process")
    evaluator.evaluate()
    os.kill(evaluator.stats()["pid"], signal.SIGKILL)
    until = time.monotonic() + patient(10.0)
    while evaluator.stats()["alive"] and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(WorkerError, match="was killed by SIGKILL"):
        evaluator.trigger_eval()


def test_stuck_process_is_killed(make: Any) -> None:
    evaluator = make(lambda: Faulty(3, sleep), backend="process", env_step_timeout=0.5)
    pid = evaluator.stats()["pid"]
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"waited 0\.5 s for a step of its environment, after 2 frames"):
        evaluator.evaluate()
    assert time.monotonic() - begun < patient(5.0)
    wait_for_end(pid)
    with pytest.raises(WorkerError, match="Make a new Evaluator"):
        evaluator.trigger_eval()


def test_process_that_a_signal_has_stopped_is_killed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollwright.collectors.evaluation.backends.STOPPED_S", 1.0)
    evaluator = make(Faulty, backend="process", env_step_timeout=1000.0)
    evaluator.evaluate()
    os.kill(evaluator._queue.backend.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"waited 1 s for a step of its environment, after 0 frames"):
        evaluator.evaluate()


@pytest.mark.parametrize("call", ["evaluate", "wait", "poll", "trigger_eval"])
def test_stuck_thread_is_told(make: Any, call: str) -> None:
    evaluator = make(lambda: Faulty(3, stick), env_step_timeout=0.3)
    if call == "evaluate":
        with pytest.raises(TimeoutError, match="for a step of its environment, after 2 frames"):
            evaluator.evaluate()
        return
    evaluator.trigger_eval()
    while evaluator._queue.progress.silence_s < 0.35 and call != "wait":
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match=r"evaluation of step 1: waited .* for a step of its environment"):
        getattr(evaluator, call)()
    LET_GO.set()
    while evaluator.pending and evaluator.stats()["frames"] == 2:
        time.sleep(0.01)
    assert evaluator.wait()["eval/lengths"] == [5, 5]  # it came back


def test_slow_on_result_is_named(make: Any) -> None:
    evaluator = make(lambda: Faulty(), env_step_timeout=0.3, on_result=lambda _: stick())
    with pytest.raises(TimeoutError, match="for on_result"):
        evaluator.evaluate()


# Construction ------------------------------------------------------------------------------------


@backends
def test_error_in_the_environments_factory(backend: str) -> None:
    with pytest.raises(ZeroDivisionError, match="the floor is gone"):
        Evaluator(fail, backend=backend)


@backends
def test_error_in_the_policys_factory(backend: str) -> None:
    with pytest.raises(ZeroDivisionError, match="the floor is gone"):
        Evaluator(Faulty, policy_factory=fail, backend=backend)


@backends
def test_policy_that_does_not_fit(backend: str) -> None:
    policy = TensorDictModule(nn.Linear(1, 1), in_keys=["speed"], out_keys=["action"])
    with pytest.raises(KeyError, match="speed"):
        Evaluator(Faulty, policy, backend=backend)


def test_init_fn_runs_first_in_the_process(make: Any, tmp_path: Any) -> None:
    make(Faulty, backend="process", init_fn=lambda: (tmp_path / "pid").write_text(str(os.getpid())))
    assert int((tmp_path / "pid").read_text()) != os.getpid()
    with pytest.raises(ZeroDivisionError, match="the floor is gone"):
        Evaluator(Faulty, backend="process", init_fn=fail)


@pytest.mark.parametrize(
    ("kind", "match", "arguments"),
    [
        (ValueError, "num_trajectories: expected an integer of at least 1, got 0", {"num_trajectories": 0}),
        (TypeError, "num_trajectories: expected an integer", {"num_trajectories": True}),
        (TypeError, "seed: expected an integer", {"seed": 1.5}),
        (ValueError, "backend: expected 'thread' or 'process' or 'ray', got 'cluster'", {"backend": "cluster"}),
        (ValueError, "busy_policy: expected 'skip' or 'error' or 'queue', got 'wait'", {"busy_policy": "wait"}),
        (TypeError, "on_result: expected a callable", {"on_result": 3}),
        (ValueError, "env_step_timeout: expected seconds above 0", {"env_step_timeout": 0}),
        (ValueError, "start_method: expected one of", {"start_method": "thread"}),
        (TypeError, "Evaluator has no option 'replay_buffer'", {"replay_buffer": None}),
        (TypeError, "exploration_type", {"exploration_type": "mode"}),
        (ValueError, "reward_key: expected one of 'reward'", {"reward_key": "score"}),
        (TypeError, "create_env_fn: backend='process' makes", {"backend": "process", "create_env_fn": Faulty()}),
    ],
)
def test_wrong_arguments(kind: Any, match: str, arguments: dict[str, Any]) -> None:
    env = arguments.pop("create_env_fn", Faulty)
    with pytest.raises(kind, match=match):
        Evaluator(env, **arguments)


def test_function_around_what_cannot_be_copied() -> None:
    class Net(nn.Linear):
        def __deepcopy__(self, memo: Any) -> None:
            raise TypeError("never")

    net = Net(1, 1)

    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", net(td["observation"]))

    with pytest.raises(TypeError, match="it would never see new weights"):
        Evaluator(Faulty, policy, backend="process")
    with pytest.warns(UserWarning, match="function around a module"):
        Evaluator(Faulty, policy).shutdown()


# The end -----------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("state", ["idle", "evaluating", "evaluated"])
def test_shutdown_is_bounded_and_may_be_repeated(make: Any, backend: str, state: str) -> None:
    slow = state == "evaluating"  # a batch of 100 steps would take longer than shutdown may
    evaluator = make(lambda: Faulty(step_s=0.1 * slow), backend=backend, num_trajectories=10_000 if slow else 2)
    if state != "idle":
        evaluator.trigger_eval()
    if state == "evaluated":
        evaluator.wait()
    while slow and not evaluator.stats()["frames"]:
        time.sleep(0.01)
    pid = evaluator.stats()["pid"]
    begun = time.monotonic()
    evaluator.shutdown()
    evaluator.shutdown()
    assert time.monotonic() - begun < patient(4.0)
    if pid is not None:
        wait_for_end(pid)
    for call in (evaluator.evaluate, evaluator.trigger_eval, evaluator.poll, evaluator.wait):
        with pytest.raises(RuntimeError, match="was shut down"):
            call()
    assert evaluator.stats()["alive"] is False


def test_shutdown_of_a_stuck_process(make: Any) -> None:
    evaluator = make(lambda: Faulty(3, sleep), backend="process")
    pid = evaluator.stats()["pid"]
    evaluator.trigger_eval()
    while evaluator.stats()["frames"] < 2:
        time.sleep(0.01)
    begun = time.monotonic()
    with pytest.warns(UserWarning, match=rf"process \(pid {pid}\) did not end within 1 s and was terminated"):
        evaluator.shutdown(timeout=1.0)
    assert time.monotonic() - begun < patient(4.0)
    wait_for_end(pid)


def test_shutdown_of_a_stuck_thread(make: Any) -> None:
    evaluator = make(lambda: Faulty(3, stick))
    evaluator.trigger_eval()
    while evaluator.stats()["frames"] < 2:
        time.sleep(0.01)
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for a step of its environment to end. .* is left behind"):
        evaluator.shutdown(timeout=0.2)


@backends
def test_shutdown_that_is_interrupted_goes_on_when_called_again(make: Any, backend: str) -> None:
    evaluator = make(lambda: Faulty(3, stick if backend == "thread" else sleep), backend=backend)
    evaluator.trigger_eval()
    while evaluator.stats()["frames"] < 2:
        time.sleep(0.01)

    def interrupt() -> None:
        while not evaluator._queue.stopping:
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        evaluator.shutdown(timeout=60.0)
    with pytest.raises(RuntimeError, match="was shut down"):
        evaluator.evaluate()
    if backend == "thread":
        with pytest.raises(TimeoutError, match="is left behind"):
            evaluator.shutdown(timeout=0.2)
    else:
        with pytest.warns(UserWarning, match="did not end within 1 s and was terminated"):
            evaluator.shutdown(timeout=1.0)
        wait_for_end(evaluator.stats()["pid"])


def test_environment_is_closed() -> None:
    env = Faulty()
    with Evaluator(env, num_trajectories=1) as evaluator:
        evaluator.evaluate()
    assert env.is_closed


def test_forgotten_evaluator_ends() -> None:
    evaluator = Evaluator(Faulty, num_trajectories=1, backend="process")
    pid = evaluator.stats()["pid"]
    del evaluator
    wait_for_end(pid)


SCRIPT = """
import os, sys, time
import torch
from rollwright.collectors.evaluation.evaluator import Evaluator
from rollwright.envs import GymEnv

evaluator = Evaluator(lambda: GymEnv("Pendulum-v1"), num_trajectories=100_000, backend=sys.argv[1])
evaluator.trigger_eval()
while evaluator.stats()["frames"] < 10:
    time.sleep(0.01)
print(evaluator.stats()["pid"], flush=True)
if sys.argv[2] == "error":
    raise ValueError("in the loop")
if sys.argv[2] == "killed":
    time.sleep(60)
"""


@pytest.mark.parametrize(("backend", "how"), [("thread", "exit"), ("process", "error"), ("process", "killed")])
def test_end_of_the_program(programs: Programs, backend: str, how: str) -> None:
    program = programs.start("-c", SCRIPT, backend, how)
    pid = program.stdout.readline().strip()
    begun = time.monotonic()
    if how == "killed":
        program.kill()
    _, errors = program.communicate(timeout=patient(30.0))
    assert time.monotonic() - begun < patient(20.0)
    assert {"exit": 0, "error": 1, "killed": -signal.SIGKILL}[how] == program.returncode, errors
    assert errors.count("Error") == (how == "error")
    if pid != "None":
        wait_for_end(int(pid))


@pytest.mark.parametrize("lacks", ["asked", "policy_version"])
def test_a_state_that_lacks_something_is_refused_by_name_and_changes_nothing(lacks):
    with Evaluator(Faulty, None, num_trajectories=1) as evaluator:
        before = evaluator.state_dict()
        state = {name: 7 for name in before if name != lacks}
        with pytest.raises(KeyError, match=rf"expected \['{lacks}'\]"):
            evaluator.load_state_dict(state)
        with pytest.raises(TypeError, match="expected a dictionary"):
            evaluator.load_state_dict(3)
        assert evaluator.state_dict() == before


class Watched(nn.Module):
    """A policy that records the modes in which it acts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.frozen, self.modes = nn.Linear(1, 1), nn.Dropout().eval(), []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.modes.append({part.training for part in self.modules()})
        return self.frozen(self.scale(observation))

    def __deepcopy__(self, memo: Any) -> Watched:
        return self


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["factory", "shared"])
def test_a_policy_that_is_trained_is_in_the_mode_of_before(how: str, fails: bool) -> None:
    net = Watched()
    policy = TensorDictModule(net, in_keys=["observation"], out_keys=["action"])
    before = {name: part.training for name, part in policy.named_modules()}
    given: dict[str, Any] = {"policy_factory": lambda: policy} if how == "factory" else {"policy": policy}
    env = (lambda: Faulty(12, fail)) if fails else Faulty
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is no copy
        evaluator = Evaluator(env, num_trajectories=3, **given)
    if fails:
        with pytest.raises(EnvError, match="the floor is gone"):
            evaluator.evaluate()
    else:
        evaluator.evaluate()
    assert {name: part.training for name, part in policy.named_modules()} == before
    assert len(net.modes) > 10
    assert all(modes == {False} for modes in net.modes)
    evaluator.shutdown()
