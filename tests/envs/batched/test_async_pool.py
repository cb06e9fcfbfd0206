"""AsyncEnvPool: each environment in its own time, with the results it would have alone, or in a SerialEnv."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import (
    CatFrames,
    EnvBase,
    GymEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
    step_mdp,
)
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.testing.comparison import differing_key
from rollwright.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvWithString,
    IncrementingEnv,
    NestedCountingEnv,
)

BACKENDS = ["threading", "multiprocessing"]
backends = pytest.mark.parametrize("backend", BACKENDS)


class Gated(EnvBase):
    """Counts its steps; each waits at a gate (of this process)."""

    def __init__(self, gate: threading.Event | None = None, length: int = 3) -> None:
        super().__init__()
        self.gate, self.length, self.count = gate, length, 0
        self.observation_spec = Composite(count=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Categorical(2, shape=(1,), dtype=torch.bool)

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random."""

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.count = kwargs.get("start", 0)
        return TensorDict({"count": torch.tensor([float(self.count)])})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.gate is not None:
            assert self.gate.wait(20.0)
        self.count += 1
        count = torch.tensor([float(self.count)])
        return TensorDict({"count": count, "reward": tensordict["action"].clone(), "done": count >= self.length})


@pytest.fixture
def make() -> Iterator[Callable[..., AsyncEnvPool]]:
    made: list[AsyncEnvPool] = []

    def maker(*args: Any, **kwargs: Any) -> AsyncEnvPool:
        made.append(AsyncEnvPool(*args, **kwargs))
        return made[-1]

    yield maker
    for pool in made:
        pool.shutdown()


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1")


KINDS: dict[str, list[Callable[[], EnvBase]]] = {
    "gym": [cartpole] * 3,
    "transforms": [lambda: TransformedEnv(cartpole(), CatFrames(2, -1, in_keys=["observation"]))] * 2,
    "batched": [lambda: CountingBatchedEnv(max_steps=torch.tensor([2, 5]), batch_size=(2,))] * 2,
    "nested": [NestedCountingEnv] * 2,
    "strings": [CountingEnvWithString] * 2,
    "unlike": [cartpole, lambda: GymEnv("Pendulum-v1")],
    "lengths": [lambda: IncrementingEnv(max_steps=2), lambda: IncrementingEnv(max_steps=5)],
}


def act_alike(td: TensorDictBase, other: TensorDictBase) -> None:
    """Write the actions of another TensorDict."""
    if isinstance(td, LazyStackedTensorDict):
        for mine, theirs in zip(td.unbind(0), other.unbind(0), strict=True):
            mine.set("action", theirs["action"])
    else:
        td.update(other)


def plain(td: TensorDictBase) -> TensorDictBase:
    return td.exclude("env_index")


# As a SerialEnv ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "backend"), in_turn(KINDS, [*BACKENDS]))
def test_steps_and_resets_equal_those_of_serial_env(make: Any, backend: str, kind: str) -> None:
    serial, pool = SerialEnv(len(KINDS[kind]), KINDS[kind]), make(KINDS[kind], backend=backend)
    assert pool.batch_size == serial.batch_size
    for name in ("observation", "action", "reward", "done", "state"):
        assert getattr(pool, f"full_{name}_spec") == getattr(serial, f"full_{name}_spec")
    assert serial.set_seed(3) == pool.set_seed(3)
    root, other = serial.reset(), pool.reset()
    assert differing_key(root, other) is None
    for _ in range(30):
        root = serial.rand_action(root)
        act_alike(other, root)
        stepped, root = serial.step_and_maybe_reset(root)
        ours, other = pool.step_and_maybe_reset(other)
        assert differing_key(stepped, ours) is None
        assert differing_key(root, other) is None


@backends
def test_rollouts_and_partial_resets(make: Any, backend: str) -> None:
    serial, pool = SerialEnv(3, cartpole), make([cartpole] * 3, backend=backend)
    for env in (serial, pool):
        env.set_seed(1)
    first = serial.rollout(40, break_when_any_done=False)
    torch.manual_seed(1)
    pool.set_seed(1)
    assert differing_key(first, pool.rollout(40, break_when_any_done=False)) is None
    for env in (serial, pool):
        env.set_seed(2)
    roots = [env.reset() for env in (serial, pool)]
    for root in roots:
        root["_reset"] = torch.tensor([[True], [False], [True]])
    ours, theirs = pool.reset(roots[1]), serial.reset(roots[0])
    assert differing_key(theirs, ours) is None


