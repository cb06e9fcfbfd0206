"""Tensors of values, whatever torch's default device is."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

__all__ = ["as_tensor", "device_of"]


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``torch.as_tensor`` that leaves a tensor on its device, and puts other values on the CPU.

    >>> with torch.device("meta"):
    ...     as_tensor([1, 2]).device, as_tensor(torch.ones(2)).device
    (device(type='cpu'), device(type='meta'))
    """
    return torch.as_tensor(value, dtype=dtype, device=getattr(value, "device", "cpu"))


def device_of(td: TensorDictBase) -> torch.device:
    """Where the entries of a TensorDict lie, whether it names its device or not; the CPU where there are none."""
    while isinstance(td, LazyStackedTensorDict):
        td = td.tensordicts[0]
    if td.device is not None:
        return td.device
    first = next((value for value in td.values() if isinstance(value, torch.Tensor)), None)
    if first is None:  # dearer
        first = next((value for value in td.values(True, True) if isinstance(value, torch.Tensor)), None)
    return torch.device("cpu") if first is None else first.device
