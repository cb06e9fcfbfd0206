"""Shared memory between a collector and its workers: blocks of batches, and packing of what does not fit in there."""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import cloudpickle  # type: ignore[import-untyped]
import torch

from rollwright._keys import NestedKey
from rollwright._memory import Borrowed, EntryMemory, Field, FreeList, Layout, MemoryPool, Segment, aligned, check_fits
from rollwright.data.transcript import ReceivedTranscripts, SentGrowth, SentTranscripts, Transcript

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
        self._mapped: dict[int, tuple[Borrowed, dict[NestedKey, torch.Tensor]]] = {}
        self._bases: dict[NestedKey, torch.Tensor] = {}
        self._in_use: dict[int, Borrowed] = {}
        self._offset: int | None = None
        self._borrowed: Borrowed | None = None
        self.windows: dict[NestedKey, torch.Tensor] = {}

    def begin(self, offset: int | None, number: int) -> None:
        """Begin a rollout, for which the block at ``offset``, of a numbered layout, is free; None: there is none."""
        known = self._place is not None and self._place.number == number
        self._offset, self.windows, self._borrowed = offset if known else None, {}, None

    def reserve(self, fields: Mapping[NestedKey, Any], env: tuple[int, ...], steps: int) -> None:
        """Prepare for a batch, before the first :meth:`take` of it."""
        if self._borrowed is not None or any(field.device.type != "cpu" for field in fields.values()):
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
            self._mapped[offset] = Borrowed(memory), layout.part_of(memory, part)
        self._borrowed, self._bases = self._mapped[offset]
        self._in_use[offset] = self._borrowed
        self.windows = layout.part_of(self._borrowed.borrow(), part)

    def take(self, place: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> EntryMemory:
        """Memory that nothing reads, allocated where there is none; slabs of another shape or dtype are dropped."""
        window = self.windows.get(place)  # type: ignore[call-overload]
        if window is None:
            return super().take(place, shape, dtype)
        return EntryMemory.over(window, self._bases[place])  # type: ignore[index]

    def end(self) -> tuple[int, ...]:
        """End the rollout; offsets of the blocks that something here still reads."""
        self.windows, self._borrowed = {}, None
        self._in_use = {offset: memory for offset, memory in self._in_use.items() if memory.borrowed}
        return tuple(self._in_use)


class Packed(NamedTuple):
    """Position of a packed object: all that the message about it carries.

    Attributes:
        place: number of the segment.
        num_bytes: of the tensors and the pickle behind them, from the segment's first byte.
        pickle_at: first byte of the pickle.
    """

    place: int
    num_bytes: int
    pickle_at: int


class Packer:
    """Packs values in two segments in turn, so that one may be opened while the next is packed.

    Of a transcript, only what came since the last value is packed: all that is packed must be opened, in order.

    Args:
        segments: two of them.

    Example:
        >>> segments = (Segment(), Segment())
        >>> packed = Packer(segments).pack({"a": torch.arange(5000), "b": "text"})
        >>> opened = unpack(packed, segments)
        >>> opened["a"].shape, opened["b"]
        (torch.Size([5000]), 'text')
    """

    def __init__(self, segments: tuple[Segment, Segment]) -> None:
        self._segments = segments
        self._next = 0
        self._sent = SentTranscripts()

    def pack(self, value: Any) -> Packed:
        """Pack anything; tensors are copied once."""
        place, self._next = self._next, 1 - self._next
        stream = io.BytesIO()
        self._sent.begin()
        pickler = _Pickler(stream, self._sent)
        pickler.dump(value)
        pickled, start = stream.getbuffer(), pickler.num_bytes
        packed = Packed(place, start + len(pickled), start)
        self._segments[place].grow(packed.num_bytes)
        memory = self._segments[place].map(0, packed.num_bytes)
        memory[start:] = pickled
        pickler.write_tensors(memory)
        self._sent.finish()
        return packed


def unpack(packed: Packed, segments: tuple[Segment, Segment], received: ReceivedTranscripts | None = None) -> Any:
    """What was packed; it is copied once more, and its tensors lie in one piece of memory.

    Args:
        packed: of a :class:`Packer`.
        segments: its own.
        received: transcripts that it has sent so far; None: none.
    """
    content = torch.frombuffer(segments[packed.place].map(0, packed.num_bytes), dtype=torch.uint8)
    memory = memoryview(cast(Any, content.clone().numpy()))
    stream = io.BytesIO(memory[packed.pickle_at :])
    return _Unpickler(stream, memory, ReceivedTranscripts() if received is None else received).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain CPU tensors out of the stream, and gives each a place in memory.

    Attributes:
        num_bytes: that they take.
    """

    def __init__(self, stream: io.BytesIO, sent: SentTranscripts) -> None:
        super().__init__(stream, protocol=5)
        self.num_bytes = 0
        self._sent = sent
        self._left_out: dict[int, tuple[torch.Tensor, Field[None]]] = {}  # by id, which stays as long as they do
        self._growths: dict[int, SentGrowth] = {}  # by id of a transcript

    def persistent_id(self, value: Any) -> Field[None] | SentGrowth | None:
        if type(value) is Transcript:
            if id(value) not in self._growths:
                self._growths[id(value)] = self._sent.growth(value)
            return self._growths[id(value)]
        if type(value) is not torch.Tensor or value.is_nested:
            return None
        known = self._left_out.get(id(value))
        if known is not None:
            return known[1]
        if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or not value.numel():
            return None
        if value.is_quantized or value.__dict__:
            return None
        field = Field(None, tuple(value.shape), value.dtype, self.num_bytes)
        self.num_bytes = aligned(field.stop)
        self._left_out[id(value)] = value, field
        return field

    def write_tensors(self, memory: memoryview) -> None:
        """Copy what was left out to its places."""
        for value, field in self._left_out.values():
            field.tensor(memory).copy_(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: memoryview, received: ReceivedTranscripts) -> None:
        super().__init__(stream)
        self._memory, self._known = memory, dict[int, torch.Tensor]()
        self._received = received

    def persistent_load(self, pid: Field[None] | SentGrowth) -> Any:
        if isinstance(pid, SentGrowth):
            return self._received.grown(pid)
        found = self._known.get(pid.start)
        if found is None:
            found = self._known[pid.start] = pid.tensor(self._memory)
        return found


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
        self._borrowed = Borrowed(segment.map(offset, max(1, layout.num_bytes)))

    @property
    def borrowed(self) -> bool:
        """Whether the consumer holds tensors of it."""
        return self._borrowed.borrowed

    @property
    def free(self) -> bool:
        """Whether it may be written."""
        return not (self.runs or self.readers or self._borrowed.borrowed)

    def borrow(self) -> dict[NestedKey, torch.Tensor]:
        """Its entries, for the consumer."""
        return self.layout.tensors(self._borrowed.borrow())


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
