"""Array forms that users register."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollwright.collectors import Collector
from rollwright.data import Unbounded
from rollwright.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    FlattenObservation,
    GymEnv,
    GymWrapper,
    SerialEnv,
    StepCounter,
    TargetReturn,
    Transform,
    TransformedEnv,
    VecNorm,
    register_array_form,
)
from rollwright.envs.arrays import ARRAY_FORMS, ArrayTransform, Entry
from rollwright.envs.transforms.base import map_spec


@pytest.fixture(autouse=True)
def registrations(monkeypatch):
    kept = dict(ARRAY_FORMS)
    yield
    ARRAY_FORMS.clear()
    ARRAY_FORMS.update(kept)


class Roots(Transform):
    """The square root of an entry's size, in double precision."""

    def _apply_transform(self, obs):
        return obs.to(torch.float64).abs_().sqrt_()

    def _changed(self, spec):
        return map_spec(spec, self._pairs(), lambda leaf: Unbounded(leaf.shape, dtype=torch.float64))

    transform_observation_spec = _changed
    transform_reward_spec = _changed


class Last(Transform):
    """Sees the action before the last one; keeps it for each row."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", None)

    def _step(self, tensordict, next_tensordict):
        self.total = self.total + next_tensordict["reward"]
        return next_tensordict.set("total", self.total.clone())

    def _reset(self, tensordict, tensordict_reset):
        zeros = torch.zeros(*tensordict_reset.batch_size, 1)
        mask = tensordict.get("_reset", None)
        self.total = zeros if mask is None or self.total is None else torch.where(mask, zeros, self.total)
        return tensordict_reset.set("total", zeros)

    def transform_observation_spec(self, observation_spec):
        observation_spec["total"] = Unbounded((*observation_spec.shape, 1))
        return observation_spec


def last_on_arrays(transform, env):
    entry = Entry((*env.batch, 1), np.dtype(np.float32), True)

    def step(root, out):
        transform.total = transform.total + torch.from_numpy(np.asarray(out["reward"]).reshape(entry.shape))
        out["total"] = transform.total.numpy()[..., 0][()]

    def restart(fresh, rows):
        zeros = torch.zeros(entry.shape)
        marked = torch.ones(entry.shape).bool() if rows is None else torch.from_numpy(np.reshape(rows, entry.shape))
        transform.total = zeros if transform.total is None else torch.where(marked, zeros, transform.total)
        fresh["total"] = np.zeros(env.batch, np.float32)[()]

    return ArrayTransform({"total": entry}, [], step, lambda fresh: restart(fresh, None), restart=restart)


ENVS = {
    "one": lambda *transforms: TransformedEnv(GymEnv("CartPole-v1"), Compose(*transforms)),
    "several": lambda *transforms: TransformedEnv(
        SerialEnv(3, lambda: GymEnv("CartPole-v1")), Compose(StepCounter(9), *transforms)
    ),
}


def how(env):
    with Collector(env, None, frames_per_batch=9, total_frames=9) as collector:
        next(iter(collector))
        return collector.stats()["paths"]["env"]


def roots():
    return Roots(["observation", "reward"], ["roots", "reward"])


@pytest.mark.parametrize("name", ENVS)
def test_a_change_of_entries_needs_no_function(name, both_paths):
    assert how(ENVS[name](roots())) == (
        "native: NumPy arrays; Roots works on TensorDicts. Define on_arrays in it, or call register_array_form"
    )
    register_array_form(Roots)
    both_paths(lambda: ENVS[name](roots()), frames=90)
    both_paths(lambda: ENVS[name](StepCounter(step_count_key="count"), Roots(["count"], ["root"]), roots()), frames=90)


@pytest.mark.parametrize("name", ENVS)
def test_a_function_makes_any(name, both_paths):
    register_array_form(Last, last_on_arrays)
    td = both_paths(lambda: ENVS[name](Last()), frames=90)
    assert td["next", "total"].max() > 5


def test_subclasses_are_not_meant():
    class Other(Roots):
        pass

    register_array_form(Roots)
    assert "Other works on TensorDicts" in how(ENVS["one"](Other(["observation"])))


def test_results_are_tested_against_specs():
    class Wrong(Transform):
        def _apply_transform(self, obs):
            return obs.double()

    register_array_form(Wrong)
    with pytest.raises(Exception, match=r"Wrong: its spec announces 'observation' as float32 \[4\], got float64"):
        how(ENVS["one"](Wrong(["observation"])))


def test_mistakes_are_named():
    register_array_form(Roots)
    with pytest.raises(ValueError, match="Roots has an array form already"):
        register_array_form(Roots)
    with pytest.raises(ValueError, match="StepCounter has an array form already"):
        register_array_form(StepCounter, last_on_arrays)
    with pytest.raises(TypeError, match="kind: expected a class"):
        register_array_form(Last())
    with pytest.raises(TypeError, match="Last is no such Transform, by its _step"):
        register_array_form(Last)
    with pytest.raises(TypeError, match="make: expected a function"):
        register_array_form(Last, 3)


# Entries that hold objects -------------------------------------------------------------------------------------------


class Mission(gymnasium.Env):
    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (3, 3), np.uint8), place=spaces.Box(-1.0, 1.0, (2,), np.float64), text=spaces.Text(9)
    )
    action_space = spaces.Discrete(3)

    def _seen(self):
        image = self.np_random.integers(0, 256, (3, 3), np.uint8)
        return {"image": image, "place": self.np_random.random(2), "text": f"go {self.left}"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self._seen(), {}

    def step(self, action):
        self.left -= 1
        return self._seen(), 1.0, self.left == 0, False, {}


@pytest.mark.parametrize("keeps", [False, True])
def test_other_entries_change_beside_objects(keeps, both_paths):
    def make():
        chain = [FlattenObservation(-2, -1, ["image"]), VecNorm(["image"]), CatFrames(2, -1, ["place"])]
        more = [DoubleToFloat(), TargetReturn(3.0), *([] if keeps else [ExcludeTransform("text")])]
        return TransformedEnv(GymWrapper(Mission()), Compose(*chain, *more))

    td = both_paths(make, frames=20)
    assert ("text" in td.keys()) is keeps  # noqa: SIM118
