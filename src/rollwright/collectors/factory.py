"""The factory behind ``Collector(...)``: which class collects, by ``backend``, ``num_collectors`` and ``sync``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from rollwright._options import check_fields, names_of, whole
from rollwright.collectors.workers.options import WorkerOptions
from rollwright.collectors.workers.transports import known_backend, num_workers_of
from rollwright.envs.libs.foreign import makers_in

_makers: list[Callable[..., Any]] = []  # of collectors with workers


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """The number of collectors, for ``Collector(...)``.

    Attributes:
        num_collectors: number of workers, each with an environment and a policy of its own. On other machines, number
            of groups of workers. None: collect in this process, unless ``backend`` names another place.
    """

    num_collectors: Annotated[int | None, whole(1)] = None

    def __post_init__(self) -> None:
        check_fields(self)


def wants_workers(options: Mapping[str, Any]) -> bool:
    """Whether options ask for a collector with workers.

    Raises:
        ValueError, TypeError: ``num_collectors`` or ``backend`` is wrong, or they contradict one another.
    """
    count = BackendOptions(num_collectors=options.get("num_collectors")).num_collectors
    backend = known_backend("backend", options.get("backend"))
    if count is not None and backend == "direct":
        raise ValueError(f"num_collectors={count} asks for processes, backend='direct' for none. Drop one of the two.")
    return count is not None or backend not in (None, "direct")


def num_in_each(options: Mapping[str, Any]) -> int:
    """Workers in each of those that ``num_collectors`` counts: groups of them on some backends."""
    return num_workers_of(options.get("backend") or "process", options.get("backend_options"))


def register_workers(make: Callable[..., Any]) -> None:
    """Let ``Collector(..., num_collectors=n)`` call ``make``, with ``num_workers`` in place of ``num_collectors``."""
    _makers[:] = [make]


def make_with_workers(args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The collector with workers that options ask for; None: they ask for one in this process.

    Raises:
        ValueError, TypeError: they contradict one another.
    """
    if not wants_workers(options):
        return None
    given = {name: value for name, value in options.items() if name != "num_collectors"}
    count, in_each = options.get("num_collectors"), num_in_each(options)
    if count is not None and given.get("num_workers") is not None:
        raise ValueError(
            f"num_workers={given['num_workers']!r} and num_collectors={count} say the same twice. Drop one of the two."
        )
    makers = args[0] if args else options.get("create_env_fn")
    listed = makers_in(makers)
    if listed is not None and in_each > 1:  # one for each group
        given.pop("create_env_fn", None)
        args = (makers_of_workers(listed, count, in_each), *args[1:])
    if count is not None:
        given["num_workers"] = count * in_each
    elif listed is None:
        given.setdefault("num_workers", in_each)
    return _makers[0](*args, **given)


def makers_of_workers(create_env_fn: Any, num_collectors: int | None, in_each: int) -> list[Any]:
    """What makes the environment of each worker, in order of the collectors that they belong to.

    Raises:
        ValueError: a list has another length.
    """
    listed = makers_in(create_env_fn)
    given = [create_env_fn] * (num_collectors or 1) if listed is None else listed
    if num_collectors not in (None, len(given)):
        raise ValueError(
            f"create_env_fn: expected one function for each of the {num_collectors} collectors, got {len(given)}. "
            "Change num_collectors, or pass a single function for all."
        )
    return [maker for maker in given for _ in range(in_each)]


def local_options(options: Mapping[str, Any], owner: type) -> dict[str, Any]:
    """The options of a collector in this process, without those that select it.

    Args:
        options: as they were given.
        owner: class of the collector.

    Raises:
        ValueError, TypeError: one is for collectors with workers only.
    """
    if wants_workers(options):  # only the factory makes these
        name = "num_collectors" if options.get("num_collectors") is not None else "backend"
        known = next(kind.__name__ for kind in owner.__mro__ if kind.__module__.startswith("rollwright."))
        raise TypeError(
            f"{name}: {owner.__name__} collects in this process, and what it changes in {known} would be lost in "
            f"workers; got {name}={options[name]!r}. Call {known} itself, or subclass a collector with workers, such "
            "as MultiSyncCollector."
        )
    also: tuple[str, ...] = getattr(owner, "also_local", ())
    alien = [name for name in names_of(WorkerOptions) if name in options and name not in ("sync", "backend", *also)]
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
    selecting = [*names_of(BackendOptions), "backend", "sync"]
    return {name: value for name, value in options.items() if name not in selecting}
