"""GroupsCollector: what collectors with workers in groups have in common, under the names that the field knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rollwright._options import check_fields, whole
from rollwright.collectors.clusters.inner import check_collector_class, inner_options, makers_of_workers
from rollwright.collectors.multi import MultiCollector

if TYPE_CHECKING:
    from rollwright.collectors.rollout.environment import EnvMakers

__all__ = ["GroupOptions", "GroupsCollector"]

_INSTEAD = {
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


class GroupsCollector(MultiCollector):
    """A :class:`MultiCollector` that counts groups of workers, and publishes weights by itself if it is asked to."""

    def _construct_groups(
        self,
        create_env_fn: EnvMakers,
        policy: Callable[..., Any] | None,
        groups: GroupOptions,
        *,
        backend: str,
        backend_options: Mapping[str, Any],
        more_backend_options: Mapping[str, Any] | None,
        collector_class: object,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> None:
        """Construct the collector.

        Args:
            create_env_fn: as of the class.
            policy: as of the class.
            groups: how many, and when their weights are updated.
            backend: where they are.
            backend_options: that are arguments of the class.
            more_backend_options: that were given as such.
            collector_class: as of the class.
            collector_kwargs: as of the class.
            options: all others.
        """
        self.closed = True
        owner = type(self).__name__
        check_collector_class(collector_class)
        for name in options:
            if name in _INSTEAD:
                raise TypeError(f"{owner} has no option {name!r}: {_INSTEAD[name]}")
        in_each = groups.num_workers_per_collector
        makers = makers_of_workers(create_env_fn, groups.num_collectors, in_each)
        merged = inner_options(collector_kwargs, options, len(makers) // in_each, in_each)
        interval = 0 if groups.update_after_each_batch else groups.max_weight_update_interval
        self._update_interval: int | None = interval if interval >= 0 else None
        self._batches_since_update = 0
        about = {"num_workers_per_collector": in_each, **backend_options}
        about.update(_not_twice(more_backend_options, about, owner))
        self._construct(makers, policy, {**merged, "backend": backend, "backend_options": about})
        if self._update_interval is not None:
            self._check_source()

    def _check_source(self) -> None:
        try:
            if self.weight_updater is None:
                self._weights.check_source("update_after_each_batch")
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    def _update_at_each_batch(self) -> None:
        if self._update_interval is None:
            return
        if self._batches_since_update >= self._update_interval:
            self.update_policy_weights_()
            self._batches_since_update = 0
        self._batches_since_update += 1


def _not_twice(given: Mapping[str, Any] | None, about: Mapping[str, Any], owner: str) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"backend_options: expected a dictionary, got {type(given).__name__}: {given!r}.")
    for name in given or {}:
        if name in about:
            raise ValueError(f"backend_options: got {name!r}, which is said by an argument of {owner}. Pass it there.")
    return given or {}
