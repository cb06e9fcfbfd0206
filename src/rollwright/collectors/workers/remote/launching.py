"""Backends "tcp", "distributed", "rpc" and "submitit": groups as processes, jobs or ranks, which join over sockets."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from rollwright._options import Check, whole
from rollwright._processes.network.handshake import SECRET, checked_address, checked_secret, secret_of
from rollwright._warnings import warn_user
from rollwright.collectors.workers.remote.group import join
from rollwright.collectors.workers.remote.transport import (
    GoneHost,
    Launcher,
    LocalLauncher,
    Manual,
    RemoteOptions,
    RemoteTransport,
    remote_transport,
)
from rollwright.errors import require

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions

dist: Any = importlib.import_module("torch.distributed")  # which names few of its classes as public

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY = "rollwright/address"
_SET_S = 20.0


class Torchrun(NamedTuple):
    """What torchrun says of this process.

    Attributes:
        rank: of it.
        num_ranks: of the program.
        master: host of rank 0.
        port: of the store there.
    """

    rank: int
    num_ranks: int
    master: str
    port: int

    @classmethod
    def here(cls) -> Torchrun:
        """Of this process.

        Raises:
            ValueError: torchrun has not started it.
        """
        lacking = [name for name in _VARIABLES if not os.environ.get(name)]
        if lacking:
            raise ValueError(
                f"launcher='torchrun': expected a program that torchrun has started, and {', '.join(lacking)} "
                f"{'is' if len(lacking) == 1 else 'are'} not set. Start it with `torchrun --nproc-per-node N "
                "program.py`, or pass launcher='mp'."
            )
        rank, count, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        return cls(rank, count, os.environ["MASTER_ADDR"], port)

    def store(self, timeout_s: float) -> Any:
        """The store of torchrun, or that of rank 0 where torchrun keeps none."""
        is_master = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
        store = dist.TCPStore(
            self.master,
            self.port,
            None,
            is_master,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"rollwright/{attempt}", store)


class TorchrunLauncher:
    """Says to the other ranks where the collector listens; see :class:`Launcher`.

    Args:
        run: of rank 0.
    """

    def __init__(self, run: Torchrun) -> None:
        self._store = run.store(_SET_S)
        self._launched: set[int] = set()

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> GoneHost | None:
        """Start the process of a group, which joins the collector at an address."""
        if group in self._launched:
            return GoneHost(f"was rank {group + 1} of torchrun, which starts no other rank by itself")
        self._store.set(f"{_KEY}/{group + 1}", f"{address[0]} {address[1]}")
        self._launched.add(group)
        return None


def serve_as_rank(run: Torchrun, secret: bytes, start_timeout_s: float) -> None:
    """Run a group of workers in this process, which is not rank 0, until the collector of rank 0 ends.

    Raises:
        TimeoutError: rank 0 has made no collector in time.
        HandshakeRefused: it has another secret.
    """
    began = time.monotonic()
    try:
        host, port = run.store(start_timeout_s).get(f"{_KEY}/{run.rank}").decode().split()
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TimeoutError(
            f"launcher='torchrun': rank {run.rank} has waited {time.monotonic() - began:.0f} s for rank 0 to make its "
            f"collector: {str(error).partition(chr(10))[0]}"
        ) from error
    name = f"{socket.gethostname()} (rank {run.rank})"
    join((host, int(port)), secret, group=run.rank - 1, name=name)


_LOOK_S = 0.5
_CANCEL_S = 15.0  # for a job to end by itself: an interpreter with torch takes seconds, on a busy machine many
_JOB_MIN = 24 * 60  # of a job that is not limited otherwise; submitit's own limit is minutes


def runs_slurm() -> bool:
    """Whether jobs go to Slurm if nothing else is asked for."""
    submitit = require("submitit", extra="submitit", purpose="launcher='submitit'")
    return str(submitit.AutoExecutor.which()) == "slurm"


class SubmititLauncher:
    """Starts groups as jobs; see :class:`~rollwright.collectors.workers.remote.transport.Launcher`.

    Args:
        executor: arguments of ``submitit.AutoExecutor``.
        job: its parameters: partition, GPUs, time and so on.

    Raises:
        MissingExtraError: submitit is not installed.
        TypeError, ValueError: submitit does not take an argument.
    """

    def __init__(self, executor: Mapping[str, Any] | None, job: Mapping[str, Any] | None) -> None:
        submitit = require("submitit", extra="submitit", purpose="launcher='submitit'")
        given = dict(executor or {})
        folder = given.pop("folder", None)
        if folder is None and given.get("cluster") != "local" and runs_slurm():
            raise ValueError(
                "submitit_kwargs: jobs of Slurm lie in a folder that all machines see, and none is given. Pass "
                "submitit_kwargs={'folder': ...}."
            )
        self._scratch = tempfile.mkdtemp(prefix="rollwright-jobs-") if folder is None else None
        try:
            self._executor = self._configured(submitit, Path(folder or self._scratch or ""), given, job)
        except BaseException:
            self.close()
            raise
        self._submitting = threading.Lock()

    @staticmethod
    def _configured(submitit: Any, folder: Path, given: dict[str, Any], job: Mapping[str, Any] | None) -> Any:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix="rollwright-", dir=folder))  # nobody else reads the secret in its jobs
        try:
            executor = submitit.AutoExecutor(folder=folder, **given)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            raise ValueError(f"submitit_kwargs: {error}") from error
        parameters = {"name": "rollwright", **(job or {})}
        if not {"timeout_min", "slurm_time"} & parameters.keys():
            parameters["timeout_min"] = _JOB_MIN
        try:
            executor.update_parameters(**parameters)
        except (TypeError, ValueError, NameError, AssertionError) as error:
            raise ValueError(f"slurm_kwargs: {error}") from error
        return executor

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> _Job:
        """Start the process of a group, which joins the collector at an address."""
        return _Job(self._submit, address, secret, group)

    def _submit(self, address: tuple[str, int], secret: bytes, group: int) -> Any:
        with self._submitting:
            job = self._executor.submit(_join, address, secret, group)
        with contextlib.suppress(OSError):  # it lies in a folder of this user's alone, and may be gone by now
            job.paths.submitted_pickle.chmod(0o600)
        return job

    def close(self) -> None:
        """Remove the folder of jobs, if it was made here."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


