"""BlockStore: the blocks in a collector's segment, and which of them are free.

A block is free again when the last of the tensors that the consumer borrowed is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from rollwright._keys import NestedKey
from rollwright._memory import FreeList, Loan, Segment, check_fits
from rollwright.collectors.workers.memory.blocks import BlockLayout

_UNUSED = 64  # blocks that are taken of other layouts before those of one count as unused


class Block:
    """A block of the store.

    Attributes:
        layout: how it is divided.
        number: of the layout; no two layouts of a store have one number.
        offset: in the segment.
        runs: rollouts that are written to it, or lie in it undelivered.
        readers: workers in which someone goes on reading it.
    """

    def __init__(self, segment: Segment, layout: BlockLayout, number: int, offset: int) -> None:
        self.layout, self.number, self.offset = layout, number, offset
        self.runs: set[int] = set()
        self.readers: set[int] = set()
        segment.grow(offset + layout.num_bytes)
        self._loan = Loan(segment.map(offset, max(1, layout.num_bytes)))

    @property
    def borrowed(self) -> bool:
        """Whether the consumer holds tensors of it."""
        return self._loan.borrowed

    @property
    def free(self) -> bool:
        """Whether it may be written."""
        return not (self.runs or self.readers or self._loan.borrowed)

    def borrow(self) -> dict[NestedKey, torch.Tensor]:
        """Its entries, for the consumer."""
        return self.layout.tensors(self._loan.borrow())


class _Shelf:
    """The blocks of one layout.

    Attributes:
        number: of the layout.
        taken: how many blocks had been taken from the store when one of these was, last.
    """

    def __init__(self, number: int) -> None:
        self.number, self.taken = number, 0
        self.blocks: list[Block] = []


class BlockStore:
    """Hands out blocks of a segment, and takes those back that nobody reads any more.

    Args:
        segment: the memory.
        most: blocks that may be borrowed at a time.
    """

    def __init__(self, segment: Segment, most: int) -> None:
        self.segment, self.most = segment, most
        self._shelves: dict[BlockLayout, _Shelf] = {}
        self._read: dict[int, set[Block]] = {}  # by worker
        self._numbers, self._taken = itertools.count(), 0
        self._free = FreeList()

    def take(self, layout: BlockLayout) -> Block:
        """A block that nobody reads or writes.

        Raises:
            MemoryError: it is larger than the memory of this machine.
        """
        self._taken += 1
        shelf = self._shelves.get(layout)
        if shelf is None:
            shelf = self._shelves[layout] = _Shelf(next(self._numbers))
        shelf.taken = self._taken
        if len(self._shelves) > 1:
            self._drop_unused()
        block = next((block for block in shelf.blocks if block.free), None)
        if block is None:
            check_fits(layout.num_bytes)
            block = Block(self.segment, layout, shelf.number, self._free.allocate(layout.num_bytes))
            shelf.blocks.append(block)
        return block

    def read_by(self, worker: int, offsets: Sequence[int]) -> None:
        """Note which blocks someone in a worker goes on reading."""
        before = self._read.pop(worker, set())
        for block in before:
            block.readers.discard(worker)
        if not offsets:
            return
        now = self._read[worker] = {block for block in self._blocks() if block.offset in offsets}
        for block in now:
            block.readers.add(worker)

    def _blocks(self) -> Iterator[Block]:
        return (block for shelf in list(self._shelves.values()) for block in list(shelf.blocks))  # other threads look

    def _drop_unused(self) -> None:
        """Let free blocks go whose layout is no longer collected."""
        for layout, shelf in list(self._shelves.items()):
            if self._taken - shelf.taken < _UNUSED:
                continue
            for block in [block for block in shelf.blocks if block.free]:
                shelf.blocks.remove(block)
                self._free.release(block.offset, layout.num_bytes)
            if not shelf.blocks:
                del self._shelves[layout]  # workers that know its number will ask

    @property
    def num_borrowed(self) -> int:
        """Blocks that the consumer holds."""
        return sum(block.borrowed for block in self._blocks())

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self._free.end
