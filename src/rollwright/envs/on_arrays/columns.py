"""What transforms work on: columns that are tensors, or NumPy arrays in row form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.specs import TensorSpec
from rollwright.data.specs.gymspaces import numpy_dtype
from rollwright.envs.arrays import Entry, Values

__all__ = ["ArrayKind", "Columns", "TensorKind", "cast", "clip", "row_form", "sign"]

Columns = Values | TensorDictBase


class TensorKind(NamedTuple):
    """Columns that are tensors.

    Attributes:
        batch: their batch size.
        device: of new ones; None: that of their specs.
        ndim: dimensions that specs have in front, for the batch.
    """

    batch: torch.Size
    device: torch.device | None
    ndim: int

    def full(self, spec: TensorSpec, value: Any) -> torch.Tensor:
        """A column of one value."""
        shape = (*self.batch, *spec.shape[self.ndim :])
        return torch.full(shape, value, dtype=spec.dtype, device=self.device or spec.device or "cpu")

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the transform's own as a column that keeps its last dimension."""
        return tensor if self.device is None else tensor.to(self.device)

    column = whole  #: A tensor of the transform's own as a column.

    def kept(self, column: torch.Tensor) -> torch.Tensor:
        """A copy of a column that is handed out, and may then be changed in place."""
        return column.clone()


class ArrayKind:
    """Columns that are NumPy arrays in row form, which nobody writes into.

    Args:
        batch: their batch size.
    """

    def __init__(self, batch: tuple[int, ...]) -> None:
        self.batch = torch.Size(batch)
        self._known: dict[tuple[Any, ...], Any] = {}

    def full(self, spec: TensorSpec, value: Any) -> Any:
        """A column of one value."""
        key = spec.shape, spec.dtype, value
        if key not in self._known:
            self._known[key] = self.column(torch.full(spec.shape, value, dtype=spec.dtype, device="cpu"))
        return self._known[key]

    def whole(self, tensor: torch.Tensor) -> Any:
        """See :class:`TensorKind`."""
        return tensor.detach().cpu().numpy()

    def column(self, tensor: torch.Tensor) -> Any:
        """See :class:`TensorKind`."""
        array = self.whole(tensor)
        return row_form(array) if array.shape == (*self.batch, 1) else array

    def entry(self, spec: TensorSpec) -> Entry:
        """Shape and dtype of :meth:`column`."""
        return Entry(tuple(spec.shape), np.dtype(numpy_dtype(spec.dtype)), tuple(spec.shape) == (*self.batch, 1))

    def kept(self, column: Any) -> Any:
        """The column itself."""
        return column


def row_form(array: Any) -> Any:
    """A column without its last dimension; a number of a single environment."""
    return array[0] if array.ndim == 1 else array[..., 0]


# What tensors and arrays do by other names ------------------------------------------------------------


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Values of another dtype."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype)
    with np.errstate(all="ignore"):  # as torch does
        return value.astype(numpy_dtype(dtype))


def clip(value: Any, low: float | None, high: float | None) -> Any:
    """``torch.clamp`` of floating-point numbers; -0.0 and NaN stay."""
    if isinstance(value, torch.Tensor):
        return value.clamp(low, high)
    kind = value.dtype.type
    if low and high:
        return np.minimum(np.maximum(value, kind(low)), kind(high))
    if low is not None:
        value = np.where(value < low, kind(low), value)
    return value if high is None else np.where(value > high, kind(high), value)


def sign(value: Any) -> Any:
    """``torch.sign`` of floating-point numbers: of NaN, 0."""
    if isinstance(value, torch.Tensor):
        return value.sign()
    return np.subtract(value > 0, value < 0, dtype=value.dtype)
