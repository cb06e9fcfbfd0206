"""TargetReturn: the return that is still to be reached."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.specs import TensorSpec, Unbounded
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.base import KeySeq
from rollwright.envs.transforms.bookkeeping import Adding

__all__ = ["TargetReturn"]

MODES = ("reduce", "constant")
Pairs = list[tuple[NestedKey, NestedKey]]


class TargetReturn(Adding):
    """Gives policies a return to reach, as decision transformers read it.

    The entry has the shape and dtype of the reward. With each reset it is ``target_return``; with each step the reward
    is taken from it (``mode="reduce"``), or it stays (``"constant"``).

    Args:
        target_return: at the begin of a trajectory.
        mode: ``"reduce"`` or ``"constant"``.
        in_keys: rewards; None: all of the environment's.
        out_keys: where to write; None: ``"target_return"`` beside each reward.
        reset_key: ``"_reset"`` entry that begins it again; None: that of the environment, or of the group of agents
            that the reward is of.

    Raises:
        ValueError: ``mode`` is another one, or ``target_return`` is no number.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv
        >>> rollout = TransformedEnv(ContinuousActionVecMockEnv(), TargetReturn(10.0)).rollout(3)
        >>> rewards = rollout["next", "reward"].cumsum(0)
        >>> bool(torch.allclose(rollout["next", "target_return"], 10 - rewards))
        True
    """

    def __init__(
        self,
        target_return: float,
        mode: str = "reduce",
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        reset_key: NestedKey | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}.")
        if isinstance(target_return, bool) or not isinstance(target_return, (int, float)):
            raise ValueError(f"target_return: expected a number, got {target_return!r}.")
        self.target_return = target_return
        self.mode = mode
        self.reset_key = None if reset_key is None else as_keys(reset_key)[0]
        self._given = in_keys is not None, out_keys is not None
        if self._given[0] and self._given[1]:
            super()._pairs()

    def _pairs(self) -> Pairs:
        return self._remember("pairs", self._find)

    def _find(self) -> Pairs:
        parent = self.parent
        if not self._given[0]:
            self.in_keys = ["reward"] if parent is None else list(parent.reward_keys)
        if not self._given[1]:
            self.out_keys = [unravel((*as_tuple(key)[:-1], "target_return")) for key in self.in_keys]
            if len(set(self.out_keys)) < len(self.out_keys):
                raise ValueError(
                    f"out_keys: expected names that differ, got {key_str(self.out_keys)} for the rewards "
                    f"{key_str(self.in_keys)}, which lie side by side. Pass out_keys=."
                )
        return super()._pairs()

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for in_key, out_key in self._pairs():
            left = self._carried(root, out_key)
            out[out_key] = left - self._read(out, in_key) if self.mode == "reduce" else left

    def _first(self, kind: Any, key: NestedKey, spec: TensorSpec) -> Any:
        return kind.full(spec, self.target_return)

    def _reset_key(self, index: int) -> NestedKey | None:
        return self.reset_key

    def _specs(self) -> list[TensorSpec]:
        """The specs of ``in_keys``."""
        parent = self.parent
        if parent is None:
            return [Unbounded((1,)) for _ in self._pairs()]
        found = []
        for key, _ in self._pairs():
            holder = next(
                (full for full in (parent.full_reward_spec, parent.full_observation_spec) if key in full), None
            )
            if holder is None:
                raise KeyError(
                    f"TargetReturn: the environment has no reward {key!r}; it has {key_str(parent.reward_keys)}. "
                    "Correct in_keys."
                )
            found.append(holder[key])
        return found

    def _added(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        left = [Unbounded(spec.shape, dtype=spec.dtype or torch.float32, device=spec.device) for spec in self._specs()]
        return dict(zip([key for _, key in self._pairs()], left, strict=True))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: it follows an environment from its reset on."""
        raise RuntimeError("TargetReturn follows an environment: TransformedEnv(env, TargetReturn(...)).")

    def __repr__(self) -> str:
        return f"TargetReturn(target_return={self.target_return}, mode={self.mode!r})"
