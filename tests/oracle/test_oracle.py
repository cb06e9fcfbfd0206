"""Collectors deliver what a loop by hand does, to the bit, on arrays and on TensorDicts."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, is_leaf_nontensor
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from tests.oracle.loop import Change, Entries, GymRow, collect
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import (
    CatFrames,
    Compose,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

SEED, STEPS = 11, 60


class Rooms(gymnasium.Env):
    """A dictionary of numbers of several kinds and text; ends in both ways, drawn from its generator."""

    observation_space = spaces.Dict(
        {
            "place": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "image": spaces.Box(0, 255, (4, 4, 1), np.uint8),
            "door": spaces.Discrete(5),
            "word": spaces.Text(10),
        }
    )
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def _seen(self) -> dict[str, Any]:
        rng = self.np_random
        return {
            "place": rng.normal(size=3),
            "image": rng.integers(0, 256, (4, 4, 1)).astype(np.uint8),
            "door": int(rng.integers(5)),
            "word": "open" if rng.random() < 0.5 else "shut",
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action):
        chance = self.np_random.random()
        return self._seen(), float(chance + action.sum()), bool(chance < 0.1), bool(0.08 < chance < 0.2), {}


# Environments: by name, one of gymnasium, and ours around the same ------------------------------------------------


def made(name: str, **options: Any) -> gymnasium.Env:
    return Rooms() if name == "Rooms" else gymnasium.make(name, **options)


def ours(name: str, **options: Any) -> EnvBase:
    if name == "Rooms":
        return GymWrapper(Rooms(), categorical_action_encoding=True)
    return GymEnv(name, categorical_action_encoding=True, **options)


ENVS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 13},
    "MountainCar-v0": {"max_episode_steps": 9},
    "HalfCheetah-v5": {"max_episode_steps": 7},
    "Rooms": {},
}


# Policies: the same twice, on tensors and for a collector ------------------------------------------------------------


def net(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)).to(dtype)


class Policy:
    """A policy on tensors, and the same for collectors.

    Args:
        env: of gymnasium.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        space = env.observation_space
        self.key = "place" if isinstance(space, spaces.Dict) else "observation"
        box = space["place"] if isinstance(space, spaces.Dict) else space
        self.dtype = torch.from_numpy(np.zeros(1, box.dtype)).dtype
        self.discrete = isinstance(env.action_space, spaces.Discrete)
        self.size = int(env.action_space.n) if self.discrete else env.action_space.shape[0]
        self.net = net(box.shape[0], self.size, self.dtype)

    def mean(self, seen: torch.Tensor) -> torch.Tensor:
        """The action without noise."""
        out = self.net(seen)
        return out.argmax(-1) if self.discrete else torch.tanh(out).float()

    def greedy(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"action": self.mean(seen[self.key])}

    def sampled(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = self.net(seen[self.key]).float()
        if self.discrete:
            drawn = torch.distributions.Categorical(logits=out)
            action = drawn.sample()
            return {"logits": out, "action": action, "action_log_prob": drawn.log_prob(action)}
        normal = torch.distributions.Normal(out, torch.ones_like(out))
        action = normal.sample()
        return {"loc": out, "scale": torch.ones_like(out), "action": action, "action_log_prob": normal.log_prob(action)}

    def for_collector(self, kind: str) -> Any:
        """The same policy as users give it."""
        if kind == "function":
            return lambda td: td.set("action", self.mean(td[self.key]))
        if kind == "module":
            return TensorDictModule(self.mean, in_keys=[self.key], out_keys=["action"])
        names = ["logits"] if self.discrete else ["loc", "scale"]
        distribution = torch.distributions.Categorical if self.discrete else torch.distributions.Normal
        return ProbabilisticTensorDictSequential(
            TensorDictModule(self._parameters, in_keys=[self.key], out_keys=names),
            ProbabilisticTensorDictModule(
                names,
                ["action"],
                distribution_class=distribution,
                default_interaction_type=InteractionType.RANDOM,
                return_log_prob=True,
                log_prob_key="action_log_prob",
            ),
        )

    def _parameters(self, seen: torch.Tensor) -> Any:
        out = self.net(seen).float()
        return out if self.discrete else (out, torch.ones_like(out))


# Comparing -------------------------------------------------------------------------------------------------------


def flat_keys(td: Any) -> dict[str, Any]:
    keys = td.keys(True, True, is_leaf=is_leaf_nontensor)
    return {key if isinstance(key, str) else ".".join(key): key for key in keys}


def compare(batches: list[Any], expected: dict[str, Any], rows: int) -> None:
    """Every entry of a loop by hand is in batches, and nothing else."""
    keys = flat_keys(batches[0])
    assert set(keys) == set(expected)
    for name, key in keys.items():
        wanted = expected[name]
        got = [batch.get(key) for batch in batches]
        if isinstance(wanted, list):
            texts = [batch.tolist() if rows > 1 else [batch.tolist()] for batch in got]
            assert [[text for batch in texts for text in batch[row]] for row in range(rows)] == wanted, name
            continue
        column = torch.cat(got, 0 if rows == 1 else 1).numpy()
        column = column[None] if rows == 1 else column
        shape = wanted.shape if column.ndim == wanted.ndim else (*wanted.shape, 1)
        assert column.shape == shape, name
        np.testing.assert_array_equal(column, wanted.reshape(shape), err_msg=name)
        assert column.dtype == wanted.dtype or (column.dtype, wanted.dtype) == (np.bool_, np.dtype(bool)), name


FORMS = {"arrays": {}, "TensorDicts": {"use_buffers": False}}


def run(env: EnvBase, policy: Any, rows: int, **options: Any) -> list[Any]:
    torch.manual_seed(SEED)
    options = {"frames_per_batch": 20 * rows, "total_frames": STEPS * rows, **options}
    collector = Collector(env, policy, **options)
    try:
        collector.set_seed(SEED)
        torch.manual_seed(SEED)
        return [batch.clone() for batch in collector]
    finally:
        collector.shutdown()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["function", "module", "sampled"])
