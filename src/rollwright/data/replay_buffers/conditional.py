"""Changes of elements that were drawn, unless they were overwritten since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, checked_key, key_str
from rollwright._tensors import as_tensor
from rollwright.data.replay_buffers.storages.base import Storage
from rollwright.data.replay_buffers.storages.entries import flat_entries
from rollwright.data.replay_buffers.storages.rows import RowStorage

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
    given = flat_entries(patch).items()
    values = {key: _ordered(storage, as_tensor(value), flat) for key, value in given}
    if version_key is not None:
        version_key = checked_key("version_key", version_key)
        if version_key in values:
            raise ValueError(f"patch: expected it without version_key {version_key!r}, which is written with it.")
        values[version_key] = _versions(storage, version_key, version, flat)
    if not values:
        raise ValueError("patch: expected at least one entry to change, got none.")
    storage.check_entries(values, len(flat))
    with storage.ledger.changing_in_place():
        present = still_there(storage, flat, generation)
        chosen, rejected = np.flatnonzero(present), None
        if version_key is not None:
            newest = _newest(storage, flat, chosen, version_key, values[version_key], require_newer)
            rejected = present.copy()
            rejected[newest] = False
            chosen = newest
        places = torch.from_numpy(chosen)
        storage.write_entries(flat[chosen], {key: value[places] for key, value in values.items()})
    updated = torch.zeros(len(flat), dtype=torch.bool, device="cpu")
    updated[places] = True
    return ConditionalUpdateResult(updated, None if rejected is None else torch.from_numpy(rejected))


def _ordered(storage: RowStorage, value: torch.Tensor, flat: Index) -> torch.Tensor:
    found: torch.Tensor = storage.in_index_order(value, flat, storage.dim_extend)
    return found


def _versions(storage: RowStorage, key: NestedKey, version: Any, flat: Index) -> torch.Tensor:
    """The versions of a patch, in the shape and dtype of the entry."""
    if key not in storage.fields:
        raise KeyError(f"version_key: there is no entry {key!r}; the storage has {key_str(storage.keys())}.")
    shape, dtype = storage.fields[key]
    value, n = _ordered(storage, as_tensor(version, dtype=dtype), flat), len(flat)
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
