"""Workers in processes of this machine."""

from __future__ import annotations

import dataclasses
import pickle

from rollwright._processes.channel import ByValue
from rollwright._processes.child import Child
from rollwright.collectors.workers.worker import WorkerSpec, serve

__all__ = ["connect"]


def connect(spec: WorkerSpec, *, start_method: str | None, num_threads: int) -> Child:
    """Start a worker.

    Args:
        spec: what it is made of.
        start_method: of its process, see :class:`~rollwright._processes.child.Child`.
        num_threads: that torch uses there.

    Raises:
        TypeError: a part of it cannot be pickled.
    """
    try:
        return Child(
            serve, spec, name=f"rollwright-worker-{spec.index}", start_method=start_method, num_threads=num_threads
        )
    except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
        raise _unsendable(spec, error) from error


def _unsendable(spec: WorkerSpec, error: Exception) -> Exception:
    """Why a worker could not be started: the part of its spec that cannot be pickled, if that is it."""
    parts = {"create_env_fn": spec.create_env_fn, "init_fn": spec.init_fn}
    parts |= {field.name: getattr(spec.options, field.name) for field in dataclasses.fields(spec.options)}
    del parts["replay_buffer"]  # which can be sent only while a process starts
    for name, part in parts.items():
        try:
            pickle.dumps(ByValue(part))
        except Exception as why:  # an object may refuse in any way it likes
            return TypeError(f"{name}: cannot be sent to a worker process: {type(why).__name__}: {why}.")
    return error