@pytest.mark.parametrize("name", ENVS)
def test_environments_and_policies(name: str, kind: str, rows: int, form: str) -> None:
    options = ENVS[name]
    policy = Policy(made(name, **options))
    env = ours(name, **options) if rows == 1 else SerialEnv(rows, partial(ours, name, **options))
    to_action = int if policy.discrete else np.asarray
    by_hand = [GymRow(made(name, **options), to_action=to_action) for _ in range(rows)]
    batches = run(env, policy.for_collector(kind), rows, **FORMS[form])
    torch.manual_seed(SEED)
    expected = collect(by_hand, policy.sampled if kind == "sampled" else policy.greedy, STEPS, seed=SEED)
    assert expected["next.done"].sum() >= 2
    compare(batches, expected, rows)


# Transforms --------------------------------------------------------------------------------------------------------


class Bookkeeping(Change):
    """Steps taken, the sum of rewards and whether the episode begins."""

    def reset(self, seen: Entries) -> None:
        seen["step_count"], seen["episode_reward"], seen["is_init"] = 0, np.float32(0), True

    def step(self, seen: Entries, after: Entries) -> None:
        after["step_count"] = seen["step_count"] + 1
        after["episode_reward"] = np.float32(seen["episode_reward"] + after["reward"])
        after["is_init"] = False


class Limit(Change):
    """Cuts episodes after so many steps."""

    def __init__(self, most: int) -> None:
        self.most, self.steps = most, 0

    def reset(self, seen: Entries) -> None:
        self.steps = seen["step_count"] = 0

    def step(self, seen: Entries, after: Entries) -> None:
        self.steps += 1
        after["step_count"] = self.steps
        after["truncated"] = after["truncated"] or self.steps >= self.most


