"""Composite: a mapping of specs under nested keys, as a TensorDict is a mapping of tensors."""

from __future__ import annotations

import contextlib
import copy
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)

from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright.data.specs.leaf import NonTensor
from rollwright.data.specs.mapping import SpecMapping, converted, is_key
from rollwright.data.specs.shapes import DeviceLike, ShapeLike, as_device, as_size, index_shape
from rollwright.data.specs.spec import TensorSpec
from rollwright.errors import SpecError


class Composite(SpecMapping):
    """Specs under nested keys; its samples are TensorDicts.

    Args:
        specs: a mapping from (nested) keys to specs (TorchRL's are converted), to further mappings, or to None: of such
            an entry only the key is known. Samples leave it out, and checks take whatever is there, or nothing.
        shape: batch size of the samples, with which the shape of every entry begins.
        device: device of the samples, to which entries are moved; None: each entry keeps its own.
        batch_size: same as ``shape``.
        kwargs: more entries, by name.

    Raises:
        ValueError: the shape of an entry does not begin with ``shape``. (A Composite or NonTensor entry
            with fewer batch dimensions takes over those of its parent.)
        TypeError: an entry is no spec, or a key is no string.

    Unlike other specs it can be changed: ``set``, ``pop``, ``update``, ``del`` and ``device = ...`` work
    in place. ``spec["a", "b"]`` looks up a key; any other index selects along the batch.

    Example:
        >>> from rollwright.data import Bounded, Categorical
        >>> spec = Composite(obs=Bounded(-1.0, 1.0, (4, 3)), info={"mode": Categorical(2, (4,))}, shape=(4,))
        >>> spec
        Composite(
            obs: Bounded(low=-1.0, high=1.0, shape=[4, 3], dtype=float32, device=cpu),
            info: Composite(
                mode: Categorical(n=2, shape=[4], dtype=int64, device=cpu),
                shape=[4], device=None),
            shape=[4], device=None)
        >>> list(spec.keys(True, True))
        ['obs', ('info', 'mode')]
        >>> spec.rand().batch_size, spec[0]["obs"].shape
        (torch.Size([4]), torch.Size([3]))
    """

    dtype = None

    def __init__(
        self,
        specs: Mapping[Any, Any] | Composite | None = None,
        /,
        *,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        batch_size: ShapeLike = None,
        **kwargs: Any,
    ) -> None:
        if shape is not None and batch_size is not None:
            raise ValueError(f"batch_size: expected it or shape, got both ({batch_size} and {shape}). Drop one.")
        if specs is not None and not isinstance(specs, (Mapping, Composite)):
            raise TypeError(f"specs: expected a mapping from keys to specs, got {type(specs).__name__}.")
        self._shape = as_size(batch_size if shape is None else shape)
        self._device = as_device(device)
        self.entries = {}
        for entries in (specs, kwargs):
            for key, spec in () if entries is None else entries.items():
                self.set(key, spec)

    @property
    def domain(self) -> str:
        """``"composite"``; each entry has its own."""
        return "composite"

    @property
    def shape(self) -> torch.Size:
        """Batch size of the samples; set, it is also that of nested Composites whose entries begin with it.

        Raises:
            ValueError: the shape of an entry does not begin with it.
        """
        return self._shape

    @shape.setter
    def shape(self, shape: ShapeLike) -> None:
        self._check_unlocked()
        size, before = as_size(shape), self._shape
        self._shape = size
        try:
            self.entries = {name: self._adopt(name, spec) for name, spec in self.entries.items()}
        except ValueError:
            self._shape = before
            raise

    @property
    def batch_size(self) -> torch.Size:
        """Same as :attr:`shape`."""
        return self.shape

    @batch_size.setter
    def batch_size(self, shape: ShapeLike) -> None:
        self.shape = as_size(shape)

    @property
    def device(self) -> torch.device | None:
        """Device of the samples; setting it moves the entries, None lifts the restriction."""
        return self._device

    @device.setter
    def device(self, device: DeviceLike) -> None:
        target = as_device(device)
        if target is not None:
            self.entries = {name: None if spec is None else spec.to(target) for name, spec in self.entries.items()}
        self._device = target

    def clear_device_(self) -> Self:
        """Set the device to None, in nested Composites as well, in place."""
        self._device = None
        for spec in self.values():
            if isinstance(spec, Composite):
                spec.clear_device_()
        return self

    # Mapping ----------------------------------------------------------------------------------

    def set(self, key: NestedKey, spec: TensorSpec | Mapping[Any, Any] | None) -> Self:
        """Put an entry under a (nested) key, in place; missing Composites are created.

        None: only the key is known.

        Raises:
            ValueError: the shape of the spec does not begin with this one's.
            TypeError: the key or the spec is none.
            RuntimeError: it is locked, see :meth:`lock_`.
        """
        if not isinstance(key, str) and not is_key(key):
            raise TypeError(f"key: expected a string or a tuple of strings, got {key!r}.")
        name, *rest = (key,) if isinstance(key, str) else key
        child = self.entries.get(name)
        if rest and isinstance(child, Composite):
            child.set(tuple(rest), spec)
            return self
        self._check_unlocked()
        if rest:
            self.entries[name] = Composite(shape=self.shape, device=self.device).set(tuple(rest), spec)
        else:
            self.entries[name] = self._adopt(name, spec)
        return self

    def __setitem__(self, key: NestedKey, spec: TensorSpec | Mapping[Any, Any] | None) -> None:
        self.set(key, spec)

    def _adopt(self, name: str, spec: object) -> TensorSpec | None:
        """The spec as an entry of this Composite: of its batch, on its device."""
        if spec is None:
            return None
        if isinstance(spec, Mapping):
            spec = Composite(spec, shape=self.shape, device=self.device)
        elif not isinstance(spec, TensorSpec):
            spec = converted(spec)
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{name!r}: expected a TensorSpec, a mapping of them or None, got {type(spec).__name__}.")
        shape, batch = spec.shape, self._shape
        if shape[: len(batch)] != batch:
            if isinstance(spec, (Composite, NonTensor)) and shape == batch[: len(shape)]:
                spec = spec.rebatched(batch)
            else:
                raise ValueError(
                    f"{name!r}: expected a spec whose shape begins with the Composite's {list(batch)}, "
                    f"got {spec!r}. Use spec.expand({[*batch, *shape]}), or another shape "
                    "for the Composite."
                )
        if spec.batch_ndim < self.batch_ndim:
            raise ValueError(
                f"{name!r}: expected a spec whose first {len(batch)} dimensions are batch dimensions, "
                f"got {spec!r}, "
                f"whose last ones belong to one value. Expand it to the batch {list(batch)} first."
            )
        device = self.device
        return spec if device is None else spec.to(device)

    def rebatched(self, shape: torch.Size) -> Self:
        """The same entries with more of their dimensions counted as batch."""
        new = self.with_entries({}, shape)
        for name, spec in self.entries.items():
            new.set(name, spec)
        return new

    def update(self, specs: Mapping[Any, Any] | Composite) -> Self:
        """Put all entries of a mapping, in place; nested Composites are merged."""
        for key, spec in specs.items():
            known = self.get(key)
            if isinstance(known, Composite) and isinstance(spec, (Mapping, Composite)):
                known.update(spec)
            else:
                self.set(key, spec)
        return self

    def empty(self) -> Self:
        """A Composite of the same shape and device without entries."""
        return self.with_entries({})

    # Samples ----------------------------------------------------------------------------------

    def _sample(self, shape: ShapeLike, draw: Callable[[TensorSpec, torch.Size], Any]) -> TensorDictBase:
        sizes = as_size(shape)
        entries = {name: draw(spec, sizes) for name, spec in self.entries.items() if spec is not None}
        return TensorDict(entries, batch_size=[*sizes, *self._safe_shape], device=self.device)

    def rand(self, shape: ShapeLike = ()) -> TensorDictBase:
        """A random TensorDict of batch size ``[*shape, *self.shape]``."""
        return self._sample(shape, lambda spec, sizes: spec.rand(sizes))

    def zero(self, shape: ShapeLike = ()) -> TensorDictBase:
        """A TensorDict of zeros, of batch size ``[*shape, *self.shape]``."""
        return self._sample(shape, lambda spec, sizes: spec.zero(sizes))

    def one(self, shape: ShapeLike = ()) -> TensorDictBase:
        """A TensorDict of ones, of batch size ``[*shape, *self.shape]``."""
        return self._sample(shape, lambda spec, sizes: spec.one(sizes))

    def cardinality(self) -> int | float:
        """The product of the entries' cardinalities."""
        return math.prod(spec.cardinality() for spec in self.entries.values() if spec is not None)

    def enumerate(self, use_mask: bool = False) -> TensorDictBase:
        """All combinations of the entries' values, batch size ``[combinations, *self.shape]``."""
        values = {name: spec.enumerate(use_mask) for name, spec in self.entries.items() if spec is not None}
        counts = [torch.arange(value.shape[0], device=value.device) for value in values.values()]
        grids = torch.meshgrid(*counts, indexing="ij") if counts else ()
        picked = {name: value[grid.flatten()] for (name, value), grid in zip(values.items(), grids, strict=True)}
        batch = [math.prod(len(count) for count in counts), *self._safe_shape]
        return TensorDict(picked, batch_size=batch, device=self.device)

    def is_in(self, val: Any) -> bool:
        """Whether every entry is there and lies in its spec; other entries of ``val`` do not matter."""
        if not _has_entries(val):
            return False
        if isinstance(val, LazyStackedTensorDict):
            parts = self._parts(val)
            return parts is not None and all(spec.is_in(part) for spec, part in parts)
        return all(
            spec.is_in(part)
            for name, spec in self.entries.items()
            if spec is not None
            if (part := val.get(name, None)) is not None or not _optional(spec)
        )

    def _parts(self, val: LazyStackedTensorDict) -> list[tuple[TensorSpec, Any]] | None:
        """A lazy stack's TensorDicts, each with its spec (entries of different shape cannot be stacked)."""
        dim = val.stack_dim - (val.ndim - self.ndim)
        parts = val.tensordicts
        if dim < 0:
            return [(self, part) for part in parts]
        if self.shape[dim] not in (-1, len(parts)):
            return None
        first = (slice(None),) * dim
        return [(self[(*first, 0 if self.shape[dim] == -1 else i)], part) for i, part in enumerate(parts)]

    def assert_is_in(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` that names the first entry that is missing or not in its spec."""
        if self.is_in(val):
            return
        path = () if key is None else as_tuple(key)
        name = repr(unravel(path)) if path else "value"
        if not _has_entries(val):
            raise SpecError(f"{name}: expected a TensorDict with {key_str(self.keys())}, got {type(val).__name__}.")
        if isinstance(val, LazyStackedTensorDict):
            parts = self._parts(val)
            if parts is None:
                raise SpecError(
                    f"{name}: expected a batch size that ends in {list(self.shape)}, "
                    f"got {list(val.batch_size)}. Index or reshape the TensorDict."
                )
            for spec, part in parts:
                spec.assert_is_in(part, key)
        for child, spec, part in self._present(val, path):
            spec.assert_is_in(part, (*path, child))

    def _present(self, val: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, TensorSpec, Any]]:
        """Name, spec and value of each entry; a SpecError where one is missing."""
        for name, spec in self.entries.items():
            part = val.get(name, None)
            if spec is None:
                continue
            if part is not None:
                yield name, spec, part
            elif not _optional(spec):
                raise SpecError(
                    f"{unravel((*path, name))!r}: expected an entry for {spec!r}, got only {_names(val)}. "
                    "Write the entry, or take it out of the spec."
                )

    def type_check(self, val: Any, key: NestedKey | None = None) -> None:
        """Raise :class:`SpecError` where an entry is missing or has another dtype than its spec.

        Args:
            val: a TensorDict; with the key of an entry, the value of that one will do.
            key: what to call the value in the message.
        """
        path = () if key is None else as_tuple(key)
        if path in self and not _has_entries(val):  # the value of that entry
            self[path].type_check(val, key)
            return
        for name, spec, part in self._present(val, path):
            spec.type_check(part, (*path, name))

    def project(self, val: Any) -> Any:
        """A TensorDict with every entry mapped into its spec; ``val`` itself where it is a member.

        Raises:
            SpecError: an entry is missing, or its shape does not fit.
        """
        if self.is_in(val):
            return val
        out = val.copy()
        put = out.set if is_tensor_collection(out) else out.__setitem__
        for name, spec, part in self._present(val):
            with _under(name):
                put(name, spec.project(part))
        return out

    def encode(self, val: Any) -> TensorDictBase:
        """A TensorDict from a mapping of data; a tuple or list is read under the keys "0", "1", ….

        Raises:
            SpecError: entries are missing or unknown, or one cannot be encoded.
        """
        if isinstance(val, (tuple, list)):
            val = {str(i): part for i, part in enumerate(val)}
        if is_tensorclass(val):
            val = {name: val.get(name) for name in val.keys()}  # noqa: SIM118
        if not _has_entries(val):
            raise SpecError(f"value: expected a mapping with {key_str(self.keys())}, got {type(val).__name__}.")
        required = {name for name, spec in self.entries.items() if not _optional(spec)}
        present = set(val.keys())
        if not required <= present <= set(self.entries):
            raise SpecError(
                f"value: expected the entries {key_str(self.keys())}, got {_names(val)}. Make data and spec agree."
            )
        entries = {}
        for name, spec in self.entries.items():
            with _under(name):
                if spec is not None:
                    entries[name] = spec.encode(val[name]) if name in present else spec.zero()
                elif name in present:
                    entries[name] = val[name]
        return TensorDict(entries, batch_size=self._safe_shape, device=self.device)

    def to_numpy(self, val: Any, safe: bool | None = None) -> dict[str, Any]:
        """A nested dict of arrays, of the entries that have a spec."""
        if safe:
            self.assert_is_in(val)
        known = {name: spec for name, spec in self.entries.items() if spec is not None}
        return {name: spec.to_numpy(val.get(name)) for name, spec in known.items()}

    # Other specs ------------------------------------------------------------------------------

    def with_entries(self, entries: dict[str, TensorSpec | None], shape: torch.Size | None = None) -> Self:
        """A copy of other entries, which are not checked, and of another shape."""
        new = copy.copy(self)
        vars(new).pop("_is_locked", None)
        new.entries = entries
        new._shape = self._shape if shape is None else shape
        return new

    def _mapped(self, op: Callable[[TensorSpec], TensorSpec], shape: torch.Size | None = None) -> Self:
        return self.with_entries(
            {name: None if spec is None else op(spec) for name, spec in self.entries.items()}, shape
        )

    def clone(self) -> Self:
        """A copy of the mapping and of every spec in it."""
        return self.with_entries({name: None if spec is None else spec.clone() for name, spec in self.entries.items()})

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """The Composite on another device, or with all its entries of another dtype."""
        device = None if dest is None or isinstance(dest, torch.dtype) else as_device(dest)
        if dest is None or (device is not None and device == self.device):
            return self
        new = self._mapped(lambda spec: spec.to(dest))
        if device is not None:
            new.device = device
        return new

    def index_batch(self, idx: Any, ndim: int) -> Any:
        """Index the first ``ndim`` dimensions of all entries."""
        shape = index_shape(self.shape[:ndim], idx) + self.shape[ndim:]
        return self._mapped(lambda spec: spec.index_batch(idx, ndim), shape)

    def expand_batch(self, batch: torch.Size, ndim: int) -> Self:
        """Expand the first ``ndim`` dimensions of all entries to ``batch``."""
        return self._mapped(lambda spec: spec.expand_batch(batch, ndim), batch + self.shape[ndim:])

    def reshape_batch(self, batch: torch.Size, ndim: int) -> Self:
        """Reshape the first ``ndim`` dimensions of all entries to ``batch``."""
        return self._mapped(lambda spec: spec.reshape_batch(batch, ndim), batch + self.shape[ndim:])

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Composite):
            return False
        return self.shape == other.shape and self.device == other.device and self.entries == other.entries

    def __repr__(self) -> str:
        end = f"shape={list(self.shape)}, device={self.device})"
        if not self.entries:
            return f"{type(self).__name__}({end}"
        lines = ",\n".join([*(f"{name}: {spec!r}" for name, spec in self.entries.items()), end])
        return f"{type(self).__name__}(\n{textwrap.indent(lines, '    ')}"


def _has_entries(val: Any) -> bool:
    """Whether a value has entries by name: a TensorDict, a tensorclass or a dictionary."""
    return isinstance(val, (TensorDictBase, Mapping)) or (is_tensorclass(val) and not is_non_tensor(val))


def _optional(spec: TensorSpec | None) -> bool:
    """Whether an entry may be missing: one without a spec, or a Composite that holds nothing else."""
    return spec is None or (isinstance(spec, Composite) and not spec.leaves())


def _names(val: Any) -> str:
    """The keys of any mapping, for a message."""
    return ", ".join(sorted(map(repr, val.keys()))) or "no entries"


@contextlib.contextmanager
def _under(name: str) -> Iterator[None]:
    """Put a key before the message of a SpecError raised inside."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{name!r}: {error}") from error
