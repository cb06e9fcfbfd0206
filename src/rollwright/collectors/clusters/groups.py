"""What collectors with workers in groups have in common, under the names that the field knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rollwright._options import check_fields, whole
from rollwright.collectors.clusters.inner import check_collector_class, inner_options
from rollwright.collectors.factory import makers_of_workers
from rollwright.collectors.workers.weights import PeriodicUpdates

if TYPE_CHECKING:
    from rollwright.collectors.rollout.environment import EnvMakers


_INSTEAD = {
    "backend": "its class says where the workers are. Drop it.",
    "num_workers": "pass num_collectors= and num_workers_per_collector=.",
    "update_at_each_batch": "here it is called update_after_each_batch.",
}


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How many groups there are, and when their weights are updated.

    Attributes:
        num_collectors: number of groups; None: as many as there are functions in ``create_env_fn``.
        num_workers_per_collector: workers in each.
        update_after_each_batch: read the weights of ``policy`` again, and publish them, before each batch.
        max_weight_update_interval: batches after which that is done at the latest; -1: it is not.
    """

    num_collectors: Annotated[int | None, whole(1)] = None
    num_workers_per_collector: Annotated[int, whole(1)] = 1
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
    groups: GroupOptions,
    *,
    backend: str,
    backend_options: Mapping[str, Any],
    more_backend_options: Mapping[str, Any] | None,
    collector_class: object,
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> Grouped:
    """What a collector is made of, from arguments under the names that the field knows.

    Args:
        owner: name of the class.
        create_env_fn: as of the class.
        groups: how many, and when their weights are updated.
        backend: where they are.
        backend_options: that are arguments of the class.
        more_backend_options: that were given as such.
        collector_class: as of the class.
        collector_kwargs: as of the class.
        options: all others.

    Raises:
        TypeError, ValueError: one is wrong, or given twice.
    """
    check_collector_class(collector_class)
    for name in options:
        if name in _INSTEAD:
            raise TypeError(f"{owner} has no option {name!r}: {_INSTEAD[name]}")
    in_each = groups.num_workers_per_collector
    makers = makers_of_workers(create_env_fn, groups.num_collectors, in_each)
    merged = inner_options(collector_kwargs, options, len(makers) // in_each, in_each)
    interval = 0 if groups.update_after_each_batch else groups.max_weight_update_interval
    updates = PeriodicUpdates("update_after_each_batch", interval) if interval >= 0 else None
    about = {"num_workers_per_collector": in_each, **backend_options}
    about.update(_not_twice(more_backend_options, about, owner))
    return Grouped(makers, {**merged, "backend": backend, "backend_options": about}, updates)


def _not_twice(given: Mapping[str, Any] | None, about: Mapping[str, Any], owner: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    for name in given or {}:
        if name in about:
            raise ValueError(f"backend_options: got {name!r}, which is said by an argument of {owner}. Pass it there.")
    return given or {}
