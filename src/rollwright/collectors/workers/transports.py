"""Transports: how workers are started and reached; backends by name, and processes of this machine."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rollwright._options import names_of, refuse_unknown
from rollwright._processes.channel import ByValue
from rollwright._processes.child import Child
from rollwright._processes.connection import Connection
from rollwright.collectors.workers.worker import WorkerSpec, serve
from rollwright.envs.foreign import is_env, remedy_for

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


class Transport:
    """Starts workers. Nothing here waits but :meth:`close`. A subclass has to define :meth:`connect` alone.

    A worker writes to the memory that its spec names, and reads published weights from there; a transport to another
    machine mirrors it.
    """

    def fileno(self) -> int:
        """A file descriptor to wait for until :meth:`read` has something to do; -1: there is none."""
        return -1

    def read(self) -> None:
        """Take in what has arrived for several workers, and send what there is room for."""

    def push(self) -> None:
        """Send what was posted to workers, as far as there is room; whoever has posted, or waits, sees to it."""

    def tend(self) -> None:
        """Look after what needs no message, such as a silence; to be called now and then."""

    def connect(self, spec: WorkerSpec) -> Connection:
        """Start a worker, and return the connection to it.

        Raises:
            TypeError: a part of it cannot be pickled.
        """
        raise NotImplementedError

    def published(self) -> None:
        """Weights were published in the memory that specs name."""

    def close(self) -> None:
        """End what is beside the workers, which have ended."""


WorkerBackend = Literal["process", "multiprocessing", "tcp", "ray", "distributed", "rpc", "submitit"]
"""Names of the backends that type checkers know, and that have workers; those that are registered are others."""
Backend = Literal["direct", WorkerBackend]
"""The same, and the collector's own process."""

BACKENDS = {
    "process": "rollwright.collectors.workers.transports",
    "multiprocessing": "rollwright.collectors.workers.transports",
    "tcp": "rollwright.collectors.workers.remote.launching",
    "ray": "rollwright.collectors.workers.remote.ray",
    "distributed": "rollwright.collectors.workers.remote.launching",
    "rpc": "rollwright.collectors.workers.remote.launching",
    "submitit": "rollwright.collectors.workers.remote.submitit",
}
"""By name, the module: it has ``Options``, a dataclass or None, and ``transport(options, own, num_workers)``."""


def register_backend(name: str, module: str) -> None:
    """Let ``backend=name`` start workers in a way of your own.

    Args:
        name: of the backend.
        module: dotted name of the module that has it; it is imported when the backend is used. It has ``Options``, a
            dataclass of what ``backend_options`` may hold, with ``num_workers_per_collector`` among it, or None for
            workers that share memory with the collector and take no options; and ``transport(options, own,
            num_workers)``, which returns a :class:`~rollwright.collectors.workers.transports.Transport`.

    Raises:
        ValueError: another module has that name.
        TypeError: one of the two is no text.

    Example:
        >>> register_backend("my_cluster", "my_package.transport")
        >>> known_backend("backend", "my_cluster")
        'my_cluster'
        >>> del BACKENDS["my_cluster"]
    """
    for argument, value in {"name": name, "module": module}.items():
        if not isinstance(value, str) or not value:
            raise TypeError(f"{argument}: expected a text, got {type(value).__name__}: {value!r}.")
    if name == "direct" or BACKENDS.get(name, module) != module:
        raise ValueError(f"name: {name!r} is {BACKENDS.get(name, 'no workers at all')}. Pass another one.")
    BACKENDS[name] = module


def known_backend(name: str, value: object) -> object:
    """Check the name of a backend.

    Raises:
        ValueError: it is unknown.
    """
    known = (None, "direct", *BACKENDS)
    if value not in known:
        names = ", ".join(map(repr, known))
        raise ValueError(f"{name}: expected {' or '.join(names.rsplit(', ', 1))}, got {value!r}.")
    return value


def _options(backend: str, given: Mapping[str, Any] | None) -> Any:
    """The options of a backend.

    Raises:
        TypeError, ValueError: one is unknown, or wrong.
    """
    declared = importlib.import_module(BACKENDS[backend]).Options
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    if declared is None:
        if given:
            raise ValueError(
                f"backend_options: backend={backend!r} has none, got {sorted(map(str, given))}. Drop them, or name the "
                "backend that they are for."
            )
        return None
    refuse_unknown([str(name) for name in given or ()], names_of(declared), f"backend_options of backend={backend!r}")
    return declared(**(given or {}))


def check_backend(backend: str, given: Mapping[str, Any] | None, *, start_method: str | None) -> None:
    """Test the options of a backend.

    Raises:
        TypeError, ValueError: one is unknown, or wrong, or means nothing there.
    """
    if backend == "direct":
        raise ValueError("backend='direct' collects in this process, without workers. Make a Collector, or drop it.")
    if _options(backend, given) is not None and start_method is not None:
        raise ValueError(
            f"start_method={start_method!r} is for processes of this machine, and backend={backend!r} starts workers "
            "where they run. Drop it."
        )


def shares_memory(backend: str) -> bool:
    """Whether workers share memory with the collector's process."""
    return importlib.import_module(BACKENDS[backend]).Options is None


def num_workers_of(backend: str, given: Mapping[str, Any] | None) -> int:
    """Workers of each collector that ``num_collectors`` counts."""
    options = _options(backend, given)
    return 1 if options is None else int(options.num_workers_per_collector)


def transport_of(own: WorkerOptions, num_workers: int) -> Transport:
    """What starts the workers, and reaches them."""
    made: Transport = importlib.import_module(BACKENDS[own.transport]).transport(
        _options(own.transport, own.backend_options), own, num_workers
    )
    return made


Options = None
"""Of this machine's processes as a backend: there are none."""


class LocalTransport(Transport):
    """Starts workers as processes of this machine, which share memory with the collector.

    Args:
        start_method: of the processes, see :class:`~rollwright._processes.child.Child`.
        num_threads: that torch uses in each.
    """

    def __init__(self, *, start_method: str | None, num_threads: int) -> None:
        self._start_method, self._num_threads = start_method, num_threads

    def connect(self, spec: WorkerSpec) -> Child:
        """Start a worker, and return the connection to it."""
        try:
            return Child(
                serve,
                spec,
                name=f"rollwright-worker-{spec.index}",
                start_method=self._start_method,
                num_threads=self._num_threads,
            )
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise unsendable(spec, error) from error


def transport(options: None, own: WorkerOptions, num_workers: int) -> LocalTransport:
    """What starts workers as processes of this machine."""
    return LocalTransport(start_method=own.start_method, num_threads=own.threads_of(num_workers))


def _remedy_for(maker: Any) -> str:
    if is_env(maker):
        return remedy_for(maker)
    return "Let the function make what cannot be pickled when it is called, instead of holding it."


def unsendable(spec: WorkerSpec, error: Exception) -> Exception:
    """Why a worker could not be started: the part of its spec that cannot be pickled, if that is it."""
    parts = {"create_env_fn": spec.create_env_fn, "init_fn": spec.init_fn}
    parts |= {field.name: getattr(spec.options, field.name) for field in dataclasses.fields(spec.options)}
    del parts["replay_buffer"]  # which can be sent only while a process starts
    for name, part in parts.items():
        try:
            pickle.dumps(ByValue(part))
        except Exception as why:  # an object may refuse in any way it likes
            remedy = f" {_remedy_for(part)}" if name == "create_env_fn" else ""
            return TypeError(f"{name}: cannot be sent to a worker process: {type(why).__name__}: {why}.{remedy}")
    return error
