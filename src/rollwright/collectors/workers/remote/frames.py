"""Frames: what a collector and a remote group of workers send one another over their line."""

from __future__ import annotations

from typing import Any, NamedTuple

from rollwright._processes.failures import ExceptionInfo
from rollwright._processes.network.carrier import CarrierOffer

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
        carrier: what the group needs to move large pieces beside the line; None: all go by the line.
    """

    num_workers: int
    num_local: int
    beat_s: float
    silence_s: float
    num_threads: int | None
    import_paths: tuple[str, ...]
    carrier: CarrierOffer | None = None


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
