"""Stacked: unlike leaf specs along a stack dimension, and the shape arithmetic of lazy stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rollwright._keys import NestedKey, unravel
from rollwright.data.specs.base import TensorSpec
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, as_size, full_index, index_shape
from rollwright.errors import SpecError


class LazyStack:
    """A list of specs along a stack dimension: its shape arithmetic, and what its parts answer one by one."""

    _sample_type: ClassVar[type]
    _wanted: ClassVar[str]  # what a sample is, for messages
    specs: list[Any]
    dim: int
    shape: torch.Size

    def _restacked(self, op: Callable[[Any], Any], dim: int) -> Any:
        """The stack of specs after an operation, along another dimension."""
        return type(self)([op(spec) for spec in self.specs], dim)  # type: ignore[call-arg]

    def index_batch(self, idx: Any, ndim: int) -> Any:
        """See :meth:`TensorSpec.index_batch`."""
        if ndim <= self.dim:
            shape = index_shape(self.shape[:ndim], idx)
            return self._restacked(lambda spec: spec.index_batch(idx, ndim), self.dim + len(shape) - ndim)
        items = full_index(idx, 0)
        gap = ndim - sum(item is not Ellipsis for item in items)
        dots = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
        items = items[:dots] + (slice(None),) * gap + items[dots + 1 :]
        along = items[self.dim] if gap >= 0 else None
        others = items[: self.dim] + items[self.dim + 1 :]
        if along is None or any(isinstance(item, bool) or not isinstance(item, (int, slice)) for item in others):
            raise IndexError(
                f"index: expected numbers and slices (beside dimension {self.dim}, that of the stack) for "
                f"shape {list(self.shape)}, got {idx!r}. Index one dimension after the other."
            )
        # numpy's rules for one dimension: a number, or an array of numbers
        numbers = np.arange(len(self.specs))[along.numpy(force=True) if isinstance(along, Tensor) else along]
        if numbers.ndim == 0:
            part = self.specs[int(numbers)]
            is_whole = all(isinstance(item, slice) and item == slice(None) for item in others)
            return part if is_whole else part.index_batch(others, ndim - 1)  # what is set there, is set here
        picked = [self.specs[int(number)] for number in numbers]
        dim = self.dim - sum(isinstance(item, int) for item in items[: self.dim])
        return torch.stack([spec.index_batch(others, ndim - 1) for spec in picked], dim)

    def expand_batch(self, batch: torch.Size, ndim: int) -> Any:
        """See :meth:`TensorSpec.expand_batch`."""
        dim = self.dim + len(batch) - ndim
        if ndim <= self.dim:
            return self._restacked(lambda spec: spec.expand_batch(batch, ndim), dim)
        rest = torch.Size(batch[:dim] + batch[dim + 1 :])
        new = self._restacked(lambda spec: spec.expand_batch(rest, ndim - 1), dim)
        if batch[dim] != len(self.specs):
            new = type(self)([new.specs[0].clone() for _ in range(batch[dim])], dim)  # type: ignore[call-arg]
        return new

    def reshape_batch(self, batch: torch.Size, ndim: int) -> Any:
        """See :meth:`TensorSpec.reshape_batch`; the stack dimension has to stay one."""
        if ndim <= self.dim:
            return self._restacked(lambda spec: spec.reshape_batch(batch, ndim), self.dim + len(batch) - ndim)
        before, number = math.prod(self.shape[: self.dim]), len(self.specs)
        places = (i for i, size in enumerate(batch) if size == number and math.prod(batch[:i]) == before)
        dim = next(places, None)
        if dim is None:
            raise ValueError(
                f"shape: expected one that keeps the stack dimension {self.dim} of {list(self.shape)}, got "
                f"{list(batch)}. Reshape the single specs before stacking."
            )
        rest = torch.Size(batch[:dim] + batch[dim + 1 :])
        return self._restacked(lambda spec: spec.reshape_batch(rest, ndim - 1), dim)

    def unsqueeze(self, dim: int) -> Any:
        """See :meth:`TensorSpec.unsqueeze`; the dimension may lie after sizes that differ."""
        place = dim + len(self.shape) + 1 if dim < 0 else dim
        if place <= self.dim:
            return self._restacked(lambda spec: spec.unsqueeze(place), self.dim + 1)
        return self._restacked(lambda spec: spec.unsqueeze(place - 1), self.dim)

    def squeeze(self, dim: int | None = None) -> Any:
        """See :meth:`TensorSpec.squeeze`."""
        if dim is None:
            return super().squeeze()  # type: ignore[misc]
        place = dim + len(self.shape) if dim < 0 else dim
        if place == self.dim:
            return self.specs[0] if len(self.specs) == 1 else self
        after = place > self.dim
        return self._restacked(lambda spec: spec.squeeze(place - after), self.dim - (self._is_one(place) and not after))

    def _is_one(self, dim: int) -> bool:
        return 0 <= dim < len(self.shape) and self.shape[dim] == 1

    def _position(self, val: Any) -> int:
        """The stack dimension in a value, which may have further leading dimensions."""
        return int(val.ndim - len(self.shape) + self.dim)

    def _split(self, val: Any) -> list[tuple[Any, Any]] | None:
        """The parts of a value, each with its spec; None where the number differs."""
        at = self._position(val)
        if at < 0 or val.shape[at] != len(self.specs):
            return None
        return list(zip(self.specs, val.unbind(at), strict=True))

    def _checked(self, val: Any, key: NestedKey | None = None) -> list[tuple[Any, Any]]:
        """The parts of a value, each with its spec; a SpecError where it is no stack of so many."""
        is_sample = isinstance(val, self._sample_type)
        parts = self._split(val) if is_sample else None
        if parts is None:
            got = list(val.shape) if is_sample else type(val).__name__
            name = "value" if key is None else repr(unravel(key))
            raise SpecError(
                f"{name}: expected {self._wanted} ends in {list(self.shape)}, got {got}. Stack its parts first."
            )
        return parts

    def is_in(self, val: Any) -> bool:
        """Whether every part lies in its spec."""
        parts = self._split(val) if isinstance(val, self._sample_type) else None
        return parts is not None and all(spec.is_in(part) for spec, part in parts)

    def assert_is_in(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where a part does not lie in its spec."""
        for spec, part in self._checked(val, key):
            spec.assert_is_in(part, key)

    def to(self, dest: torch.dtype | DeviceLike) -> Any:
        """The stack with another dtype or on another device."""
        return self._restacked(lambda spec: spec.to(dest), self.dim)

    def clone(self) -> Any:
        """A copy of the stack and of every spec in it."""
        return self._restacked(lambda spec: spec.clone(), self.dim)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.dim == other.dim and self.specs == other.specs

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.specs!r}, dim={self.dim})"


