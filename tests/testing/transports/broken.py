"""A backend that breaks what transports promise, in the way that :data:`fault` says; otherwise it is "process".

A fault is a subclass of :class:`Fault`. It may change what a worker is made of, what is sent to it, what comes back,
and the memory that both share.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch

from rollwright._interrupts import uninterrupted
from rollwright._memory import Segment
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.connection import NOTHING, ExceptionInfo
from rollwright.collectors.workers import messages, transports
from rollwright.collectors.workers.memory import Packer, unpack
from rollwright.collectors.workers.remote.frames import RolloutPlaces
from rollwright.weight_update.schemes import Publisher
from rollwright.weight_update.subscribing import Forwarder

Options = None


class Fault:
    """Nothing is broken."""

    def change(self, spec: Any) -> Any:
        """What a worker is made of."""
        return spec

    def connect(self, transport: Any, spec: Any) -> Any:
        """Start a worker."""
        return transport.connect(spec)

    def send(self, connection: Connection, message: Any) -> None:
        """Send a message."""
        connection.inner.post(message)

    def received(self, connection: Connection, message: Any) -> Any:
        """What is made of a message."""
        return message

    def published(self) -> None:
        """Weights were published."""

    def clean(self) -> None:
        """Remove what was left behind on purpose."""


fault: Fault = Fault()


class Transport:
    """Starts workers of this machine, and hands everything to the fault."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect(self, spec: Any) -> Connection:
        spec = fault.change(spec)
        return Connection(fault.connect(self._inner, spec), spec)

    def published(self) -> None:
        self._inner.published()
        fault.published()


class Connection:
    """A connection whose messages pass through the fault."""

    def __init__(self, inner: Any, spec: Any) -> None:
        self.inner, self.spec = inner, spec
        self.places = RolloutPlaces(spec.blocks, spec.packing)
        self.orders: dict[int, Any] = {}
        self.rollouts = 0
        self.kept: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def post(self, message: Any) -> None:
        self.places.note(message)
        if isinstance(message, messages.Collect):
            self.orders[message.run] = message
        fault.send(self, message)

    def take(self) -> Any:
        message = self.inner.take()
        if isinstance(message, messages.Collected):
            self.rollouts += 1
        return message if message is NOTHING else fault.received(self, message)


def transport(options: None, own: Any, num_workers: int) -> Transport:
    """See :mod:`~rollwright.collectors.workers.transports`."""
    return Transport(transports.transport(options, own, num_workers))


# Data -------------------------------------------------------------------------------------------------


class InBlock(Fault):
    """Changes what lies in the block of a rollout; its first one is sound."""

    def received(self, connection, message):
        if isinstance(message, messages.Collected):
            parts = {key: part for key, part in connection.places.take(message).items() if key is not None}
            if connection.rollouts > 1:
                self.spoil(connection, parts)
        return message

    def spoil(self, connection, parts):
        """Change it."""


class Doubles(InBlock):
    """Delivers the first rollout of a worker again in place of the later ones."""

    def received(self, connection, message):
        if isinstance(message, messages.Collected) and connection.kept is None:
            found = connection.places.take(message)
            connection.kept = {key: part.clone() for key, part in found.items() if key is not None}
            return message
        return super().received(connection, message)

    def spoil(self, connection, parts):
        for key, part in parts.items():
            part.copy_(connection.kept[key])


