"""Pickles as tensors, for saved states that ``torch.load(..., weights_only=True)`` reads."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from rollwright.envs.checkpoint.snapshot import load

__all__ = ["packed", "unpacked"]


def packed(state: Any) -> torch.Tensor:
    """A pickle as uint8 ``[bytes]``."""
    return torch.frombuffer(bytearray(pickle.dumps(state, protocol=5)), dtype=torch.uint8)


def unpacked(state: torch.Tensor) -> Any:
    """What :func:`packed` has packed, also before its classes got other modules."""
    return load(state.cpu().numpy().tobytes(), {})
