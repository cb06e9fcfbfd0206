"""LocalTransport: workers in processes of this machine, which share memory with the collector."""

from __future__ import annotations

import dataclasses
import pickle
from typing import TYPE_CHECKING, Any

from rollwright._processes.channel import ByValue
from rollwright._processes.child import Child
from rollwright.collectors.workers.worker import WorkerSpec, serve
from rollwright.envs.libs.foreign import is_env, remedy_for

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


Options = None
"""See :mod:`~rollwright.collectors.workers.transports.backends`."""


class LocalTransport:
    """See :class:`~rollwright.collectors.workers.transports.transport.Transport`.

    Args:
        start_method: of the processes, see :class:`~rollwright._processes.child.Child`.
        num_threads: that torch uses in each.
    """

    def __init__(self, *, start_method: str | None, num_threads: int) -> None:
        self._start_method, self._num_threads = start_method, num_threads

    def fileno(self) -> int:
        """There is none: each worker has its own."""
        return -1

    def read(self) -> None:
        """There is nothing."""

    def push(self) -> None:
        """There is nothing."""

    def tend(self) -> None:
        """There is nothing."""

    def connect(self, spec: WorkerSpec) -> Child:
        """See :class:`~rollwright.collectors.workers.transports.transport.Transport`."""
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

    def published(self) -> None:
        """Workers read it themselves."""

    def close(self) -> None:
        """There is nothing."""


def transport(options: None, own: WorkerOptions, num_workers: int) -> LocalTransport:
    """See :mod:`~rollwright.collectors.workers.transports.backends`."""
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
