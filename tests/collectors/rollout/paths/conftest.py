"""Environments and policies that both paths take, and how to compare what the paths deliver."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDictBase
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import distributions as D
from torch import nn

from rollwright.collectors import Collector
from rollwright.collectors.rollout.paths import choice as path_choice
from rollwright.data import Unbounded
from rollwright.data.specs import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from rollwright.envs import GymEnv, GymWrapper, SerialEnv, TransformedEnv
from rollwright.envs.libs.envpool import EnvPoolEnv
from rollwright.envs.transforms import Compose, InitTracker, RewardSum, StepCounter, TensorDictPrimer
from rollwright.errors import NotNative
from rollwright.modules import RandomPolicy

# Environments ------------------------------------------------------------------------------------------------------


def total(action: Any) -> float:
    """A number that depends on every part of an action."""
    if isinstance(action, dict):
        return sum(total(part) for part in action.values())
    if isinstance(action, tuple):
        return sum(total(part) for part in action)
    array = np.asarray(action, np.float64).reshape(-1)
    return float(array @ np.arange(1, len(array) + 1))


class Toy(gymnasium.Env):
    """Any spaces; episodes of a few steps, which the actions shorten, end in both ways.

    Observations may lie in one buffer that is written again (``reuses``). It raises ``failure`` at step ``fails_at``,
    or returns ``bad`` there instead of what its space says.
    """

    def __init__(
        self, seen: Any, act: Any, *, reuses: bool = False, fails_at: int = -1, failure: Any = None, bad: Any = None
    ):
        self.observation_space, self.action_space = copy.deepcopy(seen), act  # a space has random numbers of its own
        self.reuses, self.fails_at, self.failure, self.bad = reuses, fails_at, failure, bad
        self.buffer = None
        self.steps = 0

    def observe(self) -> Any:
        value = self.observation_space.sample()
        if not self.reuses:
            return value
        if self.buffer is None:
            self.buffer = value
        self.buffer[...] = value
        return self.buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.left = float(self.np_random.integers(3, 12))
        return self.observe(), {"left": self.left}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == self.fails_at and self.failure is not None:
            raise self.failure
        weight = total(action)
        self.left -= 1 + (weight > 1)
        ended = self.left <= 0
        terminated = bool(ended and self.np_random.random() < 0.5)
        seen = self.observe() if self.steps != self.fails_at or self.bad is None else self.bad
        return seen, weight / 7, terminated, bool(ended and not terminated), {"left": self.left}


BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


def toy(seen: Any = BOX, act: Any = None, categorical: bool = False, **options: Any) -> Callable[[], Any]:
    act = spaces.Discrete(2) if act is None else act
    return lambda: GymWrapper(Toy(seen, act, **options), categorical_action_encoding=categorical)


def toy_env() -> Toy:
    return Toy(BOX, spaces.Discrete(2))


class OwnVector(VectorEnv):
    """A vector environment that is gymnasium's in nothing but its interface."""

    def __init__(self, mode: AutoresetMode, n: int = 3):
        self.num_envs, self.mode = n, mode
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = BOX, spaces.Discrete(2)
        self.observation_space = gymnasium.vector.utils.batch_space(BOX, n)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, n)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self._np_random = np.random.default_rng(seed)
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        if mask.all():
            self.at = np.zeros((self.num_envs, 3), np.float32)
            self.left = np.zeros(self.num_envs)
        self.at[mask] = self.np_random.random((int(mask.sum()), 3))
        self.left[mask] = self.np_random.integers(2, 8, int(mask.sum()))
        return self.at, {}

    def step(self, actions: Any) -> Any:
        self.at = self.at * np.float32(0.5) + actions[:, None].astype(np.float32)
        self.left -= 1 + actions
        ended, info = self.left <= 0, {}
        if self.mode is AutoresetMode.SAME_STEP and ended.any():
            info = {"final_obs": self.at.copy()}
            self.reset(options={"reset_mask": ended})
        return self.at, actions * 0.3, ended, np.zeros_like(ended), info


def cartpole(**options: Any) -> GymEnv:
    return GymEnv("CartPole-v1", **options)


def vector(kind: Any, mode: AutoresetMode, **options: Any) -> Callable[[], Any]:
    return lambda: GymWrapper(kind([toy_env] * 3, autoreset_mode=mode, **options))


