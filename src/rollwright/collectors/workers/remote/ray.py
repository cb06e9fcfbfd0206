"""Backend "ray": groups of workers in actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rollwright._options import Check, whole
from rollwright._processes.network.handshake import checked_address
from rollwright._processes.network.ray import (
    ProcessActor,
    RaySession,
    asked_text,
    check_cluster,
    check_ray_init_config,
    check_remote_config,
    configs_of,
)
from rollwright.collectors.workers.remote.group import join
from rollwright.collectors.workers.remote.transport import RemoteOptions, RemoteTransport, remote_transport

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


_TARGET = "rollwright.collectors.workers.remote.ray:join_group"
_ANY = ("0.0.0.0", "::")
_LONGEST = 600  # characters of Ray's own messages


def _checked_niceness(name: str, value: object) -> object:
    checked = whole(-20).call(name, value)
    if isinstance(checked, int) and checked > 19:
        raise ValueError(f"{name}: expected an integer from -20 to 19, got {checked}.")
    return checked


@dataclass(frozen=True, kw_only=True)
class Options(RemoteOptions):
    """Options of ``backend="ray"``, besides those of :class:`RemoteOptions`.

    Attributes:
        remote_configs: what Ray reserves for the actor of each group, and where it puts it: ``num_cpus`` (None: one for
            each worker), ``num_gpus``, ``memory`` (bytes), ``resources``, ``accelerator_type``, ``label_selector``,
            ``scheduling_strategy`` (placement groups, nodes), ``runtime_env``; a dictionary, or a list with one for
            each group.
        ray_init_config: arguments of ``ray.init``, which is called if the program has not called it: ``address`` of a
            cluster, or what a local one has. A local cluster has a CPU for each worker, at least.
        autoscales: whether the cluster gets further nodes when they are asked for, so that actors may ask for what no
            node has yet; None: as the cluster says.
        address: where the collector listens, ``"HOST:PORT"``; None: at this machine's address in the cluster, any port
            that is free. Host ``0.0.0.0``: all addresses of this machine, of which groups are told that one.
        niceness: of the groups and their workers; None: that of Ray's actors, which is 15. A smaller one needs the
            right to it (root, ``CAP_SYS_NICE``) where they run; without it, that is logged there.
    """

    remote_configs: Annotated[Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, Check(check_remote_config)] = None
    ray_init_config: Annotated[Mapping[str, Any] | None, Check(check_ray_init_config)] = None
    autoscales: bool | None = None
    address: Annotated[str | None, Check(checked_address)] = None
    niceness: Annotated[int | None, Check(_checked_niceness)] = None


def transport(options: Options, own: WorkerOptions, num_workers: int) -> RemoteTransport:
    """Connect to Ray, listen, and start actors as workers are asked for.

    Raises:
        MissingExtraError: Ray is not installed.
        TypeError, ValueError: an option does not fit the number of groups, or no node has what actors ask for.
        ConnectionError: no cluster answers.
        OSError: the address cannot be listened at.
    """
    per_group = options.num_workers_per_collector
    workers_of_groups = [min(per_group, num_workers - first) for first in range(0, num_workers, per_group)]
    configs = configs_of(options.remote_configs, workers_of_groups)
    num_cpus = sum(float(config["num_cpus"]) for config in configs)
    session = RaySession(options.ray_init_config, num_cpus=num_cpus, purpose="backend='ray'")
    try:
        launcher = RayLauncher(session, configs, _TARGET, niceness=options.niceness)
        check_cluster(session, configs, grows=options.autoscales)
    except BaseException:
        session.close()
        raise
    return remote_transport(
        options,
        own,
        num_workers,
        launcher,
        secret=secrets.token_hex(32).encode(),
        address=options.address or f"{session.node_ip}:0",
        advice=(". Pass an address of this machine that the nodes of the cluster reach, such as '0.0.0.0:0'."),
    )


class RayLauncher:
    """Starts an actor for each group; see :class:`~rollwright.collectors.workers.remote.transport.Launcher`.

    Args:
        session: with the cluster.
        configs: options of each group's actor.
        target: what is run there, ``"module:function"``: a function of address, secret and group.
        niceness: of the actors; None: Ray's.

    Raises:
        TypeError, ValueError: Ray does not take an option.
    """

    def __init__(
        self, session: RaySession, configs: Sequence[Mapping[str, Any]], target: str, *, niceness: int | None = None
    ) -> None:
        self._ray, self._session, self.close = session.ray, session, session.close
        actor = session.ray.remote(ProcessActor)
        try:
            self._actors = [actor.options(**config) for config in configs]
        except (TypeError, ValueError) as error:
            raise type(error)(f"remote_configs: {error}") from error
        self._target, self._niceness = target, niceness
        self._asked = [asked_text(config) for config in configs]
        self._hosts: dict[int, _RayHost] = {}

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> _RayHost:
        """Start the process of a group, which joins the collector at an address."""
        host, port = address
        reached = (self._session.node_ip if host in _ANY else host, port)
        before = self._hosts.get(group)
        args = (self._target, (reached, secret, group), self._niceness)
        name = f"the Ray actor of group {group}, which asks for {self._asked[group] or 'nothing'} and has not joined"
        made = self._hosts[group] = _RayHost(self._ray, self._actors[group], args, before, name)
        return made


class _RayHost:
    """An actor; it is started in a thread, since Ray may keep one waiting when its head node is busy or gone.

    Args:
        ray: the module.
        actor: its class, with options.
        args: of its method.
        name: until it has joined, for messages.
        before: the one in whose place it is, which is ended first: it may hold what Ray is to reserve.
    """

    def __init__(self, ray: Any, actor: Any, args: tuple[Any, ...], before: _RayHost | None, name: str) -> None:
        self._ray, self._before, self.name = ray, before, name
        self._handle: Any = None
        self._how: str | None = None
        self._wanted, self._over = True, threading.Event()
        threading.Thread(target=self._run, args=(actor, args), name="rollwright-ray", daemon=True).start()

    def _run(self, actor: Any, args: tuple[Any, ...]) -> None:
        before, self._before = self._before, None
        if before is not None:
            before.kill()
        try:
            handle = self._handle = actor.remote()
            future = handle.run.remote(*args).future()
        except Exception as error:  # whatever Ray raises
            self._end(f"could not be started: {type(error).__name__}: {error}"[:_LONGEST])
            return
        future.add_done_callback(lambda done: self._end(_how_it_ended(done.exception())))
        if not self._wanted:
            self.kill()

    def _end(self, how: str) -> None:
        self._how = self._how or how
        self._over.set()

    def how_it_ended(self) -> str | None:
        """A phrase; None: it runs, as far as is known. To be asked now and then: it does not wait."""
        return self._how

    def end(self, timeout_s: float) -> None:
        """Make it end, if it has not ended by itself within a while."""
        self._wanted = False
        self._over.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End the actor at once."""
        self._wanted = False
        handle, self._handle = self._handle, None
        if handle is not None and self._ray.is_initialized():
            with contextlib.suppress(Exception):  # it is gone, or Ray is
                self._ray.kill(handle)


def _how_it_ended(error: BaseException | None) -> str:
    if error is None:
        return "has ended"
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # what the method raised
        return f"has failed: {type(cause).__name__}: {cause}"[:_LONGEST]
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return f"has ended with its Ray actor: {type(error).__name__}: {' '.join(lines)}"[:_LONGEST]


def join_group(address: tuple[str, int], secret: bytes, group: int) -> None:
    """Run a group of workers in an actor."""
    join(address, secret, group=group, name=f"{socket.gethostname()} (group {group}, a Ray actor)")
