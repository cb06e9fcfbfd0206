"""GroupConnection: a collector's end of the channel to a remote group, and the connections to its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from rollwright._processes.channel import ChannelClosed, dumps
from rollwright._processes.connection import NOTHING, ExceptionInfo
from rollwright._processes.network.channel import MessageForged, NetworkChannel, Pieces
from rollwright._processes.network.sources import with_sources
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.counters import Count, WorkerCounters
from rollwright.collectors.workers.remote import frames
from rollwright.collectors.workers.remote.frames import FrameChannel, RolloutPlaces, bytes_of
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.weight_update.subscribing import Copies, Forwarder

_WORD = 8
_OWN = _WORD * (Count.PUBLISHED + 1)  # bytes of the counters that the collector writes
_LOOK_S = 0.2


class RemoteWorker:
    """A worker of a remote group; see :class:`~rollwright._processes.connection.Connection`.

    Its counters here are as they were when it was last heard of. What it has written lies at the same place here before
    its message is taken.

    Args:
        group: that it is of.
        serial: number of its start.
        spec: what it is made of; the memory is the collector's.
    """

    def __init__(self, group: GroupConnection, serial: int, spec: WorkerSpec) -> None:
        self._group, self.serial = group, serial
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
        return self._group.name

    def clock(self) -> float:
        """Of its machine, in seconds, when that was last heard of."""
        return self._group.clock

    # What the group sends ----------------------------------------------------------------------------

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
        if isinstance(frame.message, messages.Collected):
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
        ended_at[ended_at > 0] += time.monotonic() - self._group.clock  # two clocks are never compared

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
        with self._group.lock:
            self._places.note(message)
            self._group.queue_weights()
            if isinstance(message, messages.Collect):
                self._ordered.append(self._counters.counts[Count.PUBLISHED])
            self._group.queue(frames.ToWorker(self.serial, message))

    @property
    def behind(self) -> bool:
        """The connection to the group sends what there was no room for."""
        return False

    def flush(self) -> None:
        """The connection to the group sends what there was no room for."""

    def take(self) -> Any:
        """The next message."""
        if not self._arrived:
            self._group.read()
        if not self._arrived:
            self._silence()
            is_gone = self._how is not None or self._closed
            if not self._arrived and not is_gone:  # asked after that: another thread may bring something
                return NOTHING
            self._ring()
            if not self._arrived:
                raise ChannelClosed("the other end is gone")
        message, counters = self._arrived.popleft()
        with self._group.lock:
            if counters is not None:
                self.mirror(counters)
            if isinstance(message, messages.Collected | messages.Failed) and self._ordered:
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
        self._group.forget(self)
        self.end("was killed")

    def _send_end(self, how: str) -> None:
        if self._how is None and self._group.lost is None:
            try:
                self._group.queue(frames.End(self.serial, how))
            except ChannelClosed:
                return
            self._group.push()

    def stopped_s(self) -> float:
        """For how long a signal has stopped its process, as far as is known here."""
        return self._stopped_s

    def wait(self, timeout_s: float) -> bool:
        """Wait until its process has ended; whether it has."""
        until = time.monotonic() + timeout_s
        while self._how is None:
            self._group.read()
            self._group.check()
            left_s = until - time.monotonic()
            if self._how is not None or left_s <= 0:
                break
            _wait(self._group.fileno(), min(left_s, _LOOK_S))
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


_serials = itertools.count(1)


class GroupConnection:
    """A collector's end of the channel to a remote group; each of its workers is a connection.

    What is sent before the group is there waits for it. Nothing here waits.

    Args:
        index: of the group.
        host_timeout: seconds without a sign after which the group counts as lost.
        start_timeout: seconds for the group to be there.

    Attributes:
        name: of its machine, for messages.
        lost: why it is gone; None: it is not.
        clock: of its machine, when it was last heard of.
        lock: held by whoever reads or sends, which may be a thread of its own.
    """

    def __init__(self, index: int, *, host_timeout: float, start_timeout: float) -> None:
        self.index, self.name = index, "a host that has not joined"
        self._host_timeout, self._start_timeout = host_timeout, start_timeout
        self._channel: FrameChannel | None = None
        self._waiting: list[tuple[Any, Pieces]] = []  # for the channel
        self._workers: dict[int, RemoteWorker] = {}  # by serial number
        self._began = self._heard = time.monotonic()
        self.clock = 0.0
        self.lost: str | None = None
        self._failure: ExceptionInfo | None = None  # by which it was lost
        self.lock = threading.RLock()
        self._weights = Forwarder()

    # Its state ----------------------------------------------------------------------------------------

    @property
    def is_joined(self) -> bool:
        """Whether the group is there."""
        return self._channel is not None

    def join(self, channel: NetworkChannel, name: str, begin: frames.Begin) -> None:
        """The group is there."""
        with self.lock:
            self._channel, self.name, self._heard = FrameChannel(channel), name, time.monotonic()
            channel.give_up_after(self._host_timeout)
            try:
                self._channel.send_alone(begin)  # the group has a place for weights when it has taken this in
            except ChannelClosed:
                self.lose("has hung up")
                return
            for frame, pieces in self._waiting:
                self._channel.queue(frame, pieces)
            self._waiting.clear()
            self.push()

    def fileno(self) -> int:
        """Of the channel; -1: there is none."""
        return -1 if self._channel is None else self._channel.fileno()

    def check(self, refused: str = "") -> None:
        """Find out whether the group has been silent for too long; ``refused``: who was, for messages."""
        with self.lock:
            now = time.monotonic()
            if self.lost is not None:
                return
            if self._channel is None:
                if now - self._began > self._start_timeout:
                    late = TimeoutError(f"nothing joined within start_timeout={self._start_timeout:g} s{refused}")
                    self.lose(f"within start_timeout={self._start_timeout:g} s", ExceptionInfo.of(late))
            elif now - self._heard_at() > self._host_timeout:
                self.read()  # this process may have been busy
                if self.lost is None and time.monotonic() - self._heard_at() > self._host_timeout:
                    self.lose(f"has given no sign for host_timeout={self._host_timeout:g} s")

    def _heard_at(self) -> float:
        """When the last sign came: a message, or some of one that takes long."""
        return self._heard if self._channel is None else max(self._heard, self._channel.heard_at)

    def lose(self, how: str, failure: ExceptionInfo | None = None) -> None:
        """The group is gone, with all of its workers."""
        with self.lock:
            if self.lost is None:
                self.lost = f"was lost: {self.name} {how}"
                self._failure = failure
                for worker in self._workers.values():
                    worker.end(self.lost, failure)
                self._workers.clear()
                self.close()

    def close(self) -> None:
        """Close the channel, which ends the group."""
        with self.lock:
            if self._channel is not None:
                self._channel.close()
            self.lost = self.lost or "was closed"

    # Frames -------------------------------------------------------------------------------------------

    def launch(self, spec: WorkerSpec) -> RemoteWorker:
        """Start a worker there.

        Raises:
            TypeError: a part of it cannot be pickled.
        """
        bare = dataclasses.replace(spec, counters=None, blocks=None, packing=None, weights=())  # type: ignore[arg-type]
        pickled = with_sources(bytes(dumps(bare)))
        with self.lock:
            worker = RemoteWorker(self, next(_serials), spec)
            if self.lost is not None:  # meanwhile, as another thread has read
                worker.end(self.lost, self._failure)
                return worker
            self._workers[worker.serial] = worker
            self._weights.follow(spec.index, spec.weights)
            with contextlib.suppress(ChannelClosed):  # the group is lost, and the worker with it
                self.queue(frames.Launch(worker.serial, spec.index, pickled, worker.num_ids))
                self.queue_weights()
        return worker

    def queue(self, frame: Any, pieces: Pieces = ()) -> None:
        """Have a frame sent by the next :meth:`push`.

        Raises:
            ChannelClosed: the group is lost.
        """
        with self.lock:
            if self.lost is not None:
                raise ChannelClosed(self.lost)
            if self._channel is None:
                self._waiting.append((frame, pieces))
            else:
                self._channel.queue(frame, pieces)

    def push(self) -> None:
        """Send what is queued as one message, without waiting."""
        with self.lock:
            if self._channel is not None and self.lost is None:
                try:
                    self._channel.push()
                except ChannelClosed:
                    self.lose("has hung up")

    def read(self) -> None:
        """Take in what has arrived, for all workers, and send what there is room for."""
        with self.lock:
            if self._channel is None or self.lost is not None:
                return
            try:
                self._channel.read(self._place, self._received)
                if not self._channel.behind:
                    self.queue_weights()  # others were on the way before
                self._channel.push()
            except ChannelClosed:
                self.lose("has hung up")
            except MessageForged as error:
                self.lose(f"cannot be trusted: {error}")

    def _place(self, frame: Any, sizes: Sequence[int]) -> list[memoryview]:
        self._heard = time.monotonic()
        worker = self._workers.get(frame.serial)
        if worker is None:
            return [memoryview(bytearray(size)) for size in sizes]
        return worker.place(frame, sizes)

    def _received(self, frame: Any) -> None:
        self._heard = time.monotonic()
        match frame:
            case frames.Started(serial, pid):
                if (worker := self._workers.get(serial)) is not None:
                    worker.pid = pid
            case frames.FromWorker():
                self.clock = frame.clock
                if (worker := self._workers.get(frame.serial)) is not None:
                    worker.arrive(frame)
            case ExceptionInfo():
                self.lose("has failed", frame)
            case frames.Ended(serial, how, failure, counters):
                if (worker := self._workers.pop(serial, None)) is not None:
                    worker.mirror(counters)
                    worker.end(how, failure)
            case frames.Beat() if frame.clock is not None:
                self.clock = frame.clock
                for serial, page in frame.counters.items():
                    if (worker := self._workers.get(serial)) is not None:
                        worker.mirror(page)
                        worker.note_stopped(frame.stopped_s.get(serial, 0.0))

    def forget(self, worker: RemoteWorker) -> None:
        """Take in nothing more of a worker."""
        with self.lock:
            self._workers.pop(worker.serial, None)
            if self._channel is not None:
                self._channel.divert(lambda frame: getattr(frame, "serial", None) == worker.serial)

    # Weights ------------------------------------------------------------------------------------------

    def publish(self, copies: Copies) -> None:
        """Send what was published, once for all workers of the group; while others are on the way, after these.

        Args:
            copies: see :meth:`~rollwright.weight_update.subscribing.Forwarder.take`.
        """
        with self.lock:
            if self.lost is None and self._channel is not None and not self._channel.behind:
                self.queue_weights(copies)
                self.push()

    def queue_weights(self, copies: Copies | None = None) -> None:
        """Have what was published since the last time sent, before anything that is queued from now on.

        Raises:
            ChannelClosed: the group is lost.
        """
        with self.lock:
            for forwarded in self._weights.take(copies):
                models: dict[str, Any] = {}
                tensors: list[torch.Tensor] = []
                for model_id, (of_model, extras) in forwarded.models.items():
                    specs = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in of_model.items()]
                    models[model_id] = specs, extras
                    tensors += of_model.values()
                frame = frames.Publish(forwarded.receiver, forwarded.version, models)
                self.queue(frame, [_memory(tensor) for tensor in tensors])


def _memory(tensor: torch.Tensor) -> memoryview:
    memory = bytes_of(tensor.contiguous()) if tensor.numel() else None
    return memoryview(b"") if memory is None else memory
