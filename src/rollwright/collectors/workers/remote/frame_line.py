"""FrameLine: a line on which frames that are sent together travel as one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollwright._processes.network.line import Line, Pieces


class FrameLine:
    """One end of a line, for frames: each is an object that can be pickled, with pieces of raw memory.

    Args:
        line: see :class:`~rollwright._processes.network.line.Line`.

    Attributes:
        num_messages: sent and received.
    """

    def __init__(self, line: Line) -> None:
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