def with_transforms(make: Callable[[], Any], *names: str) -> Callable[[], Any]:
    """``make()`` with the transforms that are named."""
    known: dict[str, Callable[[], Any]] = {
        "init": InitTracker,
        "count": StepCounter,
        "limit": lambda: StepCounter(max_steps=4),
        "sum": RewardSum,
        "h": lambda: TensorDictPrimer(h=Unbounded((5,))),
        "random": lambda: TensorDictPrimer(r=Unbounded((2,)), random=True),
    }
    return lambda: TransformedEnv(make(), Compose(*[known[name]() for name in names]))


def serial(make: Callable[[], Any], n: int = 3) -> Callable[[], Any]:
    return lambda: SerialEnv(n, make)


ENVS: dict[str, Callable[[], Any]] = {
    "cartpole": cartpole,
    "cartpole categorical": lambda: cartpole(categorical_action_encoding=True),
    "cartpole on cpu": lambda: cartpole(device="cpu"),
    "pendulum": lambda: GymEnv("Pendulum-v1"),
    "mountain car": lambda: GymEnv("MountainCar-v0"),
    "frozen lake": lambda: GymEnv("FrozenLake-v1"),
    "taxi categorical": lambda: GymEnv("Taxi-v4", categorical_action_encoding=True),
    "blackjack": lambda: GymEnv("Blackjack-v1"),
    "dict": toy(spaces.Dict(a=BOX, b=spaces.Dict(c=spaces.Discrete(3), d=spaces.MultiBinary(4)))),
    "multi discrete": toy(act=spaces.MultiDiscrete([2, 3])),
    "multi discrete categorical": toy(spaces.MultiDiscrete([4, 2]), spaces.MultiDiscrete([2, 3]), categorical=True),
    "odd dtypes": toy(
        spaces.Dict(
            f=spaces.Box(-1.0, 1.0, (2,), np.float16),
            u=spaces.Box(0, 9, (2,), np.uint16),
            i=spaces.Box(-3, 9, (1, 2), np.int32),
            b=spaces.MultiBinary([2, 2]),
            _p=BOX,
        )
    ),
    "multi binary": toy(act=spaces.MultiBinary(3)),
    "dict of actions": toy(act=spaces.Dict(u=spaces.Discrete(2), v=spaces.Box(-1, 1, (2,), np.float32))),
    "pixels": toy(spaces.Box(0, 255, (84, 84), np.uint8)),
    "float64": toy(spaces.Box(-1.0, 1.0, (2,), np.float64), spaces.Box(-1.0, 1.0, (2,), np.float64)),
    "scalar box": toy(spaces.Box(-1.0, 1.0, (), np.float32), spaces.Box(-1.0, 1.0, (), np.float32)),
    "discrete from 3": toy(spaces.Discrete(4, start=3), spaces.Discrete(2, start=3)),
    "reused buffer": toy(reuses=True),
    "sync of 4": lambda: cartpole(num_envs=4),
    "sync categorical": lambda: cartpole(num_envs=4, categorical_action_encoding=True),
    "sync disabled": vector(SyncVectorEnv, AutoresetMode.DISABLED),
    "sync next step": vector(SyncVectorEnv, AutoresetMode.NEXT_STEP),
    "sync same step": vector(SyncVectorEnv, AutoresetMode.SAME_STEP),
    "sync dict": lambda: GymWrapper(SyncVectorEnv([lambda: Toy(spaces.Dict(a=BOX), spaces.MultiDiscrete([2, 3]))] * 2)),
    "async": vector(AsyncVectorEnv, AutoresetMode.NEXT_STEP),
    "async same step": vector(AsyncVectorEnv, AutoresetMode.SAME_STEP, shared_memory=False),
    "sync of one": lambda: cartpole(num_envs=1),
    "wrapped vector": lambda: GymWrapper(
        RecordEpisodeStatistics(SyncVectorEnv([toy_env] * 2, autoreset_mode=AutoresetMode.SAME_STEP))
    ),
    "own disabled": lambda: GymWrapper(OwnVector(AutoresetMode.DISABLED)),
    "own same step": lambda: GymWrapper(OwnVector(AutoresetMode.SAME_STEP)),
    "envpool": lambda: EnvPoolEnv("CartPole-v1", 3, seed=5),
    "serial": serial(toy()),
    "serial categorical": serial(lambda: cartpole(categorical_action_encoding=True)),
    "serial of scalars": serial(toy(spaces.Discrete(3), spaces.Box(-1.0, 1.0, (), np.float32), categorical=True)),
    "serial of vectors": serial(vector(SyncVectorEnv, AutoresetMode.SAME_STEP), 2),
    "serial of one": serial(toy(), 1),
    "init": with_transforms(toy(), "init"),
    "limit": with_transforms(toy(), "limit"),
    "sum": with_transforms(toy(), "sum"),
    "h": with_transforms(toy(), "h"),
    "random": with_transforms(toy(), "random"),
    "books": with_transforms(toy(), "init", "count", "sum"),
    "all": with_transforms(toy(), "random", "init", "limit", "sum", "h"),
    "vector books": with_transforms(vector(SyncVectorEnv, AutoresetMode.DISABLED), "sum", "limit", "init"),
    "vector all": with_transforms(vector(SyncVectorEnv, AutoresetMode.SAME_STEP), "h", "limit", "random", "sum"),
    "pool all": with_transforms(lambda: EnvPoolEnv("CartPole-v1", 3, seed=5), "limit", "init", "random", "sum", "h"),
    "primed serial": with_transforms(serial(toy()), "h", "init", "sum"),
    "serial of transformed": serial(with_transforms(toy(), "init", "limit", "h", "random", "sum")),
    "transformed serial": with_transforms(serial(toy()), "h", "random", "init", "limit", "sum"),
    "serial of serial": serial(with_transforms(serial(toy(), 2), "limit", "h"), 2),
    "both sides": with_transforms(
        serial(with_transforms(vector(SyncVectorEnv, AutoresetMode.DISABLED), "sum"), 2), "h"
    ),
}

