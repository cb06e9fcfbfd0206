"""Staged: a policy on a CUDA device for data on the host, with one copy in each direction a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright.policies.base import ArrayPolicy, TensorPolicy


class PackedArrays:
    """One piece of memory for several arrays, so that one copy moves them all.

    Arrays lie in the order of their item sizes, largest first: each begins at a multiple of its own.

    Args:
        shapes: of the arrays.
        dtypes: of the arrays.
        pinned: lock the memory, so that a device can copy it by itself.
    """

    def __init__(self, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], *, pinned: bool) -> None:
        self.shapes, self.dtypes = list(shapes), list(dtypes)
        self.order = sorted(range(len(shapes)), key=lambda i: -dtypes[i].itemsize)
        self._spans: dict[int, tuple[int, int]] = {}
        size = 0
        for i in self.order:
            length = shapes[i].numel() * dtypes[i].itemsize
            self._spans[i] = (size, size + length)
            size += length
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        self.arrays: list[np.ndarray] = [view.numpy() for view in self.views(self.host)]

    def views(self, memory: Tensor) -> list[Tensor]:
        """The arrays as tensors over ``memory`` (uint8, one dimension), in the order given at construction."""
        return [
            memory[slice(*self._spans[i])].view(dtype).view(shape)
            for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        ]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The bytes of ``tensors``, as they lie in ``host``."""
        return torch.cat([tensors[i].contiguous().view(-1).view(torch.uint8) for i in self.order])

    def fits(self, values: Sequence[Tensor]) -> bool:
        """Whether the values have the shapes and dtypes that were packed."""
        return [value.shape for value in values] == self.shapes and [value.dtype for value in values] == self.dtypes


class Staged(ArrayPolicy):
    """Brings inputs to the device of a policy on arrays, and its outputs back.

    Copies and calls are queued on the current stream. The host waits for one event a step, never for the device.

    Args:
        policy: computes on ``device``.
        device: a CUDA device.
    """

    def __init__(self, policy: TensorPolicy, device: torch.device) -> None:
        self.policy, self.device = policy, device
        self.in_keys, self.finite_keys = policy.in_keys, policy.finite_keys
        self.frozen, self.kept = policy.frozen, policy.kept
        self._in: PackedArrays | None = None
        self._out: PackedArrays | None = None
        self._done = torch.cuda.Event()

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """Those of the policy."""
        return self.policy.out_keys

    @property
    def how(self) -> str:  # type: ignore[override]
        """That of the policy, and where."""
        return f"{self.policy.how}, on {self.device}"

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """That of the policy."""
        return self.policy.varies

    def start(self, steps: int) -> None:
        """Prepare a rollout of ``steps`` calls."""
        self.policy.start(steps)

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """Copy to the device, call, copy back, wait for that copy alone."""
        with torch.cuda.device(self.device):
            outputs = self.policy.tensors(*self._send(inputs))
            return self._receive(outputs)

    def _send(self, inputs: Sequence[np.ndarray]) -> list[Tensor]:
        if not inputs:
            return []
        packing = self._in
        if packing is None or [array.shape for array in packing.arrays] != [array.shape for array in inputs]:
            tensors = [torch.from_numpy(array) for array in inputs]
            packing = self._in = PackedArrays([t.shape for t in tensors], [t.dtype for t in tensors], pinned=True)
        # The last step's copy has left this memory: its outputs were waited for.
        for staged, array in zip(packing.arrays, inputs, strict=True):
            staged[...] = array
        return packing.views(packing.host.to(self.device, non_blocking=True))

    def _receive(self, outputs: Sequence[Tensor]) -> list[np.ndarray]:
        if not outputs:
            return []
        packing = self._out
        if packing is None or not packing.fits(outputs):
            packing = self._out = PackedArrays([t.shape for t in outputs], [t.dtype for t in outputs], pinned=True)
        packing.host.copy_(packing.pack(outputs), non_blocking=True)
        self._done.record(torch.cuda.current_stream(self.device))
        self._done.synchronize()
        return [array.copy() for array in packing.arrays]