class Normed(Change):
    """Observations times a scale plus a place, rewards likewise and then clipped; the last three observations."""

    def _seen(self, entries: Entries) -> np.ndarray:
        entries["observation"] = entries["observation"] * np.float32(0.5) + np.float32(0.25)
        return entries["observation"]

    def reset(self, seen: Entries) -> None:
        self.last = [self._seen(seen)] * 3
        seen["frames"] = np.concatenate(self.last)

    def step(self, seen: Entries, after: Entries) -> None:
        self.last = [*self.last[1:], self._seen(after)]
        after["frames"] = np.concatenate(self.last)
        reward = np.float32(after["reward"] * np.float32(2.0) + np.float32(-1.0))
        after["reward"] = np.clip(reward, np.float32(-0.5), np.float32(0.75))


CHAINS: dict[str, tuple[Any, Any]] = {
    "bookkeeping": (
        lambda: Compose(StepCounter(), RewardSum(), InitTracker()),
        lambda: [Bookkeeping()],
    ),
    "limit": (lambda: StepCounter(max_steps=6), lambda: [Limit(6)]),
    "numbers": (
        lambda: Compose(
            ObservationNorm(loc=0.25, scale=0.5, in_keys=["observation"]),
            CatFrames(3, -1, in_keys=["observation"], out_keys=["frames"]),
            RewardScaling(loc=-1.0, scale=2.0),
            RewardClipping(-0.5, 0.75),
        ),
        lambda: [Normed()],
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["alone", "around", "inside"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_transforms(name: str, chain: str, place: str, form: str) -> None:
    options, rows = ENVS[name], 1 if place == "alone" else 3
    policy, (transform, changes) = Policy(made(name, **options)), CHAINS[chain]
    if place == "inside":
        env = SerialEnv(rows, lambda: TransformedEnv(ours(name, **options), transform()))
    else:
        base = ours(name, **options) if rows == 1 else SerialEnv(rows, partial(ours, name, **options))
        env = TransformedEnv(base, transform())
    batches = run(env, policy.for_collector("module"), rows, **FORMS[form])
    by_hand = [GymRow(made(name, **options), to_action=int if policy.discrete else np.asarray) for _ in range(rows)]
    expected = collect(by_hand, policy.greedy, STEPS, seed=SEED, changes=changes)
    assert expected["next.done"].sum() >= 2
    compare(batches, expected, rows)


# Options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["Rooms", "Pendulum-v1"])
def test_environments_that_go_on_after_their_end(name: str, rows: int, form: str) -> None:
    policy = Policy(made(name, **ENVS[name]))
    make = partial(ours, name, **ENVS[name])
    env = make() if rows == 1 else SerialEnv(rows, make)
    batches = run(env, policy.for_collector("module"), rows, reset_when_done=False, **FORMS[form])
    by_hand = [GymRow(made(name, **ENVS[name])) for _ in range(rows)]
    compare(batches, collect(by_hand, policy.greedy, STEPS, seed=SEED, reset_when_done=False), rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
def test_trajectories_of_a_limited_number_of_frames(rows: int, form: str) -> None:
    policy = Policy(made("CartPole-v1"))
    env = ours("CartPole-v1") if rows == 1 else SerialEnv(rows, partial(ours, "CartPole-v1"))
    batches = run(env, policy.for_collector("module"), rows, max_frames_per_traj=7, **FORMS[form])
    by_hand = [GymRow(made("CartPole-v1"), to_action=int) for _ in range(rows)]
    expected = collect(by_hand, policy.greedy, STEPS, seed=SEED, changes=lambda: [Limit(7)])
    compare(batches, expected, rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3])
def test_batches_of_any_size_hold_the_same_frames(rows: int, form: str) -> None:
    policy = Policy(made("CartPole-v1"))
    env = ours("CartPole-v1") if rows == 1 else SerialEnv(rows, partial(ours, "CartPole-v1"))
    batches = run(env, policy.for_collector("module"), rows, frames_per_batch=rows, **FORMS[form])
    assert len(batches) == STEPS
    by_hand = [GymRow(made("CartPole-v1"), to_action=int) for _ in range(rows)]
    compare(batches, collect(by_hand, policy.greedy, STEPS, seed=SEED), rows)


# Batches of environments that are one object -----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
def test_vector_environments(name: str, mode: AutoresetMode, form: str) -> None:
    options, rows = ENVS[name], 3
    policy = Policy(made(name, **options))
    vector = SyncVectorEnv([partial(made, name, **options)] * rows, autoreset_mode=mode)
    env = GymWrapper(vector, categorical_action_encoding=True)
    batches = run(env, policy.for_collector("module"), rows, **FORMS[form])
    by_hand = [GymRow(made(name, **options), to_action=int if policy.discrete else np.asarray) for _ in range(rows)]
    compare(batches, collect(by_hand, policy.greedy, STEPS, seed=SEED), rows)


class Walks(EnvBase):
    """Three walkers of tensors, which go by their actions; each ends at a distance of its own."""

    LIMITS = (2.0, 3.0, 4.5)

    def __init__(self) -> None:
        super().__init__(batch_size=[3])
        self.observation_spec = Composite(
            observation=Unbounded((3, 2)),
            nest=Composite(taken=Unbounded((3, 1), dtype=torch.int64), shape=[3]),
            shape=[3],
        )
        self.action_spec = Bounded(-1.0, 1.0, (3, 2))
        self.reward_spec = Unbounded((3, 1))
        self.at, self.taken = torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64)

    def _seen(self) -> TensorDict:
        return TensorDict({"observation": self.at.clone(), "nest": {"taken": self.taken.clone()}}, [3])

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        rows = torch.ones(3, 1, dtype=torch.bool) if tensordict is None else tensordict.get("_reset")
        self.at, self.taken = torch.where(rows, 0.5, self.at), torch.where(rows, 0, self.taken)
        return self._seen()

    def _step(self, tensordict: Any) -> TensorDict:
        self.at, self.taken = self.at + tensordict["action"], self.taken + 1
        ended = self.at.abs().amax(-1, keepdim=True) > torch.tensor(self.LIMITS).unsqueeze(-1)
        reward = self.at[:, :1] * 0.25
        return self._seen().update({"reward": reward, "terminated": ended, "done": ended.clone()})

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random."""


class WalkByHand(GymRow):
    """One of the three."""

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def _entries(self, observation: Any = None) -> Entries:
        return {"observation": self.at.copy(), "nest.taken": self.taken}

    def reset(self, seed: int | None = None) -> Entries:
        self.at, self.taken = np.full(2, 0.5, np.float32), 0
        return self._entries()

    def step(self, action: np.ndarray) -> tuple[Entries, float, bool, bool]:
        self.at, self.taken = self.at + action, self.taken + 1
        return self._entries(), self.at[0] * np.float32(0.25), bool(np.abs(self.at).max() > self.limit), False


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", [False, True])
def test_environments_of_tensors(counts: bool, form: str) -> None:
    def act(seen: torch.Tensor) -> torch.Tensor:
        return torch.stack([seen[..., 1] * 0.5, -seen[..., 0] * 0.75], -1).clamp(-1, 1)

    env = TransformedEnv(Walks(), StepCounter(max_steps=9)) if counts else Walks().add_truncated_keys()
    batches = run(env, TensorDictModule(act, ["observation"], ["action"]), 3, **FORMS[form])
    by_hand = [WalkByHand(limit) for limit in Walks.LIMITS]
    changes = (lambda: [Limit(9)]) if counts else tuple
    expected = collect(by_hand, lambda seen: {"action": act(seen["observation"])}, STEPS, seed=SEED, changes=changes)
    assert expected["next.done"].sum() > 2
    compare(batches, expected, 3)
