"""Columns of a storage of rows, read and written at random positions, and TensorDicts of what was read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from rollwright._keys import NestedKey, as_tuple
from rollwright._memory import in_numpy
from rollwright.data.unchecked import unchecked_td

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READ_ONLY = (torch.uint16, torch.uint32, torch.uint64)  # torch reads them at indices, and cannot write them


class Column:
    """Takes and puts rows of a tensor at indices.

    Takes on the CPU through NumPy, which costs a call less and takes fresh memory in huge pages where it is large.

    Args:
        rows: ``[n, ...]``.

    Example:
        >>> Column(torch.arange(6.0).reshape(3, 2)).take(np.array([2, 0]))
        tensor([[4., 5.],
                [0., 1.]])
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._plain = in_numpy(rows.dtype)
        self._array = None
        if rows.device.type == "cpu":
            self._array = (rows if self._plain else rows.view(_BITS[rows.dtype.itemsize])).numpy()

    def take(self, index: NDArray[np.int64]) -> torch.Tensor:
        """A copy of the rows at ``index``."""
        if self._array is None:
            return self.rows.index_select(0, torch.from_numpy(index).to(self.rows.device))
        taken = torch.from_numpy(self._array.take(index, axis=0))
        return taken if self._plain else taken.view(self.rows.dtype)

    def put(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows at ``index``, int64 ``[n]``; where one is named twice, by either of its values.

        Args:
            index: on the device of the rows, as ``values`` are.
            values: ``[n, ...]``, of the dtype of the rows.
        """
        rows = self.rows
        if rows.dtype in _READ_ONLY:
            bits = _BITS[rows.dtype.itemsize]
            rows, values = rows.view(bits), values.view(bits)
        rows[index] = values


class TensorDictBuilder:
    """Makes TensorDicts of the same keys from lists of tensors.

    What the constructor of ``TensorDict`` finds out and tests each time (how keys are nested, that shapes begin with
    the batch size) is known here. That is most of the cost of a small batch.

    Args:
        keys: of the entries, in the order in which tensors will come.

    Example:
        >>> builder = TensorDictBuilder(["a", ("b", "c")])
        >>> td = builder.build([torch.zeros(3), torch.ones(3, 2)], (3,), torch.device("cpu"))
        >>> td["b", "c"].shape, td.batch_size
        (torch.Size([3, 2]), torch.Size([3]))
    """

    def __init__(self, keys: Iterable[NestedKey]) -> None:
        paths = [as_tuple(key) for key in keys]
        above = sorted({path[:depth] for path in paths for depth in range(len(path))}, key=len)
        places = {path: number for number, path in enumerate(above)}
        self._count = max(len(above), 1)
        self._entries = [(places[path[:-1]], path[-1]) for path in paths]
        inner = reversed(above[1:])  # the deepest first, so that each is whole when it goes into the one above
        self._inner = [(places[path], places[path[:-1]], path[-1]) for path in inner]

    def build(self, values: Iterable[torch.Tensor], batch: tuple[int, ...], device: torch.device) -> TensorDict:
        """A TensorDict ``[*batch]``.

        Args:
            values: ``[*batch, ...]`` each, on ``device``.
            batch: batch size.
            device: of the values.
        """
        batch_size = torch.Size(batch)
        levels: list[dict[Any, Any]] = [{} for _ in range(self._count)]
        for (level, name), value in zip(self._entries, values, strict=True):
            levels[level][name] = value
        for level, above, name in self._inner:
            levels[above][name] = unchecked_td(levels[level], batch_size, device=device)
        return unchecked_td(levels[0], batch_size, device=device)
