"""Weights of many workers: published here, taken by them between two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from rollwright._interrupts import uninterrupted
from rollwright.collectors._multi_core import MultiCore
from rollwright.collectors.attribute_paths import resolve
from rollwright.collectors.weights import updates as weight_forms
from rollwright.collectors.workers.counters import Word
from rollwright.errors import WorkerError
from rollwright.weight_update import WeightSyncScheme
from rollwright.weight_update.feed import HasModels
from rollwright.weight_update.receiving import Relay

if TYPE_CHECKING:
    from rollwright.collectors.keywords import MultiKeywords
    from rollwright.collectors.rollout.environment import EnvMakers

__all__ = ["WorkersWeights"]

_LAG_S = 60.0


class WorkersWeights(MultiCore):
    """The part of :class:`~rollwright.collectors.MultiCollector` that publishes weights, and counts versions."""

    _signatures: dict[tuple[int, str], Any]
    _relay: Relay | None = None

    def __init__(self, create_env_fn: EnvMakers, policy: Any = None, **options: Unpack[MultiKeywords]) -> None:
        self._signatures = {}
        super().__init__(create_env_fn, policy, **options)
        try:
            self._check_scheme_models(options.get("weight_sync_schemes") or {})
            if self.own_options.update_at_each_batch and self._updater is None:
                self._check_source("update_at_each_batch")
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    def _check_scheme_models(self, schemes: Mapping[str, WeightSyncScheme]) -> None:
        """Test that every worker has the models that schemes are for."""
        for model_id, scheme in schemes.items():
            if scheme.sends:
                try:
                    self._group.call("describe_model", [((model_id,), {})] * self.num_workers)
                except WorkerError as error:
                    if not error.remote_type:  # it has died
                        raise
                    raise ValueError(
                        f"weight_sync_schemes[{model_id!r}]: expected a model that workers have. {error}"
                    ) from error

    def _update_weights(
        self, given: Any, *, weights_dict: Mapping[str, Any] | None, model_id: str | None, worker_ids: Any
    ) -> int:
        """Publish an update; the weights are copied here.

        A worker takes them between two steps: it acts with one version or with the next, never with a mixture. With
        ``max_policy_lag`` and ``policy_lag="wait"``, waits for workers whose rollout would be too stale.
        """
        self._check_open()
        self._raise_of_runner()
        if given is None and weights_dict is None and model_id in (None, "policy"):
            self._check_source("update_policy_weights_")
        updates = weight_forms.parse_update_for_workers(
            given,
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            num_workers=self.num_workers,
            devices=self._devices(),
            fallback=self._policy if isinstance(self._policy, nn.Module) else None,
            signature=self._signature,
            state_of=lambda name, weights: self._publisher.scheme(name).state_of(weights, name),
        )
        return self._publish(updates)

    def _version_now(self) -> int:
        return self._version

    def _check_source(self, what_for: str) -> None:
        """Raise where workers act with weights, and there are none here to publish."""
        policy = self._policy
        if isinstance(policy, nn.Module) or (policy is None and self.options.policy_factory is None):
            return  # the latter act at random
        what = "policy_factory and no policy" if policy is None else f"{type(policy).__name__} as policy"
        raise RuntimeError(
            f"{what_for}: found no module whose weights could be published to the workers (got {what}). "
            "Pass weights, or an nn.Module or a TensorDictModule as policy, or call increment_version() to count an "
            "update of your own."
        )

    def _receiving_end(self) -> HasModels:
        if self._relay is None:
            self._relay = Relay(self)
        return self._relay

    def _received(self, models: Sequence[str]) -> None:
        relay = self._relay
        brought = {} if relay is None else {model_id: relay.weights(model_id) for model_id in models}
        brought = {model_id: weights for model_id, weights in brought.items() if weights is not None}
        if brought:
            self._update_weights(None, weights_dict=brought, model_id=None, worker_ids=None)

    def _publish(self, updates: Sequence[Any]) -> int:
        meant = {
            i for update in updates for i in (range(self.num_workers) if update.workers is None else update.workers)
        }
        with self._publishing, self._none_too_stale(meant), uninterrupted:  # a version is published once, or not at all
            version = self._version + 1
            self._publisher.publish(updates, version)
            self._version = version
            for index in meant:
                self._group.workers[index].words.whole[Word.PUBLISHED] = version
        return version

    @contextmanager
    def _none_too_stale(self, meant: set[int]) -> Iterator[None]:
        """Publish to some workers when no rollout that another thread waits for will be staler than it may be."""
        limit, schedule = self.own_options.max_policy_lag, self._schedule
        if limit is None or self.own_options.policy_lag != "wait":
            yield
            return

        def fresh() -> bool:
            oldest = self._group.oldest_versions() + schedule.oldest_versions()
            late = [first for worker, first in oldest if worker in meant and self._version + 1 - first > limit]
            return not late or not schedule.is_awaited()

        try:
            schedule.held += 1
            self._group.wait(fresh, _LAG_S, lambda: f"rollouts to end that are max_policy_lag={limit} versions old")
            yield
        finally:
            schedule.held -= 1
            self._group.wake()

    def _signature(self, worker: int, model_id: str) -> Any:
        """What a model takes, in a worker; asked once."""
        key = (worker, model_id)
        if key not in self._signatures:
            [found] = self._group.call("describe_model", [((model_id,), {})], workers=[worker], again=True)
            self._signatures[key] = found
        return self._signatures[key]

    def _devices(self) -> list[Any]:
        told = [worker.ready for worker in self._group.workers]
        return [None if ready is None else torch.device(ready.policy_device or "cpu") for ready in told]

    def get_model(self, model_id: str) -> Any:
        """The model that an id names, as far as it is known in this process: the policy that was passed.

        Raises:
            ValueError: it is another, which the workers have.
        """
        if model_id == "policy" and self._policy is not None:
            return self._policy
        try:
            return resolve(self._policy, model_id)
        except AttributeError as error:
            raise ValueError(f"model_id: {model_id!r} is not known in this process, only in its workers.") from error

    @property
    def policy_version(self) -> int:
        """Number of updates of the weights so far."""
        return self._version

    def get_policy_version(self) -> int:
        """Same as :attr:`policy_version`."""
        return self._version

    def increment_version(self) -> int:
        """Count an update of the weights; returns the new version."""
        return self._publish([weight_forms.Update(None, {})])
