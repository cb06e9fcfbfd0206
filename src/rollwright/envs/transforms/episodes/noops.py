"""NoopResetEnv: random actions after each reset."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import leaf_keys, without
from rollwright.data.specs import Composite
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Values
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.episodes.inner import InnerEnv
from rollwright.errors import EnvError

__all__ = ["NoopResetEnv"]

_TRIALS = 11


class NoopResetEnv(Transform):
    """Takes some random actions after each reset, so that trajectories begin in different states.

    The number of actions and the actions are drawn from torch's generator. Transforms before it follow these steps (a
    ``StepCounter`` counts them), those after it do not. Where a trajectory ends meanwhile, another one is begun.

    It works on one environment: put it on each one inside a batch, as in
    ``SerialEnv(8, lambda: TransformedEnv(GymEnv(...), NoopResetEnv()))``.

    Args:
        noops: number of actions; with ``random`` there are fewer: 0 to ``noops - 1``.
        random: draw their number at each reset.

    Raises:
        ValueError: ``noops`` is no such number.
        EnvError: the trajectory ended early in eleven trials; or the environment is a batch.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> env = TransformedEnv(CountingEnv(max_steps=1000), NoopResetEnv(3, random=False))
        >>> env.reset()["observation"].shape
        torch.Size([1])
    """

    def __init__(self, noops: int = 30, random: bool = True) -> None:
        super().__init__()
        least = 1 if random else 0
        if not isinstance(noops, int) or isinstance(noops, bool) or noops < least:
            raise ValueError(f"noops: expected an integer of at least {least}, got {noops!r}.")
        self.noops = noops
        self.random = bool(random)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        inner = InnerEnv(self)
        self._check_single(inner.parent.numel())
        count = int(torch.randint(self.noops, (1,), device="cpu")) if self.random else self.noops
        known = without(tensordict, "next", *inner.parent.reset_keys)
        for _ in range(_TRIALS):
            root = self._act(inner, known.clone(False).update(tensordict_reset), count)
            if root is not None:
                return tensordict_reset.update(root.select(*leaf_keys(tensordict_reset), strict=False))
            tensordict_reset = inner.reset()
        raise EnvError(
            f"NoopResetEnv: {_TRIALS} trajectories ended within {count} random actions, which are to come before "
            "the first step. Pass a smaller noops."
        )

    def _act(self, inner: InnerEnv, root: TensorDictBase, count: int) -> TensorDictBase | None:
        """The root after ``count`` random actions; None if the trajectory ends."""
        for _ in range(count):
            outcome = inner.random_step(root)
            if bool(inner.ended(outcome).any()):
                return None
            root = inner.carried_on(root, outcome)
        return root

    def _check_single(self, number: int) -> None:
        if number > 1:
            raise EnvError(
                f"NoopResetEnv: expected a single environment, got {number}, which are not reset together. Put it on "
                "each of them: SerialEnv(n, lambda: TransformedEnv(env, NoopResetEnv(...))), or ParallelEnv."
            )

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        entries = dict(env.entries)

        def reset(fresh: Values) -> None:
            td = TensorDict({}, batch_size=env.batch)
            for key, entry in entries.items():
                td.set(key, torch.from_numpy(np.asarray(fresh[key], entry.dtype).reshape(entry.shape).copy()))
            td = self._reset(td.empty(), td)
            for key, entry in entries.items():
                value = td.get(key).numpy()
                fresh[key] = value[..., 0][()] if entry.column else value

        return ArrayTransform({}, [], lambda root, out: None, reset)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """The same.

        Raises:
            EnvError: the environment is a batch.
        """
        self._check_single(output_spec.shape.numel())
        return output_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: there is no environment to step in data."""
        raise RuntimeError("NoopResetEnv steps an environment: TransformedEnv(env, NoopResetEnv(...)).")

    def __repr__(self) -> str:
        return f"NoopResetEnv(noops={self.noops}, random={self.random})"
