"""StackedComposite: Composites whose entries differ, stacked along a batch dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from tensordict import TensorDictBase, lazy_stack

from rollwright._keys import NestedKey, as_tuple
from rollwright.data.specs.base import TensorSpec
from rollwright.data.specs.composite import Composite
from rollwright.data.specs.mapping import MISSING
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, as_size
from rollwright.data.specs.stacks.stacked import LazyStack
from rollwright.errors import SpecError


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
