"""Steps of the environment in front of a transform, taken by the transform itself."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from rollwright._keys import leaf_keys, without
from rollwright.data.layout import deciding_groups, end_of_trajectory
from rollwright.data.specs import Composite
from rollwright.envs.base import EnvBase
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.masks import ActionMask

__all__ = ["InnerEnv"]


class InnerEnv:
    """The environment that a transform follows: the base environment, and the transforms before this one.

    :attr:`Transform.parent` has the same specs, and clones of those transforms; here they act themselves, so that
    what they keep (past frames, statistics) follows each step.

    Args:
        transform: the one that takes steps.

    Raises:
        RuntimeError: it is on no environment.
    """

    def __init__(self, transform: Transform) -> None:
        env, parent = transform.container, transform.parent
        if env is None or parent is None:
            name = type(transform).__name__
            raise RuntimeError(f"{name} steps an environment and is on none. Use TransformedEnv(env, {name}(...)).")
        self.base_env: EnvBase = env.base_env
        self.parent: EnvBase = parent
        self._before = transform.transforms_before()

    def step(self, given: TensorDictBase) -> TensorDictBase:
        """What comes below ``"next"``; ``given`` is what the base environment is given."""
        outcome = self.base_env.step_outcome(given)
        preset = given.get("next", None)
        if preset is not None:
            outcome.update(preset.exclude(*leaf_keys(outcome)))
        for transform in self._before:
            outcome = transform.transform_step(given, outcome)
        return outcome

    def random_step(self, root: TensorDictBase) -> TensorDictBase:
        """What comes below ``"next"`` after a random action, which is written into ``root``."""
        if any(isinstance(transform, ActionMask) for transform in self._before):
            root.update(self._masked_actions().rand())
        else:
            self.parent.rand_action(root)
        given = root.clone(False)
        for transform in reversed(self._before):
            given = transform.inv(given)
        return self.step(given)

    def _masked_actions(self) -> Composite:
        """The spec of the actions that are allowed now, which the clones of :attr:`parent` do not follow."""
        spec = self.base_env.full_action_spec.clone()
        for transform in self._before:
            spec = transform.transform_action_spec(spec)
        return spec

    def reset(self) -> TensorDictBase:
        """First data of a new trajectory."""
        fresh = self.base_env.reset_outcome(None)
        for transform in self._before:
            fresh = transform.transform_reset(fresh.empty(), fresh)
        return fresh

    def carried_on(self, root: TensorDictBase, outcome: TensorDictBase) -> TensorDictBase:
        """The root of the step after the one that began at ``root``."""
        actions = self.parent.action_keys
        return without(self.parent.step_mdp(root.clone(False).set("next", outcome)), *actions)

    def ended(self, outcome: TensorDictBase) -> torch.Tensor:
        """Where a trajectory ended, bool ``[*batch]``."""
        return end_of_trajectory(outcome, deciding_groups(self.parent.done_groups), self.parent.ndim)
