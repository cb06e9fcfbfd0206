"""Specs along a new dimension: one spec where they agree, a lazy stack where they do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self, overload

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.specs.composite import Composite
from rollwright.data.specs.leaf import LeafSpec
from rollwright.data.specs.mapping import MISSING
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, as_size, full_index, index_shape
from rollwright.data.specs.spec import TensorSpec, implements
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
        """Index the first ``ndim`` dimensions."""
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
        """Expand the first ``ndim`` dimensions to ``batch``, already known to be possible."""
        dim = self.dim + len(batch) - ndim
        if ndim <= self.dim:
            return self._restacked(lambda spec: spec.expand_batch(batch, ndim), dim)
        rest = torch.Size(batch[:dim] + batch[dim + 1 :])
        new = self._restacked(lambda spec: spec.expand_batch(rest, ndim - 1), dim)
        if batch[dim] != len(self.specs):
            new = type(self)([new.specs[0].clone() for _ in range(batch[dim])], dim)  # type: ignore[call-arg]
        return new

    def reshape_batch(self, batch: torch.Size, ndim: int) -> Any:
        """Reshape the first ``ndim`` dimensions to ``batch``; the stack dimension has to stay one."""
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
        """The spec with a new dimension of size one; the dimension may lie after sizes that differ."""
        place = dim + len(self.shape) + 1 if dim < 0 else dim
        if place <= self.dim:
            return self._restacked(lambda spec: spec.unsqueeze(place), self.dim + 1)
        return self._restacked(lambda spec: spec.unsqueeze(place - 1), self.dim)

    def squeeze(self, dim: int | None = None) -> Any:
        """The spec without its dimensions of size one, or without the given one if it has size one."""
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


class StackedComposite(LazyStack, Composite):
    """Composites whose entries differ, stacked along a batch dimension; samples are lazy stacks.

    Args:
        specs: Composites of one shape and device.
        dim: the stack dimension.

    ``keys`` and their like show the entries that all have and that can be stacked; ``specs`` holds the
    single Composites.

    Example:
        >>> from rollwright.data import Unbounded, stack
        >>> spec = stack([Composite(obs=Unbounded((3,))), Composite(obs=Unbounded((4,)))])
        >>> spec["obs"].shape
        torch.Size([2, -1])
        >>> [part["obs"].shape[-1] for part in spec.rand().unbind(0)]
        [3, 4]
    """

    _sample_type = TensorDictBase
    _wanted = "a TensorDict whose batch size"

    def __init__(self, specs: Sequence[Composite], dim: int = 0) -> None:
        self.specs = list(specs)
        first = self.specs[0]
        self.dim = dim + first.ndim + 1 if dim < 0 else dim
        self._shape = torch.Size((*first.shape[: self.dim], len(self.specs), *first.shape[self.dim :]))

    @property
    def entries(self) -> dict[str, TensorSpec | None]:  # type: ignore[override]
        """The entries that all have and that can be stacked, by name."""
        stacks = {name: self._stack_of(name) for name in self.specs[0]}
        return {name: spec for name, spec in stacks.items() if spec is not MISSING}

    def _stack_of(self, key: NestedKey) -> Any:
        """The stack of the entries of a key; None where one has no spec, MISSING where they cannot be stacked."""
        found = [spec.get(key, MISSING) for spec in self.specs]
        if any(spec is MISSING for spec in found):
            return MISSING
        if any(spec is None for spec in found):
            return None
        try:
            return torch.stack(found, self.dim)
        except ValueError:  # such as a leaf here and a Composite there
            return MISSING

    @property
    def shape(self) -> torch.Size:
        """Batch size of the samples, the stack dimension included; see :attr:`Composite.shape`."""
        return self._shape

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        size = as_size(shape)
        if len(size) <= self.dim or size[self.dim] != len(self.specs):
            raise ValueError(
                f"shape: expected one whose dimension {self.dim}, along which Composites are stacked, is "
                f"{len(self.specs)}, got {list(size)}. Stack others."
            )
        for spec in self.specs:
            spec.shape = torch.Size((*size[: self.dim], *size[self.dim + 1 :]))
        self._shape = size

    @property
    def stack_dim(self) -> int:
        """Same as ``dim``."""
        return self.dim

    @property
    def device(self) -> torch.device | None:
        """Device of the samples."""
        return self.specs[0].device  # type: ignore[no-any-return]

    @device.setter
    def device(self, device: DeviceLike) -> None:
        for spec in self.specs:
            spec.device = device

    def clear_device_(self) -> Self:
        """Set the device to None, in place."""
        for spec in self.specs:
            spec.clear_device_()
        return self

    @property
    def is_locked(self) -> bool:
        """Whether entries may be neither set nor removed."""
        return any(spec.is_locked for spec in self.specs)

    def _set_lock(self, locked: bool, recurse: bool) -> Self:
        for spec in self.specs:
            spec.lock_(recurse) if locked else spec.unlock_(recurse)
        return self

    def get(self, key: NestedKey, default: Any = None) -> Any:
        """The stack of the entries of a (nested) key, ``default`` where one has none."""
        found = self._stack_of(key)
        return default if found is MISSING else found

    def set(self, key: NestedKey, spec: TensorSpec | Mapping[Any, Any] | None) -> Self:
        """Put an entry, whose shape includes the stack dimension, in every Composite, in place."""
        adopted = self._adopt(as_tuple(key)[-1], spec)
        parts = [None] * len(self.specs) if adopted is None else adopted.unbind(self.dim)
        for own, part in zip(self.specs, parts, strict=True):
            own.set(key, part)
        return self

    def __delitem__(self, key: NestedKey) -> None:
        self._check_unlocked()
        having = [spec for spec in self.specs if key in spec]
        if not having:
            raise self._unknown(key)
        for spec in having:
            del spec[key]

    def update(self, specs: Mapping[Any, Any] | Composite) -> Self:
        """Put all entries of a mapping, whose shapes include the stack dimension, in place."""
        if not isinstance(specs, Composite):
            specs = Composite(specs, shape=self.shape, device=self.device)
        for own, part in zip(self.specs, specs.unbind(self.dim), strict=True):
            own.update(part)
        return self

    def rebatched(self, shape: torch.Size) -> Self:
        """The same entries with more of their dimensions counted as batch."""
        rest = torch.Size((*shape[: self.dim], *shape[self.dim + 1 :]))
        return self._restacked(lambda spec: spec.rebatched(rest), self.dim)  # type: ignore[no-any-return]

    def select(self, *keys: NestedKey, strict: bool = True) -> Self:
        """A stack of the given entries only."""
        return self._restacked(lambda spec: spec.select(*keys, strict=strict), self.dim)  # type: ignore[no-any-return]

    def exclude(self, *keys: NestedKey) -> Self:
        """A stack without the given entries."""
        return self._restacked(lambda spec: spec.exclude(*keys), self.dim)  # type: ignore[no-any-return]

    def empty(self) -> Self:
        """A stack without entries."""
        return self._restacked(lambda spec: spec.empty(), self.dim)  # type: ignore[no-any-return]

    def is_empty(self, recurse: bool = False) -> bool:
        """Whether no Composite of the stack has an entry."""
        return all(spec.is_empty(recurse) for spec in self.specs)

    def _sample(self, shape: ShapeLike, draw: Callable[[TensorSpec, torch.Size], Any]) -> TensorDictBase:
        sizes = as_size(shape)
        parts = [draw(spec, sizes) for spec in self.specs]
        return lazy_stack(parts, len(sizes) + self.dim)  # type: ignore[no-any-return]

    def cardinality(self) -> int | float:
        """The product of the parts' cardinalities."""
        product: int | float = math.prod(spec.cardinality() for spec in self.specs)
        return product

    def enumerate(self, use_mask: bool = False) -> NoReturn:
        """Raise: the parts have different numbers of values."""
        raise ValueError(f"enumerate: expected specs that agree, got {self!r}. Enumerate each of spec.specs.")

    def type_check(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where an entry is missing or has another dtype; see :meth:`Composite.type_check`."""
        if key is not None and key in self and not isinstance(val, TensorDictBase):
            self[key].type_check(val, key)
            return
        for spec, part in self._checked(val, key):
            spec.type_check(part, key)

    def project(self, val: Any) -> Any:
        """Every part mapped into its spec, as a lazy stack; ``val`` itself where it is a member."""
        parts = self._checked(val)
        if self.is_in(val):
            return val
        return lazy_stack([spec.project(part) for spec, part in parts], self._position(val))

    def encode(self, val: Any) -> TensorDictBase:
        """A lazy stack from a sequence of mappings, one for each part."""
        if isinstance(val, TensorDictBase):
            val = val.unbind(self.dim)
        if isinstance(val, Mapping) or len(val) != len(self.specs):
            raise SpecError(f"value: expected a sequence of {len(self.specs)} mappings, got {val!r}.")
        parts = [spec.encode(part) for spec, part in zip(self.specs, val, strict=True)]
        return lazy_stack(parts, self.dim)  # type: ignore[no-any-return]

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """A list of nested dicts of arrays, one for each part."""
        return [spec.to_numpy(part, safe) for spec, part in self._checked(val)]


@overload
def stack(specs: Sequence[Composite], dim: int = 0) -> Composite: ...
@overload
def stack(specs: Sequence[TensorSpec], dim: int = 0) -> TensorSpec: ...
def stack(specs: Sequence[TensorSpec], dim: int = 0) -> TensorSpec:
    """Stack specs along a new dimension; ``torch.stack`` of specs does the same.

    Specs that differ in bounds, masks or nothing give one spec; others a :class:`Stacked`, and
    Composites whose entries differ a :class:`StackedComposite`.

    Args:
        specs: at least one spec; all leaves, or all Composites.
        dim: the new dimension.

    Raises:
        ValueError: nothing to stack, leaves mixed with Composites, or other dtypes, devices or
            numbers of dimensions.

    Example:
        >>> from rollwright.data import Bounded, Unbounded
        >>> stack([Bounded(0.0, 1.0, (3,)), Bounded(0.0, 2.0, (3,))]).high[:, 0]
        tensor([1., 2.])
        >>> stack([Unbounded((3,)), Unbounded((4,))]).shape
        torch.Size([2, -1])
    """
    specs = list(specs)
    if not specs:
        raise ValueError("specs: expected at least one spec to stack, got none.")
    first = specs[0]
    composite = isinstance(first, Composite)
    kinds = {(isinstance(spec, Composite), spec.dtype, spec.device, spec.ndim) for spec in specs}
    if len(kinds) > 1 or (composite and len({spec.shape for spec in specs}) > 1):
        raise ValueError(
            "specs: expected leaves of one dtype, device and number of dimensions, or Composites of one "
            f"shape and device, got {specs!r}. Put different leaves under keys of a Composite."
        )
    dim = dim + first.ndim + 1 if dim < 0 else dim
    if not 0 <= dim <= first.batch_ndim:
        raise ValueError(f"dim: expected a new dimension among the first {first.batch_ndim + 1}, got {dim}.")
    if composite:
        return _stack_composites(specs, dim)
    dense = first.stack_with(specs[1:], dim) if isinstance(first, LeafSpec) else None
    return Stacked(specs, dim) if dense is None else dense


def _stack_composites(specs: Sequence[Any], dim: int) -> Composite:
    first: Composite = specs[0]
    if any(isinstance(spec, StackedComposite) or set(spec) != set(first) for spec in specs):
        return StackedComposite(specs, dim)
    entries: dict[str, TensorSpec | None] = {}
    for name in first:
        found = [spec[name] for spec in specs]
        if any(each is None for each in found):  # only the key is known
            if any(each is not None for each in found):
                return StackedComposite(specs, dim)
            entries[name] = None
            continue
        try:
            entries[name] = stack(found, dim)
        except ValueError:  # entries of one name that are too different even for a lazy stack
            return StackedComposite(specs, dim)
    if any(isinstance(entry, (Stacked, StackedComposite)) for entry in entries.values()):
        return StackedComposite(specs, dim)
    shape = torch.Size((*first.shape[:dim], len(specs), *first.shape[dim:]))
    return first.with_entries(entries, shape)


implements(torch.stack, stack)
