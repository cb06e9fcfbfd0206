"""Collectors whose workers are in groups: their options, and those whose groups are ranks of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from rollwright._options import PER_WORKER, Check, check_fields, names_of, refuse_unknown, whole, with_options
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.collector import Collector
from rollwright.collectors.multi import MultiCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.options import WorkerOptions, makers_of_workers
from rollwright.collectors.workers.weights import PeriodicUpdates

if TYPE_CHECKING:
    from rollwright.collectors.keywords import GroupKeywords
    from rollwright.collectors.rollout.environment import EnvMakers

__all__ = ["DistributedCollector", "DistributedDataCollector"]

_NAMES: dict[str, type[BaseCollector]] = {
    "single": Collector,
    "Collector": Collector,
    "SyncDataCollector": Collector,
    "sync": MultiCollector,
    "MultiSyncCollector": MultiCollector,
    "MultiSyncDataCollector": MultiCollector,
    "async": MultiCollector,
    "MultiAsyncCollector": MultiCollector,
    "MultiaSyncDataCollector": MultiCollector,
}
_LISTS = (list, tuple)


def check_collector_class(name: str, value: object) -> type[BaseCollector]:
    """The class that is meant: :class:`Collector` or :class:`MultiCollector`, or a subclass.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(value, str):
        if value not in _NAMES:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, _NAMES))}, got {value!r}.")
        return _NAMES[value]
    if isinstance(value, type) and (issubclass(value, Collector) or issubclass(value, MultiCollector)):
        return value
    raise TypeError(
        f"{name}: expected Collector, MultiSyncCollector, MultiAsyncCollector or one of their names, got {value!r}."
    )


def inner_options(given: Any, options: Mapping[str, Any], num_groups: int, in_each: int) -> dict[str, Any]:
    """Options of all workers, from those of each group's collector and those of the whole.

    Args:
        given: one dictionary, or a list with one for each group.
        options: of the whole.
        num_groups: how many there are.
        in_each: workers in each.

    Raises:
        TypeError, ValueError: an option is unknown, given twice with two values, or has to be the same for all groups.
    """
    each = list(given) if isinstance(given, _LISTS) else [given or {}] * num_groups
    if len(each) != num_groups:
        raise ValueError(
            f"collector_kwargs: expected one dictionary for each of the {num_groups} collectors, got {len(each)}. Pass "
            "a single one for all."
        )
    for kwargs in each:
        if not isinstance(kwargs, Mapping):
            raise TypeError(
                "collector_kwargs: expected a dictionary of options, or a list with one for each collector, got "
                f"{type(kwargs).__name__}: {kwargs!r}."
            )
        refuse_unknown(map(str, kwargs), [*names_of(CollectorOptions), *names_of(WorkerOptions)], "collector_kwargs")
    merged = dict(options)
    for name in dict.fromkeys(name for kwargs in each for name in kwargs):
        of_all = options.get(name)
        if of_all is not None and all(kwargs.get(name, of_all) == of_all for kwargs in each):
            continue  # said twice
        if of_all is not None:
            raise ValueError(f"{name}: got {of_all!r}, and something else in collector_kwargs. Pass it once.")
        merged[name] = _merged(name, each, in_each)
    for name in names_of(CollectorOptions, marked=PER_WORKER):
        value = merged.get(name)
        if in_each > 1 and isinstance(value, _LISTS) and len(value) == num_groups:
            merged[name] = [one for one in value for _ in range(in_each)]
    return merged


def _merged(name: str, each: Sequence[Mapping[str, Any]], in_each: int) -> Any:
    values = [kwargs.get(name, _NOT_GIVEN) for kwargs in each]
    first = values[0]
    if all(value is first or value == first for value in values):
        return first
    if name not in names_of(CollectorOptions, marked=PER_WORKER) or _NOT_GIVEN in values:
        raise ValueError(
            f"collector_kwargs: {name} has to be the same for all collectors, got {values}. Pass one value for all."
        )
    return [value for value in values for _ in range(in_each)]


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOT_GIVEN = _Nothing()


