"""RemoteGroup: workers in processes of another machine, whose memory a collector mirrors; and how it joins."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

import torch

from rollwright._memory import Segment
from rollwright._processes.channel import Channel, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.connection import ExceptionInfo, ExitReason
from rollwright._processes.network.channel import MessageForged, NetworkChannel
from rollwright._processes.network.handshake import RefusedForNow, connect_to
from rollwright._processes.pool import Answer, Pool
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.counters import Count, WorkerCounters
from rollwright.collectors.workers.remote import frames
from rollwright.collectors.workers.remote.frames import FrameChannel, RolloutPlaces, bytes_of
from rollwright.collectors.workers.worker import serve
from rollwright.weight_update.forms import State
from rollwright.weight_update.schemes import Publisher

_HOLD_S = 0.02
_LARGE = 1 << 16  # bytes, which are better on their way while others collect


class Holding:
    """Decides when what a remote group has queued is sent.

    A message costs the collector as much processor as a small rollout itself. So a small one waits for those that were
    asked for in the same message, for 20 ms at most; everything else is sent at once.

    Example:
        >>> holding = Holding()
        >>> for serial in (1, 2):
        ...     holding.ordered(serial)
        >>> holding.orders_read()
        >>> holding.collected(1, 100)
        >>> holding.left_s() > 0
        True
        >>> holding.collected(2, 100)
        >>> holding.left_s()
        0.0
    """

    def __init__(self) -> None:
        self._orders: list[int] = []
        self._due: set[int] = set()  # serial numbers of workers whose rollouts travel together
        self._until = math.inf

    def ordered(self, serial: int) -> None:
        """A worker was asked for a rollout."""
        self._orders.append(serial)

    def orders_read(self) -> None:
        """What has arrived was read: the rollouts that it asked for belong together."""
        if self._orders:
            self._due = set(self._orders)
            self._orders.clear()

    def collected(self, serial: int, num_bytes: int) -> None:
        """The rollout of a worker was queued."""
        is_due = serial in self._due
        self._due.discard(serial)
        if is_due and self._due and num_bytes < _LARGE:
            self._until = min(self._until, time.monotonic() + _HOLD_S)
        else:
            self._until = 0.0

    def queued(self) -> None:
        """Something else was queued."""
        self._until = 0.0

    def ended(self, serial: int) -> None:
        """A worker is gone."""
        self._due.discard(serial)

    def left_s(self) -> float:
        """Seconds until what is queued is to be sent; infinity: nothing is."""
        return self._until if self._until in (0.0, math.inf) else max(0.0, self._until - time.monotonic())

    def pushed(self) -> None:
        """What was queued is sent."""
        self._until = math.inf


_END_S = 5.0
_NAP_S = 1.0
_WITHOUT_ATTENTION = (
    messages.Collect,
    messages.MemoryGrant,
    messages.MemoryRefusal,
)  # read where a worker waits for them


class RemoteGroup:
    """Starts workers as a collector elsewhere asks, and passes on what both sides send.

    Each worker writes to memory of this machine at the places that it would have in the collector's; what a message
    refers to is sent from there. Published weights arrive once for all workers.

    Args:
        line: to the collector.
        begin: what it has sent first.
    """

    def __init__(self, line: FrameChannel, begin: frames.Begin) -> None:
        self._line, self._begin = line, begin
        self._holding = Holding()
        count = begin.num_workers
        self._counters, self._blocks = Segment(), Segment()
        self._packing = [(Segment(), Segment()) for _ in range(count)]
        self._pages = [WorkerCounters(self._counters, index) for index in range(count)]
        self._publisher = Publisher(count)
        self._pool = Pool(count, self._relay, lost=self._lost, flushed=self._flushed)
        self._pool.watch(line.fileno(), lambda: None)
        self._serials: dict[int, int] = {}  # by worker
        self._workers: dict[int, int] = {}  # by serial number
        self._places: dict[int, RolloutPlaces] = {}  # by worker
        self._weights: deque[list[torch.Tensor]] = deque()  # of the publications in the message being received
        self._beat_at = 0.0
        threading.Thread(target=self._show_life, name="rollwright-beat", daemon=True).start()

    def serve(self) -> None:
        """Serve the collector until it hangs up, or its machine is gone."""
        try:
            while True:
                self._pool.run_once(min(self._begin.beat_s / 2, self._holding.left_s()))
                self._line.read(self.place, self.received)
                self._holding.orders_read()
                self._beat()
                if not self._holding.left_s():
                    self._holding.pushed()
                    self._line.push()
        except (ChannelClosed, MessageForged) as error:
            if not isinstance(error, ChannelClosed):
                with contextlib.suppress(ChannelClosed):
                    self._line.send_alone(ExceptionInfo.of(error))
            until = time.monotonic() + _END_S
            self._pool.end(lambda: until, hang_up=True)
            if not isinstance(error, ChannelClosed):
                raise

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beat_at >= self._begin.beat_s and not self._line.behind:
            self._beat_at = now
            counters = {serial: self._snapshot(worker) for serial, worker in self._workers.items()}
            stopped = {self._serials[place]: each.stopped_s() for place, each in self._pool.connections.items()}
            self._send(frames.Beat(now, counters, {serial: s for serial, s in stopped.items() if s}))

    def _show_life(self) -> None:
        """Show that this machine is there, where starting a process takes long."""
        while True:
            time.sleep(2 * self._begin.beat_s)
            if time.monotonic() - self._beat_at > 2 * self._begin.beat_s and not self._line.behind:
                try:
                    self._line.send_alone(frames.Beat(None, {}, {}))
                except ChannelClosed:
                    return

    def _send(self, frame: Any) -> None:
        self._line.queue(frame)
        self._holding.queued()

    def _snapshot(self, worker: int) -> bytes:
        return bytes(self._pages[worker].page)

    # From the collector -------------------------------------------------------------------------------

    def place(self, frame: Any, sizes: Sequence[int]) -> list[memoryview]:
        """Memory for published weights."""
        specs = [spec for entries, _ in frame.models.values() for spec in entries]
        self._weights.append([torch.empty(shape, dtype=dtype, device="cpu") for _, shape, dtype in specs])
        memories = [bytes_of(tensor) if tensor.numel() else None for tensor in self._weights[-1]]
        return [memoryview(b"") if memory is None else memory for memory in memories]

    def received(self, frame: Any) -> None:
        """Do what the collector asks."""
        match frame:
            case frames.Launch():
                self._launch(frame)
            case frames.ToWorker(serial, message) if serial in self._workers:
                worker = self._workers[serial]
                self._places[worker].note(message)
                if isinstance(message, messages.Collect):
                    self._holding.ordered(serial)
                self._pool.send(worker, message)
                if not isinstance(message, _WITHOUT_ATTENTION):
                    self._pages[worker].call_attention()
            case frames.Publish():
                self._publish(frame)
            case frames.End(serial, how) if serial in self._workers:
                connection = self._pool.by_place[self._workers[serial]]
                if connection is not None:
                    connection.kill() if how == "kill" else connection.terminate()

    def _launch(self, asked: frames.Launch) -> None:
        worker = asked.worker
        if (before := self._serials.get(worker)) is not None:
            self._pool.drop(worker, "was replaced")
            self._ended(worker, before, "was replaced", None)
        self._publisher.forget(worker)
        self._pages[worker].counts[Count.NUM_IDS] = max(asked.num_ids, self._pages[worker].counts[Count.NUM_IDS])
        self._places[worker] = RolloutPlaces(self._blocks, self._packing[worker])
        self._serials[worker], self._workers[asked.serial] = asked.serial, worker
        memory = {
            "counters": self._counters,
            "blocks": self._blocks,
            "packing": self._packing[worker],
            "weights": tuple(self._publisher.weights_of(worker)),
        }
        threads = self._begin.num_threads or max(1, len(os.sched_getaffinity(0)) // self._begin.num_local)
        name = f"rollwright-worker-{worker}"
        try:
            child = Child(_serve_sent, asked.spec, memory, name=name, num_threads=threads)
        except OSError as error:
            self._ended(worker, asked.serial, "could not be started", ExceptionInfo.of(error))
            return
        self._pool.add(worker, child)
        self._send(frames.Started(asked.serial, child.pid))

    def _publish(self, frame: frames.Publish) -> None:
        has_tensors = any(specs for specs, _ in frame.models.values())
        tensors = iter(self._weights.popleft() if has_tensors else ())
        models: dict[str, State] = {
            model_id: {**{name: next(tensors) for name, _, _ in specs}, **extras}
            for model_id, (specs, extras) in frame.models.items()
        }
        meant = None if frame.worker is None else [frame.worker]
        self._publisher.publish(frame.version, models, meant)
        for index in range(len(self._pages)) if meant is None else meant:
            self._pages[index].counts[Count.PUBLISHED] = frame.version

    # From the workers ---------------------------------------------------------------------------------

    def _relay(self, worker: int, message: Any) -> Answer | None:
        """Pass on a message of a worker, with what it refers to."""
        found = self._places[worker].take(message)
        pieces, serial = [_piece(each) for each in found.values()], self._serials[worker]
        frame = frames.FromWorker(serial, message, time.monotonic(), self._snapshot(worker), tuple(found))
        self._line.queue(frame, pieces)
        if isinstance(message, messages.Collected):
            self._holding.collected(serial, sum(piece.nbytes for piece in pieces))
        else:
            self._holding.queued()
        return None

    def _lost(self, worker: int, loss: ExitReason) -> None:
        """The process of a worker is gone."""
        self._ended(worker, self._serials[worker], loss.how, loss.failure)

    def _ended(self, worker: int, serial: int, how: str, failure: Any) -> None:
        self._publisher.forget(worker)
        del self._serials[worker], self._workers[serial]
        self._holding.ended(serial)
        self._send(frames.Ended(serial, how, failure, self._snapshot(worker)))

    def _flushed(self, worker: int) -> None:
        self._pages[worker].call_attention()


def _piece(found: torch.Tensor | memoryview) -> memoryview:
    """The bytes of what a worker has written, where they lie if that is possible.

    The worker does not write there again before the collector has read its message. But its packing segment it may,
    since what is in there may be read later than the message.
    """
    if isinstance(found, memoryview):
        return memoryview(bytes(found))
    memory = bytes_of(found)
    if memory is None:
        memory = bytes_of(found.contiguous())
    assert memory is not None
    return memory


def _serve_sent(channel: Channel, spec: bytes, memory: dict[str, Any]) -> None:
    """Serve as a worker that was sent from another machine, with memory of this one."""
    serve(channel, dataclasses.replace(pickle.loads(spec), **memory))


def serve_collector(line: NetworkChannel) -> None:
    """Serve a collector until it hangs up, or its machine is gone."""
    group: list[RemoteGroup] = []
    ends = FrameChannel(line)

    def received(frame: Any) -> None:
        if group:
            group[0].received(frame)
        else:
            ends.give_up_after(frame.silence_s)
            sys.path.extend(path for path in frame.import_paths if path not in sys.path)
            group.append(RemoteGroup(ends, frame))

    try:
        while not group:
            wait([ends.fileno()], _NAP_S)
            ends.read(lambda frame, sizes: group[0].place(frame, sizes), received)
        group[0].serve()
    except ChannelClosed:
        return
    except Exception as error:
        with contextlib.suppress(ChannelClosed):
            ends.send_alone(ExceptionInfo.of(error))
        raise


_RETRY_S = 0.2


def join(
    address: tuple[str, int],
    secret: bytes,
    *,
    group: int | None = None,
    name: str | None = None,
    timeout_s: float = 20.0,
) -> None:
    """Run workers of a collector until it hangs up, or its machine is gone.

    Args:
        address: host and port where the collector listens.
        secret: of its run.
        group: which group this is; None: any that nobody has joined.
        name: of this machine, for messages; None: its host name.
        timeout_s: for the collector to listen, to answer, and to have a place: it is asked again until then.

    Raises:
        HandshakeRefused: the collector has another secret, or does not want this host.
        ConnectionError, TimeoutError: nothing answers there.
    """
    about = {"group": group, "name": name or socket.gethostname(), "cores": len(os.sched_getaffinity(0))}
    line = _let_in(address, secret, about, timeout_s)
    try:
        serve_collector(line)
    finally:
        line.close()


def _let_in(address: tuple[str, int], secret: bytes, about: dict[str, Any], timeout_s: float) -> NetworkChannel:
    until = time.monotonic() + timeout_s
    while True:
        try:
            return connect_to(address, secret, about, max(_RETRY_S, until - time.monotonic()))
        except RefusedForNow:
            if time.monotonic() + _RETRY_S > until:
                raise
            time.sleep(_RETRY_S)