class Stacked(LazyStack, TensorSpec):
    """Different leaf specs, stacked along a dimension: the spec of a row of unlike things.

    Args:
        specs: leaf specs of one dtype, device and number of dimensions.
        dim: the stack dimension.

    Sizes that differ are -1 in ``shape``. Samples exist as one tensor only where all sizes agree (two
    :class:`Categorical` of different ``n``); others exist in Composites, as lazily stacked TensorDicts.

    Example:
        >>> from rollwright.data import Categorical
        >>> spec = Stacked([Categorical(2), Categorical(5)])
        >>> spec.is_in(torch.tensor([1, 4])), spec.is_in(torch.tensor([4, 1]))
        (True, False)
        >>> spec[1]
        Categorical(n=5, shape=[], dtype=int64, device=cpu)
    """

    _sample_type = Tensor
    _wanted = "a tensor whose shape"

    def __init__(self, specs: Sequence[TensorSpec], dim: int = 0) -> None:
        self.specs = list(specs)
        first = self.specs[0]
        self.dim = dim + first.ndim + 1 if dim < 0 else dim
        sizes = [column[0] if len(set(column)) == 1 else -1 for column in zip(*(s.shape for s in specs), strict=True)]
        self.shape = torch.Size((*sizes[: self.dim], len(self.specs), *sizes[self.dim :]))
        self.dtype, self.device = first.dtype, first.device

    @property
    def batch_ndim(self) -> int:
        """Leading dimensions that shape operations may change: all before the first one that varies."""
        return min([super().batch_ndim, *(int(spec.batch_ndim) + 1 for spec in self.specs)])

    @property
    def domain(self) -> str | None:
        """The domain of the first part: ``"continuous"``, ``"discrete"``, or None if values are no numbers."""
        found: str | None = self.specs[0].domain
        return found

    def _join(self, parts: Sequence[Tensor], lead: int) -> Tensor:
        if len({part.shape for part in parts}) > 1:
            raise SpecError(
                f"{self!r}: expected parts of one shape for a tensor, got "
                f"{[list(part.shape) for part in parts]}. Stack Composites instead: their samples are "
                "lazily stacked TensorDicts."
            )
        return torch.stack(list(parts), lead + self.dim)

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """A random sample, where the parts have one shape (SpecError otherwise)."""
        return self._join([spec.rand(shape) for spec in self.specs], len(as_size(shape)))

    def zero(self, shape: ShapeLike = ()) -> Tensor:
        """Zeros, where the parts have one shape (SpecError otherwise)."""
        return self._join([spec.zero(shape) for spec in self.specs], len(as_size(shape)))

    def one(self, shape: ShapeLike = ()) -> Tensor:
        """Ones, where the parts have one shape (SpecError otherwise)."""
        return self._join([spec.one(shape) for spec in self.specs], len(as_size(shape)))

    def type_check(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where the dtype of ``val`` is not the spec's."""
        self.specs[0].type_check(val, key)

    def project(self, val: Any) -> Tensor:
        """Every part mapped into its spec; ``val`` itself where it is a member."""
        parts = self._checked(val)
        if self.is_in(val):
            return val  # type: ignore[no-any-return]
        return torch.stack([spec.project(part) for spec, part in parts], self._position(val))

    def encode(self, val: Any) -> Tensor:
        """A tensor from the parts' data, a sequence or an array along the stack dimension."""
        parts = val.unbind(self.dim) if isinstance(val, Tensor) else np.moveaxis(np.asarray(val), self.dim, 0)
        if len(parts) != len(self.specs):
            raise SpecError(f"value: expected {len(self.specs)} parts for {self!r}, got {len(parts)}.")
        return self._join([spec.encode(part) for spec, part in zip(self.specs, parts, strict=True)], 0)

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """The array of a sample."""
        arrays = [spec.to_numpy(part, safe) for spec, part in self._checked(val)]
        return np.stack(arrays, self._position(val))
