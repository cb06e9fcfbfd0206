"""RenameTransform: other names for entries."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.base import KeySeq, Transform
from rollwright.errors import NotNative

__all__ = ["RenameTransform"]


class RenameTransform(Transform):
    """Gives entries other names.

    Args:
        in_keys: observations, rewards and flags that the environment returns.
        out_keys: their names, one for each.
        in_keys_inv: actions and states that the environment wants; in a replay buffer, the names of entries in its
            storage.
        out_keys_inv: the names under which the policy writes them, or that they have in what is written, one for each.
        create_copy: keep the entries under their old names, too. Flags must be kept.

    Raises:
        ValueError: the numbers of keys differ, or a name is there twice.

    Example:
        >>> from tensordict import TensorDict
        >>> RenameTransform(["x"], ["y"])(TensorDict({"x": [1.0]}))["y"]
        tensor([1.])
    """

    def __init__(
        self,
        in_keys: KeySeq,
        out_keys: KeySeq,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
        create_copy: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.create_copy = create_copy
        for pairs in (self._pairs(), self._pairs_inv()):
            for name in {out for _, out in pairs}:
                if sum(out == name for _, out in pairs) > 1:
                    raise ValueError(f"out_keys: expected names that differ, got {name!r} twice.")

    moves = True

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        self._rename(out, may_lack=False)

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        self._rename(fresh, may_lack=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Rename entries of data."""
        self._rename(tensordict, may_lack=False)
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        found = [(in_key, out_key, self._read(tensordict, out_key)) for in_key, out_key in self._pairs_inv()]
        if self.container is None and not self.create_copy:  # data for a buffer; those of a step have all entries
            for _, out_key, _ in found:
                del tensordict[out_key]
        for in_key, _, value in found:
            tensordict.set(in_key, value)
        return tensordict

    @property
    def inverts(self) -> bool:
        """Whether this transform changes what the environment gets."""
        return bool(self.in_keys_inv)

    def _rename(self, td: Columns, *, may_lack: bool) -> None:
        found = []
        for in_key, out_key in self._pairs():
            if not (may_lack and td.get(in_key, None) is None):
                found.append((in_key, out_key, self._read(td, in_key)))
        if not self.create_copy:
            for in_key, _, _ in found:
                del td[in_key]
        for _, out_key, value in found:
            td[out_key] = value

    def _renamed(self, spec: Composite, pairs: list[tuple[NestedKey, NestedKey]], *, move: bool) -> Composite:
        there = [(in_key, out_key) for in_key, out_key in pairs if in_key in spec]
        leaves = {out_key: spec[in_key] for in_key, out_key in there}
        changed = spec.clone()
        if move:
            for in_key, _ in there:
                del changed[in_key]
        for out_key, leaf in leaves.items():
            changed.set(out_key, leaf.clone())
        return changed

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Observations under their new names."""
        return self._renamed(observation_spec, self._pairs(), move=not self.create_copy)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Rewards under their new names."""
        return self._renamed(reward_spec, self._pairs(), move=not self.create_copy)

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Flags under their old and new names.

        Raises:
            ValueError: flags would lose their names.
        """
        flags = [in_key for in_key, _ in self._pairs() if in_key in done_spec]
        if flags and not self.create_copy:
            raise ValueError(
                f"RenameTransform: {flags[0]!r} is a flag, by which environments are reset, and keeps its name. Pass "
                "create_copy=True."
            )
        return self._renamed(done_spec, self._pairs(), move=False)

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Actions under the names that the policy writes."""
        return self._renamed(action_spec, self._pairs_inv(), move=True)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """States under the names that the policy writes."""
        return self._renamed(state_spec, self._pairs_inv(), move=True)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        pairs = self._pairs()
        of_rewards = [pair for pair in pairs if pair[0] in env.rewards]
        of_entries = [pair for pair in pairs if pair[0] in env.entries]
        if len(of_rewards) + len(of_entries) < len(pairs):
            raise NotNative("RenameTransform renames flags, or what is not there")
        form = self._on_rows(
            env,
            entries={out_key: env.entries[in_key] for in_key, out_key in of_entries},
            rewards={out_key: env.rewards[in_key] for in_key, out_key in of_rewards},
            drops=frozenset() if self.create_copy else frozenset(in_key for in_key, _ in pairs),
        )
        if any(in_key in env.entries for in_key, _ in self._pairs_inv()):
            raise NotNative("RenameTransform renames states on the way in")
        return self._with_converted(form, lambda value: value) if self.inverts else form

    def __repr__(self) -> str:
        return f"RenameTransform({self._pairs()}, {self._pairs_inv()})"
