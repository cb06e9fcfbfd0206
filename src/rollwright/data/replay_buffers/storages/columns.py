"""Column: the values of one entry, read and written at random positions."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._memory import in_numpy

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
