"""Seeds torch's global generators."""

from __future__ import annotations

import torch

__all__ = ["seed_torch"]


def seed_torch(seed: int) -> None:
    """Seed the generators of all devices, as ``torch.manual_seed`` does.

    That writes down the call stack for each kind of device that torch was built without, as if it might be there later:
    half a millisecond and more, where a reset takes a tenth of it.
    """
    if _has_accelerator():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(int(seed))


def _has_accelerator() -> bool:
    """Whether torch was built with another kind of device than the CPU."""
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:  # there is none, with torch 2.6
        return False