_INSTEAD = {
    "backend": "its class says where the workers are. Drop it.",
    "num_workers": "pass num_collectors= and num_workers_per_collector=.",
    "update_at_each_batch": "here it is called update_after_each_batch.",
}


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How many groups there are, what is in each, and when their weights are updated.

    Attributes:
        num_collectors: number of groups; None: as many as there are functions in ``create_env_fn``.
        num_workers_per_collector: workers in each.
        collector_class: :class:`Collector`, :class:`MultiSyncCollector`, :class:`MultiAsyncCollector` or one of their
            names, for programs that say so. ``num_workers_per_collector`` and ``sync`` alone decide what runs.
        collector_kwargs: further options, for all groups or a list with one dictionary for each. Only those that may
            differ between workers may differ.
        update_after_each_batch: read the weights of ``policy`` again, and publish them, before each batch.
        max_weight_update_interval: batches after which that is done at the latest; -1: it is not.
    """

    num_collectors: Annotated[int | None, whole(1)] = None
    num_workers_per_collector: Annotated[int, whole(1)] = 1
    collector_class: Annotated[type[BaseCollector] | str, Check(check_collector_class)] = Collector
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    update_after_each_batch: bool = False
    max_weight_update_interval: Annotated[int, whole(-1)] = -1

    def __post_init__(self) -> None:
        check_fields(self)


def grouped(
    owner: str,
    create_env_fn: EnvMakers,
    backend: str,
    about: Mapping[str, Any],
    options: Mapping[str, Any],
) -> tuple[list[Any], dict[str, Any], PeriodicUpdates | None]:
    """What a :class:`~rollwright.collectors.MultiCollector` of groups is made of.

    Args:
        owner: name of the class.
        create_env_fn: as of the class.
        backend: where groups are.
        about: options of the backend that are arguments of the class; those that are None are left to the backend.
        options: those of :class:`GroupOptions`, and all others, under the names that the field knows.

    Returns:
        What makes the environment of each worker, options, and before which batches weights are published.

    Raises:
        TypeError, ValueError: one is wrong, or given twice.
    """
    for name in options:
        if name in _INSTEAD:
            raise TypeError(f"{owner} has no option {name!r}: {_INSTEAD[name]}")
    own = names_of(GroupOptions)
    groups = GroupOptions(**{name: value for name, value in options.items() if name in own})
    others = {name: value for name, value in options.items() if name not in {*own, "backend_options"}}
    in_each = groups.num_workers_per_collector
    makers = makers_of_workers(create_env_fn, groups.num_collectors, in_each)
    merged = inner_options(groups.collector_kwargs, others, len(makers) // in_each, in_each)
    interval = 0 if groups.update_after_each_batch else groups.max_weight_update_interval
    updates = PeriodicUpdates("update_after_each_batch", interval) if interval >= 0 else None
    given = {name: value for name, value in about.items() if value is not None} | {"num_workers_per_collector": in_each}
    given.update(_not_twice(options.get("backend_options"), {**about, **given}, owner))
    return makers, {**merged, "backend": backend, "backend_options": given}, updates


def _not_twice(given: Mapping[str, Any] | None, about: Mapping[str, Any], owner: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    for name in given or {}:
        if name in about:
            raise ValueError(f"backend_options: got {name!r}, which is said by an argument of {owner}. Pass it there.")
    return given or {}


LEFT_OUT = ("backend", "num_workers", "update_at_each_batch")  # said otherwise here


@with_options(GroupOptions, WorkerOptions, CollectorOptions, leave_out=LEFT_OUT)
class DistributedCollector(MultiCollector):
    """Collects experience in groups of workers, each a rank of its own: ``backend="distributed"``.

    A group that dies is replaced (``on_worker_failure="restart"``), and the others do not notice. Batches and weights
    go by one authenticated connection for each group. ``DistributedDataCollector`` is the same class.

    ``backend_options`` takes others of :class:`~rollwright.collectors.workers.remote.launching.Options`, such as
    ``host_timeout``.

    Args:
        create_env_fn: makes an environment, in a worker; or a list of such functions, one for each group.
        policy: as of :class:`Collector`; each worker acts with a copy, see :meth:`update_policy_weights_`.
        sync: whether a batch is of all workers; if False, batches are of one worker each, in the order in which they
            are finished.
        backend: of torch.distributed, for programs that name one: ``"gloo"``, ``"nccl"`` or ``"mpi"``; none is used.
        launcher: what starts groups: ``"submitit"``: jobs of Slurm, or of submitit's executor for one machine;
            ``"mp"``: processes of this machine; ``"torchrun"``: they are the other ranks of this program; ``"join"``:
            somebody, by ``rollwright join HOST:PORT``.
        slurm_kwargs: parameters of jobs, such as ``slurm_partition``, ``gpus_per_node``, ``timeout_min``.
        tcp_port: where this process listens; None: at any port that is free.
        **options: how many groups there are, and those of
            :class:`~rollwright.collectors.workers.options.WorkerOptions` and of
            :class:`~rollwright.collectors.CollectorOptions`.

    Raises:
        MissingExtraError: submitit is not installed.
        ValueError, TypeError: an option is wrong.
        WorkerError: a worker could not make its environment or its policy.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with DistributedCollector(
        ...     lambda: GymEnv("CartPole-v1"),
        ...     num_collectors=2,
        ...     launcher="mp",
        ...     sync=True,
        ...     frames_per_batch=200,
        ...     total_frames=400,
        ... ) as collector:
        ...     print([batch.shape for batch in collector])
        [torch.Size([2, 100]), torch.Size([2, 100])]
    """

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        sync: bool = False,
        backend: Literal["gloo", "nccl", "mpi"] = "gloo",
        launcher: Literal["mp", "submitit", "torchrun", "join"] = "submitit",
        slurm_kwargs: Mapping[str, Any] | None = None,
        tcp_port: int | None = None,
        **options: Unpack[GroupKeywords],
    ) -> None:
        given = {**options, "sync": sync}
        about = _about(backend, launcher, slurm_kwargs, tcp_port)
        makers, given, self._updates = grouped(type(self).__name__, create_env_fn, "distributed", about, given)
        self._construct(makers, policy, given)


@with_options(DistributedCollector, leave_out=["sync", "max_weight_update_interval"])
class DistributedSyncCollector(MultiCollector):
    """A :class:`DistributedCollector` whose batches are of all workers, each with the newest weights.

    ``DistributedSyncDataCollector`` is the same class.

    Args:
        create_env_fn: as of :class:`DistributedCollector`.
        policy: as of :class:`DistributedCollector`.
        update_interval: batches after which the weights of ``policy`` are read again, and published; without a policy
            that has weights, nothing is.
        **options: those of :class:`DistributedCollector`.

    Raises:
        ValueError, TypeError: an option is wrong.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> with DistributedSyncCollector(
        ...     [lambda: GymEnv("CartPole-v1")] * 2, launcher="mp", frames_per_batch=200, total_frames=200
        ... ) as collector:
        ...     print([batch.shape for batch in collector])
        [torch.Size([2, 100])]
    """

    _sync = True

    def __init__(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None = None,
        *,
        update_interval: int = 1,
        **options: Any,
    ) -> None:
        if isinstance(update_interval, bool) or not isinstance(update_interval, int) or update_interval < 1:
            raise ValueError(f"update_interval: expected an integer of at least 1, got {update_interval!r}.")
        for name, why in (("sync", "it is True here"), ("max_weight_update_interval", "pass update_interval=")):
            if name in options:
                raise TypeError(f"{type(self).__name__} has no option {name!r}: {why}.")
        if hasattr(policy, "parameters"):
            options["max_weight_update_interval"] = update_interval
        about = _about(*(options.pop(name, default) for name, default in _LAUNCH.items()))
        given = {**options, "sync": True}
        makers, given, self._updates = grouped(type(self).__name__, create_env_fn, "distributed", about, given)
        self._construct(makers, policy, given)


_LAUNCH = {"backend": "gloo", "launcher": "submitit", "slurm_kwargs": None, "tcp_port": None}


def _about(backend: str, launcher: str, slurm_kwargs: Any, tcp_port: int | None) -> dict[str, Any]:
    """Options of the backend, under its own names."""
    return {"process_group_backend": backend, "launcher": launcher, "slurm_kwargs": slurm_kwargs, "port": tcp_port}


DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
