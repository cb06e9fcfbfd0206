"""Transforms that change the shape of entries: FlattenObservation, UnsqueezeTransform, SqueezeTransform."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch

from rollwright.data.specs import Bounded, TensorSpec, Unbounded
from rollwright.data.specs.leaf import DenseSpec
from rollwright.envs.transforms.base import EntryTransform, KeySeq

__all__ = ["FlattenObservation", "SqueezeTransform", "UnsqueezeTransform", "mapped_spec"]


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
