"""Ladder: a batched environment with episodes of different lengths, whose resets return rubbish in other rows.

Besides, environments as TorchRL seeds them, and collecting on arrays and on TensorDicts.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright.collectors import Collector
from rollwright.data import Bounded, Categorical, Composite, Unbounded
from rollwright.envs import Compose, EnvBase, GymWrapper, TransformedEnv

RUBBISH = -99


class Ladder(EnvBase):
    """Climbs one rung a step; row ``i`` ends after ``limits[i]`` steps and begins at ``100 * i``.

    ``rung`` is float ``[rows, 2]``: the rung, and its negative; the reward is the number of steps taken. ``mask``
    allows action ``t % 3`` after ``t`` steps, and nothing at the end.
    """

    def __init__(self, limits: list[int], dtype: torch.dtype = torch.float32, masks: bool = False) -> None:
        super().__init__(batch_size=[len(limits)])
        rows = len(limits)
        self.limits, self.dtype, self.masks = torch.tensor(limits).unsqueeze(-1), dtype, masks
        self.starts = 100 * torch.arange(rows).unsqueeze(-1)
        self.observation_spec = Composite(rung=Bounded(-1000.0, 1000.0, (rows, 2), dtype=dtype), shape=(rows,))
        if masks:
            self.observation_spec["mask"] = Categorical(2, (rows, 3), dtype=torch.bool)
        self.action_spec = Categorical(3, (rows,)) if masks else Unbounded((rows, 1), dtype=dtype)
        self.reward_spec = Unbounded((rows, 1), dtype=dtype)
        self.taken = torch.zeros(rows, 1, dtype=torch.int64)
        self.actions: list[torch.Tensor] = []

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random."""

    def _observe(self) -> TensorDict:
        rung = (self.starts + self.taken).to(self.dtype)
        fields = {"rung": torch.cat([rung, -rung], -1)}
        if self.masks:
            fields["mask"] = (self.taken % 3 == torch.arange(3)) & (self.taken < self.limits)
        return TensorDict(fields, self.batch_size)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = torch.ones_like(self.limits, dtype=torch.bool)
        if tensordict is not None:
            rows = tensordict.get("_reset", rows)
        self.taken = torch.where(rows, 0, self.taken)
        seen = self._observe()
        seen["rung"] = torch.where(rows, seen["rung"], RUBBISH)
        if self.masks:
            seen["mask"] = seen["mask"] | ~rows
        return seen

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.actions.append(tensordict["action"])
        self.taken = self.taken + 1
        done = self.taken >= self.limits
        return self._observe().update({"reward": self.taken.to(self.dtype), "terminated": done})


@pytest.fixture
def ladder() -> type[Ladder]:
    return Ladder


def still(tensordict: TensorDictBase) -> TensorDictBase:
    """A policy that does nothing."""
    return tensordict.set("action", torch.zeros(*tensordict.batch_size, 1))


@pytest.fixture
def do_nothing() -> Any:
    return still


def _seeded(name, *transforms, seed=0):
    env = gymnasium.make(name)
    env.reset(seed=seed)
    return TransformedEnv(GymWrapper(env), Compose(*transforms))


@pytest.fixture
def seeded():
    """Makes an environment whose first reset is that which follows TorchRL's ``set_seed(seed)``."""
    return _seeded


def _collect(make, seed, frames, batches, policy, **options):
    env = make()
    env.set_seed(seed)
    torch.manual_seed(seed)
    with Collector(env, policy, frames_per_batch=frames, total_frames=batches * frames, **options) as collector:
        found = torch.cat([batch.clone() for batch in collector], -1)
        state = {key: copy.deepcopy(value) for key, value in env.state_dict().items()}
        return found, collector.stats()["paths"]["env"], state


def _both(make, *, seed=3, frames=40, batches=2, policy=None, **options):
    native, how, state = _collect(make, seed, frames, batches, policy, **options)
    plain, _, expected = _collect(make, seed, frames, batches, policy, use_buffers=False)
    assert how.startswith("native: NumPy arrays"), how
    assert set(native.keys(True, True)) == set(plain.keys(True, True))
    for key in plain.keys(True, True):
        assert native[key].dtype == plain[key].dtype, key
        assert torch.equal(native[key], plain[key]), key
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[key], value), key
    return native


@pytest.fixture
def both_paths():
    """Collects on arrays and on TensorDicts, compares all bits and the state left behind, and returns the data."""
    return _both