# Policies ------------------------------------------------------------------------------------------------------------


class Features(nn.Module):
    """All inputs, flattened below the batch, through a small network of two layers."""

    def __init__(self, shapes: list[tuple[int, ...]], batch_ndim: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.batch_ndim, self.dtype = batch_ndim, dtype
        size = sum(int(np.prod(shape)) for shape in shapes)
        self.net = nn.Sequential(nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        rows = [x.reshape(*x.shape[: self.batch_ndim], -1).to(self.dtype) for x in inputs]
        return self.net(torch.cat(rows, -1))


class Actions(nn.Module):
    """Deterministic actions of any spec from numbers, one after another."""

    def __init__(self, leaves: list[Any], batch_ndim: int):
        super().__init__()
        self.leaves, self.batch_ndim = leaves, batch_ndim

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.one(leaf, hidden) for leaf in self.leaves)

    def one(self, leaf: Any, x: torch.Tensor) -> torch.Tensor:
        shape = leaf.shape[self.batch_ndim :]
        if isinstance(leaf, Categorical):
            return x[..., : leaf.space.n].argmax(-1)
        if isinstance(leaf, MultiCategorical):
            return torch.stack([x[..., :2].argmax(-1), x[..., 2:5].argmax(-1)], -1)
        if isinstance(leaf, MultiOneHot):
            parts = torch.split(x[..., :5], [2, 3], -1)
            return torch.cat([nn.functional.one_hot(part.argmax(-1), part.shape[-1]) for part in parts], -1)
        if isinstance(leaf, OneHot):
            return nn.functional.one_hot(x[..., : shape[-1]].argmax(-1), shape[-1])
        if isinstance(leaf, Binary):
            return (x[..., : shape[-1]] > 0).to(leaf.dtype)
        return torch.tanh(x[..., : max(shape.numel(), 1)]).reshape((*x.shape[:-1], *shape)).to(leaf.dtype)


class ByName(nn.Module):
    """Knows nothing of TensorDict: an action, and two outputs beside it."""

    def __init__(self, features: Features, actions: Actions):
        super().__init__()
        self.features, self.actions = features, actions

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.features(observation)
        return (*self.actions(hidden), hidden, observation)


class Recurrent(nn.Module):
    def __init__(self, batch_ndim: int):
        super().__init__()
        self.cell, self.batch_ndim = nn.GRUCell(8, 5), batch_ndim

    def forward(self, hidden: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.cell(hidden.reshape(-1, 8), h.reshape(-1, 5)).reshape(h.shape)


def tanh_normal(loc: torch.Tensor, scale: torch.Tensor) -> D.Distribution:
    return D.Independent(D.TransformedDistribution(D.Normal(loc, scale), [D.TanhTransform(cache_size=1)]), 1)


BOOKS = ("is_init", "step_count", "episode_reward", "r", "h")


def build(env: Any, kind: str, seed: int = 0) -> Any:
    """A policy of a kind for an environment; None where the kind does not fit."""
    torch.manual_seed(seed)
    spec, ndim = env.full_observation_spec, env.ndim
    keys = [key for key in env.observation_keys if key not in BOOKS]
    books = [key for key in env.observation_keys if key in BOOKS[:4]]
    reads = [*keys, *([*books, "done", "terminated"] if kind == "books" else [])]
    shapes = [spec[key].shape[ndim:] for key in [*keys, *(books if kind == "books" else [])]]
    shapes += [(1,), (1,)] if kind == "books" else []
    dtype = torch.float64 if any(spec[key].dtype == torch.float64 for key in keys) else torch.float32
    actions = list(env.action_keys)
    leaves = [env.full_action_spec[key] for key in actions]
    leaf = leaves[0] if len(leaves) == 1 else None
    size = 8 if leaf is None else max(int(leaf.shape[ndim:].numel()), getattr(leaf.space, "n", 1))

    def features(outputs: int) -> Features:
        return Features(shapes, ndim, outputs, dtype)

    def sampled(distribution: Any, outputs: int, split: bool) -> Any:
        body: Any = nn.Sequential(NormalParamExtractor()) if split else nn.Identity()
        names = ["loc", "scale"] if split else ["logits"]
        return ProbabilisticTensorDictSequential(
            TensorDictModule(features(outputs), reads, ["_hidden"]),
            TensorDictModule(body, ["_hidden"], names),
            ProbabilisticTensorDictModule(names, actions, distribution_class=distribution, return_log_prob=True),
        )

    continuous = leaf is not None and leaf.dtype.is_floating_point and leaf.shape[ndim:] != ()
    if kind == "none":
        return None
    if kind == "random":
        return RandomPolicy(env.full_action_spec)
    if kind == "categorical" and isinstance(leaf, Categorical) and leaf.shape == env.batch_size:
        return sampled(D.Categorical, leaf.space.n, False)
    if kind == "one-hot" and type(leaf) is OneHot:
        return sampled(D.OneHotCategorical, size, False)
    if kind in ("gaussian", "tanh") and continuous:
        return sampled(D.Normal if kind == "gaussian" else tanh_normal, 2 * size, True)
    if kind == "module" and keys == ["observation"] and len(actions) == 1:
        return ByName(features(8), Actions(leaves, ndim))
    act = TensorDictModule(Actions(leaves, ndim), ["hidden"], actions)
    body = TensorDictModule(features(8), reads, ["hidden"])
    if kind == "deterministic" or (kind == "books" and books):
        return TensorDictSequential(body, act)
    if kind == "several":
        value = TensorDictModule(lambda x: (x[..., :1], x.sum(-1), x), ["hidden"], ["value", ("stats", "sum"), "_same"])
        return TensorDictSequential(body, value, act)
    if kind == "recurrent" and "h" in env.observation_keys:
        remember = TensorDictModule(Recurrent(ndim), ["hidden", "h"], [("next", "h")])
        return TensorDictSequential(body, remember, act)
    return None


KINDS = ["none", "random", "categorical", "one-hot", "gaussian", "tanh", "module", "deterministic", "several"]
KINDS += ["recurrent", "books"]

# Comparing -----------------------------------------------------------------------------------------------------------


def assert_equal(left: Any, right: Any, place: str = "") -> None:
    """Two batches are equal in every leaf, and in all that a TensorDict says of itself."""
    if isinstance(left, TensorDictBase) and not isinstance(left, NonTensorData):
        assert type(left) is type(right), place
        for name in ("batch_size", "device", "names"):
            assert getattr(left, name) == getattr(right, name), f"{name} of {place or 'the root'}"
        assert set(left.keys()) == set(right.keys()), place
        if isinstance(left, LazyStackedTensorDict):
            for i, (one, other) in enumerate(zip(left.tensordicts, right.tensordicts, strict=True)):
                assert_equal(one, other, f"{place}[{i}]")
            return
        for key in set(left.keys()):
            assert_equal(left.get(key), right.get(key), f"{place}.{key}")
    elif isinstance(left, NonTensorData):
        assert_equal(left.data, right.data, place)
    elif isinstance(left, torch.Tensor):
        assert isinstance(right, torch.Tensor), place
        assert (left.shape, left.dtype, left.device) == (right.shape, right.dtype, right.device), place
        bits = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (left, right)]
        assert torch.equal(*bits), (place, left, right)
    else:
        assert left == right, place


class Run(SimpleNamespace):
    """What a collector did on one of the paths."""


def run(env: Any, policy: Any, *, batches: int, script: Any, options: Callable[[], dict[str, Any]]) -> Run:
    made = env()
    torch.manual_seed(0)
    collector = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*delivers whole batches")
            warnings.filterwarnings("ignore", ".*split_trajs=True pads")
            warnings.filterwarnings("ignore", "deterministic_sample wasn't found")
            given = {"frames_per_batch": 10, **options()}
            collector = Collector(made, build(made, policy) if isinstance(policy, str) else policy(made), **given)
            collector.set_seed(3)
            how = collector.stats()["paths"]
            kept = []
            for i in range(batches):
                if script is not None:
                    script(collector, i)
                batch = collector.next()
                kept.append(batch.clone() if given.get("return_same_td") else batch)
        stats = collector.stats()
        names = ("frames", "batches", "episodes", "mean_return", "mean_length", "last_return", "policy_version")
        return Run(
            how=how,
            then=stats["paths"],
            batches=kept,
            carrier=collector._carrier,
            rng=torch.get_rng_state(),
            ids=collector._traj_pool.state_dict(),
            stats={name: stats.get(name) for name in names},
        )
    finally:
        if collector is not None:
            collector.shutdown()
        made.close(raise_if_closed=False)


def _refused(core: Any) -> Any:
    raise NotNative("a test")


@pytest.fixture(autouse=True)
def _private_entries_are_left_out():
    """Environments here announce ``"_p"``, of which a collector warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*announces '_p'")
        yield


@pytest.fixture
def force_plain(monkeypatch):
    """A function: collectors that are made from then on take the plain path, until ``undo()`` of its result."""

    def forced():
        context = monkeypatch.context()
        patch = context.__enter__()
        patch.setattr(path_choice, "arrays_of", _refused)
        return SimpleNamespace(undo=lambda: context.__exit__(None, None, None))

    return forced


@pytest.fixture
def both(force_plain):
    """``both(env, policy)``: run on both paths, compare all, and return the two runs.

    ``expect`` is ``"arrays"``, or what ``stats()`` must say of why not. ``options`` is a function: some have a state.
    """

    def compare(env, policy, *, batches=3, script=None, options=dict, expect="arrays"):
        first = run(env, policy, batches=batches, script=script, options=options)
        forced = force_plain()
        try:
            second = run(env, policy, batches=batches, script=script, options=options)
        finally:
            forced.undo()
        assert "a test" in second.how["env"]
        if expect == "arrays":
            assert "NumPy arrays" in first.how["env"], first.how
        else:
            assert expect in " ".join(first.how.values()), first.how
        for i, (one, other) in enumerate(zip(first.batches, second.batches, strict=True)):
            assert_equal(one, other, f"batch {i}")
        assert first.stats == second.stats
        assert torch.equal(first.rng, second.rng), "torch's generator"
        assert first.ids == second.ids
        carriers = [run.carrier.exclude("policy_version").clear_device_() for run in (first, second)]
        assert_equal(*carriers, "carrier")
        return first, second

    return compare


@pytest.fixture
def lab():
    """The tables and tools above."""
    return SimpleNamespace(envs=ENVS, kinds=KINDS, build=build, assert_equal=assert_equal, toy=toy, Toy=Toy)


def pytest_generate_tests(metafunc):
    for name, values in (("env_name", list(ENVS)), ("kind", KINDS)):
        marked = any(name in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
        if name in metafunc.fixturenames and not marked:
            metafunc.parametrize(name, values, ids=str)