class _Job:
    """A job; a thread submits it and asks after it, since both call programs of Slurm."""

    def __init__(self, submit: Any, address: tuple[str, int], secret: bytes, group: int) -> None:
        self._ended: str | None = None
        self._stop, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._follow, args=(submit, address, secret, group), name="rollwright-job", daemon=True
        )
        self._thread.start()

    def _follow(self, submit: Any, *args: Any) -> None:
        job = None
        try:
            job = submit(*args)
            while not self._stop.wait(_LOOK_S) and not job.done():
                pass
            if not job.done():
                self._end(job)
            self._ended = _how(job)
        except Exception as error:
            self._ended = f"could not be followed as a job: {error}" if job else f"was not taken as a job: {error}"
        finally:
            self._over.set()

    @staticmethod
    def _end(job: Any) -> None:
        until = time.monotonic() + _CANCEL_S  # to end by itself, since the collector has hung up
        while time.monotonic() < until and not job.done():
            time.sleep(_LOOK_S / 10)
        if not job.done():
            with contextlib.suppress(Exception):
                job.cancel()

    def how_it_ended(self) -> str | None:
        """A phrase; None: it runs, as far as is known. To be asked now and then: it does not wait."""
        return self._ended

    def end(self, timeout_s: float) -> None:
        """Make it end, if it has not ended by itself within a while."""
        self._stop.set()
        self._over.wait(timeout_s + _CANCEL_S)
        self._thread.join(1.0)


