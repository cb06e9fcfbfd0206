"""Backend "rpc": groups of workers whose batches and weights move by calls of torch.distributed.rpc."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import secrets
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from rollwright._options import Check, refuse_unknown
from rollwright._processes.network.carriers import RpcCarrier
from rollwright._warnings import warn_user
from rollwright.collectors.workers.remote.launching import (
    LaunchOptions,
    interface_of,
    launched_transport,
    listening_store,
)
from rollwright.collectors.workers.remote.transport import GoneHost, Host, Launcher, RemoteTransport, close_launcher

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions

_LEARNER = "learner"
_NUM_THREADS = 4
_NOTICE = "You are using a Backend .* as a ProcessGroup"  # a notice of torch on its own call
_GONE = (
    "was {name} of an RPC group, whose members are fixed once it is made: torch lets no other join. Pass "
    "backend='distributed' for groups that can be replaced"
)
_IF_LOST = (
    "no other can join, since the members of an RPC group are fixed once it is made: on_worker_failure='restart' "
    "replaces workers of members that live. Pass backend='distributed' for groups that can be replaced"
)
_dist: Any = importlib.import_module("torch.distributed")
_has_warned = False
_serials = itertools.count(1)
_CLOSE_S = 10.0
_LOOK_S = 0.05


def name_of(group: int) -> str:
    """Of the member that a remote group is."""
    return f"group-{group}"


def check_rpc() -> Any:
    """The module of RPC; warns once that torch keeps it as it is.

    Raises:
        ValueError: this torch has none.
        RuntimeError: this process is in a group of RPC already.
    """
    global _has_warned
    if not _dist.rpc.is_available():
        raise ValueError("backend='rpc': this torch was built without RPC. Pass backend='distributed' or 'tcp'.")
    rpc = importlib.import_module("torch.distributed.rpc")
    if _is_member():
        raise RuntimeError(
            "backend='rpc': this process is in an RPC group already, and torch lets it be in one at a time. Shut down "
            "the other collector, or call torch.distributed.rpc.shutdown(), or pass backend='distributed'."
        )
    if not _has_warned:
        _has_warned = True
        warn_user(
            "backend='rpc': torch keeps its RPC (TensorPipe) in maintenance, and may remove it; a group that dies "
            "cannot be replaced. backend='distributed' does the same over Gloo, and replaces groups.",
            FutureWarning,
        )
    return rpc


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a remote group needs to become a member; see :class:`CarrierOffer`.

    Attributes:
        group: its index.
        num_members: with the collector.
        port: of the store, on the collector's machine.
        learner: name of the collector as a member.
        key: of the store's entries, and of carriers with the group's index.
        interface: that it binds to; None: that by which the line goes.
        connect_s: seconds for all members to be there.
        limit_s: seconds for a call.
        min_bytes: pieces of fewer bytes go by the line.
        options: arguments of ``TensorPipeRpcBackendOptions``.
    """

    group: int
    num_members: int
    port: int
    learner: str
    key: str
    interface: str | None
    connect_s: float
    limit_s: float
    min_bytes: int
    options: Mapping[str, Any]

    def open(self, hosts: tuple[str, str]) -> RpcCarrier:
        """Connect the other end; nothing waits."""
        own, collector = hosts
        carrier = self.carrier(self.learner, leave=_leave)
        rank, name = self.group + 1, name_of(self.group)
        enter = partial(self.enter, rank, name, own, collector)
        threading.Thread(target=_enter, args=(enter, [carrier]), name="rollwright-rpc", daemon=True).start()
        return carrier

    def carrier(self, other: str, **options: Any) -> RpcCarrier:
        """An end of what connects the group and the collector."""
        key = f"{self.key}/{self.group}"
        return RpcCarrier(key, other, limit_s=self.limit_s, min_bytes=self.min_bytes, **options)

    def enter(self, rank: int, name: str, own: str, collector: str) -> None:
        """Become a member; waits for all."""
        rpc = importlib.import_module("torch.distributed.rpc")
        limit = timedelta(seconds=self.connect_s)
        store = _dist.PrefixStore(self.key, _dist.TCPStore(collector, self.port, None, False, timeout=limit))
        given = {"rpc_timeout": self.limit_s, "num_worker_threads": _NUM_THREADS, **self.options}
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{collector}:{self.port}", **given)
        warnings.filterwarnings("ignore", message=_NOTICE)
        with _bound_to(self.interface or interface_of(own)):
            # init_rpc() counts the groups of a process, and those of a new process and of an old one do not match.
            importlib.import_module("torch.distributed.autograd")._init(rank)
            rpc._init_rpc_backend(rpc.BackendType.TENSORPIPE, store, name, rank, self.num_members, options)


