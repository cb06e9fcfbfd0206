"""CatTensors: several observations as one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.specs import Bounded, Composite, TensorSpec, Unbounded
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.on_arrays.columns import ArrayKind, Columns, join
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
