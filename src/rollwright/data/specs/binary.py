"""The spec of free bits: Binary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollwright.data.specs.leaf import DenseSpec
from rollwright.data.specs.shapes import DeviceLike, ShapeLike
from rollwright.data.specs.spaces import OutcomeSpace


class Binary(DenseSpec):
    """Zeros and ones, each element free of the others.

    Args:
        n: size of the last dimension, where ``shape`` is not given; must agree with it otherwise.
        shape: shape of a sample.
        device: device of the tensors.
        dtype: dtype of the tensors.

    Example:
        >>> spec = Binary(3)
        >>> spec.is_in(torch.tensor([0, 1, 1], dtype=torch.int8))
        True
        >>> spec.cardinality()
        8
    """

    def __init__(
        self,
        n: int | None = None,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if n is None and shape is None:
            raise ValueError("n, shape: expected one of them, got neither. Write Binary(n) or Binary(shape=...).")
        super().__init__((int(n or 0),) if shape is None else shape, device, dtype)
        if n is not None and self.shape[-1:] != (n,):
            raise ValueError(f"shape: expected one that ends in n={n}, got {list(self.shape)}. Give shape alone.")

    @property
    def space(self) -> OutcomeSpace:
        """Two outcomes for each element."""
        return OutcomeSpace(2)

    def cardinality(self) -> int:
        """The number of patterns along the last dimension."""
        return int(2 ** math.prod(self._safe_shape[-1:]))

    def enumerate(self, use_mask: bool = False) -> Tensor:
        """All patterns of the last dimension, ``[2**shape[-1], *self.shape]``."""
        width = math.prod(self._safe_shape[-1:])
        bits = torch.arange(width - 1, -1, -1, device=self.device)
        patterns = (torch.arange(2**width, device=self.device).unsqueeze(-1) >> bits) & 1
        lead = (1,) * (self.ndim - 1)
        return patterns.to(self.dtype).view(-1, *lead, *self._safe_shape[-1:]).expand(-1, *self._safe_shape)

    def rand(self, shape: ShapeLike = ()) -> Tensor:
        """Zeros and ones with equal chance."""
        return torch.randint(2, self._sizes(shape), dtype=self.dtype, device=self.device)

    def _in_domain(self, val: Tensor) -> bool:
        return val.dtype == torch.bool or bool(((val == 0) | (val == 1)).all())

    def _nearest(self, val: Tensor) -> Tensor:
        return val if val.dtype == torch.bool else val > 0.5

    def _domain(self) -> str:
        return "zeros and ones"
