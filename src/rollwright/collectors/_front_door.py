"""The front door: which collector a call of ``Collector`` makes, by where it is to collect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

from rollwright.collectors.workers.options import WorkerOptions

__all__ = ["collector_elsewhere", "here", "is_elsewhere"]

_HERE = (None, "direct")
_PROCESS = ("process", "multiprocessing")
_DOOR = ("backend", "num_collectors", "sync")


def is_elsewhere(options: Mapping[str, Any]) -> bool:
    """Whether options ask for other processes.

    Raises:
        ValueError, TypeError: they contradict one another.
    """
    backend, count = options.get("backend"), options.get("num_collectors")
    if backend not in (*_HERE, *_PROCESS):
        raise ValueError(f"backend: expected None, 'direct', 'process' or 'multiprocessing', got {backend!r}.")
    if count is not None:
        if not isinstance(count, Integral) or isinstance(count, bool):
            raise TypeError(f"num_collectors: expected an integer of at least 1, got {count!r}.")
        if count < 1:
            raise ValueError(f"num_collectors: expected an integer of at least 1, got {count}.")
        if options.get("num_workers") is not None:
            raise ValueError(
                f"num_workers={options['num_workers']!r} and num_collectors={count} say the same twice. Drop one of "
                "the two."
            )
        if backend == "direct":
            raise ValueError(
                f"num_collectors={count} asks for processes, backend='direct' for none. Drop one of the two."
            )
    return count is not None or backend in _PROCESS


def collector_elsewhere(args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """A collector whose environments are in other processes."""
    from rollwright.collectors.multi import MultiCollector  # it is made of collectors itself

    others = {name: value for name, value in options.items() if name not in ("backend", "num_collectors")}
    count = options.get("num_collectors")
    makers = args[0] if args else options.get("create_env_fn")
    if count is not None:
        others["num_workers"] = int(count)
    elif not isinstance(makers, Sequence):
        others.setdefault("num_workers", 1)
    return MultiCollector(*args, **others)


def here(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a collector in this process.

    Raises:
        ValueError, TypeError: one is of processes only.
    """
    alien = [field.name for field in fields(WorkerOptions) if field.name in options and field.name not in _DOOR]
    if alien:
        raise TypeError(
            f"{alien[0]}: expected num_collectors= beside it, which makes the workers that it is for; got it for a "
            "collector in this process. Pass num_collectors=, or leave it out."
        )
    if options.get("sync") not in (None, True):
        raise ValueError(
            f"sync={options['sync']!r}: in one process a batch is collected while the caller waits. Pass "
            "num_collectors=, or call start() with a replay_buffer."
        )
    return {name: value for name, value in options.items() if name not in _DOOR}
