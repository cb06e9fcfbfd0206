"""Backend "rpc": groups of workers whose batches and weights move by calls of torch.distributed.rpc."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from rollwright._options import Check, refuse_unknown
from rollwright.collectors.workers.remote.process_groups.launching import LaunchOptions, launched_transport
from rollwright.collectors.workers.remote.process_groups.members import Member, Members, OnceLauncher, check_rpc
from rollwright.collectors.workers.remote.transport import RemoteTransport

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


_KNOWN = ["num_worker_threads", "rpc_timeout", "device_maps", "devices", "_transports", "_channels"]


def _tensorpipe_options(name: str, value: Any) -> object:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dictionary of arguments by name, got {type(value).__name__}: {value!r}.")
    refuse_unknown(map(str, value), _KNOWN, name)
    rpc = importlib.import_module("torch.distributed.rpc")
    try:
        rpc.TensorPipeRpcBackendOptions(**value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: {str(error).partition(chr(10))[0]}") from error
    return value


@dataclass(frozen=True, kw_only=True)
class Options(LaunchOptions):
    """Options of ``backend="rpc"``, besides those of :class:`LaunchOptions`.

    Attributes:
        tensorpipe_options: arguments of ``torch.distributed.rpc.TensorPipeRpcBackendOptions`` for the
            collector's member: ``device_maps`` for calls of your own to members ``"group-0"``, ``"group-1"``, ...,
            ``num_worker_threads``, ``rpc_timeout``.
    """

    tensorpipe_options: Annotated[Mapping[str, Any] | None, Check(_tensorpipe_options)] = None


def transport(options: Options, own: WorkerOptions, num_workers: int) -> RemoteTransport:
    """Listen, and start groups as workers are asked for; see :func:`launched_transport`.

    Raises:
        RuntimeError: this process is in a group of RPC already.
    """
    check_rpc()
    member = Member(
        group=0,
        num_members=1 + -(-num_workers // options.num_workers_per_collector),
        port=0,
        learner="",
        key="",
        interface=options.interface,
        connect_s=own.start_timeout,
        limit_s=options.host_timeout,
        min_bytes=options.min_bytes,
        options=dict(options.tensorpipe_options or {}),
    )
    carriers = partial(Members, num_groups=member.num_members - 1, member=member)
    return launched_transport(options, own, num_workers, carriers, limited=OnceLauncher)
