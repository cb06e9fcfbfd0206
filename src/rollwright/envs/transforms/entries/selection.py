"""SelectTransform and ExcludeTransform: entries that are kept, and those that are dropped."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.data.specs import Composite
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.base import Transform
from rollwright.errors import NotNative

__all__ = ["ExcludeTransform", "SelectTransform"]

_NEEDED = ("done", "terminated")


class _Drop(Transform):
    """Takes entries away from what the environment returns."""

    @abstractmethod
    def _drops(self, key: NestedKey, kind: str) -> bool:
        """Whether an entry is taken away; ``kind``: ``"observation"``, ``"reward"`` or ``"done"``."""

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for key in self._dropped:
            if out.get(key, None) is not None:
                del out[key]

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        self._change(kind, given, fresh)

    @property
    def _dropped(self) -> list[NestedKey]:
        return self._remember("dropped", self._find)

    def _find(self) -> list[NestedKey]:
        parent = self.parent
        if parent is None:
            return []
        kinds = {"observation": parent.full_observation_spec, "reward": parent.full_reward_spec}
        kinds["done"] = parent.full_done_spec
        found = [
            unravel(key) for kind, spec in kinds.items() for key in spec.leaves() if self._drops(unravel(key), kind)
        ]
        read = {unravel(key) for key in parent.full_state_spec.leaves()}
        return self._checked(found, read, [unravel(key) for key in parent.done_keys])

    def _checked(self, found: list[NestedKey], read: set[NestedKey], flags: list[NestedKey]) -> list[NestedKey]:
        name = type(self).__name__
        for key in found:
            if key in read:
                raise ValueError(
                    f"{name}: {key!r} is read by each step, by the environment or a transform before this one, and "
                    "cannot be taken away. Leave it, or drop it with postproc= of the collector."
                )
        ends = [key for key in flags if as_tuple(key)[-1] in _NEEDED]
        if gone := [key for key in ends if key in found]:
            raise ValueError(
                f"{name}: {gone[0]!r} says whether a trajectory has ended, and cannot be taken away. Leave it."
            )
        return found

    def _without(self, spec: Composite) -> Composite:
        changed = spec.clone()
        for key in self._dropped:
            if key in changed:
                del changed[key]
        return changed

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Observations that are left."""
        return self._without(observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Rewards that are left."""
        return self._without(reward_spec)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Flags that are left."""
        return self._without(done_spec)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        dropped = frozenset(self._dropped)
        if self.inverts or dropped - env.entries.keys() - env.rewards.keys():
            raise NotNative(f"{type(self).__name__} drops flags, or what the environment is given")
        return self._on_rows(env, drops=dropped)


class SelectTransform(_Drop):
    """Keeps some of what the environment returns, and drops the rest; also what steps read, stays.

    Called on data, it keeps the selected entries there.

    Args:
        *selected_keys: entries to keep; those that are not there are ignored.
        keep_rewards: keep all rewards; otherwise those that are selected.
        keep_dones: keep all flags; otherwise those that are selected. ``done`` and
            ``terminated`` stay.

    Example:
        >>> from tensordict import TensorDict
        >>> sorted(SelectTransform("x")(TensorDict({"x": 1, "y": 2})).keys())
        ['x']
    """

    def __init__(self, *selected_keys: NestedKey, keep_rewards: bool = True, keep_dones: bool = True) -> None:
        super().__init__()
        self.selected_keys = [unravel(key) for key in _flat(selected_keys)]
        self.keep_rewards, self.keep_dones = keep_rewards, keep_dones

    def _drops(self, key: NestedKey, kind: str) -> bool:
        keeps = {"reward": self.keep_rewards, "done": self.keep_dones or as_tuple(key)[-1] in _NEEDED}
        return not keeps.get(kind, False) and not any(_is_below(key, selected) for selected in self.selected_keys)

    def _checked(self, found: list[NestedKey], read: set[NestedKey], flags: list[NestedKey]) -> list[NestedKey]:
        return super()._checked([key for key in found if key not in read], read, flags)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Keep the selected entries."""
        return tensordict.select(*self.selected_keys, strict=False)

    def __repr__(self) -> str:
        return f"SelectTransform({key_str(self.selected_keys)})"


class ExcludeTransform(_Drop):
    """Drops some of what the environment returns.

    Args:
        *excluded_keys: entries to drop; those that are not there are ignored.
        inverse: drop them from what the environment is given instead.

    Raises:
        ValueError: an entry is read by each step, or says whether a trajectory has ended; when the transform is
            put on an environment.

    Example:
        >>> from tensordict import TensorDict
        >>> sorted(ExcludeTransform("x")(TensorDict({"x": 1, "y": 2})).keys())
        ['y']
    """

    def __init__(self, *excluded_keys: NestedKey, inverse: bool = False) -> None:
        super().__init__()
        self.excluded_keys = [unravel(key) for key in _flat(excluded_keys)]
        self.inverse = inverse

    def _drops(self, key: NestedKey, kind: str) -> bool:
        return not self.inverse and any(_is_below(key, excluded) for excluded in self.excluded_keys)

    @property
    def inverts(self) -> bool:
        """Whether this transform changes what the environment gets."""
        return self.inverse

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.exclude(*self.excluded_keys) if self.inverse else tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Drop the excluded entries."""
        return tensordict if self.inverse else tensordict.exclude(*self.excluded_keys)

    def __repr__(self) -> str:
        return f"ExcludeTransform({key_str(self.excluded_keys)})"


def _flat(keys: Iterable[Any]) -> list[NestedKey]:
    return [key for given in keys for key in (given if isinstance(given, list) else [given])]


def _is_below(key: NestedKey, prefix: NestedKey) -> bool:
    head = as_tuple(prefix)
    return as_tuple(key)[: len(head)] == head
