"""CatTensors: several observations as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.specs import Bounded, Composite, TensorSpec, Unbounded
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Values
from rollwright.envs.transforms.base import KeySeq, Transform
from rollwright.errors import NotNative

__all__ = ["CatTensors"]


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

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        joined = self._join([self._read(next_tensordict, key) for key in self._keys])
        for key in self._drops:
            del next_tensordict[key]
        return next_tensordict.set(self.out_keys[0], joined)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Join entries of data."""
        return self._call(tensordict)

    def _join(self, values: list[torch.Tensor]) -> torch.Tensor:
        if self.unsqueeze_if_oor:
            values = [value if value.ndim >= -self.dim else value.unsqueeze(self.dim) for value in values]
        try:
            return torch.cat(values, self.dim)
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
        """See :meth:`Transform.on_arrays`."""
        keys, (out_key,) = self._keys, self.out_keys
        if lacking := [key for key in keys if key not in env.entries]:
            raise NotNative(f"CatTensors joins {lacking[0]!r}, which is no observation")
        entries = [env.entries[key] for key in keys]
        if len({entry.dtype for entry in entries}) > 1 or self.unsqueeze_if_oor:
            raise NotNative("CatTensors joins entries of several dtypes or numbers of dimensions")
        shape = self._join([torch.zeros((), device="cpu").expand(entry.shape) for entry in entries]).shape
        whole = [_as_whole(entry) for entry in entries]
        axis, drops = len(shape) + self.dim, self._drops

        def join(values: Values) -> None:
            joined = np.concatenate([make(values[key]) for key, make in zip(keys, whole, strict=True)], axis)
            for key in drops:
                del values[key]
            values[out_key] = joined

        entry = Entry(tuple(shape), entries[0].dtype, False)
        return ArrayTransform({out_key: entry}, [], lambda root, out: join(out), join, {}, frozenset(drops))

    def __repr__(self) -> str:
        return f"CatTensors({self.in_keys} -> {self.out_keys[0]!r}, dim={self.dim})"


def _as_whole(entry: Entry) -> Callable[[Any], Any]:
    """Of a value, an array of the entry's whole shape."""
    return (lambda value: np.asarray(value)[..., None]) if entry.column else np.asarray
