"""The factory behind ``Collector(...)``: which class collects, by ``backend``, ``num_collectors`` and ``sync``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import Any

from rollwright.collectors.workers.options import WorkerOptions

__all__ = ["local_options", "make_with_workers", "register_backend"]

_LOCAL = (None, "direct")
_SELECTING = ("backend", "num_collectors", "sync")
_backends: dict[str, Callable[..., Any]] = {}  # classes of collectors with workers, by names of `backend`


def register_backend(*names: str, make: Callable[..., Any]) -> None:
    """Let ``Collector(..., backend=name)`` call ``make``, with ``num_workers`` in place of ``num_collectors``.

    The first one that is registered serves ``num_collectors`` without a ``backend``.
    """
    _backends.update(dict.fromkeys(names, make))


def make_with_workers(args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The collector with workers that options ask for; None: they ask for one in this process.

    Raises:
        ValueError, TypeError: they contradict one another.
    """
    backend, count = options.get("backend"), options.get("num_collectors")
    if backend not in (*_LOCAL, *_backends):
        known = ", ".join(repr(name) for name in (*_LOCAL, *_backends))
        raise ValueError(f"backend: expected {' or '.join(known.rsplit(', ', 1))}, got {backend!r}.")
    if count is not None:
        _check_count(count, backend, options.get("num_workers"))
    elif backend in _LOCAL:
        return None
    given = {name: value for name, value in options.items() if name not in ("backend", "num_collectors")}
    makers = args[0] if args else options.get("create_env_fn")
    if count is not None:
        given["num_workers"] = int(count)
    elif not isinstance(makers, Sequence):
        given.setdefault("num_workers", 1)
    make = next(iter(_backends.values())) if backend is None else _backends[backend]
    return make(*args, **given)


def _check_count(count: Any, backend: str | None, num_workers: Any) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool):
        raise TypeError(f"num_collectors: expected an integer of at least 1, got {count!r}.")
    if count < 1:
        raise ValueError(f"num_collectors: expected an integer of at least 1, got {count}.")
    if num_workers is not None:
        raise ValueError(
            f"num_workers={num_workers!r} and num_collectors={count} say the same twice. Drop one of the two."
        )
    if backend == "direct":
        raise ValueError(f"num_collectors={count} asks for processes, backend='direct' for none. Drop one of the two.")


def local_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a collector in this process, without those that select it.

    Raises:
        ValueError, TypeError: one is for collectors with workers only.
    """
    alien = [field.name for field in fields(WorkerOptions) if field.name in options and field.name not in _SELECTING]
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
    return {name: value for name, value in options.items() if name not in _SELECTING}
