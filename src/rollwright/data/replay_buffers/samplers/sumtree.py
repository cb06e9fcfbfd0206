"""Trees over a flat array that keep a reduction of it up to date: sums, to draw in proportion, and minima."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

FAN_OUT = 32  # children of a node: few levels and few calls, while a row still fits four cache lines
TOP = 1024  # a level this short is reduced and searched as a whole
MANY = 500  # leaves of an update that may lie side by side
_BELOW_ONE = 1.0 - 2.0**-52

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


class _Tree(ABC):
    """Levels over ``size`` leaves; each node is the reduction of the :data:`FAN_OUT` nodes below it.

    A node is always computed again from the nodes below it, never by adding differences: nothing drifts.

    Args:
        size: number of leaves.
        empty: value of leaves that hold nothing, neutral in the reduction.

    Raises:
        ValueError: ``size`` is below 1.
    """

    def __init__(self, size: int, empty: float) -> None:
        if size < 1:
            raise ValueError(f"size: expected at least 1 leaf, got {size}.")
        self.size = size
        self._rows: list[Floats] = []  # the levels from the leaves up, but for the top: [nodes / FAN_OUT, FAN_OUT]
        self._flat: list[Floats] = []  # all levels, [nodes]
        width = size
        while width > TOP:
            width = -(-width // FAN_OUT)
            self._rows.append(np.full((width, FAN_OUT), empty))
            self._flat.append(self._rows[-1].reshape(-1))
            width = width if width <= TOP else -(-width // FAN_OUT) * FAN_OUT
        self._flat.append(np.full(width, empty))
        self._top = self._flat[-1]

    @property
    def leaves(self) -> Floats:
        """The leaves, float64 ``[size]``, to be read."""
        return self._flat[0][: self.size]

    def update(self, index: Index, value: Floats | float) -> None:
        """Set leaves in O(n log size); where an index is repeated its last value counts.

        Args:
            index: int64 ``[n]``, ``0 <= index < size``.
            value: float64 ``[n]``, or one for all.
        """
        self._flat[0][index] = value
        for rows, above in zip(self._rows, self._flat[1:], strict=True):
            index = index // FAN_OUT
            if len(index) > MANY:  # neighbours have one parent; to look for more of them does not pay
                index = index[np.append(True, index[1:] != index[:-1])]
            above[index] = self._reduce(rows.take(index, axis=0))

    def fill(self, start: int, stop: int, value: Floats | float) -> None:
        """Set the leaves ``start <= i < stop`` in O(stop - start + log size).

        Args:
            start: first leaf.
            stop: leaf after the last.
            value: float64 ``[stop - start]``, or one for all.
        """
        if start >= stop:
            return
        self._flat[0][start:stop] = value
        for rows, above in zip(self._rows, self._flat[1:], strict=True):
            start, stop = start // FAN_OUT, (stop - 1) // FAN_OUT + 1
            above[start:stop] = self._reduce(rows[start:stop])

    @abstractmethod
    def _reduce(self, rows: Floats) -> Floats:
        """``[n, FAN_OUT]`` to ``[n]``: each row for itself, so that the bits do not depend on the rows beside it."""


class SumTree(_Tree):
    """Draws leaves in proportion to their values.

    Args:
        size: number of leaves, all 0 at first.

    Example:
        >>> tree = SumTree(4)
        >>> tree.update(np.array([0, 2, 2]), np.array([1.0, 7.0, 3.0]))
        >>> tree.total
        4.0
        >>> tree.find(np.array([0.0, 0.9, 1.0, 3.9]))
        array([0, 0, 2, 2])
    """

    def __init__(self, size: int) -> None:
        super().__init__(size, 0.0)
        self._reached: Floats | None = None  # sums over the top from its beginning

    def update(self, index: Index, value: Floats | float) -> None:
        """Set leaves; values are finite and at least 0."""
        self._reached = None
        super().update(index, value)

    def fill(self, start: int, stop: int, value: Floats | float) -> None:
        """Set the leaves ``start <= i < stop``; values are finite and at least 0."""
        self._reached = None
        super().fill(start, stop, value)

    def _reduce(self, rows: Floats) -> Floats:
        summed: Floats = np.einsum("ij->i", rows)
        return summed

    def _reach(self) -> Floats:
        if self._reached is None:
            self._reached = self._top.cumsum()
        return self._reached

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._reach()[-1])

    def find(self, mass: Floats) -> Index:
        """The leaves where the sum from the beginning first exceeds ``mass``; never one whose value is 0.

        Args:
            mass: float64 ``[n]``, ``0 <= mass < total``; what lies beyond finds the last leaf above 0.

        Returns:
            int64 ``[n]``.

        Raises:
            ValueError: all leaves are 0.
        """
        reached = self._reach()
        if not reached[-1] > 0.0:
            raise ValueError("cannot draw in proportion: all values are 0.")
        # Sums of a level and of the one below agree but for rounding. Each level is searched in sums over its own
        # values, for a mass kept below their total: some value brings the sum over it, so that value is above 0.
        mass = np.minimum(mass, reached[-1] * _BELOW_ONE)
        node = reached.searchsorted(mass, "right")
        value, upto = self._top.take(node), reached.take(node)
        for rows in reversed(self._rows):
            mass = np.maximum(mass - (upto - value), 0.0)
            children = rows.take(node, axis=0)
            sums: Floats = torch.from_numpy(children).cumsum(1).numpy()  # NumPy takes seven times as long
            mass = np.minimum(mass, sums[:, -1] * _BELOW_ONE)
            child = (sums > mass[:, None]).argmax(1)
            within = child + np.arange(0, children.size, FAN_OUT)
            value, upto = children.take(within), sums.take(within)
            node = node * FAN_OUT + child
        return node


class MinTree(_Tree):
    """Keeps the least of its leaves.

    Args:
        size: number of leaves, all infinite at first.

    Example:
        >>> tree = MinTree(4)
        >>> tree.update(np.array([1, 3]), np.array([5.0, 2.0]))
        >>> tree.least
        2.0
    """

    def __init__(self, size: int) -> None:
        super().__init__(size, np.inf)

    def _reduce(self, rows: Floats) -> Floats:
        return torch.from_numpy(rows).amin(1).numpy()  # NumPy takes five times as long over short rows

    @property
    def least(self) -> float:
        """The least leaf, infinite where there is none."""
        return float(self._top.min())
