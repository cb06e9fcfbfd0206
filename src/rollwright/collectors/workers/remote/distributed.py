"""Backend "distributed": groups of workers whose batches and weights move over process groups of torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from rollwright._options import Check
from rollwright.collectors.workers.remote.process_groups.launching import LaunchOptions, launched_transport
from rollwright.collectors.workers.remote.process_groups.pairs import Kind, Pairs, check_kind
from rollwright.collectors.workers.remote.transport import RemoteTransport

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


@dataclass(frozen=True, kw_only=True)
class Options(LaunchOptions):
    """Options of ``backend="distributed"``, besides those of :class:`LaunchOptions`.

    Attributes:
        process_group_backend: what moves batches and weights: ``"gloo"``; ``"nccl"`` where torch and all machines have
            it: over a GPU of each, to which they are copied. Every remote group makes a process group of two with the
            collector, so that one can be replaced and the others go on.
    """

    process_group_backend: Annotated[Kind, Check(check_kind)] = "gloo"


def transport(options: Options, own: WorkerOptions, num_workers: int) -> RemoteTransport:
    """Listen, and start groups as workers are asked for; see :func:`launched_transport`."""
    carriers = partial(
        Pairs,
        kind=options.process_group_backend,
        interface=options.interface,
        limit_s=options.host_timeout,
        min_bytes=options.min_bytes,
    )
    return launched_transport(options, own, num_workers, carriers)
