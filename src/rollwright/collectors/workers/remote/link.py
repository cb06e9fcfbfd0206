"""Link: a collector's end of the line to a remote group."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.failures import ExceptionInfo
from rollwright._processes.network.carrier import CarrierFailed
from rollwright._processes.network.line import Line, MessageForged, Pieces
from rollwright._processes.network.sources import with_sources
from rollwright._processes.pickling import dumps
from rollwright.collectors.workers.remote import frames
from rollwright.collectors.workers.remote.frame_line import FrameLine
from rollwright.collectors.workers.remote.mirror import bytes_of
from rollwright.collectors.workers.remote.worker import RemoteWorker
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.weight_update.subscribing import Copies, Forwarder

_serials = itertools.count(1)


class Link:
    """A collector's end of the line to a remote group; each of its workers is a connection.

    What is sent before the group is there waits for it. Nothing here waits.

    Args:
        index: of the group.
        host_timeout: seconds without a sign after which the group counts as lost.
        start_timeout: seconds for the group to be there.
        if_lost: what is said in addition when it is lost, as a phrase; "": nothing.

    Attributes:
        name: of its machine, for messages.
        lost: why it is gone; None: it is not.
        clock: of its machine, when it was last heard of.
        lock: held by whoever reads or sends, which may be a thread of its own.
    """

    def __init__(self, index: int, *, host_timeout: float, start_timeout: float, if_lost: str = "") -> None:
        self.index, self.name = index, "a host that has not joined"
        self._host_timeout, self._start_timeout, self._if_lost = host_timeout, start_timeout, if_lost
        self._line: FrameLine | None = None
        self._waiting: list[tuple[Any, Pieces]] = []  # for the line
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
        return self._line is not None

    def join(self, line: Line, name: str, begin: frames.Begin) -> None:
        """The group is there."""
        with self.lock:
            self._line, self.name, self._heard = FrameLine(line), name, time.monotonic()
            line.give_up_after(self._host_timeout)
            try:
                self._line.send_alone(begin)  # the group has a place for weights when it has taken this in
            except ChannelClosed:
                self.lose("has hung up")
                return
            for frame, pieces in self._waiting:
                self._line.queue(frame, pieces)
            self._waiting.clear()
            self.push()

    def fileno(self) -> int:
        """Of the line; -1: there is none."""
        return -1 if self._line is None else self._line.fileno()

    def check(self, refused: str = "") -> None:
        """Find out whether the group has been silent for too long; ``refused``: who was, for messages."""
        with self.lock:
            now = time.monotonic()
            if self.lost is not None:
                return
            if self._line is None:
                if now - self._began > self._start_timeout:
                    late = TimeoutError(f"nothing joined within start_timeout={self._start_timeout:g} s{refused}")
                    self.lose(f"within start_timeout={self._start_timeout:g} s", ExceptionInfo.of(late))
            elif now - self._heard_at() > self._host_timeout:
                self.read()  # this process may have been busy
                if self.lost is None and time.monotonic() - self._heard_at() > self._host_timeout:
                    self.lose(f"has given no sign for host_timeout={self._host_timeout:g} s")

    def _heard_at(self) -> float:
        """When the last sign came: a message, or some of one that takes long."""
        return self._heard if self._line is None else max(self._heard, self._line.heard_at)

    def lose(self, how: str, failure: ExceptionInfo | None = None) -> None:
        """The group is gone, with all of its workers."""
        with self.lock:
            if self.lost is None:
                self.lost = f"was lost: {self.name} {how}" + (f" ({self._if_lost})" if self._if_lost else "")
                self._failure = failure
                for worker in self._workers.values():
                    worker.end(self.lost, failure)
                self._workers.clear()
                self.close()

    def close(self) -> None:
        """Hang up, which ends the group."""
        with self.lock:
            if self._line is not None:
                self._line.close()
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
            with contextlib.suppress(ChannelClosed):  # the link is lost, and the worker with it
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
            if self._line is None:
                self._waiting.append((frame, pieces))
            else:
                self._line.queue(frame, pieces)

    def push(self) -> None:
        """Send what is queued as one message, without waiting."""
        with self.lock:
            if self._line is not None and self.lost is None:
                try:
                    self._line.push()
                except ChannelClosed:
                    self.lose("has hung up")

    def read(self) -> None:
        """Take in what has arrived, for all workers, and send what there is room for."""
        with self.lock:
            if self._line is None or self.lost is not None:
                return
            try:
                self._line.read(self._place, self._received)
                if not self._line.behind:
                    self.queue_weights()  # others were on the way before
                self._line.push()
            except ChannelClosed:
                self.lose("has hung up")
            except MessageForged as error:
                self.lose(f"cannot be trusted: {error}")
            except CarrierFailed as error:
                self.lose(f"has hung up, or its second connection has failed ({error})")

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
            if self._line is not None:
                self._line.divert(lambda frame: getattr(frame, "serial", None) == worker.serial)

    # Weights ------------------------------------------------------------------------------------------

    def publish(self, copies: Copies) -> None:
        """Send what was published, once for all workers of the group; while others are on the way, after these.

        Args:
            copies: see :meth:`~rollwright.weight_update.subscribing.Forwarder.take`.
        """
        with self.lock:
            if self.lost is None and self._line is not None and not self._line.behind:
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
