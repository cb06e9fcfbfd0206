"""Transforms of which entries there are, of their names and of their shapes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.specs import Bounded, Composite, TensorSpec, Unbounded
from rollwright.data.specs.leaf import DenseSpec
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.columns import ArrayKind, Columns, join
from rollwright.envs.transforms.base import EntryTransform, KeySeq, Transform
from rollwright.errors import NotNative


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


class CatTensors(Transform):
    """Joins several observations into one.

    Args:
        in_keys: observations; None: all of the environment's.
        out_key: the entry to write.
        dim: dimension to join along, negative.
        del_keys: drop ``in_keys``.
        unsqueeze_if_oor: where a tensor lacks the dimension, add it.
        sort: join in the order of the names; otherwise in that of ``in_keys``.

    Raises:
        ValueError: ``dim`` is not negative, or there is nothing to join.

    Example:
        >>> from tensordict import TensorDict
        >>> CatTensors(["y", "x"], "z")(TensorDict({"x": torch.zeros(1), "y": torch.ones(2)}))["z"]
        tensor([0., 1., 1.])
    """

    def __init__(
        self,
        in_keys: KeySeq = None,
        out_key: NestedKey = "observation_vector",
        dim: int = -1,
        *,
        del_keys: bool = True,
        unsqueeze_if_oor: bool = False,
        sort: bool = True,
    ) -> None:
        if not isinstance(dim, int) or dim >= 0:
            raise ValueError(f"dim: expected a negative number, counted from the last dimension, got {dim!r}.")
        self._finds, self._sorts = in_keys is None, sort
        super().__init__(in_keys, [out_key])
        if in_keys is not None and not self.in_keys:
            raise ValueError("in_keys: expected observations to join, got none.")
        if sort:
            self.in_keys.sort(key=lambda key: as_tuple(key))
        self.dim, self.del_keys, self.unsqueeze_if_oor = dim, del_keys, unsqueeze_if_oor

    @property
    def _keys(self) -> list[NestedKey]:
        return self._remember("keys", self._find_keys)

    def _find_keys(self) -> list[NestedKey]:
        parent = self.parent
        if self._finds and parent is not None:
            found = [unravel(key) for key in parent.full_observation_spec.leaves()]
            self.in_keys = sorted(found, key=as_tuple) if self._sorts else found
        if not self.in_keys:
            raise ValueError(
                "CatTensors: expected in_keys, or an environment with observations, got none. Pass in_keys=."
            )
        return as_keys(self.in_keys)

    @property
    def _drops(self) -> list[NestedKey]:
        return [key for key in self._keys if key != self.out_keys[0]] if self.del_keys else []

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        joined = self._join([kind.array(index, self._read(out, key)) for index, key in enumerate(self._keys)])
        for key in self._drops:
            del out[key]
        out[self.out_keys[0]] = joined

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        self._change(kind, given, fresh)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Join entries of data."""
        return self._call(tensordict)

    def _join(self, values: list[Any]) -> Any:
        if self.unsqueeze_if_oor:
            values = [value if value.ndim >= -self.dim else value.unsqueeze(self.dim) for value in values]
        try:
            return join(values, self.dim)
        except (RuntimeError, IndexError) as error:
            shapes = [tuple(value.shape) for value in values]
            raise ValueError(
                f"CatTensors: expected {key_str(self._keys)} of shapes that can be joined along {self.dim}, got "
                f"{shapes}. Correct in_keys or dim, or flatten them before."
            ) from error

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce the joined observation, and drop the others."""
        specs = [self._spec(observation_spec, key) for key in self._keys]
        changed = observation_spec.clone()
        for key in self._drops:
            del changed[key]
        changed.set(self.out_keys[0], self._joined_spec(specs))
        return changed

    def _spec(self, spec: Composite, key: NestedKey) -> TensorSpec:
        if key not in spec:
            raise KeyError(f"CatTensors: no observation {key!r}; there are {key_str(spec.leaves())}. Correct in_keys.")
        found: TensorSpec = spec[key]
        return found

    def _joined_spec(self, specs: list[TensorSpec]) -> TensorSpec:
        example = self._join([spec.zero() for spec in specs])
        bounded = [spec for spec in specs if isinstance(spec, Bounded)]
        if len(bounded) < len(specs):
            return Unbounded(example.shape, device=example.device, dtype=example.dtype)
        low, high = (self._join([getattr(spec, end).expand(spec.shape) for spec in bounded]) for end in ("low", "high"))
        return Bounded(low, high, example.shape, example.device, example.dtype)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        keys, (out_key,) = self._keys, self.out_keys
        if lacking := [key for key in keys if key not in env.entries]:
            raise NotNative(f"CatTensors joins {lacking[0]!r}, which is no observation")
        forms = [env.entries[key] for key in keys]
        if len({form.dtype for form in forms}) > 1 or forms[0].dtype == np.object_ or self.unsqueeze_if_oor:
            raise NotNative("CatTensors joins objects, or entries of several dtypes or numbers of dimensions")
        joined = self._join([torch.from_numpy(np.zeros(form.shape, form.dtype)) for form in forms])
        made = {out_key: ArrayKind(env.batch).entry(joined).replace(column=False)}
        return self._on_rows(env, forms, entries=made, drops=frozenset(self._drops))

    def __repr__(self) -> str:
        return f"CatTensors({self.in_keys} -> {self.out_keys[0]!r}, dim={self.dim})"


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


def mapped_spec(spec: TensorSpec, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorSpec:
    """The spec of ``change(x)`` for ``x`` of ``spec``, where ``change`` moves elements and keeps their values."""
    example = change(spec.zero())
    if isinstance(spec, Bounded):
        low, high = (change(end.expand(spec.shape)) for end in (spec.low, spec.high))
        return Bounded(low, high, example.shape, spec.device, example.dtype)
    if isinstance(spec, Unbounded) or not isinstance(spec, DenseSpec):
        return Unbounded(example.shape, device=spec.device, dtype=example.dtype)
    return spec.replace(shape=example.shape)


class _Reshape(EntryTransform):
    """Moves elements of entries to another shape, and back on the way in."""

    def __init__(self, allow_positive_dim: bool, *keys: KeySeq) -> None:
        super().__init__(*keys)
        self.allow_positive_dim = allow_positive_dim
        if not self.in_keys and not self.in_keys_inv:
            name = type(self).__name__
            raise ValueError(f"in_keys: expected entries for {name}, got None. Pass in_keys=['observation'].")

    @abstractmethod
    def _reshape(self, value: torch.Tensor, batch_ndim: int) -> torch.Tensor:
        """The value in its new shape; positive dimensions count from ``batch_ndim``."""

    def _checked_dim(self, name: str, dim: int) -> int:
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise TypeError(f"{name}: expected an integer, got {dim!r}.")
        if dim >= 0 and not self.allow_positive_dim:
            raise ValueError(
                f"{name}: expected a negative number, counted from the last dimension, got {dim}. Pass one, or "
                "allow_positive_dim=True to count from the first dimension below the environment's batch."
            )
        return dim

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        return self._reshape(obs, self._batch_ndim())

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        return mapped_spec(spec, self._apply_transform)


class FlattenObservation(_Reshape):
    """Joins adjacent dimensions of observations.

    Args:
        first_dim: first dimension to join.
        last_dim: last dimension to join.
        in_keys: observations; default ``["pixels"]``.
        out_keys: where to write; default: ``in_keys``.
        allow_positive_dim: count dimensions from 0 on from the first one below the environment's batch; otherwise
            they must be negative.

    Raises:
        ValueError: a dimension is positive without leave.

    Example:
        >>> from tensordict import TensorDict
        >>> FlattenObservation(-2, -1, in_keys=["x"])(TensorDict({"x": torch.zeros(4, 2, 3)}))["x"].shape
        torch.Size([4, 6])
    """

    def __init__(
        self,
        first_dim: int,
        last_dim: int,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        allow_positive_dim: bool = False,
    ) -> None:
        super().__init__(allow_positive_dim, "pixels" if in_keys is None else in_keys, out_keys)
        self.first_dim = self._checked_dim("first_dim", first_dim)
        self.last_dim = self._checked_dim("last_dim", last_dim)

    def _reshape(self, value: torch.Tensor, batch_ndim: int) -> torch.Tensor:
        first, last = (dim if dim < 0 else dim + batch_ndim for dim in (self.first_dim, self.last_dim))
        return value.flatten(first, last)


class UnsqueezeTransform(_Reshape):
    """Adds a dimension of size one, and takes it away on the way in.

    Args:
        dim: where.
        allow_positive_dim: count from 0 on from the first dimension below the environment's batch; otherwise ``dim``
            must be negative.
        in_keys: observations and rewards.
        out_keys: where to write; default: ``in_keys``.
        in_keys_inv: actions and states that the environment wants without the dimension.
        out_keys_inv: where the policy writes them; default: ``in_keys_inv``.

    Raises:
        ValueError: ``dim`` is positive without leave, or there are no keys.

    Example:
        >>> from tensordict import TensorDict
        >>> UnsqueezeTransform(-1, in_keys=["x"])(TensorDict({"x": torch.zeros(4, 2)}))["x"].shape
        torch.Size([4, 2, 1])
    """

    _adds = True

    def __init__(
        self,
        dim: int,
        *,
        allow_positive_dim: bool = False,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
    ) -> None:
        super().__init__(allow_positive_dim, in_keys, out_keys, in_keys_inv, out_keys_inv)
        self.dim = self._checked_dim("dim", dim)

    def _reshape(self, value: torch.Tensor, batch_ndim: int) -> torch.Tensor:
        return self._changed(value, batch_ndim, self._adds)

    def _changed(self, value: torch.Tensor, batch_ndim: int, adds: bool) -> torch.Tensor:
        dim = self.dim if self.dim < 0 else self.dim + batch_ndim
        if adds:
            return value.unsqueeze(dim)
        if value.shape[dim] != 1:
            raise ValueError(
                f"dim: expected a dimension of size one at {self.dim}, got shape {tuple(value.shape)}. Correct dim or "
                "keys."
            )
        return value.squeeze(dim)

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        return self._changed(state, self._batch_ndim(), not self._adds)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(dim={self.dim}, keys={self.in_keys or self.in_keys_inv})"


class SqueezeTransform(UnsqueezeTransform):
    """Takes a dimension of size one away, and adds it on the way in.

    Args: see :class:`UnsqueezeTransform`; ``in_keys_inv`` are entries that the environment wants with the dimension.

    Raises:
        ValueError: ``dim`` is positive without leave, there are no keys, or the dimension has another size.

    Example:
        >>> from tensordict import TensorDict
        >>> SqueezeTransform(-1, in_keys=["x"])(TensorDict({"x": torch.zeros(4, 1)}))["x"].shape
        torch.Size([4])
    """

    _adds = False
