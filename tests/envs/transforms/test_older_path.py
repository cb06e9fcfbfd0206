"""Transforms at the path that programs import, and the decorators that are there."""

from __future__ import annotations

import torch

from rollwright import envs
from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs.transforms import transforms
from rollwright.envs.transforms.transforms import Transform, _apply_to_composite, _apply_to_composite_inv


class Doubled(Transform):
    """Doubles observations, and halves actions on their way to the environment."""

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    def _inv_apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        return value / 2

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    @_apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return Unbounded(observation_spec.shape)

    @_apply_to_composite_inv
    def transform_action_spec(self, action_spec):
        return Bounded(2 * action_spec.low, 2 * action_spec.high)


def test_names_are_the_same_at_both_paths():
    assert transforms.TransformedEnv is envs.TransformedEnv
    assert set(transforms.__all__) == set(envs.transforms.__all__)


def test_specs_of_single_entries_change_a_composite():
    spec = Composite(a=Bounded(-1, 1, (3,)), n={"m": Bounded(-1, 1, (2,))})
    change = Doubled(["a", ("n", "m"), "missing"], ["b", ("n", "k"), "c"])
    changed = change.transform_observation_spec(spec)
    assert list(changed.keys(True, True)) == ["a", ("n", "m"), ("n", "k"), "b"]
    assert changed["b"] == Unbounded((3,))
    assert list(spec.keys(True, True)) == ["a", ("n", "m")]
    assert change.transform_observation_spec(spec["a"]) == Unbounded((3,))
    actions = Doubled([], [], ["inner"], ["action"]).transform_action_spec(Composite(inner=Bounded(-1, 1, (2,))))
    assert actions == Composite(action=Bounded(-2, 2, (2,)))


def test_such_a_transform_goes_into_an_environment():
    env = envs.TransformedEnv(envs.GymEnv("Pendulum-v1"), Doubled(["observation"], ["double"], ["action"], ["action"]))
    envs.check_env_specs(env)
    assert env.action_spec == Bounded(-4.0, 4.0, (1,))
    td = env.rand_step(env.reset(seed=0))
    assert torch.equal(td["double"], 2 * td["observation"])
    assert torch.equal(td["next", "double"], 2 * td["next", "observation"])