@backends
def test_specs_and_collector(make: Any, backend: str) -> None:
    pool = make([cartpole] * 2, backend=backend)
    check_env_specs(pool)
    batches = []
    for env in (SerialEnv(2, cartpole), pool):
        collector = Collector(env, frames_per_batch=50)
        collector.set_seed(5)
        batches.append([collector.next() for _ in range(2)])
    for expected, batch in zip(*batches, strict=True):
        assert differing_key(expected, batch) is None


@backends
def test_attributes_seeds_and_inner_transforms(make: Any, backend: str) -> None:
    pool = make(lambda size: CountingEnv(max_steps=size), create_env_kwargs=[{"size": 4}], backend=backend)
    assert (pool.num_envs, pool.env_batch_sizes, pool.max_steps) == (1, [torch.Size([])], [4])
    pool = make([lambda: TransformedEnv(cartpole(), StepCounter(3))] * 2, backend=backend)
    assert pool.set_seed(7) == 8
    assert pool.set_seed(7, static_seed=True) == 7
    assert torch.equal(*pool.reset()["observation"].unbind(0))
    assert pool.rollout(10).shape == (2, 3)


def test_outer_transforms(make: Any) -> None:
    env = TransformedEnv(make([cartpole] * 2), StepCounter(4))
    assert env.rollout(10).shape == (2, 4)


# Send and receive ----------------------------------------------------------------------------------


@backends
def test_every_environment_has_the_stream_it_has_alone(make: Any, backend: str) -> None:
    pool = make([cartpole] * 4, backend=backend)
    pool.set_seed(11)
    alone = [cartpole() for _ in range(4)]
    for i, env in enumerate(alone):
        env.set_seed(11 + i)
    draw = random.Random(0)
    pool.async_reset_send()
    roots = {}
    for root in pool.async_reset_recv(min_get=4).unbind(0):
        roots[int(root["env_index"])] = root
    expected = {i: env.reset() for i, env in enumerate(alone)}
    for i in range(4):
        assert differing_key(expected[i], plain(roots[i])) is None
    ends = 0
    for _ in range(150):
        idle = draw.sample(sorted(roots), draw.randint(min(1, len(roots)), len(roots))) if roots else []
        if idle:
            sent = torch.stack([alone[i].rand_action(roots.pop(i)) for i in idle])
            for row in sent.unbind(0):
                i = int(row["env_index"])
                expected[i] = alone[i].step_and_maybe_reset(plain(row))
                ends += bool(expected[i][0]["next", "done"])
            pool.async_step_and_maybe_reset_send(sent)
        count = draw.randint(1, len(pool.busy))
        stepped, after = pool.async_step_and_maybe_reset_recv(min_get=count)
        assert len(stepped) >= count
        for one, root in zip(stepped.unbind(0), after.unbind(0), strict=True):
            i = int(root["env_index"])
            assert differing_key(expected[i][0], plain(one)) is None
            assert differing_key(expected[i][1], plain(root)) is None
            roots[i] = root
    assert ends > 5


def test_slow_ones_hold_nobody_up(make: Any) -> None:
    gates = [threading.Event() for _ in range(3)]
    pool = make([lambda gate=gate: Gated(gate, 99) for gate in gates])
    root = pool.reset().set("action", torch.ones(3, 1))
    pool.async_step_send(root)
    assert pool.busy == [0, 1, 2]
    gates[2].set()
    for count in range(1, 5):
        [stepped] = pool.async_step_recv().unbind(0)
        assert (int(stepped["env_index"]), stepped["next", "count"].item()) == (2, count)
        pool.async_step_send(step_mdp(stepped).set("action", torch.ones(1)))
    for gate in gates:
        gate.set()
    assert sorted(pool.async_step_recv(min_get=3)["env_index"].tolist()) == [0, 1, 2]


@backends
def test_step_send_one_row(make: Any, backend: str) -> None:
    pool = make([lambda: Gated()] * 3, backend=backend, min_get=1)
    root = pool.reset()
    row = root[1].exclude("env_index").set("action", torch.full((1,), 2.0)).set("mine", torch.tensor(5))
    pool.async_step_send(row, env_index=1)
    stepped = pool.async_step_recv()
    assert stepped.shape == (1,)
    assert (stepped["env_index"].tolist(), stepped["next", "reward"].tolist(), stepped["mine"].tolist()) == (
        [1],
        [[2.0]],
        [5],
    )
    row["env_index"] = 2  # as an entry: a plain number
    pool.async_step_send(row)
    assert pool.async_step_recv(env_index=2)["env_index"].tolist() == [2]
    assert "next" not in row


