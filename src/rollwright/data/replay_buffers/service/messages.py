"""Messages between a replay service and those who use it."""

from __future__ import annotations

from typing import NamedTuple

from rollwright._processes.failures import ExceptionInfo


class WriterName(NamedTuple):
    """Who writes, where a writer may be given up and replaced.

    Attributes:
        name: of its place, such as that of a worker of a collector.
        generation: how many had the place before.
    """

    name: str
    generation: int


class Info(NamedTuple):
    """What never changes about a buffer in a service.

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
        has_limiter: whether sampling and collecting are kept at one pace.
        limiter_timeout_s: how long one side waits without a sign of the other.
        priority_key: of a buffer of TensorDicts.
        num_transforms: that it was made with.
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
    has_limiter: bool
    limiter_timeout_s: float
    priority_key: object
    num_transforms: int


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
        what: a name of :class:`~rollwright.data.replay_buffers.service.serving.commands.Commands`.
        body: the arguments, packed.
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


class Welcome(NamedTuple):
    """The first message to a client.

    Attributes:
        write_count: elements that were written so far.
        num_stored: elements that are there.
        dump_failure: why they could not be saved the last time.
    """

    write_count: int
    num_stored: int
    dump_failure: str | None = None


class Counts(NamedTuple):
    """To the owner, before the writes that they count are acknowledged.

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
