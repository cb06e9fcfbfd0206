"""Frames between a collector and a remote group of workers, their line, and the memory that they refer to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rollwright._memory import Segment
from rollwright._processes.connection import ExceptionInfo
from rollwright._processes.network.channel import NetworkChannel, Pieces
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.memory import BlockLayout

# To a group -----------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """The first frame, in a message of its own.

    Attributes:
        num_workers: of the whole collector.
        num_local: how many of them at most run in this group.
        beat_s: the longest time between two signs of life of the group.
        silence_s: after which the collector counts as gone, when its machine does not answer either.
        num_threads: that torch uses in each worker; None: the cores of the machine, shared out.
        import_paths: where modules are looked for, after the group's own.
    """

    num_workers: int
    num_local: int
    beat_s: float
    silence_s: float
    num_threads: int | None
    import_paths: tuple[str, ...]


class Launch(NamedTuple):
    """Start a worker, or another one in its place.

    Attributes:
        serial: number of this start; what is sent to the worker and by it bears it.
        worker: its index.
        spec: a pickled :class:`~rollwright.collectors.workers.worker.WorkerSpec` without memory.
        num_ids: trajectory ids that its predecessors took.
    """

    serial: int
    worker: int
    spec: bytes
    num_ids: int


class ToWorker(NamedTuple):
    """Hand a message to a worker."""

    serial: int
    message: Any


class Publish(NamedTuple):
    """Publish weights in the group; the tensors are the pieces.

    Attributes:
        worker: who gets them; None: all.
        version: of the publication.
        models: those that have changed: by model, the names, shapes and dtypes of its tensors, in order of the pieces,
            and what else belongs to its state.
    """

    worker: int | None
    version: int
    models: dict[str, tuple[list[tuple[str, tuple[int, ...], Any]], dict[str, Any]]]


class End(NamedTuple):
    """End the process of a worker.

    Attributes:
        serial: of its start.
        how: ``"terminate"`` or ``"kill"``.
    """

    serial: int
    how: str


# From a group ---------------------------------------------------------------------------------------


class Started(NamedTuple):
    """The process of a worker was started.

    Attributes:
        serial: of its start.
        pid: number of the process on that machine.
    """

    serial: int
    pid: int


class FromWorker(NamedTuple):
    """A message of a worker; the pieces are what it refers to, to lie at the same places.

    Attributes:
        serial: of its start.
        message: as it was sent.
        clock: of the group's machine, in seconds.
        counters: of the worker, as they were then.
        keys: of the pieces: entries of the block; None: the worker's packing segment.
    """

    serial: int
    message: Any
    clock: float
    counters: bytes
    keys: tuple[Any, ...]


class Ended(NamedTuple):
    """The process of a worker has ended.

    Attributes:
        serial: of its start.
        how: a phrase.
        failure: what it raised.
        counters: of the worker, as they were at its end.
    """

    serial: int
    how: str
    failure: ExceptionInfo | None
    counters: bytes


class Beat(NamedTuple):
    """The group is there.

    Attributes:
        clock: of its machine, in seconds; None: the rest is not known now.
        counters: of its workers, by serial number.
        stopped_s: for how long a signal has stopped a worker's process, by serial number.
    """

    clock: float | None
    counters: dict[int, bytes]
    stopped_s: dict[int, float]


class FrameChannel:
    """One end of a line, for frames: each is an object that can be pickled, with pieces of raw memory.

    Args:
        line: see :class:`~rollwright._processes.network.channel.NetworkChannel`.

    Attributes:
        num_messages: sent and received.
    """

    def __init__(self, line: NetworkChannel) -> None:
        self._line = line
        self._queued: list[tuple[Any, Pieces]] = []
        self.num_messages = 0
        self.fileno, self.close, self.give_up_after = line.fileno, line.close, line.give_up_after

    @property
    def behind(self) -> bool:
        """Whether something was sent that is not on its way yet."""
        return self._line.behind

    @property
    def heard_at(self) -> float:
        """When something has arrived last, by ``time.monotonic()``."""
        return self._line.heard_at

    def queue(self, frame: Any, pieces: Pieces = ()) -> None:
        """Have a frame sent by the next :meth:`push`."""
        self._queued.append((frame, pieces))

    def push(self) -> None:
        """Send what is queued, as far as there is room now; the rest goes in :meth:`read`.

        Raises:
            ChannelClosed: the other end is gone.
        """
        if self._queued:
            queued, self._queued = self._queued, []
            self._post(queued)

    def send_alone(self, frame: Any) -> None:
        """Send a frame, before what is queued; any thread may.

        Raises:
            ChannelClosed: the other end is gone.
        """
        self._post([(frame, ())])

    def _post(self, queued: Sequence[tuple[Any, Pieces]]) -> None:
        self.num_messages += 1
        message = [(frame, len(pieces)) for frame, pieces in queued]
        self._line.post(message, [piece for _, pieces in queued for piece in pieces])

    def read(
        self, place: Callable[[Any, Sequence[int]], Sequence[memoryview]], received: Callable[[Any], None]
    ) -> None:
        """Send what waits for room, and take in what has arrived, without waiting.

        Args:
            place: takes a frame and the sizes of its pieces in bytes; returns the memory for each.
            received: takes each frame, in order, once its pieces are there.

        Raises:
            ChannelClosed: the other end is gone, and all that it had sent was taken in.
            MessageForged: what has arrived is not what was sent.
        """

        def place_all(message: list[tuple[Any, int]], sizes: Sequence[int]) -> list[memoryview]:
            found: list[memoryview] = []
            for frame, count in message:
                if count:
                    found += place(frame, sizes[len(found) : len(found) + count])
            return found

        def received_all(message: list[tuple[Any, int]], pieces: Pieces) -> None:
            self.num_messages += 1
            for frame, _ in message:
                received(frame)

        self._line.read(place_all, received_all)

    def divert(self, is_meant: Callable[[Any], bool]) -> None:
        """Put what is still to be received of certain frames elsewhere: its place is taken away."""

        def is_piece_meant(message: list[tuple[Any, int]], index: int) -> bool:
            for frame, count in message:
                if index < count:
                    return is_meant(frame)
                index -= count
            return False

        self._line.divert(is_piece_meant)


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
            case messages.Collect(run, offset, layout) if offset is not None and layout == self._number:
                self._offsets[run] = offset
            case messages.MemoryGrant(run, layout, number, offset, part):
                self._layout, self._number, self._part = layout, number, part
                self._offsets[run] = offset
            case _:
                return
        if self._layout is not None:
            self._blocks.grow(self._offsets[message.run] + max(1, self._layout.num_bytes))

    def take(self, message: Any) -> dict[Any, torch.Tensor | memoryview]:
        """What a message of the worker refers to, by key of the entry; None: in its packing segment."""
        if not isinstance(message, messages.Collected):
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
