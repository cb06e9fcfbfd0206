"""Backend "ray": a replay service in a Ray actor; and RayReplayBuffer, its name in the field."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from rollwright._options import Check, with_options
from rollwright._processes.connection import ExceptionInfo
from rollwright._processes.network.ray import RaySession, check_cluster, check_ray_init_config, check_remote_config
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.service.buffer import ServiceOptions, ServiceReplayBuffer
from rollwright.data.replay_buffers.service.messages import Ready
from rollwright.data.replay_buffers.service.server import Recipe, Service
from rollwright.errors import WorkerError

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.keywords import BufferKeywords

DEFAULT_ADDRESS = "0.0.0.0:0"
_LOOK_S = 0.05


def _checked_config(name: str, value: object) -> object:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dictionary, got {type(value).__name__}: {value!r}.")
    return check_remote_config(name, value)


@dataclass(frozen=True, kw_only=True)
class Options(ServiceOptions):
    """Options of ``service_backend="ray"``, besides those of :class:`ServiceOptions`.

    Attributes:
        ray_init_config: arguments of ``ray.init``, where Ray does not run yet in this program: with ``address`` it
            attaches to a cluster, without it starts a local one, which ends with the buffer.
        remote_config: options of the actor: ``num_cpus``, ``num_gpus``, ``memory``, ``resources`` and others.
    """

    ray_init_config: Annotated[Mapping[str, Any] | None, Check(check_ray_init_config)] = None
    remote_config: Annotated[Mapping[str, Any] | None, Check(_checked_config)] = None


class _Actor:
    """What runs in the actor: the service, in a thread of its own."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def start(self, recipe: bytes) -> tuple[Ready, str, int] | ExceptionInfo:
        """Make the service; where it listens, its node, and its process."""
        ray: Any = importlib.import_module("ray")
        made: Recipe = pickle.loads(recipe)
        try:
            self._service = Service(made)
        except Exception as error:
            return ExceptionInfo.of(error)
        context, ready = ray.get_runtime_context(), self._service.ready
        if made.address[0] == "0.0.0.0":
            ready = ready._replace(address=(ray.util.get_node_ip_address(), ready.address[1]))
        return ready, context.get_node_id(), os.getpid()

    def serve(self) -> None:
        """Serve until :meth:`stop`."""
        self._service.serve(self._stopping.is_set)

    def stop(self) -> None:
        """Have :meth:`serve` return."""
        self._stopping.set()


class _RayHost:
    """The actor of Ray in which a service runs."""

    def __init__(self, session: RaySession, recipe: Recipe, config: dict[str, Any]) -> None:
        self._session, self._ray = session, session.ray
        self._actor = self._ray.remote(_Actor).options(**config).remote()
        self._started = self._actor.start.remote(pickle.dumps(recipe))
        self._served: Any = None
        self.node: str | None = None
        self.pid: int | None = None

    def await_ready(self, timeout_s: float) -> Ready:
        """Wait until the service listens."""
        errors = self._ray.exceptions
        try:
            found = self._ray.get(self._started, timeout=timeout_s)
        except errors.GetTimeoutError:
            raise TimeoutError(
                f"waited start_timeout={timeout_s:g} s for the actor of the replay service. Ray has "
                f"{self._ray.available_resources()} left; see remote_config, or pass a longer start_timeout."
            ) from None
        except errors.RayError as error:
            raise WorkerError(f"the actor of the replay service has failed: {error}") from error
        if isinstance(found, ExceptionInfo):
            raise found.error("the replay service")
        ready: Ready = found[0]
        self.node, self.pid = found[1:]
        self._served = self._actor.serve.remote()
        return ready

    def how_it_ended(self) -> str | None:
        """A phrase that says how it ended; None: it runs, as far as is known."""
        if self._served is None or not self._ray.wait([self._served], timeout=_LOOK_S)[0]:
            return None
        try:
            self._ray.get(self._served)
        except self._ray.exceptions.RayActorError:
            return "was killed with its actor"
        except self._ray.exceptions.RayError as error:
            return f"has raised: {error}"
        return "has ended"

    def end(self, timeout_s: float) -> None:
        """Make it end, if it does not by itself in time."""
        with contextlib.suppress(Exception):  # Ray may have ended, and says so in many ways
            if self._served is not None and timeout_s:
                self._actor.stop.remote()
                self._ray.wait([self._served], timeout=timeout_s)
            self._ray.kill(self._actor)
        self._session.close()


def _check(session: RaySession, config: dict[str, Any]) -> None:
    try:
        check_cluster(session, [config], grows=None)
    except ValueError as error:
        raise ValueError(str(error).replace("remote_configs: group 0", "remote_config: the actor")) from None


def host(recipe: Recipe, options: Options, before: _RayHost | None) -> _RayHost:
    """Start a service in an actor.

    Args:
        recipe: of the service.
        options: of this backend.
        before: the service that has died; the other one starts on its node, where clients look for it.

    Raises:
        MissingExtraError: Ray is not installed.
        ValueError: no node has what the actor asks for.
        ConnectionError: no cluster answers.
    """
    config: dict[str, Any] = {"num_cpus": 1, **(options.remote_config or {})}
    purpose = "service_backend='ray'"
    session = RaySession(options.ray_init_config, num_cpus=float(config["num_cpus"] or 0), purpose=purpose)
    try:
        _check(session, config)
        if before is not None and before.node is not None:
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            config["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(before.node, soft=False)
        return _RayHost(session, recipe, {**config, "max_concurrency": 3, "max_restarts": 0})
    except BaseException:
        session.close()
        raise


@with_options(ReplayBuffer)
class RayReplayBuffer(ServiceReplayBuffer):
    """A replay buffer in a Ray actor: ``ReplayBuffer(service_backend="ray")`` under its name in the field.

    Args:
        replay_buffer_cls: class of the buffer in the actor.
        ray_init_config: arguments of ``ray.init``, where Ray does not run yet in this program.
        remote_config: options of the actor: ``num_cpus``, ``num_gpus``, ``memory``, ``resources`` and others.
        **options: those of :class:`ReplayBuffer`.
    """

    def __init__(
        self,
        *,
        replay_buffer_cls: type[ReplayBuffer] = ReplayBuffer,
        ray_init_config: dict[str, Any] | None = None,
        remote_config: dict[str, Any] | None = None,
        **options: Unpack[BufferKeywords],
    ) -> None:
        given: dict[str, Any] = dict(options)
        backend = given.pop("service_backend", None) or "ray"
        if backend != "ray":
            raise ValueError(f"service_backend: a RayReplayBuffer is in a Ray actor, got {backend!r}. Drop it.")
        own = {"ray_init_config": ray_init_config, "remote_config": remote_config}
        own = {**own, **(given.pop("service_backend_options", None) or {})}
        super().__init__(kind=replay_buffer_cls, service_backend="ray", service_backend_options=own, **given)
