"""FrameSkipTransform: each action is repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import unravel
from rollwright.data.specs import Bounded, Composite, TensorSpec, Unbounded
from rollwright.envs._partial_reset import Masks, merge_reset
from rollwright.envs.arrays import STEPPED, ArrayEnv, ArrayTransform, Values
from rollwright.envs.transforms.base import Transform, map_spec
from rollwright.envs.transforms.episodes.inner import InnerEnv

__all__ = ["FrameSkipTransform"]


class FrameSkipTransform(Transform):
    """Repeats each action, and sums the rewards.

    Observations and flags are those of the last frame taken. A trajectory that ends inside takes no more frames: its
    last observation and its flags are the true ones. In a batch the other rows go on, and those that ended keep what
    they had; in a ``SerialEnv`` or ``ParallelEnv`` they are not stepped. In a batch of your own they are, and the
    result is dropped.

    Transforms before it are applied to each frame, each time from the data that the step began from: a ``StepCounter``
    before it counts one a step. Put those that sum up (``RewardSum``) after it.

    Args:
        frame_skip: number of frames of a step, in all.

    Raises:
        ValueError: ``frame_skip`` is no integer of at least 1.

    Example:
        >>> from rollwright.envs import StepCounter, TransformedEnv
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> env = TransformedEnv(CountingEnv(max_steps=5), FrameSkipTransform(3))
        >>> env.rollout(9, lambda td: td.set("action", torch.ones(1)))["next", "observation"].flatten()
        tensor([3, 6], dtype=torch.int32)
    """

    def __init__(self, frame_skip: int = 1) -> None:
        super().__init__()
        if not isinstance(frame_skip, int) or isinstance(frame_skip, bool) or frame_skip < 1:
            raise ValueError(f"frame_skip: expected an integer of at least 1, got {frame_skip!r}.")
        self.frame_skip = frame_skip

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.frame_skip == 1:
            return next_tensordict
        inner = InnerEnv(self)
        for _ in range(self.frame_skip - 1):
            ended = inner.ended(next_tensordict)
            if bool(ended.all()):
                break
            given = tensordict.clone(False).set(STEPPED, ~ended) if ended.ndim and bool(ended.any()) else tensordict
            outcome = inner.step(given)
            for key in inner.parent.reward_keys:
                outcome.set(key, self._read(next_tensordict, key) + self._read(outcome, key))
            masks: Masks | None = {(): ~ended} if bool(ended.any()) else None
            next_tensordict = merge_reset(inner.parent, next_tensordict, outcome, masks)
        return next_tensordict

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        again, rewards, last = env.stepper(), list(env.rewards), self.frame_skip - 1

        def step(root: Values, out: Values) -> None:
            for _ in range(last):
                ended = out["done"]
                if np.all(ended):
                    break
                frame = again({**root, STEPPED: ~ended} if np.any(ended) else root)
                for key in rewards:
                    frame[key] = out[key] + frame[key]
                if np.any(ended):
                    _keep(ended, out, frame)
                out.update(frame)

        return ArrayTransform({}, [], step, _nothing, reads_env=True)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Rewards, with the bounds of sums."""
        pairs = [(unravel(key), unravel(key)) for key in reward_spec.leaves()]
        return map_spec(reward_spec, pairs, self._summed) if self.frame_skip > 1 else reward_spec

    def _summed(self, spec: TensorSpec) -> TensorSpec:
        if not isinstance(spec, Bounded):
            return Unbounded(spec.shape, device=spec.device, dtype=spec.dtype or torch.float32)
        low, high = (
            torch.minimum(spec.low, spec.low * self.frame_skip),
            torch.maximum(spec.high, spec.high * self.frame_skip),
        )
        return Bounded(low, high, spec.shape, spec.device, spec.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: there is no environment to step in data."""
        raise RuntimeError("FrameSkipTransform steps an environment: TransformedEnv(env, FrameSkipTransform(...)).")

    def __repr__(self) -> str:
        return f"FrameSkipTransform(frame_skip={self.frame_skip})"


def _nothing(fresh: Values) -> None:
    """A reset changes nothing."""


def _keep(ended: Any, out: Values, frame: Values) -> None:
    """Put what ``out`` holds in rows that ended into ``frame``."""
    for key, value in frame.items():
        if key in out:
            rows = ended.reshape(ended.shape + (1,) * (np.ndim(value) - ended.ndim))
            frame[key] = np.where(rows, out[key], value)
