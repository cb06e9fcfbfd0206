"""ParallelEnv: construction, partial resets, seeds, attributes, life (parity: test_parallel_parity.py)."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tests.patience import patient
from tests.programs import Programs
from tests.variants import one_quick

from rollwright.data import Composite, OneHot, Unbounded
from rollwright.envs import EnvBase, SerialEnv, StepCounter, TransformedEnv, check_env_specs
from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.envs.factories import EnvCreator
from rollwright.envs.libs import GymEnv
from rollwright.errors import EnvError, EnvKeyError
from rollwright.modules import LSTMModule

Make = Callable[..., Any]


class Steps(EnvBase):
    """Counts steps; ends after ``length``; records its seeds and resets."""

    def __init__(self, length: int = 3, size: int = 1, device: str | None = None, batch: tuple[int, ...] = ()) -> None:
        super().__init__(device=device, batch_size=batch)
        self.length, self.seeds, self.resets = length, [], 0
        self.observation_spec = Composite(count=Unbounded((*batch, size)), shape=batch)
        self.action_spec = OneHot(2, (*batch, 2))
        self.register_buffer("total", torch.zeros(()))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.resets += 1
        self.options = kwargs
        self.count = self.full_observation_spec["count"].zero()
        return TensorDict({"count": self.count}, self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if "fail" in tensordict:
            raise RuntimeError("out of order")
        self.count = self.count + 1
        self.total += 1
        done = (self.count[..., :1] >= self.length).clone()
        return TensorDict(
            {"count": self.count, "reward": self.count[..., :1], "done": done}, self.batch_size, device=self.device
        )

    def _set_seed(self, seed: int | None) -> None:
        self.seeds.append(seed)

    def multiply(self, number: int) -> int:
        return number * self.length

    def process(self) -> int:
        return os.getpid()

    def itself(self) -> EnvBase:
        return self


class StuckClosing(Steps):
    def close(self, *, raise_if_closed: bool = True) -> None:
        raise RuntimeError("stuck")


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Any] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        made.append(ParallelEnv(*args, **kwargs))
        return made[-1]

    yield build
    for env in made:
        env.close(raise_if_closed=False)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may end between the two calls
        return False


# Construction ------------------------------------------------------------------------------------------


def test_layout(make: Make) -> None:
    env = make(3, Steps)
    assert env.batch_size == (3,)
    assert repr(env) == "ParallelEnv(num_workers=3, env=Steps(batch_size=[], device=None), batch_size=[3], device=None)"
    rollout = env.rollout(2)
    assert rollout.batch_size == (3, 2)
    assert type(rollout) is TensorDict
    check_env_specs(env)


def test_environments_share_processes(make: Make) -> None:
    pids = make(5, Steps, num_processes=2).process()
    assert pids[0] == pids[2] == pids[4] != pids[1] == pids[3]
    assert os.getpid() not in pids
    assert len(set(make(3, Steps).process())) == min(3, len(os.sched_getaffinity(0)))


def test_one_function_or_one_for_each_with_arguments(make: Make) -> None:
    assert make(2, Steps, create_env_kwargs={"length": 4}).length == [4, 4]
    assert make(2, Steps, create_env_kwargs=[{"length": 4}, {}]).length == [4, 3]
    assert make(2, [lambda: Steps(1), lambda: Steps(2)]).length == [1, 2]
    assert make(1, EnvCreator(Steps, length=5)).length == [5]


def test_serial_for_single() -> None:
    assert type(ParallelEnv(1, Steps, serial_for_single=True, num_processes=1)) is SerialEnv


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((0, Steps), {}, ValueError, "num_workers: expected a number of at least 1, got 0"),
        ((2, Steps), {"pin_memroy": True}, TypeError, "no option 'pin_memroy'. Did you mean 'pin_memory'"),
        ((2, 7), {}, TypeError, "create_env_fn: expected .* got int"),
        ((2, [Steps]), {}, ValueError, "create_env_fn: expected one entry for each of the 2 workers, got 1"),
        ((2, Steps), {"num_processes": 3}, ValueError, "num_processes: expected a number from 1 to num_workers=2, got"),
        ((2, Steps), {"num_processes": True}, ValueError, "num_processes"),
        ((2, Steps), {"mp_start_method": "thread"}, ValueError, "mp_start_method: expected one of"),
        ((2, Steps), {"env_step_timeout": 0}, ValueError, "env_step_timeout: expected seconds above 0"),
        ((2, Steps), {"on_env_failure": "ignore"}, ValueError, "on_env_failure: expected one of"),
        ((2, lambda: 3), {}, TypeError, "one that made int .worker 0"),
        ((2, lambda: GymEnv("NoSuchTask-v0")), {}, EnvError, "worker 0: .*NoSuchTask"),
        ((2, [Steps, lambda: Steps(height=1)]), {}, EnvError, "worker 1 raised TypeError.*height"),
        ((2, lambda: os._exit(3)), {}, EnvError, r"process that makes the environments \[[01]\] exited with status 3"),
        ((2, [Steps, lambda: Steps(batch=(2,))]), {}, ValueError, r"one batch size, got \[\[\], \[2\]\]"),
        ((2, [Steps, lambda: Steps(device="cpu")]), {}, ValueError, "different devices.*Pass device="),
    ],
)
def test_bad_arguments_leave_nothing_behind(args: tuple, kwargs: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        ParallelEnv(*args, **{"num_processes": 2, **kwargs})
    if error is EnvError and "raised" in message:
        assert "height=1" in str(caught.value.__cause__.__cause__)  # the traceback from there


@pytest.mark.parametrize("method", one_quick(["fork", "spawn"], "fork"))  # the latter imports everything
def test_other_ways_to_start(make: Make, method: str) -> None:
    assert make(2, Steps, mp_start_method=method, num_processes=1).rollout(2).batch_size == (2, 2)


# Steps and resets --------------------------------------------------------------------------------------


def test_episodes_of_different_lengths_reset_each_by_itself(make: Make) -> None:
    env = make(2, [lambda: Steps(2), lambda: Steps(3)])
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["next", "count"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]
    assert env.resets == [3, 2]  # none after the last step


def test_partial_reset_reaches_the_marked_only(make: Make) -> None:
    env = make(3, Steps)
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[False], [True], [False]])
    before = env._processes.num_messages
    td = env.reset(td)
    assert env._processes.num_messages - before == 3  # a layout, a reset, an answer: one process is concerned
    assert env.resets == [1, 2, 1]
    assert td["count"].squeeze(-1).tolist() == [1, 0, 1]


def test_partial_reset_within_batched_environments(make: Make) -> None:
    env = make(2, lambda: Steps(batch=(2,)))
    td = env.rand_step(env.reset())["next"]
    td["_reset"] = torch.tensor([[[False], [True]], [[False], [False]]])
    assert env.reset(td)["count"].squeeze(-1).tolist() == [[1, 0], [1, 1]]
    assert env.resets == [2, 1]


def test_step_is_one_message_to_each_process_and_one_back(make: Make) -> None:
    env = make(6, Steps, num_processes=2)
    td = env.rand_step(env.reset())
    before = env._processes.num_messages
    for _ in range(5):
        td = env.rand_step(td)
    assert env._processes.num_messages - before == 5 * 2 * 2 + 2  # and once the layout, which has "next" now


def test_reset_arguments_reach_the_environments(make: Make) -> None:
    env = make(2, Steps)
    env.reset(options={"easy": True})
    assert env.options == [{"options": {"easy": True}}] * 2
    env.reset(seed=4)
    assert env.seeds == [[4], [5]]


def test_results_are_not_shared_with_the_environments(make: Make) -> None:
    env = make(2, Steps)
    td = env.reset()
    first = env.rand_step(td)["next", "count"]
    first += 10
    assert env.rand_step(td)["next", "count"].squeeze(-1).tolist() == [2, 2]
    assert first.squeeze(-1).tolist() == [11, 11]


def test_many_shapes_of_data_fit_into_bounded_memory(make: Make) -> None:
    env = make(2, Steps)
    td = env.reset()
    for size in range(1, 60):
        out = env.step(env.rand_action(td).set("extra", torch.zeros(2, size)))
    assert out["next", "count"].squeeze(-1).tolist() == [59, 59]
    assert len(env._processes._inputs._layouts) <= 16


def test_transformed_environments_inside_and_outside(make: Make) -> None:
    inside = make(2, [lambda n=n: TransformedEnv(Steps(n), StepCounter()) for n in (2, 3)])
    outside = TransformedEnv(make(2, [lambda: Steps(2), lambda: Steps(3)]), StepCounter())
    for env in (inside, outside):
        check_env_specs(env)
        rollout = env.rollout(6, break_when_any_done=False)
        assert rollout["next", "step_count"].squeeze(-1).tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]


def test_policy_provides_for_itself(make: Make) -> None:
    lstm = LSTMModule(input_size=1, hidden_size=2, in_key="count", out_key="features")
    env = make(2, Steps, policy=lstm)
    assert {"is_init", "recurrent_state_h", "recurrent_state_c"} <= set(env.reset().keys())


def test_errors_name_the_environment(make: Make) -> None:
    env = make(3, lambda: GymEnv("CartPole-v1"))
    td = env.rand_action(env.reset())
    td["action"] = td["action"] / torch.tensor([[1.0], [1.0], [0.0]])  # NaN in the last
    with pytest.raises(EnvError, match=r"ParallelEnv\[2\]: GymEnv\(env=CartPole-v1.*must be one-hot"):
        env.step(td)
    with pytest.raises(EnvKeyError, match=r"ParallelEnv\[0\]: .*'action'"):
        env.step(env.reset())
    env = make(2, Steps)
    with pytest.raises(EnvError, match=r"ParallelEnv\[0\]: .*RuntimeError: out of order") as caught:
        env.step(env.rand_action(env.reset()).set("fail", torch.ones(2)))
    assert 'raise RuntimeError("out of order")' in str(caught.value.__cause__.__cause__)
    assert env.rand_step(env.reset())["next", "count"].squeeze(-1).tolist() == [1, 1]  # it goes on


def test_unlike_environments_are_stacked_lazily(make: Make) -> None:
    env = make(2, [lambda: Steps(2, size=2), lambda: Steps(3, size=5)])
    rollout = env.rollout(6, break_when_any_done=False)
    assert isinstance(rollout, LazyStackedTensorDict)
    assert rollout[0]["next", "count"][:, 0].tolist() == [1, 2, 1, 2, 1, 2]
    assert rollout[1]["next", "count"].shape == (6, 5)
    check_env_specs(env)


# Seeds, attributes, life ---------------------------------------------------------------------------------


def test_seeds_follow_on(make: Make) -> None:
    env = make(3, lambda: GymEnv("CartPole-v1", num_envs=2))
    assert env.set_seed(10) == 15
    plain = GymEnv("CartPole-v1", num_envs=6)
    plain.set_seed(10)
    assert torch.equal(env.reset()["observation"].flatten(0, 1), plain.reset()["observation"])
    assert env.set_seed(10, static_seed=True) == 10
    assert len(env.reset()["observation"].flatten(0, 1).unique(dim=0)) == 1


def test_seeding_leaves_torchs_generator_as_for_a_single_environment(make: Make) -> None:
    make(2, Steps).set_seed(5)
    after = torch.rand(1)
    Steps().set_seed(5)
    assert torch.equal(after, torch.rand(1))


def test_global_generators_differ_from_process_to_process(make: Make) -> None:
    env = make(2, Drawing, num_processes=2)
    first, second = env.draw()
    assert all(a != b for a, b in zip(first, second, strict=True))


class Drawing(Steps):
    def draw(self) -> tuple[float, ...]:
        return float(torch.rand(())), float(np.random.rand()), random.random()


def test_attributes_and_methods_of_the_environments(make: Make) -> None:
    env = make(2, [lambda: Steps(2), lambda: Steps(3)])
    assert env.length == [2, 3]
    assert env.multiply(10) == [20, 30]
    assert env.itself() == [env, env]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = env.no_such_thing
    with pytest.raises(AttributeError):
        _ = env._private
    with pytest.raises(TypeError, match=r"ParallelEnv\[0\]: TypeError: .*multiply"):
        env.multiply()


def test_devices(make: Make) -> None:
    assert make(2, [lambda: Steps(device="cpu"), Steps], device="cpu").rollout(2).device == torch.device("cpu")
    moved = make(2, Steps).to("cpu")
    assert moved.rollout(2).device == torch.device("cpu")
    assert moved.device == torch.device("cpu")


@pytest.mark.cuda
def test_data_of_environments_on_cpu_on_cuda(make: Make) -> None:
    rollout = make(2, lambda: Steps(device="cpu"), device="cuda").rollout(5, break_when_any_done=False)
    assert rollout.device.type == "cuda"
    assert rollout["next", "count"][0].squeeze(-1).tolist() == [1, 2, 3, 1, 2]


def test_close(make: Make) -> None:
    env = make(2, Steps)
    env.start()
    pids = env.process()
    env.close()
    assert not any(is_alive(pid) for pid in pids)
    with pytest.raises(EnvError, match="clos"):
        env.step(env.fake_tensordict())
    with pytest.raises(EnvError, match="already closed"):
        env.close()
    env.close(raise_if_closed=False)
    with pytest.raises(AttributeError):
        _ = env.length


def test_close_ends_all_when_one_raises() -> None:
    env = ParallelEnv(2, [StuckClosing, Steps])
    pids = env.process()
    with pytest.raises(RuntimeError, match=r"ParallelEnv\[0\]: RuntimeError: stuck"):
        env.close()
    assert not any(is_alive(pid) for pid in pids)


def test_processes_end_with_the_last_reference() -> None:
    env = ParallelEnv(2, Steps)
    pids = env.process()
    del env
    until = time.monotonic() + patient(10)
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until
        os.sched_yield()


PROGRAM = """
import sys
from rollwright.envs import GymEnv
from rollwright.envs.batched.parallel import ParallelEnv
env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
env.reset()
print(*env._processes.pids(), flush=True)
{then}
"""


@pytest.mark.parametrize("then", ["raise ValueError", "import os; os.kill(os.getpid(), 9)"])
def test_program_that_ends_without_close_leaves_nothing(programs: Programs, then: str) -> None:
    begun = time.monotonic()
    done = programs.run("-c", PROGRAM.format(then=then), timeout=patient(60))
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == min(2, len(os.sched_getaffinity(0)))
    until = time.monotonic() + patient(10)
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until
        os.sched_yield()
    assert time.monotonic() - begun < patient(60)


def test_batches_of_batches(make: Make) -> None:
    env = make(2, lambda: SerialEnv(3, [lambda n=n: Steps(n) for n in (2, 3, 4)]))
    assert env.batch_size == (2, 3)
    assert env.set_seed(1) == 6
    expected = [[[t % n for t in range(6)] for n in (2, 3, 4)]] * 2
    assert env.rollout(6, break_when_any_done=False)["count"].squeeze(-1).tolist() == expected


def test_processes_within_processes(make: Make) -> None:
    env = make(2, lambda: ParallelEnv(2, Steps, num_processes=1, mp_start_method="fork"), num_processes=1)
    assert env.batch_size == (2, 2)
    assert env.rollout(2)["next", "count"].squeeze(-1).tolist() == [[[1, 2]] * 2] * 2
