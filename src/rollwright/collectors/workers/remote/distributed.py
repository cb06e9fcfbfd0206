"""Backend "distributed": groups of workers whose batches and weights move over process groups of torch.distributed."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rollwright._options import Check, whole
from rollwright._processes.network.addresses import SECRET, checked_address, checked_secret, parse_address
from rollwright.collectors.workers.remote.launchers import Launcher, LocalLauncher, Manual
from rollwright.collectors.workers.remote.options import RemoteOptions
from rollwright.collectors.workers.remote.process_groups.pairs import Kind, Pairs, check_interface, check_kind
from rollwright.collectors.workers.remote.process_groups.slurm import SubmititLauncher, runs_slurm
from rollwright.collectors.workers.remote.process_groups.torchrun import Torchrun, TorchrunLauncher, serve_as_rank
from rollwright.collectors.workers.remote.transport import RemoteTransport

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions

__all__ = ["Options", "transport"]

_LOOPBACK = "127.0.0.1"
_log = logging.getLogger("rollwright")


def _keywords(name: str, value: Any) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(f"{name}: expected a dictionary of arguments by name, got {type(value).__name__}: {value!r}.")
    return value


def _checked_port(name: str, value: object) -> object:
    checked = whole(0).call(name, value)
    if isinstance(checked, int) and checked > 65535:
        raise ValueError(f"{name}: expected a port from 0 to 65535, got {checked}.")
    return checked


@dataclass(frozen=True, kw_only=True)
class Options(RemoteOptions):
    """Options of ``backend="distributed"``, besides those of :class:`RemoteOptions`.

    Attributes:
        process_group_backend: what moves batches and weights: ``"gloo"``; ``"nccl"`` where torch and all machines have
            it: over a GPU of each, to which they are copied. Every remote group makes a process group of two with the
            collector, so that one can be replaced and the others go on.
        launcher: ``"mp"``: remote groups are processes of this machine; ``"submitit"``: jobs of Slurm, or of submitit's
            executor for one machine; ``"torchrun"``: the other ranks of this program; ``"join"``: somebody starts each,
            by ``rollwright join HOST:PORT``.
        address: where the collector listens, ``"HOST:PORT"``, port 0: any that is free; None: at this machine's
            loopback address where all groups are on it, otherwise at the address of its name.
        port: where it listens, if ``address`` is not given; 0: any that is free.
        secret: that whoever joins has to know; None: the environment variable ``ROLLWRIGHT_SECRET``, or, with launchers
            ``"mp"`` and ``"submitit"``, one that is made up.
        interface: network interface that process groups use, on every machine, such as ``"eth0"``; None: that by which
            the collector is reached.
        min_bytes: entries of a batch, and weights, of fewer bytes are sent over the control connection, which is
            quicker for them.
        submitit_kwargs: arguments of ``submitit.AutoExecutor``: ``cluster`` (``"slurm"``, ``"local"``), ``folder`` for
            jobs and their output, which all machines see.
        slurm_kwargs: parameters of the jobs: ``slurm_partition``, ``gpus_per_node``, ``timeout_min`` and so on.
    """

    process_group_backend: Annotated[Kind, Check(check_kind)] = "gloo"
    launcher: Literal["mp", "submitit", "torchrun", "join"] = "mp"
    address: Annotated[str | None, Check(checked_address)] = None
    port: Annotated[int, Check(_checked_port)] = 0
    secret: Annotated[str | None, Check(checked_secret)] = None
    interface: Annotated[str | None, Check(check_interface)] = None
    min_bytes: Annotated[int, whole(0)] = 1 << 15
    submitit_kwargs: Annotated[Mapping[str, Any] | None, Check(_keywords)] = None
    slurm_kwargs: Annotated[Mapping[str, Any] | None, Check(_keywords)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("submitit_kwargs", "slurm_kwargs"):
            if getattr(self, name) is not None and self.launcher != "submitit":
                raise ValueError(f"{name}: is for launcher='submitit', got launcher={self.launcher!r}. Drop it.")
        if self.address is not None and self.port:
            raise ValueError(f"port={self.port}: address={self.address!r} has one. Drop one of the two.")
        if self.launcher in ("join", "torchrun") and self.secret is None and SECRET not in os.environ:
            raise ValueError(
                f"secret: launcher={self.launcher!r} needs one that all processes know, and neither secret= nor "
                f"{SECRET} is there. Set {SECRET}=$(openssl rand -hex 16) on all machines."
            )
        if self.launcher == "torchrun":
            Torchrun.here()


def transport(options: Options, own: WorkerOptions, num_workers: int) -> RemoteTransport:
    """Listen, and start groups as workers are asked for. On ranks of torchrun other than 0: run workers, and exit.

    Raises:
        OSError: the address cannot be listened at.
        MissingExtraError: submitit is not installed.
        ValueError: torchrun has started more or fewer ranks than groups and a learner.
        SystemExit: this is a rank of torchrun other than 0, and the collector of rank 0 has ended.
    """
    secret = (options.secret or os.environ.get(SECRET) or secrets.token_hex(32)).encode()
    num_groups = -(-num_workers // options.num_workers_per_collector)
    if options.launcher == "torchrun":
        run = Torchrun.here()
        _check_ranks(run, num_groups)
        if run.rank:
            serve_as_rank(run, secret, own.start_timeout)
            raise SystemExit(0)
    launcher = _launcher(options)
    address = options.address or _own_address(options)
    try:
        made = _Transport(options, own, num_workers, launcher, secret, address)
    except OSError as error:
        why = f"backend_options['address']: cannot listen at {address}: {error.strerror}"
        raise OSError(error.errno, why) from error
    if options.launcher == "join":
        host, port = made.address
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        _log.warning("waits for %d hosts to join: run `rollwright join %s:%d` on each", num_groups, shown, port)
    return made


class _Transport(RemoteTransport):
    """Groups, their pairs, and the launcher's files."""

    def __init__(
        self,
        options: Options,
        own: WorkerOptions,
        num_workers: int,
        launcher: Launcher,
        secret: bytes,
        address: str,
    ) -> None:
        self._own_launcher = launcher
        super().__init__(
            num_workers,
            options.num_workers_per_collector,
            launcher,
            secret=secret,
            address=parse_address("address", address),
            host_timeout=options.host_timeout,
            start_timeout=own.start_timeout,
            step_timeout=own.env_step_timeout,
            num_threads=own.num_sub_threads,
            carriers=partial(
                Pairs,
                kind=options.process_group_backend,
                interface=options.interface,
                limit_s=options.host_timeout,
                min_bytes=options.min_bytes,
            ),
        )

    def close(self) -> None:
        """See :class:`~rollwright.collectors.workers.transports.transport.Transport`."""
        super().close()
        if isinstance(self._own_launcher, SubmititLauncher):
            self._own_launcher.close()


def _launcher(options: Options) -> Launcher:
    if options.launcher == "submitit":
        return SubmititLauncher(options.submitit_kwargs, options.slurm_kwargs)
    if options.launcher == "torchrun":
        return TorchrunLauncher(Torchrun.here())
    return LocalLauncher() if options.launcher == "mp" else Manual()


def _own_address(options: Options) -> str:
    """Where groups reach this machine."""
    if options.launcher == "torchrun":
        return f"{Torchrun.here().master}:{options.port}"
    if options.launcher == "submitit":
        cluster = (options.submitit_kwargs or {}).get("cluster")
        if cluster == "slurm" or (cluster is None and runs_slurm()):
            return f"{socket.gethostname()}:{options.port}"
    return f"{_LOOPBACK}:{options.port}"


def _check_ranks(run: Torchrun, num_groups: int) -> None:
    if run.num_ranks != num_groups + 1:
        raise ValueError(
            f"num_collectors: expected {run.num_ranks - 1}, one for each of the {run.num_ranks} ranks of torchrun but "
            f"rank 0, which is the learner; got {num_groups}. Change it, or --nproc-per-node."
        )
