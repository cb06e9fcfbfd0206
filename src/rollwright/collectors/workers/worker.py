"""Worker: collects in its own process, one batch for each message that asks for it."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollwright._memory import Segment
from rollwright._processes.channel import ByValue, Channel, ChannelClosed
from rollwright._processes.connection import ExceptionInfo
from rollwright._seeding import seed_torch
from rollwright.collectors.core import resolve
from rollwright.collectors.delivery.thread import paused_error
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.collector import WorkerCollector
from rollwright.collectors.workers.counters import BEAT_S, Count, WorkerCounters, WorkerState
from rollwright.collectors.workers.memory import BatchForm, BlockPart
from rollwright.weight_update.subscribing import WeightSubscriber

_NAP_S = BEAT_S
_BEAT, _ATTENTION = int(Count.BEAT), int(Count.ATTENTION)  # those of each step, without a lookup


@dataclass(frozen=True)
class WorkerSpec:
    """Settings from which a worker is constructed.

    Attributes:
        index: its number among its siblings.
        num_workers: how many they are.
        create_env_fn: makes the environment.
        policy: acts, in a pickle, with the weights that its functions read; None: ``options.policy_factory`` makes it,
            or actions are random.
        options: of its collector.
        init_fn: called first, without arguments.
        seed: of the global random generators.
        counters: of all workers.
        blocks: memory of batches.
        packing: memory of what does not fit in there.
        weights: where its weights are published.
        max_policy_lag: versions that may have been published since the first of a batch acted; beyond it, the batch is
            thrown away and taken again; None: no limit.
        keeps_place: whether the collector is to know where in the data the worker is: another may take its place.
        place: where in the data it begins; None: at the start.
    """

    index: int
    num_workers: int
    create_env_fn: Any
    policy: bytes | None
    options: CollectorOptions
    init_fn: Callable[[], Any] | None
    seed: int
    counters: Segment
    blocks: Segment
    packing: tuple[Segment, Segment]
    weights: tuple[Any, ...]
    max_policy_lag: int | None
    keeps_place: bool = False
    place: bytes | None = None


def serve(channel: Channel, spec: WorkerSpec) -> None:
    """Serve the collector until it sends a stop, or is gone."""
    Worker(channel, spec).serve()


class Worker:
    """Takes rollouts one at a time, and attends to everything else between two steps."""

    def __init__(self, channel: Channel, spec: WorkerSpec) -> None:
        self._channel, self._spec = channel, spec
        self._counters = WorkerCounters(spec.counters, spec.index)
        self._counts = self._counters.counts
        self._seen = self._counts[Count.ATTENTION]
        self._counters.state = WorkerState.STARTING
        self._inbox: deque[Any] = deque()
        self._run: int | None = None  # the current rollout
        self._interrupted_run = -1  # number of the last one that was to be interrupted
        self._cut = self._paused = False
        self._stopping: messages.Stop | None = None
        _seed_all(spec.seed)
        if spec.init_fn is not None:
            spec.init_fn()
        self._subscriber = WeightSubscriber(spec.weights)
        self._collector = WorkerCollector(
            spec,
            self._counters,
            self._ask,
            self._subscriber,
            interrupted=self._checkpoint,
            stopping=lambda: self._stopping is not None,
            send=self._send_in_rollout,
        )
        self._take_weights()
        self._say(self._collector.ready())

    # The loop ---------------------------------------------------------------------------------

    def serve(self) -> None:
        """Do what is asked until the end."""
        collector = self._collector
        try:
            while self._stopping is None:
                self._counters.state = WorkerState.PAUSED if self._paused else WorkerState.WAITING
                with collector.observer.spending("wait"):
                    message = self._next_message()
                self._handle(message, between_batches=True)
        finally:
            self._counters.state = WorkerState.STOPPING
            collector.shutdown(close_env=self._stopping is None or self._stopping.close_env)
            self._counters.state = WorkerState.ENDED

    def _say(self, message: Any) -> None:
        """Send to the collector, which may be busy for long; if it is gone, that is ``ChannelClosed``."""
        self._channel.send(message, timeout_s=math.inf)

    def _send_in_rollout(self, message: Any) -> None:
        """Send in the middle of a rollout, which may take until the collector reads."""
        before, self._counters.state = self._counters.state, WorkerState.DELIVERING
        self._say(message)
        self._counters.state = before

    def _read(self) -> None:
        seen = self._counts[Count.ATTENTION]  # before, so that what comes while we read is attended to later
        while self._channel.poll():
            self._inbox.append(self._channel.recv(0.0))
        self._seen = seen - self._channel.partial  # come again for the rest of a message

    def _next_message(self) -> Any:
        """Wait for what is to be done next, in the order it was sent; rollouts come last, and after a pause."""
        while True:
            self._read()
            message = next((m for m in self._inbox if not isinstance(m, messages.Collect)), None)
            if message is None and self._inbox and not self._paused:
                message = self._inbox[0]
            if message is not None:
                self._inbox.remove(message)
                return message
            self._channel.poll(_NAP_S)
            self._counters.beat()

    def _handle(self, message: Any, *, between_batches: bool) -> bool:
        """Do what a message asks; False if it has to wait for the end of the rollout."""
        match message:
            case messages.Stop():
                self._stopping, self._cut, self._paused = message, True, False
            case messages.Pause():
                self._paused = True
                self._counters.state = WorkerState.PAUSED
                self._say(messages.Paused(message.serial))
            case messages.Resume():
                self._paused = False
            case messages.Interrupt():
                self._interrupted_run = max(self._interrupted_run, message.run)  # it may not have begun yet
                self._cut = self._cut or message.run == self._run
            case messages.Call() if between_batches or not message.between_batches:
                self._call(message)
            case messages.Call() if self._paused and not message.cut:
                self._say(messages.Raised(message.serial, ExceptionInfo.of(paused_error(message.path))))
            case messages.Call():
                self._cut = self._cut or message.cut
                return False
            case messages.Collect() if between_batches:
                self._collect(message)
            case _:
                return False
        return True

    def _call(self, call: messages.Call) -> None:
        before, self._counters.state = self._counters.state, WorkerState.CALLED
        try:
            self._take_weights()  # what was published before the call counts in it
            found = resolve(self._collector, call.path)
            if call.arguments is not None:
                args, kwargs = call.arguments.value
                with self._collector.called(call.path, paused=self._paused, in_rollout=self._run is not None):
                    found = found(*args, **kwargs)
            if (place := self._collector.moved()) is not None:
                self._say(messages.Position(place))
            answer: Any = messages.Returned(call.serial, ByValue(found))
            self._counters.state = WorkerState.DELIVERING  # which may take until the collector reads
            try:
                self._say(answer)
            except (TypeError, AttributeError, ValueError, RuntimeError) as error:  # what pickling raises
                raise TypeError(
                    f"{call.path}: {type(found).__name__} cannot be sent between processes: {error}"
                ) from error
        except ChannelClosed:
            raise
        except BaseException as error:
            self._counters.state = WorkerState.DELIVERING
            self._say(messages.Raised(call.serial, ExceptionInfo.of(error)))
        self._counters.state = before

    # A rollout --------------------------------------------------------------------------------

    def _collect(self, order: messages.Collect) -> None:
        collector = self._collector
        self._run, self._cut = order.run, order.run <= self._interrupted_run
        self._take_weights()
        self._counters.state = WorkerState.PREPARING  # which a hook may take long for
        try:
            try:
                found: Any = collector.collect(order)
            finally:
                self._run = None
        except BaseException as error:  # if it is that the collector is gone, send() raises that again
            found = messages.Failed(order.run, ExceptionInfo.of(error))
        news = collector.news()
        if news is not None:
            self._say(news)
        self._say(found)
        self._counts[Count.OLDEST] = -1  # not before: who reads it may rely on having the message

    def _checkpoint(self) -> bool:
        """Between two steps: whether the rollout ends here."""
        counts = self._counts
        counts[_BEAT] += 1
        if counts[_ATTENTION] != self._seen or self._subscriber.due:
            self._attend()
        return self._cut

    def _attend(self) -> None:
        """Take new weights, and do what can be done now; rest while that is asked."""
        with self._collector.observer.spending("wait"):
            self._take_weights()
            while True:
                self._read()
                self._inbox = deque(m for m in self._inbox if not self._handle(m, between_batches=False))
                if not self._paused or self._cut:
                    break
                self._channel.poll(_NAP_S)
                self._counters.beat()
                self._take_weights()
            if self._run is not None:
                self._counters.state = WorkerState.COLLECTING

    def _take_weights(self) -> None:
        if self._subscriber.due:
            self._counters.state, before = WorkerState.TAKING_WEIGHTS, self._counters.state
            with self._collector.observer.spending("weights"):
                self._collector.take_weights()
            self._counters.state = before

    def _ask(self, form: BatchForm) -> BlockPart | None:
        """Ask for memory in the middle of a rollout, however long the consumer is busy; None if the collector ends."""
        assert self._run is not None
        before, self._counters.state = self._counters.state, WorkerState.DELIVERING
        self._say(messages.MemoryRequest(self._run, form))
        place = None
        while place is None and self._stopping is None:
            if not self._channel.poll(_NAP_S):
                continue
            match message := self._channel.recv(0.0):
                case messages.MemoryGrant():
                    place = BlockPart(*message[1:])
                case messages.MemoryRefusal():
                    raise MemoryError(f"there is no memory for a batch. {message.why}")
                case messages.Stop():
                    self._handle(message, between_batches=False)
                case _:
                    self._inbox.append(message)
        self._counters.state = before
        return place


def _seed_all(seed: int) -> None:
    """Seed the global generators: forked processes have them all in one state."""
    seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
