"""Blocks: shared memory of batches, which workers write and the consumer reads.

The collector owns it (:mod:`~rollwright.collectors.workers.memory.store`). It gives a worker the place of a free block
with each rollout, the worker writes its part, and the consumer gets the whole as tensors. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from rollwright._keys import NestedKey
from rollwright._memory import EntryMemory, Layout, Loan, MemoryPool, Segment

Join = Literal["stack", "first", "time", "alone"]


class BatchForm(NamedTuple):
    """Entries of a rollout.

    Attributes:
        fields: key, shape of a frame's entry ``[*env, ...]``, dtype.
        env: the environment's batch size.
        steps: T.
    """

    fields: tuple[tuple[NestedKey, tuple[int, ...], torch.dtype], ...]
    env: tuple[int, ...]
    steps: int


@dataclass(frozen=True)
class BlockLayout:
    """Positions of the rollouts of several workers in one block.

    Attributes:
        form: of each rollout, but for its steps.
        steps: T of each worker.
        join: ``"stack"``: ``[W, *env, T]``; ``"first"``: along the first dimension; ``"time"``: along the last one;
            ``"alone"``: one worker's ``[*env, T]``.

    Example:
        >>> form = BatchForm((("obs", (4,), torch.float32),), (), 5)
        >>> layout = BlockLayout(form, (5, 5), "stack")
        >>> layout.batch_size, layout.num_bytes
        (torch.Size([2, 5]), 192)
    """

    form: BatchForm
    steps: tuple[int, ...]
    join: Join

    @cached_property
    def batch_size(self) -> torch.Size:
        """Of the block."""
        return torch.Size(self._joined(()))

    def _joined(self, rest: tuple[int, ...]) -> tuple[int, ...]:
        env, steps = self.form.env, self.steps
        if self.join == "stack":
            return (len(steps), *env, steps[0], *rest)
        if self.join == "first" and env:
            return (len(steps) * env[0], *env[1:], steps[0], *rest)
        return (*env, sum(steps), *rest)

    def part(self, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """What one worker writes of an entry of the block."""
        env, steps = self.form.env, self.steps
        if self.join == "stack":
            return tensor[part]
        if self.join == "first" and env:
            return tensor.narrow(0, part * env[0], env[0])
        return tensor.narrow(len(env), sum(steps[:part]), steps[part])

    @cached_property
    def memory(self) -> Layout[NestedKey]:
        """Where the entries of a block lie in it."""
        ndim = len(self.form.env)
        return Layout.of((key, self._joined(shape[ndim:]), dtype) for key, shape, dtype in self.form.fields)

    @property
    def num_bytes(self) -> int:
        """Of a block."""
        return self.memory.end

    def tensors(self, memory: memoryview) -> dict[NestedKey, torch.Tensor]:
        """The entries of a block; they keep ``memory`` alive."""
        return self.memory.tensors(memory)

    def part_of(self, memory: memoryview, part: int) -> dict[NestedKey, torch.Tensor]:
        """What one worker writes of a block."""
        return {key: self.part(tensor, part) for key, tensor in self.tensors(memory).items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"form": self.form, "steps": self.steps, "join": self.join}


# The worker's side -------------------------------------------------------------------------------------


class BlockPart(NamedTuple):
    """The part of a block that a rollout is written to, in a layout that has a number."""

    layout: BlockLayout
    number: int
    offset: int
    part: int


class BlockMemory(MemoryPool):
    """Gives a worker's collector the block that its batch is to lie in.

    Args:
        segment: the memory.
        ask: for a block of another form than the last one's; None: the batch lies in memory of its own.
    """

    def __init__(self, segment: Segment, ask: Callable[[BatchForm], BlockPart | None]) -> None:
        super().__init__()
        self._segment, self._ask = segment, ask
        self._form: BatchForm | None = None
        self._place: BlockPart | None = None
        self._mapped: dict[int, tuple[Loan, dict[NestedKey, torch.Tensor]]] = {}
        self._bases: dict[NestedKey, torch.Tensor] = {}
        self._loans: dict[int, Loan] = {}
        self._offset: int | None = None
        self._loan: Loan | None = None
        self.windows: dict[NestedKey, torch.Tensor] = {}

    def begin(self, offset: int | None, number: int) -> None:
        """Begin a rollout, for which the block at ``offset``, of a numbered layout, is free; None: there is none."""
        known = self._place is not None and self._place.number == number
        self._offset, self.windows, self._loan = offset if known else None, {}, None

    def reserve(self, fields: Mapping[NestedKey, Any], env: tuple[int, ...], steps: int) -> None:
        """See :class:`~rollwright._memory.pool.MemoryPool`."""
        if self._loan is not None or any(field.device.type != "cpu" for field in fields.values()):
            return  # a second block in one rollout, of another form: it travels as a whole
        form = BatchForm(tuple((key, tuple(f.shape), f.dtype) for key, f in fields.items()), tuple(env), steps)
        if form != self._form or self._offset is None or self._place is None:
            granted = self._ask(form)
            if granted is None:
                return
            self._place, self._offset, self._form, self._mapped = granted, granted.offset, form, {}
        offset, (layout, _, _, part) = self._offset, self._place
        if offset not in self._mapped:
            memory = self._segment.map(offset, max(1, layout.num_bytes))
            self._mapped[offset] = Loan(memory), layout.part_of(memory, part)
        self._loan, self._bases = self._mapped[offset]
        self._loans[offset] = self._loan
        self.windows = layout.part_of(self._loan.borrow(), part)

    def take(self, place: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> EntryMemory:
        """See :class:`~rollwright._memory.pool.MemoryPool`."""
        window = self.windows.get(place)  # type: ignore[call-overload]
        if window is None:
            return super().take(place, shape, dtype)
        return EntryMemory.over(window, self._bases[place])  # type: ignore[index]

    def end(self) -> tuple[int, ...]:
        """End the rollout; offsets of the blocks that something here still reads."""
        self.windows, self._loan = {}, None
        self._loans = {offset: loan for offset, loan in self._loans.items() if loan.borrowed}
        return tuple(self._loans)
