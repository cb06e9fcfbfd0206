"""Messages between a replay service and those who use it."""

from __future__ import annotations

from typing import NamedTuple

from rollwright._processes.failures import ExceptionInfo
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.limiter import SampleToInsertRatio
from rollwright.data.replay_buffers.samplers.slices import SliceSampler


class WriterName(NamedTuple):
    """Who writes, where a writer may be given up and replaced.

    Attributes:
        name: of its place, such as that of a worker of a collector.
        generation: how many had the place before.
    """

    name: str
    generation: int


class Info(NamedTuple):
    """What is known of a buffer in a service without asking; it changes with its parts alone.

    Attributes:
        kind: name of its class.
        storage: name of the storage's class.
        sampler: name of the sampler's class.
        max_size: elements that the storage has room for.
        ndim: dimensions that distinguish its elements.
        dim_extend: which dimension of the data grows.
        keeps_objects: whether entries may be text and other objects.
        draws_slices: whether the sampler draws stretches of trajectories.
        has_priorities: whether the sampler has priorities.
        limiter: keeps sampling and collecting at one pace; a copy, for its numbers.
        priority_key: of a buffer of TensorDicts.
        num_transforms: that are applied to batches.
    """

    kind: str
    storage: str
    sampler: str
    max_size: int
    ndim: int
    dim_extend: int
    keeps_objects: bool
    draws_slices: bool
    has_priorities: bool
    limiter: SampleToInsertRatio | None
    priority_key: object
    num_transforms: int

    @classmethod
    def of(cls, buffer: ReplayBuffer) -> Info:
        """That on a buffer."""
        storage, sampler = buffer.storage, buffer.sampler
        return cls(
            kind=type(buffer).__name__,
            storage=type(storage).__name__,
            sampler=type(sampler).__name__,
            max_size=storage.max_size,
            ndim=storage.ndim,
            dim_extend=buffer.dim_extend,
            keeps_objects=storage.keeps_objects,
            draws_slices=isinstance(sampler, SliceSampler),
            has_priorities=sampler.has_priorities,
            limiter=buffer.limiter,
            priority_key=getattr(buffer, "priority_key", None),
            num_transforms=len(buffer.transforms),
        )


class Ready(NamedTuple):
    """The service listens.

    Attributes:
        address: host and port.
        info: on its buffer.
        write_count: elements of its buffer that were written before.
    """

    address: tuple[str, int]
    info: Info
    write_count: int = 0


class Request(NamedTuple):
    """Something to do, once; the pieces are memory of its arguments.

    Attributes:
        number: of the client's requests, rising.
        received: the client has the replies of all that it has sent below this number.
        what: path of a method from the buffer, such as ``"extend"`` or ``"storage.ledger.take_ids"``; or ``"info"``,
            ``"give_up"``, ``"was_done"``, ``"cancel"``, ``"finish"``, of the service itself.
        body: the arguments, by position and by name, packed.
    """

    number: int
    received: int
    what: str
    body: bytes


class Reply(NamedTuple):
    """What came of a request; the pieces are memory of the result.

    Attributes:
        number: of the request.
        body: the result, packed.
        failure: what was raised instead.
    """

    number: int
    body: bytes
    failure: ExceptionInfo | None = None


class Counts(NamedTuple):
    """The first message to a client; and to the owner, before the writes that they count are acknowledged.

    Attributes:
        write_count: elements that were written so far.
        num_stored: elements that are there.
        dump_failure: why they could not be saved the last time; None: they could.
    """

    write_count: int
    num_stored: int
    dump_failure: str | None = None


class Beat(NamedTuple):
    """The service is there."""
