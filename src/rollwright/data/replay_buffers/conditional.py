"""Changes of entries of elements that are stored: by place, or unless they were overwritten since they were drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, checked_key, key_str, leaves, unravel
from rollwright._tensors import as_tensor
from rollwright.data.replay_buffers.storages.rows import RowStorage
from rollwright.data.replay_buffers.storages.storage import Storage

Index = NDArray[np.int64]


class ConditionalUpdateResult(NamedTuple):
    """What became of a conditional change.

    Attributes:
        updated: bool ``[n]``: the element was changed.
        version_rejected: bool ``[n]``: it was there, and what is stored is of a newer version; None: versions were not
            compared.
    """

    updated: torch.Tensor
    version_rejected: torch.Tensor | None = None

    @property
    def updated_count(self) -> int:
        """Number of elements that were changed."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of elements that were there, of a newer version; 0 where versions were not compared."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of elements that were overwritten or dropped since they were drawn."""
        return len(self.updated) - self.updated_count - self.version_rejected_count


def still_there(storage: Storage, flat: Index, generation: Any) -> NDArray[np.bool_]:
    """Whether elements are those that were drawn, bool ``[n]``. For use while reading.

    Raises:
        ValueError: generations of another number than elements.
    """
    given = np.asarray(generation.cpu() if isinstance(generation, torch.Tensor) else generation, np.int64).reshape(-1)
    if len(given) != len(flat):
        raise ValueError(
            f"generation: expected one for each of the {len(flat)} elements, got {len(given)}. Pass "
            "'index_generation' of the batch along with its 'index'."
        )
    now = storage.generations(flat)
    same: NDArray[np.bool_] = (now == given) & (now >= 0)
    return same


def update_if_present(
    storage: Storage,
    flat: Index,
    generation: Any,
    patch: Mapping[NestedKey, Any] | TensorDictBase,
    version_key: NestedKey | None,
    version: Any,
    require_newer: bool,
) -> ConditionalUpdateResult:
    """Change entries of elements that are still those that were drawn; see :meth:`ReplayBuffer.update_if_present`."""
    if not isinstance(storage, RowStorage):
        raise TypeError(
            f"update_if_present: {type(storage).__name__} has no entries that can be changed alone. Use a "
            "LazyTensorStorage or a LazyMemmapStorage."
        )
    if (version_key is None) != (version is None):
        raise ValueError("version_key, version: expected both or neither, got one. Pass the version of the patch.")
    values = _known("patch", storage, patch)
    if version_key is not None:
        version_key = checked_key("version_key", version_key)
        if version_key in values:
            raise ValueError(f"patch: expected it without version_key {version_key!r}, which is written with it.")
    elif not values:
        raise ValueError("patch: expected at least one entry to change, got none.")
    values = {key: storage.in_index_order(as_tensor(value), flat, storage.dim_extend) for key, value in values.items()}
    entries = _fitting("patch", storage, values, flat.shape)
    if version_key is not None:
        entries[version_key] = _versions(storage, version_key, version, flat)
    with storage.ledger.changing_in_place():
        present = still_there(storage, flat, generation)
        chosen, rejected = np.flatnonzero(present), None
        if version_key is not None:
            newest = _newest(storage, flat, chosen, version_key, entries[version_key], require_newer)
            rejected = present.copy()
            rejected[newest] = False
            chosen = newest
        places = torch.from_numpy(chosen)
        storage.write_entries(flat[chosen], {key: value[places] for key, value in entries.items()})
    updated = torch.zeros(len(flat), dtype=torch.bool, device="cpu")
    updated[places] = True
    return ConditionalUpdateResult(updated, None if rejected is None else torch.from_numpy(rejected))


def _versions(storage: RowStorage, key: NestedKey, version: Any, flat: Index) -> torch.Tensor:
    """The versions of a patch, in the shape and dtype of the entry."""
    if key not in storage.fields:
        raise KeyError(f"version_key: there is no entry {key!r}; the storage has {key_str(storage.keys())}.")
    shape, dtype = storage.fields[key]
    value: torch.Tensor = storage.in_index_order(as_tensor(version, dtype=dtype), flat, storage.dim_extend)
    n = len(flat)
    if torch.Size(shape).numel() != 1 or value.numel() not in (1, n):
        raise ValueError(
            f"version: expected one number, or one for each of the {n} elements, for an entry of one number each, got "
            f"{list(value.shape)} for {key!r} of shape {list(shape)}."
        )
    return value.reshape(-1).expand(n).reshape(n, *shape)


def _newest(
    storage: RowStorage, flat: Index, present: Index, key: NestedKey, version: torch.Tensor, require_newer: bool
) -> Index:
    """Of the elements that are there, those whose version is newer than what is stored; of one element the newest."""
    stored = storage.read_entry(key, flat[present]).reshape(-1).numpy(force=True)
    given = version.reshape(-1).numpy(force=True)[present]
    wins = given > stored if require_newer else given >= stored
    candidates, given = present[wins], given[wins]
    order = np.lexsort((np.arange(len(candidates)), given, flat[candidates]))  # the newest of each last
    last = np.append(flat[candidates][order][1:] != flat[candidates][order][:-1], True)[: len(order)]
    chosen: Index = np.sort(candidates[order[last]])
    return chosen


def flat_entries(data: Mapping[NestedKey, Any] | TensorDictBase) -> dict[NestedKey, Any]:
    """The entries of a TensorDict, or of a dictionary whose values may be such, by their whole names.

    >>> flat_entries({"a": 1, "next": {"b": 2}, ("next", "c"): 3})
    {'a': 1, ('next', 'b'): 2, ('next', 'c'): 3}
    """
    if isinstance(data, TensorDictBase):
        return leaves(data)
    found: dict[NestedKey, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping | TensorDictBase):
            found |= {unravel((*as_tuple(key), *as_tuple(name))): leaf for name, leaf in flat_entries(value).items()}
        else:
            found[unravel(key)] = value
    return found


def set_entries(
    storage: Storage, data: Mapping[NestedKey, Any] | TensorDictBase, index: Any = None, dim: int | None = None
) -> None:
    """Change entries of elements; all come to light at once.

    Args:
        storage: of rows of tensors.
        data: new values of some entries, ``[*index, *entry]`` or what broadcasts to that; dictionaries may be nested.
        index: as ``sample`` and ``extend`` give it, or a slice of places; None: of all that is stored.
        dim: of the batch of all that is stored, the dimension that grows; None: that of the storage.

    Raises:
        TypeError: the storage has no rows of tensors.
        KeyError, ValueError: entries do not fit what is stored.
        IndexError: there is no such element.
    """
    if not isinstance(storage, RowStorage):
        raise TypeError(
            f"storage: {type(storage).__name__} has no entries that can be changed alone. Use a LazyTensorStorage or a "
            "LazyMemmapStorage, or replace elements: buffer[index] = data."
        )
    values = _known("data", storage, data)
    with storage.ledger.changing_in_place():
        if index is None or isinstance(index, slice):
            chosen = storage.elements_at(slice(None) if index is None else index, dim)
        else:
            chosen = storage.flat(index)
            if not (storage.generations(chosen) >= 0).all():
                raise IndexError(f"index: expected places of elements that are stored, got {index!r}.")
            dim = storage.dim_extend if dim is None else dim
            values = {key: storage.in_index_order(value, chosen, dim) for key, value in values.items()}
            if storage.ndim == 1:
                chosen = chosen.reshape(index.shape if isinstance(index, torch.Tensor) else np.shape(index))
        entries = _fitting("data", storage, values, chosen.shape)
        storage.write_entries(chosen.reshape(-1), entries)


def _known(name: str, storage: RowStorage, data: Mapping[NestedKey, Any] | TensorDictBase) -> dict[NestedKey, Any]:
    """Values by entry, all of which are stored."""
    values = flat_entries(data)
    unknown = [key for key in values if key not in storage.fields]
    if unknown:
        raise KeyError(f"{name}: expected entries among {key_str(storage.keys())}, got {key_str(unknown)}.")
    return values


def _fitting(
    name: str, storage: RowStorage, values: Mapping[NestedKey, Any], shape: tuple[int, ...]
) -> dict[NestedKey, torch.Tensor]:
    """Values of entries, ``[n, *entry]``, of their dtypes."""
    found = {}
    for key, value in values.items():
        feature, dtype = storage.fields[key]
        tensor = value if isinstance(value, torch.Tensor) else as_tensor(value, dtype=dtype)
        try:
            if tensor.dtype != dtype:
                raise RuntimeError
            found[key] = tensor.broadcast_to((*shape, *feature)).reshape(math.prod(shape), *feature)
        except RuntimeError:
            raise ValueError(
                f"{name}: expected {key!r} of shape {[*shape, *feature]} and {dtype}, got {list(tensor.shape)} and "
                f"{tensor.dtype}. Convert it."
            ) from None
    return found
