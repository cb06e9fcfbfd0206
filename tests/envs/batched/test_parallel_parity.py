"""ParallelEnv does what SerialEnv does, bit for bit: on TensorDicts, on arrays, in groups, under a collector."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from rollwright.collectors import Collector
from rollwright.data import Unbounded
from rollwright.envs import EnvBase, GymWrapper, SerialEnv, TransformedEnv, default_info_dict_reader
from rollwright.envs.arrays import ArrayEnv, array_form
from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.envs.transforms import Compose, InitTracker, RewardSum, StepCounter, TensorDictPrimer, VecNorm
from rollwright.errors import EnvError, NotNative
from rollwright.modules import RandomPolicy
from rollwright.testing import check_env
from rollwright.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvWithString,
    EnvThatDoesNothing,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


class Walk(gymnasium.Env):
    """Observations of any space, drawn by the seed, in one buffer where that is an array."""

    def __init__(self, seen=BOX, act=None):
        self.observation_space = copy.deepcopy(seen)
        self.action_space = act or spaces.Discrete(3)

    def _seen(self):
        value = self.observation_space.sample()
        if isinstance(value, np.ndarray):
            if not hasattr(self, "buffer"):
                self.buffer = value.copy()
            self.buffer[...] = value
            return self.buffer
        return value

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = int(self.np_random.integers(1, 5))
        return self._seen(), {}

    def step(self, action):
        self.left -= 1
        ended = self.left <= 0
        cut = ended and self.np_random.random() < 0.5
        return self._seen(), float(np.sum(action)) / 3, ended and not cut, cut, {}


def walk(**spaces_: Any) -> EnvBase:
    return GymWrapper(Walk(**spaces_), categorical_action_encoding=True)


def vector() -> EnvBase:
    return GymWrapper(SyncVectorEnv([Walk] * 3, autoreset_mode=AutoresetMode.SAME_STEP))


def books(env: EnvBase) -> EnvBase:
    primer = TensorDictPrimer(h=Unbounded((2,)), r=Unbounded(()))
    return TransformedEnv(env, Compose(InitTracker(), StepCounter(max_steps=3), RewardSum(), primer))


def normed() -> EnvBase:
    return TransformedEnv(walk(), Compose(StepCounter(max_steps=4), VecNorm(in_keys=["observation"], decay=0.9)))


# On TensorDicts --------------------------------------------------------------------------------------------

MOCKS: dict[str, Callable[[], EnvBase]] = {
    "counting": lambda: CountingEnv(max_steps=3),
    "rows of different lengths": lambda: CountingBatchedEnv(max_steps=torch.tensor([3, 4]), batch_size=[2]),
    "nested": lambda: NestedCountingEnv(max_steps=2, nest_done=True, has_root_done=True),
    "several keys": lambda: MultiKeyCountingEnv(max_steps=3),
    "heterogeneous": lambda: HeterogeneousCountingEnv(max_steps=3),
    "objects": EnvWithMetadata,
    "strings": CountingEnvWithString,
    "growing": EnvWithDynamicSpec,
    "nothing": EnvThatDoesNothing,
    "gym": walk,
    "gym, text": lambda: walk(seen=spaces.Dict(a=BOX, b=spaces.Text(3))),
    "vector": vector,
    "normed": normed,
}


def flat(td: Any, above: tuple[Any, ...] = ()) -> dict[Any, Any]:
    """Everything that a TensorDict is made of."""
    if type(td) is LazyStackedTensorDict:
        out = {(*above, "stack"): (td.stack_dim, tuple(td.batch_size))}
        for i, row in enumerate(td.tensordicts):
            out.update(flat(row, (*above, i)))
        return out
    out = {above: (type(td).__name__, tuple(td.batch_size), td.device)}
    if not isinstance(td, TensorDict):
        return {**out, (*above, "objects"): td.tolist()}
    for key, value in td.items():
        out.update(flat(value, (*above, key)) if is_tensor_collection(value) else {(*above, key): value})
    return out


def assert_same(one: TensorDictBase, other: TensorDictBase) -> None:
    first, second = flat(one), flat(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == second[key].dtype, key
            assert torch.equal(value, second[key]), key
        else:
            assert value == second[key], key


@pytest.mark.parametrize("name", MOCKS)
def test_rollouts_are_those_of_serial_env(name: str) -> None:
    results = []
    for cls in (SerialEnv, ParallelEnv):
        env = cls(3, MOCKS[name])
        env.set_seed(4)
        rollout = env.rollout(9, break_when_any_done=False)
        results.append((rollout, env.rand_step(env.reset()), env.fake_tensordict()))
        env.close()
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


def test_conformance() -> None:
    check_env(lambda: ParallelEnv(2, lambda: CountingEnv(max_steps=3), num_processes=1), num_steps=8)


# On arrays -------------------------------------------------------------------------------------------------

ARRAYS: dict[str, Callable[[type], EnvBase]] = {
    "single": lambda cls: cls(5, walk),
    "of a dict": lambda cls: cls(2, lambda: walk(seen=spaces.Dict(a=BOX, b=spaces.Discrete(3)))),
    "many choices": lambda cls: cls(2, lambda: walk(act=spaces.MultiDiscrete([2, 3]))),
    "vectors": lambda cls: cls(2, vector),
    "books inside": lambda cls: cls(3, lambda: books(walk())),
    "books of vectors, outside": lambda cls: books(cls(2, vector)),
    "serial inside": lambda cls: cls(2, lambda: SerialEnv(2, lambda: books(walk()))),
}


class Stepper:
    """Steps an array form as a collector does, and keeps what it has seen."""

    def __init__(self, env: EnvBase, arrays: ArrayEnv, groups: int = 1) -> None:
        self.env = env
        self.parts = [arrays] if groups == 1 else arrays.groups(groups)
        self.roots: list[Any] = []
        self.seen: list[list[dict[Any, Any]]] = []

    def reset(self) -> None:
        self.roots = [part.reset(None) for part in self.parts]

    def run(self, steps: int, *, halves: bool = False) -> list[dict[Any, Any]]:
        rng = torch.Generator().manual_seed(0)
        for _ in range(steps):
            torch.manual_seed(int(torch.randint(1000, (), generator=rng)))
            action = self.env.rand_action()["action"].numpy()
            chunks = np.split(action, np.cumsum([part.batch[0] for part in self.parts])[:-1])
            given = [{**root, "action": chunk} for root, chunk in zip(self.roots, chunks, strict=True)]
            if halves:
                for part, root in zip(self.parts, given, strict=True):
                    part.send(root, {})
            outs = [
                part.receive() if halves else part.step(root, {}) for part, root in zip(self.parts, given, strict=True)
            ]
            self.seen.append([{key: value.copy() for key, value in out.items()} for out in outs])
            self.roots = [self.following(part, out) for part, out in zip(self.parts, outs, strict=True)]
            self.seen.append([{key: value.copy() for key, value in root.items()} for root in self.roots])
        return [{key: np.concatenate([out[key] for out in outs]) for key in outs[0]} for outs in self.seen]

    def following(self, part: ArrayEnv, out: dict[Any, Any]) -> dict[Any, Any]:
        ended = out["done"]
        if not ended.any():
            return {key: out[key] for key in part.entries}
        fresh = part.reset(ended)
        return {
            key: np.where(ended.reshape(ended.shape + (1,) * (value.ndim - ended.ndim)), value, out[key])
            for key, value in fresh.items()
        }


def run(env: EnvBase, groups: int = 1, *, ahead: bool = False, halves: bool = False) -> list[dict[Any, Any]]:
    arrays = array_form(env)
    arrays.resets_ahead = ahead
    env.set_seed(3)
    stepper = Stepper(env, arrays, groups)
    stepper.reset()
    return stepper.run(25, halves=halves)


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_are_those_of_serial_env(name: str) -> None:
    expected = run(ARRAYS[name](SerialEnv))
    env = ARRAYS[name](ParallelEnv)
    assert sum(int(step["done"].sum()) for step in expected[::2]) > 10
    for kwargs in ({}, {"ahead": True}, {"groups": 2, "halves": True}):
        for one, other in zip(expected, run(env, **kwargs), strict=True):
            assert one.keys() == other.keys()
            for key, value in one.items():
                assert value.dtype == other[key].dtype, key
                assert np.array_equal(value, other[key]), key
    env.close()


@pytest.fixture
def env() -> Iterator[Any]:
    made = ParallelEnv(4, walk, num_processes=2)
    yield made
    made.close(raise_if_closed=False)


def test_messages_for_a_step_with_and_without_resets_ahead(env: Any) -> None:
    for ahead, most in ((False, 8), (True, 4)):
        arrays = array_form(env)
        arrays.resets_ahead = ahead
        env.set_seed(0)
        stepper = Stepper(env, arrays)
        stepper.reset()
        stepper.run(3)
        before = env._processes.num_messages
        stepper.run(20)
        count = (env._processes.num_messages - before) / 20
        assert 4 <= count <= most
    assert count == 4  # two processes, one message there and one back


def test_seed_after_resets_ahead_counts(env: Any) -> None:
    results = []
    for cls in (SerialEnv, ParallelEnv):
        batch = cls(2, walk)
        arrays = array_form(batch)
        arrays.resets_ahead = True
        batch.set_seed(0)
        arrays.reset(None)
        action = {"action": np.zeros(2, np.int64)}
        while not arrays.step(action, {})["done"].any():
            pass
        batch.set_seed(1)
        results.append(arrays.reset(None)["observation"])
        batch.close()
    assert np.array_equal(*results)


def test_halves_out_of_order(env: Any) -> None:
    one, other = array_form(env).groups(2)
    one.reset(None)
    other.reset(None)
    action = {"action": np.zeros(2, np.int64)}
    with pytest.raises(EnvError, match=r"receive\(\) before send\(\)"):
        one.receive()
    one.send(action, {})
    with pytest.raises(EnvError, match=r"step before receive\(\)"):
        one.send(action, {})
    with pytest.raises(EnvError, match=r"step before receive\(\)"):
        env.step(env.rand_action())
    other.send(action, {})
    other.receive()  # in any order
    one.receive()
    one.send(action, {})
    fresh = one.reset(None)  # what is under way is dropped
    assert fresh["observation"].shape == (2, 2)
    with pytest.raises(EnvError, match=r"receive\(\) before send\(\)"):
        one.receive()
    env.step(env.rand_action(env.reset()))


def test_what_has_no_array_form_says_why(env: Any) -> None:
    unlike = ParallelEnv(2, [walk, lambda: TransformedEnv(walk(), InitTracker())])
    with pytest.raises(NotNative, match="differ in their entries"):
        array_form(unlike)
    unlike.close()
    mock = ParallelEnv(2, EnvWithDynamicSpec)
    with pytest.raises(NotNative, match="varies in shape"):
        array_form(mock)
    mock.close()
    arrays = array_form(env)
    arrays.check()
    env.set_info_dict_reader(default_info_dict_reader(["x"]))
    with pytest.raises(NotNative, match="readers of info"):
        arrays.check()
    with pytest.raises(NotNative, match="do not make 5 groups"):
        arrays.groups(5)


# Under a collector -----------------------------------------------------------------------------------------


def batches(cls: type, make: Callable[[], EnvBase], *, resumes: bool) -> list[TensorDictBase]:
    def collector() -> Collector:
        env = cls(3, make)
        return Collector(env, RandomPolicy(), frames_per_batch=12, total_frames=60, max_frames_per_traj=7)

    one = collector()
    one.set_seed(5)
    seen = []
    for batch in one:
        seen.append(batch.clone())
        if resumes and len(seen) == 2:
            break
    if resumes:
        state = one.state_dict()
        assert state["unsaved"] == []
        other = collector()
        other.load_state_dict(state)
        seen += [batch.clone() for batch in other]
        other.shutdown()
    one.shutdown()
    return seen


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("make", [walk, lambda: TransformedEnv(walk(), VecNorm(in_keys=["observation"], decay=0.9))])
def test_collector_delivers_the_same_and_resumes(make: Callable[[], EnvBase], resumes: bool) -> None:
    expected = batches(SerialEnv, make, resumes=False)
    for one, other in zip(expected, batches(ParallelEnv, make, resumes=resumes), strict=True):
        assert_same(one, other)
