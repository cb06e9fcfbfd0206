"""StatefulTransform: a change of entries by what was kept of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from rollwright._keys import NestedKey
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.base import Transform
from rollwright.errors import NotNative


class StatefulTransform(Transform):
    """Changes each of some observations by what it keeps of its past; each row of a batch has its own.

    Attributes:
        reset_key: ``"_reset"`` entry that begins it again; None: that of the environment, or of the group of agents
            that the observation is of.
    """

    reset_key: NestedKey | None = None

    @abstractmethod
    def _next(self, kind: Any, index: int, value: torch.Tensor) -> torch.Tensor:
        """The new value of the entry at ``index``, a place among ``in_keys``, in a step."""

    @abstractmethod
    def _first(self, kind: Any, index: int, value: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        """The same at a reset of the rows that are ``fresh``; None: of all."""

    def _keep(self, kind: Any, name: str, begun: torch.Tensor, fresh: torch.Tensor | None) -> None:
        """Keep in a buffer what was begun, and in rows that are not ``fresh`` what is there."""
        past = self._buffers[name]
        if fresh is not None and past is not None and past.shape == begun.shape:
            self._buffers[name] = torch.where(fresh, begun, past)
        else:
            self._buffers[name] = kind.kept(begun)

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for index, (in_key, out_key) in enumerate(self._pairs()):
            out[out_key] = kind.whole(self._next(kind, index, kind.tensor(index, self._read(out, in_key))))

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        for index, (in_key, out_key) in enumerate(self._pairs()):
            if (column := fresh.get(in_key, None)) is None:
                continue
            value = kind.tensor(index, column)
            marks = self._fresh(kind, given, in_key, value)
            if self.reset_key is not None and (mask := given.get(self.reset_key, None)) is not None:
                marks = mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
            fresh[out_key] = kind.whole(self._first(kind, index, value, marks))

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        self._needs_all_rows(env)
        name = type(self).__name__
        if self.reset_key not in (None, *(group.reset for group in self._groups)):
            raise NotNative(f"{name} has a reset_key of its own")
        entries: dict[NestedKey, Entry] = {}
        forms: list[Entry] = []
        for key, out_key in self._pairs():
            entry = {**env.entries, **entries}.get(key)
            if entry is None:
                raise NotNative(f"{name} changes {key!r}, which is no observation")
            forms.append(entry)
            entries[out_key] = self._changed_entry(key, entry, len(env.batch))
        return self._on_rows(env, forms, restarts=True, entries=entries)

    def _changed_entry(self, key: NestedKey, entry: Entry, ndim: int) -> Entry:
        """What an entry becomes on arrays.

        Args:
            key: of the entry.
            entry: its form.
            ndim: dimensions of the batch.
        """
        return entry.replace(column=False)