@backends
def test_true_last_observation_and_reset_arguments(make: Any, backend: str) -> None:
    pool = make([lambda: Gated(length=1)] * 2, backend=backend)
    pool.async_reset_send(env_index=[1, 0], start=0)
    root = pool.async_reset_recv(min_get=2)
    pool.async_step_and_maybe_reset_send(root.set("action", torch.ones(2, 1)))
    stepped, after = pool.async_step_and_maybe_reset_recv(min_get=2)
    assert stepped["next", "count"].tolist() == [[1.0], [1.0]]
    assert stepped["next", "done"].all()
    assert after["count"].tolist() == [[0.0], [0.0]]
    assert not after["done"].any()
    assert "_reset" not in after
    pool.async_reset_send(env_index=0, start=7)
    assert pool.async_reset_recv()["count"].tolist() == [[7.0]]


@backends
def test_chosen_environments_come_in_the_order_asked_for(make: Any, backend: str) -> None:
    pool = make([lambda: Gated()] * 3, backend=backend)
    root = pool.reset().set("action", torch.ones(3, 1))
    pool.async_step_send(root)
    assert pool.async_step_recv(env_index=[2, 0])["env_index"].tolist() == [2, 0]
    assert pool.async_step_recv()["env_index"].tolist() == [1]


def test_most_and_least(make: Any) -> None:
    gate = threading.Event()
    pool = make([lambda: Gated(), lambda: Gated(), lambda: Gated(gate)])
    pool.async_step_send(pool.reset().set("action", torch.ones(3, 1)))
    assert len(pool.async_step_recv(max_get=1)) == 1
    with pytest.raises(TimeoutError, match=r"waited 0\.05 s for 2 results, and [01] are ready; they stay"):
        pool.async_step_recv(min_get=2, timeout=0.05)
    assert pool.async_step_recv(min_get=1, timeout=5.0)["env_index"].item() in (0, 1)
    with pytest.raises(TimeoutError, match=r"Under way are environments \[2\]"):
        pool.async_step_recv(timeout=0.0)
    gate.set()
    assert pool.async_step_recv()["env_index"].tolist() == [2]


def test_stacks(make: Any) -> None:
    assert isinstance(make(KINDS["unlike"]).reset(), LazyStackedTensorDict)
    pool = make([cartpole] * 2, stack="lazy")
    pool.async_reset_send()
    assert isinstance(pool.async_reset_recv(min_get=2), LazyStackedTensorDict)
    with pytest.raises(ValueError, match="stack='dense': the environments' entries differ"):
        AsyncEnvPool(KINDS["unlike"], stack="dense")


def test_random_actions_of_some(make: Any) -> None:
    pool = make(KINDS["unlike"])
    pool.async_reset_send()
    root = pool.rand_action(pool.async_reset_recv(env_index=[1, 0]))
    assert [row["action"].shape for row in root.unbind(0)] == [(1,), (2,)]
    assert pool.rand_action(root[1].exclude("action"))["action"].shape == (2,)
    pool.async_step_send(root)
    assert len(pool.async_step_recv(min_get=2)) == 2
    pool = make([cartpole] * 3)
    pool.async_reset_send(env_index=[2, 0])
    assert pool.rand_action(pool.async_reset_recv(min_get=2))["action"].sum(-1).tolist() == [1, 1]


@backends
def test_unlike_environments(make: Any, backend: str) -> None:
    pool = make(KINDS["unlike"], backend=backend)
    pool.async_step_and_maybe_reset_send(pool.rand_action(pool.reset())[1], env_index=1)
    stepped, after = pool.async_step_and_maybe_reset_recv()
    assert stepped["next", "observation"].shape == after["observation"].shape == (1, 3)


def test_presets_below_next_survive(make: Any) -> None:
    pool = make([lambda: Gated()] * 2)
    root = pool.reset().set("action", torch.ones(2, 1)).set(("next", "hidden"), torch.arange(2.0))
    pool.async_step_and_maybe_reset_send(root)
    stepped, after = pool.async_step_and_maybe_reset_recv(min_get=2)
    assert torch.equal(stepped["next", "hidden"], stepped["env_index"].float())
    assert torch.equal(after["hidden"], after["env_index"].float())


@backends
def test_data_out_of_order_is_not_taken_for_all(make: Any, backend: str) -> None:
    pool = make([lambda: Gated()] * 2, backend=backend)
    pool.async_reset_send(env_index=[1, 0])
    root = pool.async_reset_recv(env_index=[1, 0]).set("action", torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"expected environments 0 to 1 in order, got 'env_index' \[1, 0\]"):
        pool.step(root)
    assert pool.step(root[[1, 0]])["env_index"].tolist() == [0, 1]
