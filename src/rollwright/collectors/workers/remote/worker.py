"""RemoteWorker: the connection to a worker of a remote group."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.connection import NOTHING
from rollwright._processes.failures import ExceptionInfo
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.counters import Count, WorkerCounters
from rollwright.collectors.workers.remote import frames
from rollwright.collectors.workers.remote.mirror import RolloutPlaces, bytes_of

if TYPE_CHECKING:
    from rollwright.collectors.workers.remote.link import Link
    from rollwright.collectors.workers.worker import WorkerSpec


_WORD = 8
_OWN = _WORD * (Count.PUBLISHED + 1)  # bytes of the counters that the collector writes
_LOOK_S = 0.2


class RemoteWorker:
    """A worker of a remote group; see :class:`~rollwright._processes.connection.Connection`.

    Its counters here are as they were when it was last heard of. What it has written lies at the same place here before
    its message is taken.

    Args:
        link: to the group.
        serial: number of its start.
        spec: what it is made of; the memory is the collector's.
    """

    def __init__(self, link: Link, serial: int, spec: WorkerSpec) -> None:
        self._link, self.serial = link, serial
        self.name = f"rollwright-worker-{spec.index}"
        self.pid: int | None = None  # on its machine
        self._counters = WorkerCounters(spec.counters, spec.index)
        self._places = RolloutPlaces(spec.blocks, spec.packing)
        self._arrived: deque[Any] = deque()
        # By rollout, parts that do not lie in one piece, as they arrived:
        self._beside: dict[int, list[tuple[torch.Tensor, memoryview]]] = {}
        self._how: str | None = None
        self._closed = False
        self._stopped_s = 0.0
        self._ordered: deque[int] = deque()  # versions published when its rollouts in progress were asked for
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False

    @property
    def num_ids(self) -> int:
        """Trajectory ids that were taken by it, and by those before it."""
        return int(self._counters.counts[Count.NUM_IDS])

    @property
    def host(self) -> str:
        """Where it runs, for messages."""
        return self._link.name

    def clock(self) -> float:
        """Of its machine, in seconds, when that was last heard of."""
        return self._link.clock

    # What the link brings -----------------------------------------------------------------------------

    def place(self, frame: frames.FromWorker, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for what a message refers to."""
        found = []
        parts = self._places.take(frame.message)
        for key, size in zip(frame.keys, sizes, strict=True):
            part = parts[key]
            memory = part if isinstance(part, memoryview) else bytes_of(part)
            if memory is None:
                memory = memoryview(bytearray(size))
                assert isinstance(part, torch.Tensor)
                self._beside.setdefault(frame.message.run, []).append((part, memory))
            found.append(memory)
        return found

    def arrive(self, frame: frames.FromWorker) -> None:
        """Keep a message until it is taken."""
        if isinstance(frame.message, say.Collected):
            for part, memory in self._beside.pop(frame.message.run, ()):
                part.copy_(torch.frombuffer(memory, dtype=torch.uint8).view(part.dtype).reshape(part.shape))
        self._arrived.append((frame.message, frame.counters))
        self._ring()

    def end(self, how: str, failure: ExceptionInfo | None = None) -> None:
        """Its process has ended."""
        if self._how is None:
            if failure is not None:
                self._arrived.append((failure, None))
            self._how = how  # last: who sees it finds the failure
            self._ring()

    def note_stopped(self, seconds: float) -> None:
        """For how long a signal has stopped its process."""
        self._stopped_s = seconds

    def mirror(self, page: bytes) -> None:
        """Show its counters, but for those that the collector writes."""
        self._counters.page[_OWN:] = page[_OWN:]
        if self._counters.counts[Count.OLDEST] < 0:
            self._expect_oldest()
        ended_at = self._counters.episodes[:, 2]
        ended_at[ended_at > 0] += time.monotonic() - self._link.clock  # two clocks are never compared

    def _expect_oldest(self) -> None:
        """The next rollout may have begun, with what was published when it was asked for."""
        self._counters.counts[Count.OLDEST] = self._ordered[0] if self._ordered else -1

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)

    # Connection ---------------------------------------------------------------------------------------

    def filenos(self) -> tuple[int, ...]:
        """Ready as long as there is something to take."""
        return (self._bell,)

    def post(self, message: Any) -> None:
        """Have a message sent, after the weights that were published before."""
        if self._closed or self._how is not None:
            raise ChannelClosed("the other end is gone")
        with self._link.lock:
            self._places.note(message)
            self._link.queue_weights()
            if isinstance(message, say.Collect):
                self._ordered.append(self._counters.counts[Count.PUBLISHED])
            self._link.queue(frames.ToWorker(self.serial, message))

    @property
    def behind(self) -> bool:
        """The link sends what there was no room for."""
        return False

    def flush(self) -> None:
        """See :attr:`behind`."""

    def take(self) -> Any:
        """The next message."""
        if not self._arrived:
            self._link.read()
        if not self._arrived:
            self._silence()
            is_gone = self._how is not None or self._closed
            if not self._arrived and not is_gone:  # asked after that: another thread may bring something
                return NOTHING
            self._ring()
            if not self._arrived:
                raise ChannelClosed("the other end is gone")
        message, counters = self._arrived.popleft()
        with self._link.lock:
            if counters is not None:
                self.mirror(counters)
            if isinstance(message, say.Collected | say.Failed) and self._ordered:
                self._ordered.popleft()
                self._expect_oldest()
        return message

    def _silence(self) -> None:
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Forget it; its process is asked to end, if it has not."""
        if not self._closed:
            if self._how is None:
                self.kill()
            self._closed = True

    def terminate(self) -> None:
        """Make it end."""
        self._send_end("terminate")

    def kill(self) -> None:
        """Make it end at once: nothing more of it is taken in."""
        self._send_end("kill")
        self._link.forget(self)
        self.end("was killed")

    def _send_end(self, how: str) -> None:
        if self._how is None and self._link.lost is None:
            try:
                self._link.queue(frames.End(self.serial, how))
            except ChannelClosed:
                return
            self._link.push()

    def stopped_s(self) -> float:
        """For how long a signal has stopped its process, as far as is known here."""
        return self._stopped_s

    def wait(self, timeout_s: float) -> bool:
        """Wait until its process has ended; whether it has."""
        until = time.monotonic() + timeout_s
        while self._how is None:
            self._link.read()
            self._link.check()
            left_s = until - time.monotonic()
            if self._how is not None or left_s <= 0:
                break
            _wait(self._link.fileno(), min(left_s, _LOOK_S))
        return self._how is not None

    def how_it_ended(self) -> str:
        """A phrase for messages."""
        return self._how or "is alive"


def _wait(fd: int, timeout_s: float) -> None:
    if fd < 0:
        time.sleep(timeout_s)
        return
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(timeout_s * 1e3)
