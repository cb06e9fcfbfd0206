"""Layouts of the input data of hosted environments in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rollwright._keys import NestedKey
from rollwright._memory import Layout, Segment
from rollwright.envs.batched.hosting.messages import SetLayout
from rollwright.envs.batched.hosting.shared_rows import SharedRows

MOST_LAYOUTS = 16

Signature = tuple[tuple[NestedKey, tuple[int, ...], torch.dtype | np.dtype[Any]], ...]
Entries = Mapping[NestedKey, tuple[tuple[int, ...], torch.dtype]]


class InputLayouts:
    """A layout for each set of entries that is sent, and which process was sent it.

    Args:
        segment: shared with the processes.
        num_processes: how many of these.
    """

    def __init__(self, segment: Segment, num_processes: int) -> None:
        self._segment = segment
        self._first_free = self._free = 0
        self._layouts: dict[Signature, tuple[int, SharedRows]] = {}
        self._last = 0
        self._known: list[set[int]] = [set() for _ in range(num_processes)]  # by process
        self._forgets = [False] * num_processes

    def begin_at(self, first_free: int) -> None:
        """Use the memory from this byte on."""
        self._free = self._first_free = first_free

    @property
    def is_full(self) -> bool:
        """Whether there are so many that the next one needs a :meth:`clear` before."""
        return len(self._layouts) == MOST_LAYOUTS

    def clear(self) -> None:
        """Forget all, here and in the processes; none may be reading any."""
        self._layouts.clear()
        self._free = self._first_free
        self._forgets = [True] * len(self._known)

    def find(self, signature: Signature) -> tuple[int, SharedRows] | None:
        """The number and the memory for these entries; None where there is none yet."""
        return self._layouts.get(signature)

    def add(self, signature: Signature) -> tuple[int, SharedRows]:
        """Lay out these entries: keys, shapes ``[rows, *]``, dtypes."""
        layout = Layout.of(((key, shape, _of_torch(dtype)) for key, shape, dtype in signature), self._free)
        rows = SharedRows(self._segment, layout)
        self._free = layout.end
        self._last += 1
        self._layouts[signature] = self._last, rows
        return self._last, rows

    def begin_anew(self, process: int) -> None:
        """Another process is in its place, which was sent none."""
        self._known[process].clear()
        self._forgets[process] = False

    def message(self, process: int, number: int) -> SetLayout | None:
        """What a process has to be sent before it can read a layout; None if nothing."""
        if number in self._known[process]:
            return None
        rows = next(rows for known, rows in self._layouts.values() if known == number)
        forgets, self._forgets[process] = self._forgets[process], False
        if forgets:
            self._known[process].clear()
        self._known[process].add(number)
        return SetLayout(number, rows.layout, forgets)


def _of_torch(dtype: torch.dtype | np.dtype[Any]) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.empty(0, dtype)).dtype