class Tears(InBlock):
    """Loses the second half of an entry's bytes."""

    def spoil(self, connection, parts):
        part = parts["observation"]
        part.view(torch.uint8).flatten(-1)[..., part.shape[-1] // 2 :] = 0


class Reorders(InBlock):
    """Frames arrive in another order."""

    def spoil(self, connection, parts):
        for part in parts.values():
            time_dim = 1 if connection.spec.create_env_fn.func.__name__ == "several" else 0
            part.copy_(part.clone().roll(1, time_dim))


class LosesRollouts(Fault):
    """Has a rollout taken again in place of the one that has arrived, once for each worker."""

    def received(self, connection, message):
        if isinstance(message, messages.Collected) and connection.rollouts == 2:
            connection.inner.post(connection.orders[message.run])
            return NOTHING
        return message


class DropsMessages(Fault):
    """The second rollout never arrives."""

    def received(self, connection, message):
        return NOTHING if isinstance(message, messages.Collected) and connection.rollouts == 2 else message


class Resets(Fault):
    """Begins new trajectories with each rollout."""

    def send(self, connection, message):
        if isinstance(message, messages.Collect):
            message = message._replace(reset=True)
        connection.inner.post(message)


class InPacking(Fault):
    """Changes what does not lie in the block."""

    def received(self, connection, message):
        if isinstance(message, messages.Collected) and message.rest is not None:
            segment = connection.spec.packing[message.rest.place]
            found = self.spoiled(unpack(message.rest, connection.spec.packing), connection)
            packed = Packer((segment, segment)).pack(found)
            return message._replace(rest=packed._replace(place=message.rest.place))
        return message

    def spoiled(self, found, connection):
        """What is delivered in place of it."""


class CutsTrajectories(InPacking):
    """The last frame of each trajectory is missing."""

    def spoiled(self, found, connection):
        return [trajectory[:-1].clone() for trajectory in found] if isinstance(found, list) else found


class LosesTrajectories(InPacking):
    """The first trajectory of a later rollout is missing."""

    def spoiled(self, found, connection):
        found = [trajectory.clone() for trajectory in found]
        return found[1:] if connection.rollouts == 2 else found


class SpoilsPacked(InPacking):
    """Zeros in place of what was packed."""

    def spoiled(self, found, connection):
        return found.apply(torch.zeros_like)


class LosesCounters(Fault):
    """The counters of a worker do not arrive."""

    def change(self, spec):
        return dataclasses.replace(spec, counters=Segment()) if spec.index == 1 else spec


class CollectsAhead(Fault):
    """Has rollouts taken that nobody has asked for."""

    def send(self, connection, message):
        if isinstance(message, messages.MemoryGrant):
            connection.kept = message
        connection.inner.post(message)

    def received(self, connection, message):
        if not isinstance(message, messages.Collected) or connection.kept is None:
            return message
        mine = message.run >= 10**6
        run = 1 + max(10**6, message.run)
        grant, far = connection.kept, (1 << 24) + (connection.spec.index << 20)
        connection.spec.blocks.grow(far + (1 << 20))
        connection.inner.post(messages.Collect(run, far, grant.number, False))
        return NOTHING if mine else message


class WritesTooMuch(Fault):
    """Writes into the buffer before trajectories are whole."""

    def change(self, spec):
        return dataclasses.replace(spec, options=dataclasses.replace(spec.options, trajs_per_batch=None))


class FillsCopies(Fault):
    """Workers write into a buffer of their own."""

    def change(self, spec):
        if spec.options.replay_buffer is None:
            return spec
        from rollwright.data import LazyTensorStorage, ReplayBuffer

        copy = ReplayBuffer(storage=LazyTensorStorage(10_000), shared=True)
        copy.share()
        return dataclasses.replace(spec, options=dataclasses.replace(spec.options, replay_buffer=copy))


# Weights ----------------------------------------------------------------------------------------------


class OwnWeights(Fault):
    """Workers read other weights than those that the collector writes."""

    def __init__(self):
        self.publisher, self.forwarder, self.before = Publisher(8), Forwarder(), {}

    def change(self, spec):
        self.forwarder.follow(spec.index, spec.weights)
        return dataclasses.replace(spec, weights=tuple(self.publisher.weights_of(spec.index)))

    def forward(self, mixed=False):
        """Publish there what was published here."""
        for receiver, version, models in self.forwarder.take():
            sent = {model_id: {**tensors, **extras} for model_id, (tensors, extras) in models.items()}
            whole = {model_id: dict(state) for model_id, state in sent.items()}
            if mixed:
                for model_id, state in sent.items():
                    old = self.before.get(model_id, state)
                    state.update({name: old[name] for name in list(state)[: len(state) // 2]})
            self.before.update(whole)
            self.publisher.publish(version, sent, None if receiver is None else [receiver])


class LosesWeights(OwnWeights):
    """Published weights do not arrive."""


class MixesWeights(OwnWeights):
    """Half of the tensors are those of the version before."""

    def published(self):
        self.forward(mixed=True)


class DelaysWeights(OwnWeights):
    """Weights arrive with the next rollout only."""

    def send(self, connection, message):
        self.forward()
        connection.inner.post(message)


class MixesUpWorkers(Fault):
    """A worker gets the weights of the one before it."""

    def change(self, spec):
        self.originals = [*getattr(self, "originals", []), spec]
        own = self.originals[-2 if spec.index else -1].weights[1]
        return dataclasses.replace(spec, weights=(spec.weights[0], own))


# Calls, hooks, states -----------------------------------------------------------------------------------


class AnswersForOthers(Fault):
    """An answer is that of another worker."""

    last: Any = None

    def received(self, connection, message):
        if isinstance(message, messages.Returned):
            self.last, value = message.value, self.last
            return message if value is None else message._replace(value=value)
        return message


class HidesTracebacks(Fault):
    """Errors arrive without the traceback."""

    def received(self, connection, message):
        if isinstance(message, messages.Raised | messages.Failed):
            return message._replace(failure=dataclasses.replace(message.failure, trace="it failed"))
        if isinstance(message, ExceptionInfo):
            return dataclasses.replace(message, trace="it failed")
        return message


class DropsHooks(Fault):
    """Workers do without hooks."""

    def change(self, spec):
        return dataclasses.replace(spec, options=dataclasses.replace(spec.options, pre_collect_hook=None))


class DropsInit(Fault):
    """Workers do without ``init_fn``."""

    def change(self, spec):
        return dataclasses.replace(spec, init_fn=None)


class ForgetsStates(Fault):
    """A state is loaded into one worker only."""

    def send(self, connection, message):
        if isinstance(message, messages.Call) and message.path == "load_saved_state" and connection.spec.index:
            message = message._replace(path="get_distant_attr", arguments=None)
            message = message._replace(path="worker_idx", arguments=None)
        connection.inner.post(message)


# Faults, Ctrl-C, the end --------------------------------------------------------------------------------


class RefusesAnyhow(Fault):
    """What cannot be sent is an error without a name."""

    def connect(self, transport, spec):
        try:
            return transport.connect(spec)
        except TypeError:
            raise TypeError("it cannot be sent") from None


class IgnoresTheDead(Fault):
    """The end of a process is not noticed."""

    def connect(self, transport, spec):
        inner = transport.connect(spec)
        take = inner.take

        def taken():
            try:
                return take()
            except ChannelClosed:
                return NOTHING

        first = inner.filenos()[:1]
        inner.filenos = lambda: first
        inner.take = taken
        inner.wait = lambda timeout_s: not inner.alive and self.closed(inner)
        return inner

    def closed(self, inner):
        """Whether the collector has ended the connection."""
        return inner.channel.fileno() < 0


class DoesNotHear(Fault):
    """Waits without looking for Ctrl-C."""

    def send(self, connection, message):
        connection.inner.post(message)
        if isinstance(message, messages.Collect):
            with uninterrupted:
                time.sleep(0.5)


class LeavesProcesses(Fault):
    """A process goes on."""

    def connect(self, transport, spec):
        self.left = [
            *getattr(self, "left", []),
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]),
        ]
        return transport.connect(spec)

    def clean(self):
        for process in self.left:
            process.kill()
            process.wait()


class LeavesThreads(Fault):
    """A thread goes on."""

    def connect(self, transport, spec):
        self.over = getattr(self, "over", None) or threading.Event()
        threading.Thread(target=self.over.wait, daemon=True, name="left").start()
        return transport.connect(spec)

    def clean(self):
        self.over.set()


class LeavesDescriptors(Fault):
    """A pipe stays open."""

    def connect(self, transport, spec):
        self.left = [*getattr(self, "left", []), *os.pipe()]
        return transport.connect(spec)

    def clean(self):
        for fd in self.left:
            os.close(fd)


class LeavesMemory(Fault):
    """Named shared memory is not removed."""

    def connect(self, transport, spec):
        self.left = [*getattr(self, "left", []), SharedMemory(create=True, size=100)]
        return transport.connect(spec)

    def clean(self):
        for memory in self.left:
            memory.close()
            memory.unlink()


class LeavesMappings(Fault):
    """Memory that is shared with workers stays mapped."""

    def connect(self, transport, spec):
        segment = Segment()
        segment.grow(8)
        self.left = [*getattr(self, "left", []), (segment.map(0, 8), segment.close())]
        return transport.connect(spec)

    def clean(self):
        self.left.clear()