class Members:
    """Makes the carriers of a collector that is the first member; see :class:`Carriers`.

    Args:
        address: of the collector's machine, where the store listens; the port is not used.
        num_groups: the other members.
        member: of the groups; index, port and key are not used.
    """

    def __init__(self, address: tuple[str, int], *, num_groups: int, member: Member) -> None:
        self._store, port = listening_store(address[0])
        key = secrets.token_hex(16)
        # torch numbers what members do together by their names, for as long as a process lives.
        serial = next(_serials)
        learner = _LEARNER if serial == 1 else f"{_LEARNER}-{serial}"
        about = {**vars(member), "port": port, "learner": learner, "key": key, "options": {}}
        self._of_group = [Member(**{**about, "group": group}) for group in range(num_groups)]
        self._own = Member(**{**about, "options": member.options})
        self._carriers = [each.carrier(name_of(each.group)) for each in self._of_group]
        self._thread: threading.Thread | None = None

    def open(self, group: int, hosts: tuple[str, str]) -> tuple[RpcCarrier, Member]:
        """A carrier to a group that has joined, and what that needs for its own."""
        if self._thread is None:
            enter = partial(self._own.enter, 0, self._own.learner, hosts[0], hosts[0])
            args = (enter, self._carriers)
            self._thread = threading.Thread(target=_enter, args=args, name="rollwright-rpc", daemon=True)
            self._thread.start()
        return self._carriers[group], self._of_group[group]

    def close(self) -> None:
        """End what is beside the carriers, which are closed."""
        for carrier in self._carriers:
            carrier.close()
        self._store = None
        if self._thread is not None:
            until = time.monotonic() + _CLOSE_S
            while self._thread.is_alive() and time.monotonic() < until:
                _stop_gathering(self._own.learner)
                self._thread.join(_LOOK_S)
            _leave()


class OnceLauncher:
    """Starts each group once: no other can become a member in its place; see :class:`Launcher`.

    Args:
        launcher: starts them.

    Attributes:
        if_lost: what is to be known where a group is lost.
    """

    if_lost = _IF_LOST

    def __init__(self, launcher: Launcher) -> None:
        self.inner, self._launched = launcher, set[int]()

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> Host | None:
        """Start the process of a group, which joins the collector at an address."""
        if group in self._launched:
            return GoneHost(_GONE.format(name=name_of(group)))
        self._launched.add(group)
        return self.inner.launch(group, address, secret)

    def close(self) -> None:
        """Close the launcher, where it has something to close."""
        close_launcher(self.inner)


def _enter(enter: Any, carriers: list[RpcCarrier]) -> None:
    try:
        enter()
    except Exception as error:
        for carrier in carriers:
            carrier.fail(f"the members could not be connected: {str(error).partition(chr(10))[0]}")
        return
    for carrier in carriers:
        carrier.connected()


def _stop_gathering(learner: str) -> None:
    """End the wait for the others' first calls, which do not come any more: torch waits for the whole limit."""
    api = importlib.import_module("torch.distributed.rpc.api")
    with api._all_gather_dict_lock:
        waiting = [states for key, states in api._all_gather_sequence_id_to_states.items() if learner in key]
    for states in waiting:
        states.proceed_signal.set()


def _is_member() -> bool:
    """Whether this process is in a group."""
    return bool(importlib.import_module("torch.distributed.rpc.api")._is_current_rpc_agent_set())


def _leave() -> None:
    api = importlib.import_module("torch.distributed.rpc.api")
    if _is_member():
        with contextlib.suppress(RuntimeError):
            api.shutdown(graceful=False)


@contextlib.contextmanager
def _bound_to(interface: str | None) -> Iterator[None]:
    """Have TensorPipe and Gloo bind to an interface, which they take from the environment."""
    if interface is None:
        yield
        return
    names = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, interface))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
