"""WorkersWeights: publishes weights to the policies in workers, which take them between two steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rollwright._interrupts import uninterrupted
from rollwright._processes.forks import on_fork
from rollwright.collectors.weights import CollectorWeights, Update, parse_update_for_workers
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.options import WorkerOptions
from rollwright.collectors.workers.schedule import Schedule
from rollwright.errors import WorkerError
from rollwright.weight_update import WeightSyncScheme
from rollwright.weight_update.forms import Description
from rollwright.weight_update.policy_weights import weights_of
from rollwright.weight_update.schemes import Publisher, Relay
from rollwright.weight_update.subscribing import HasModels

_LAG_S = 60.0


class WorkersWeights(CollectorWeights):
    """Publishes weights, and counts versions.

    Args:
        collector: has the models of this process.
        group: the workers.
        schedule: of their rollouts.
        publisher: of weights.
        options: of the workers.
        policy: that was passed; None: none was.
        acts_at_random: whether workers have no policy of the user.
        check: raises where nothing can be published.
    """

    def __init__(
        self,
        collector: HasModels,
        group: WorkerGroup,
        schedule: Schedule,
        publisher: Publisher,
        *,
        options: WorkerOptions,
        policy: Any,
        acts_at_random: bool,
        check: Callable[[], None],
    ) -> None:
        super().__init__()
        self._group, self._schedule, self._publisher = group, schedule, publisher
        self._options, self._policy, self._acts_at_random, self._check = options, policy, acts_at_random, check
        self._relay = Relay(collector)
        self._descriptions: dict[tuple[int, str], Description | None] = {}
        self._version = 0
        self.reset_after_fork()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """Have a lock that nobody holds."""
        self._publishing = threading.Lock()

    @property
    def version(self) -> int:
        """Number of updates so far."""
        return self._version

    def check_schemes(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Test that every worker has the models that schemes are for."""
        for model_id, scheme in schemes.items():
            if scheme.sends:
                try:
                    self._group.call("describe_model", [((model_id,), {})] * len(self._group.workers))
                except WorkerError as error:
                    if not error.remote_type:  # it has died
                        raise
                    raise ValueError(
                        f"weight_sync_schemes[{model_id!r}]: expected a model that workers have. {error}"
                    ) from error

    def check_source(self, what_for: str) -> None:
        """Raise where workers act with weights, and there are none here to publish."""
        policy = self._policy
        if self._acts_at_random or weights_of(policy) is not None:
            return
        what = "policy_factory and no policy" if policy is None else f"{type(policy).__name__} as policy"
        raise RuntimeError(
            f"{what_for}: found no module whose weights could be published to the workers (got {what}). "
            "Pass weights, or an nn.Module or a TensorDictModule as policy, or call increment_version() to count an "
            "update of your own."
        )

    def apply(
        self,
        given: Any,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """See :class:`CollectorWeights`; the weights are copied here."""
        self._check()
        if given is None and weights_dict is None and model_id in (None, "policy"):
            self.check_source("update_policy_weights_")
        updates = parse_update_for_workers(
            given,
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            num_workers=len(self._group.workers),
            devices=self._devices(),
            fallback=None if self._acts_at_random else self._policy,
            signature=self._describe,
            state_of=lambda name, weights, optional: self._publisher.scheme(name).state_of(
                weights, name, optional=optional
            ),
        )
        return self._publish(updates)

    def count_update(self) -> int:
        """Count an update that the user has made; returns the new version."""
        return self._publish([Update(None, {})])

    @contextmanager
    def receiving(self) -> Iterator[HasModels]:
        """What schemes write into; inside the ``with`` block, no model of this process acts in another thread."""
        yield self._relay

    def received(self, models: Sequence[str]) -> None:
        """Schemes have brought new weights for models."""
        brought = {model_id: self._relay.weights(model_id) for model_id in models}
        brought = {model_id: weights for model_id, weights in brought.items() if weights is not None}
        if brought:
            self.apply(None, weights_dict=brought)

    def load(self, version: int, workers: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the saved states of workers, which have loaded them: for those that may take their places."""
        self._version = version
        for member, saved in zip(self._group.workers, workers, strict=True):
            of_worker = int(saved.get("policy_version", version))
            weights = saved.get("policy_state_dict", saved.get("engine_state_dict"))
            models = {} if weights is None else {"policy": dict(weights)}
            self._publisher.publish(of_worker, models, [member.index])
            self._group.published(of_worker, [member.index])

    def _publish(self, updates: Sequence[Update]) -> int:
        everyone = range(len(self._group.workers))
        meant = {i for update in updates for i in (everyone if update.workers is None else update.workers)}
        with self._publishing, self._none_too_stale(meant), uninterrupted:  # a version is published once, or not at all
            version = self._version + 1
            for update in updates:
                self._publisher.publish(version, update.models, update.workers)
            self._version = version
            self._group.published(version, meant)
        return version

    @contextmanager
    def _none_too_stale(self, meant: set[int]) -> Iterator[None]:
        """Publish to some workers when no rollout that another thread waits for will be staler than it may be."""
        limit, schedule = self._options.max_policy_lag, self._schedule
        if limit is None or self._options.policy_lag != "wait":
            yield
            return

        def fresh() -> bool:
            oldest = self._group.oldest_versions() + schedule.oldest_versions()
            late = [first for worker, first in oldest if worker in meant and self._version + 1 - first > limit]
            return not late or not schedule.is_awaited()

        with schedule.holding():
            self._group.wait(fresh, _LAG_S, lambda: f"rollouts to end that are max_policy_lag={limit} versions old")
            yield

    def _describe(self, worker: int, model_id: str) -> Description | None:
        """What a model takes, in a worker; asked once."""
        key = (worker, model_id)
        if key not in self._descriptions:
            [found] = self._group.call("describe_model", [((model_id,), {})], workers=[worker], again=True)
            self._descriptions[key] = found
        return self._descriptions[key]

    def _devices(self) -> list[Any]:
        ready = [worker.ready for worker in self._group.workers]
        return [None if of_worker is None else torch.device(of_worker.policy_device or "cpu") for of_worker in ready]


class PeriodicUpdates:
    """Says before which batches a collector publishes weights by itself.

    Args:
        option: that asks for it, for messages.
        interval: batches from one update to the next; 0: one before each.

    Example:
        >>> updates = PeriodicUpdates("max_weight_update_interval", 2)
        >>> [updates.is_due() for _ in range(5)]
        [False, False, True, False, True]
    """

    def __init__(self, option: str, interval: int = 0) -> None:
        self.option, self._interval, self._batches = option, interval, 0

    def is_due(self) -> bool:
        """Whether to publish before the next batch; to be asked once before each."""
        is_due = self._batches >= self._interval
        self._batches = 1 if is_due else self._batches + 1
        return is_due
