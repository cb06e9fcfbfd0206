"""Launching: options of backends that start groups as processes, jobs or ranks, and the transport to them."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rollwright._options import Check, whole
from rollwright._processes.network.addresses import SECRET, checked_address, checked_secret, parse_address, secret_of
from rollwright._processes.network.carrier import Carriers
from rollwright.collectors.workers.remote.launchers import Launcher, LocalLauncher, Manual
from rollwright.collectors.workers.remote.options import RemoteOptions
from rollwright.collectors.workers.remote.process_groups.interfaces import check_interface
from rollwright.collectors.workers.remote.process_groups.slurm import SubmititLauncher, runs_slurm
from rollwright.collectors.workers.remote.process_groups.torchrun import Torchrun, TorchrunLauncher, serve_as_rank
from rollwright.collectors.workers.remote.transport import RemoteTransport

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


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
class LaunchOptions(RemoteOptions):
    """Options of backends that start groups as processes, jobs or ranks, besides those of :class:`RemoteOptions`.

    Attributes:
        launcher: ``"mp"``: remote groups are processes of this machine; ``"submitit"``: jobs of Slurm, or of submitit's
            executor for one machine; ``"torchrun"``: the other ranks of this program; ``"join"``: somebody starts each,
            by ``rollwright join HOST:PORT``.
        address: where the collector listens, ``"HOST:PORT"``, port 0: any that is free; None: at this machine's
            loopback address where all groups are on it, otherwise at the address of its name.
        port: where it listens, if ``address`` is not given; 0: any that is free.
        secret: that whoever joins has to know; None: the environment variable ``ROLLWRIGHT_SECRET``, or, with launchers
            ``"mp"`` and ``"submitit"``, one that is made up.
        interface: network interface for what does not go by the control connection, on every machine, such as
            ``"eth0"``; None: that by which the collector is reached.
        min_bytes: entries of a batch, and weights, of fewer bytes are sent over the control connection, which is
            quicker for them.
        submitit_kwargs: arguments of ``submitit.AutoExecutor``: ``cluster`` (``"slurm"``, ``"local"``), ``folder`` for
            jobs and their output, which all machines see.
        slurm_kwargs: parameters of the jobs: ``slurm_partition``, ``gpus_per_node``, ``timeout_min`` and so on.
    """

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
        if secret_of(self.secret) is None and self.launcher in ("join", "torchrun"):
            raise ValueError(
                f"secret: launcher={self.launcher!r} needs one that all processes know, and neither secret= nor "
                f"{SECRET} is there. Set {SECRET}=$(openssl rand -hex 16) on all machines."
            )
        if self.launcher == "torchrun":
            Torchrun.here()


class LaunchedTransport(RemoteTransport):
    """Groups that a launcher starts, and the launcher's files.

    Args:
        options: of the backend.
        own: of the collector.
        num_workers: of it.
        launcher: starts the groups.
        secret: of the run.
        address: where to listen.
        carriers: see :class:`RemoteTransport`.
    """

    def __init__(
        self,
        options: LaunchOptions,
        own: WorkerOptions,
        num_workers: int,
        launcher: Launcher,
        *,
        secret: bytes,
        address: str,
        carriers: Callable[[tuple[str, int]], Carriers],
    ) -> None:
        self._own_launcher = launcher
        try:
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
                carriers=carriers,
            )
        except BaseException:
            self._close_launcher()
            raise

    def _close_launcher(self) -> None:
        close = getattr(self._own_launcher, "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        """See :class:`~rollwright.collectors.workers.transports.transport.Transport`."""
        super().close()
        self._close_launcher()


def launched_transport(
    options: LaunchOptions,
    own: WorkerOptions,
    num_workers: int,
    carriers: Callable[[tuple[str, int]], Carriers],
    *,
    limited: Callable[[Launcher], Launcher] = lambda launcher: launcher,
) -> RemoteTransport:
    """Listen, and start groups as workers are asked for. On ranks of torchrun other than 0: run workers, and exit.

    Args:
        options: of the backend.
        own: of the collector.
        num_workers: of it.
        carriers: see :class:`RemoteTransport`.
        limited: takes the launcher; returns what is used in its place.

    Raises:
        OSError: the address cannot be listened at.
        MissingExtraError: submitit is not installed.
        ValueError: torchrun has started more or fewer ranks than groups and a learner.
        SystemExit: this is a rank of torchrun other than 0, and the collector of rank 0 has ended.
    """
    secret = (secret_of(options.secret) or secrets.token_hex(32)).encode()
    num_groups = -(-num_workers // options.num_workers_per_collector)
    if options.launcher == "torchrun":
        run = Torchrun.here()
        _check_ranks(run, num_groups)
        if run.rank:
            serve_as_rank(run, secret, own.start_timeout)
            raise SystemExit(0)
    address = options.address or _own_address(options)
    launcher = limited(_launcher(options))
    try:
        made = LaunchedTransport(options, own, num_workers, launcher, secret=secret, address=address, carriers=carriers)
    except OSError as error:
        why = f"backend_options['address']: cannot listen at {address}: {error.strerror}"
        raise OSError(error.errno, why) from error
    if options.launcher == "join":
        host, port = made.address
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        _log.warning("waits for %d hosts to join: run `rollwright join %s:%d` on each", num_groups, shown, port)
    return made


def _launcher(options: LaunchOptions) -> Launcher:
    if options.launcher == "submitit":
        return SubmititLauncher(options.submitit_kwargs, options.slurm_kwargs)
    if options.launcher == "torchrun":
        return TorchrunLauncher(Torchrun.here())
    return LocalLauncher() if options.launcher == "mp" else Manual()


def _own_address(options: LaunchOptions) -> str:
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
