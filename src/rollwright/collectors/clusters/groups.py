"""What collectors with workers in groups have in common, under the names that the field knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rollwright._options import PER_WORKER, Check, check_fields, names_of, refuse_unknown, whole
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.collector import Collector
from rollwright.collectors.factory import makers_of_workers
from rollwright.collectors.multi import MultiCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.options import WorkerOptions
from rollwright.collectors.workers.weights import PeriodicUpdates

if TYPE_CHECKING:
    from rollwright.collectors.rollout.environment import EnvMakers

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


class Grouped(NamedTuple):
    """What a :class:`~rollwright.collectors.MultiCollector` of groups is made of.

    Attributes:
        makers: what makes the environment of each worker.
        options: of the collector.
        updates: before which batches it publishes weights by itself; None: before none.
    """

    makers: list[Any]
    options: dict[str, Any]
    updates: PeriodicUpdates | None


def grouped(
    owner: str,
    create_env_fn: EnvMakers,
    backend: str,
    about: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Grouped:
    """What a collector is made of, from arguments under the names that the field knows.

    Args:
        owner: name of the class.
        create_env_fn: as of the class.
        backend: where groups are.
        about: options of the backend that are arguments of the class.
        options: those of :class:`GroupOptions`, and all others.

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
    given = {**about, "num_workers_per_collector": in_each}
    given.update(_not_twice(options.get("backend_options"), given, owner))
    return Grouped(makers, {**merged, "backend": backend, "backend_options": given}, updates)


def _not_twice(given: Mapping[str, Any] | None, about: Mapping[str, Any], owner: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    for name in given or {}:
        if name in about:
            raise ValueError(f"backend_options: got {name!r}, which is said by an argument of {owner}. Pass it there.")
    return given or {}
