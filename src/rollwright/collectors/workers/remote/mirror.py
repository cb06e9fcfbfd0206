"""Where the rollouts of a worker lie: the same place in the collector's memory and in that of its own machine."""

from __future__ import annotations

from typing import Any

import torch

from rollwright._memory import Segment
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.memory.blocks import BlockLayout


class RolloutPlaces:
    """Follows the messages to a worker that say where it writes, and finds what it has written.

    Args:
        blocks: memory of batches.
        packing: memory of what does not fit in there.
    """

    def __init__(self, blocks: Segment, packing: tuple[Segment, Segment]) -> None:
        self._blocks, self._packing = blocks, packing
        self._layout: BlockLayout | None = None
        self._number, self._part = -1, 0
        self._offsets: dict[int, int] = {}  # by run

    def note(self, message: Any) -> None:
        """Take in what is sent to the worker."""
        match message:
            case say.Collect(run, offset, layout) if offset is not None and layout == self._number:
                self._offsets[run] = offset
            case say.Grant(run, layout, number, offset, part):
                self._layout, self._number, self._part = layout, number, part
                self._offsets[run] = offset
            case _:
                return
        if self._layout is not None:
            self._blocks.grow(self._offsets[message.run] + max(1, self._layout.num_bytes))

    def take(self, message: Any) -> dict[Any, torch.Tensor | memoryview]:
        """What a message of the worker refers to, by key of the entry; None: in its packing segment."""
        if not isinstance(message, say.Collected):
            return {}
        found: dict[Any, torch.Tensor | memoryview] = {}
        offset = self._offsets.pop(message.run, None)
        if message.in_block and self._layout is not None and offset is not None:
            memory = self._blocks.map(offset, max(1, self._layout.num_bytes))
            lacking = set(message.lacking)
            parts = self._layout.part_of(memory, self._part)
            found.update((key, part) for key, part in parts.items() if key not in lacking and part.numel())
        if message.rest is not None:
            segment = self._packing[message.rest.place]
            segment.grow(message.rest.num_bytes)
            found[None] = segment.map(0, message.rest.num_bytes)
        return found


def bytes_of(tensor: torch.Tensor) -> memoryview | None:
    """The memory of a tensor; None: it does not lie in one piece."""
    if not tensor.is_contiguous():
        return None
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
