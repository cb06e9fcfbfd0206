"""The factory behind ``Collector(...)``: which class collects, by ``backend``, ``num_collectors`` and ``sync``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rollwright._options import Check, check_fields, names_of, whole
from rollwright.collectors.workers.options import WorkerOptions
from rollwright.collectors.workers.transports.backends import BACKENDS, num_workers_of

__all__ = ["BackendOptions", "local_options", "make_with_workers", "register_workers"]

_LOCAL = (None, "direct")
_makers: list[Callable[..., Any]] = []  # of collectors with workers


def _known_backend(name: str, value: object) -> object:
    if value not in (*_LOCAL, *BACKENDS):
        known = ", ".join(repr(backend) for backend in (*_LOCAL, *BACKENDS))
        raise ValueError(f"{name}: expected {' or '.join(known.rsplit(', ', 1))}, got {value!r}.")
    return value


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Where ``Collector(...)`` collects.

    Attributes:
        num_collectors: number of workers, each with an environment and a policy of its own; on other machines, number
            of groups of workers; None: collect in this process, unless ``backend`` names another.
        backend: ``"direct"``: in this process; ``"process"`` or ``"multiprocessing"``: in workers, one for each
            function in ``create_env_fn`` unless ``num_collectors`` is given; ``"tcp"``: in groups of workers that share
            nothing with this process, on any machine; None: as ``num_collectors`` says.
    """

    num_collectors: Annotated[int | None, whole(1)] = None
    backend: Annotated[Literal["direct", "process", "multiprocessing", "tcp"] | None, Check(_known_backend)] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_local(self) -> bool:
        """Whether the collector is to collect in this process."""
        return self.num_collectors is None and self.backend in _LOCAL


def register_workers(make: Callable[..., Any]) -> None:
    """Let ``Collector(..., num_collectors=n)`` call ``make``, with ``num_workers`` in place of ``num_collectors``."""
    _makers[:] = [make]


def make_with_workers(args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The collector with workers that options ask for; None: they ask for one in this process.

    Raises:
        ValueError, TypeError: they contradict one another.
    """
    selected = names_of(BackendOptions)
    where = BackendOptions(**{name: options[name] for name in selected if name in options})
    if where.is_local:
        return None
    given = {name: value for name, value in options.items() if name not in selected}
    count = where.num_collectors
    if count is not None:
        if given.get("num_workers") is not None:
            raise ValueError(
                f"num_workers={given['num_workers']!r} and num_collectors={count} say the same twice. Drop one of the "
                "two."
            )
        if where.backend == "direct":
            raise ValueError(
                f"num_collectors={count} asks for processes, backend='direct' for none. Drop one of the two."
            )
    makers = args[0] if args else options.get("create_env_fn")
    backend = where.backend or "process"
    in_each = num_workers_of(backend, given.get("backend_options"))
    if isinstance(makers, Sequence) and in_each > 1:
        makers = [maker for maker in makers for _ in range(in_each)]  # one for each group
        args, given = (makers, *args[1:]), {name: value for name, value in given.items() if name != "create_env_fn"}
    if count is not None:
        given["num_workers"] = count * in_each
    elif not isinstance(makers, Sequence):
        given.setdefault("num_workers", in_each)
    return _makers[0](*args, backend=backend, **given)


def local_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a collector in this process, without those that select it.

    Raises:
        ValueError, TypeError: one is for collectors with workers only.
    """
    alien = [name for name in names_of(WorkerOptions) if name in options and name != "sync"]
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
    selecting = [*names_of(BackendOptions), "sync"]
    return {name: value for name, value in options.items() if name not in selecting}
