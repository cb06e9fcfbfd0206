"""What cluster collectors of the field say of the collectors in each process: their class, and their options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollwright._options import PER_WORKER, names_of, refuse_unknown
from rollwright.collectors.base import BaseCollector
from rollwright.collectors.collector import Collector
from rollwright.collectors.multi import MultiCollector
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.options import WorkerOptions

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


def check_collector_class(value: object) -> type[BaseCollector]:
    """The class that is meant: :class:`Collector` or :class:`MultiCollector`, or a subclass.

    Raises:
        TypeError, ValueError: it is something else.
    """
    if isinstance(value, str):
        if value not in _NAMES:
            raise ValueError(f"collector_class: expected one of {', '.join(map(repr, _NAMES))}, got {value!r}.")
        return _NAMES[value]
    if isinstance(value, type) and (issubclass(value, Collector) or issubclass(value, MultiCollector)):
        return value
    raise TypeError(
        "collector_class: expected Collector, MultiSyncCollector, MultiAsyncCollector or one of their names, got "
        f"{value!r}."
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