def _how(job: Any) -> str:
    """How a job has ended, and where its output lies."""
    why = f"state {job.state}"
    with contextlib.suppress(Exception):  # there may be no result
        error = job.exception()
        if error is not None:
            why = str(error).strip().splitlines()[-1]
    return f"was job {job.job_id}, which has ended: {why} (its output: {job.paths.stderr})"


def _join(address: tuple[str, int], secret: bytes, group: int) -> None:
    """What a job runs."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("SUBMITIT_LOCAL_JOB_ID")
    join(address, secret, group=group, name=f"{socket.gethostname()} (group {group}, job {job})")


_LOOPBACK = "127.0.0.1"


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
    """Options of backends whose groups are processes, jobs or ranks, besides those of :class:`RemoteOptions`.

    Attributes:
        launcher: ``"mp"``: remote groups are processes of this machine; ``"submitit"``: jobs of Slurm, or of submitit's
            executor for one machine; ``"torchrun"``: the other ranks of this program; ``"join"``: somebody starts each,
            on any machine, by ``rollwright join HOST:PORT``.
        address: where the collector listens, ``"HOST:PORT"``, port 0: any that is free; None: at this machine's
            loopback address where all groups are on it, otherwise at the address of its name. Groups on other machines
            need an address that they reach, such as ``"0.0.0.0:29400"`` for all of this machine's.
        port: where it listens, if ``address`` is not given; 0: any that is free.
        secret: that whoever joins has to know; None: the environment variable ``ROLLWRIGHT_SECRET``, or, with launchers
            ``"mp"`` and ``"submitit"``, one that is made up. What is sent after the proof is authenticated, not
            encrypted.
        submitit_kwargs: arguments of ``submitit.AutoExecutor``: ``cluster`` (``"slurm"``, ``"local"``), ``folder`` for
            jobs and their output, which all machines see.
        slurm_kwargs: parameters of the jobs: ``slurm_partition``, ``gpus_per_node``, ``timeout_min`` and so on.
        process_group_backend, tensorpipe_options: of torch.distributed, for programs that name them: nothing goes by
            process groups or RPC, and groups can be replaced with all of these backends.
    """

    launcher: Literal["mp", "submitit", "torchrun", "join"] = "mp"
    address: Annotated[str | None, Check(checked_address)] = None
    port: Annotated[int, Check(_checked_port)] = 0
    secret: Annotated[str | None, Check(checked_secret)] = None
    submitit_kwargs: Annotated[Mapping[str, Any] | None, Check(_keywords)] = None
    slurm_kwargs: Annotated[Mapping[str, Any] | None, Check(_keywords)] = None
    process_group_backend: Literal["gloo", "nccl", "mpi"] = "gloo"
    tensorpipe_options: Annotated[Mapping[str, Any] | None, Check(_keywords)] = None

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


def transport(options: Options, own: WorkerOptions, num_workers: int) -> RemoteTransport:
    """Listen, and start groups as workers are asked for. On ranks of torchrun other than 0: run workers, and exit.

    Raises:
        OSError: the address cannot be listened at.
        MissingExtraError: submitit is not installed.
        ValueError: torchrun has started more or fewer ranks than groups and a learner.
        SystemExit: this is a rank of torchrun other than 0, and the collector of rank 0 has ended.
    """
    for name, default in (("process_group_backend", "gloo"), ("tensorpipe_options", None)):
        if (given := getattr(options, name)) != default:
            warn_user(
                f"{name}={given!r} has no effect: what is sent goes by one TCP connection for each group. Drop it.",
                UserWarning,
            )
    secret = (secret_of(options.secret) or secrets.token_hex(32)).encode()
    if options.launcher == "torchrun":
        run = Torchrun.here()
        _check_ranks(run, -(-num_workers // options.num_workers_per_collector))
        if run.rank:
            serve_as_rank(run, secret, own.start_timeout)
            raise SystemExit(0)
    address = options.address or _own_address(options)
    return remote_transport(options, own, num_workers, _launcher(options), secret=secret, address=address)


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
