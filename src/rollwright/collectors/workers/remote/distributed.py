"""Backend "distributed": groups of workers whose batches and weights move over process groups of torch.distributed."""

from __future__ import annotations

import importlib
import itertools
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from rollwright._options import Check
from rollwright._processes.network.carriers import PairCarrier
from rollwright.collectors.workers.remote.launching import LaunchOptions, launched_transport, listening_store
from rollwright.collectors.workers.remote.transport import RemoteTransport

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions

Kind = Literal["gloo", "nccl", "mpi"]

dist: Any = importlib.import_module("torch.distributed")  # which names few of its classes as public

_CLOSE_S = 1.0
_serials = itertools.count(1)


def check_kind(name: str, value: Any) -> object:
    """Check that this torch has a kind of process group, and that it can be replaced.

    Raises:
        ValueError: it has not; the message says what it has.
    """
    has = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    if value not in has:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, has))}, got {value!r}.")
    usable = [repr(kind) for kind in ("gloo", "nccl") if has[kind]]
    advice = f"Pass {' or '.join(usable)}." if usable else "Pass backend='tcp', which needs no process groups."
    if not has[value]:
        has_ones = ", ".join(repr(kind) for kind in has if has[kind]) or "none"
        raise ValueError(
            f"{name}={value!r}: torch {torch.__version__} was built without it; it has {has_ones}. {advice}"
        )
    if value == "mpi":
        raise ValueError(
            f"{name}='mpi': the ranks of MPI are those that mpirun has started, and one that dies ends all. {advice}"
        )
    if value == "nccl" and not torch.cuda.is_available():
        raise ValueError(f"{name}='nccl': it sends memory of GPUs, and this machine has none that torch sees. {advice}")
    return value


@dataclass(frozen=True, kw_only=True)
class PairOffer:
    """What both ends of a pair need to find each other; see :class:`CarrierOffer`.

    Attributes:
        kind: of process group.
        port: of the store, on the collector's machine.
        name: of the pair in the store; no other has it.
        interface: that it binds to on both machines; None: to the address by which the line goes.
        connect_s: seconds for both to be there.
        limit_s: seconds for 8 MiB to arrive once they were announced.
        min_bytes: pieces of fewer bytes go by the line.
    """

    kind: Kind
    port: int
    name: str
    interface: str | None
    connect_s: float
    limit_s: float
    min_bytes: int

    def open(self, hosts: tuple[str, str]) -> PairCarrier:
        """Connect the other end; nothing waits."""
        own, collector = hosts
        return self.carrier(1, own, collector)

    def carrier(self, rank: int, own: str, collector: str) -> PairCarrier:
        """One end.

        Args:
            rank: 0: the collector; 1: the group.
            own: address of this end's machine.
            collector: address of the collector's machine.
        """
        return PairCarrier(
            partial(_connect, self, rank, own, collector),
            rank,
            name=self.kind,
            limit_s=self.limit_s,
            min_bytes=self.min_bytes,
            staging=torch.device("cuda") if self.kind == "nccl" else None,
        )


class Pairs:
    """Makes pairs over one store of the collector; see :class:`~rollwright._processes.network.line.Carriers`.

    Args:
        address: of the collector's machine, where the store listens; the port is not used.
        kind: of process groups.
        interface: see :class:`PairOffer`.
        limit_s: see :class:`PairOffer`.
        min_bytes: see :class:`PairOffer`.
    """

    def __init__(
        self, address: tuple[str, int], *, kind: Kind, interface: str | None, limit_s: float, min_bytes: int
    ) -> None:
        self._store, port = listening_store(address[0])
        self._offer = PairOffer(
            kind=kind,
            port=port,
            name="",
            interface=interface,
            connect_s=limit_s,
            limit_s=limit_s,
            min_bytes=min_bytes,
        )
        self._open: list[PairCarrier] = []

    def open(self, group: int, hosts: tuple[str, str]) -> tuple[PairCarrier, PairOffer]:
        """A carrier to a group that has joined, and what that needs for its own."""
        name = f"{group}/{next(_serials)}/{secrets.token_hex(16)}"
        offer = PairOffer(**{**vars(self._offer), "name": name})
        carrier = offer.carrier(0, hosts[0], hosts[0])
        self._open = [each for each in self._open if not each.join(0.0)] + [carrier]
        return carrier, offer

    def close(self) -> None:
        """End what is beside the carriers, which are closed."""
        self._store = None  # whoever still connects gets an error
        until = time.monotonic() + _CLOSE_S
        for carrier in self._open:
            carrier.close()
            carrier.join(max(0.0, until - time.monotonic()))
        self._open.clear()


def _connect(offer: PairOffer, rank: int, own: str, collector: str) -> Any:
    """Wait for the other end."""
    limit = timedelta(seconds=offer.connect_s)
    store = dist.PrefixStore(offer.name, dist.TCPStore(collector, offer.port, None, False, timeout=limit))
    if offer.kind == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    kind = dist.ProcessGroupGloo
    options = kind._Options()
    options._timeout = limit
    where = {"hostname": own} if offer.interface is None else {"interface": offer.interface}
    options._devices = [kind.create_device(**where)]
    return kind(store, rank, 2, options)


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
