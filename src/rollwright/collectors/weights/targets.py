"""WeightTargets: where published weights go: into modules, and to the engine of the policy."""

from __future__ import annotations

from typing import Any

from rollwright.collectors.rollout.policy import ActingPolicy
from rollwright.weight_update.feed import HasModels, StateReceiver
from rollwright.weight_update.forms import State

__all__ = ["WeightTargets"]


class WeightTargets:
    """The models of a collector, for what receives weights; an engine takes whole states, between two tokens.

    Args:
        collector: has the models, by id.
        acting: the policy, perhaps with an engine.
        worker_idx: which of the receivers of a scheme this is.
    """

    def __init__(self, collector: HasModels, acting: ActingPolicy, worker_idx: int | None = None) -> None:
        self._collector, self._acting, self._worker_idx = collector, acting, worker_idx

    def get_model(self, model_id: str) -> Any:
        """Where the weights of a model go."""
        if model_id == "policy" and self._acting.engine is not None:
            return _EngineWeights(self._acting)
        return self._collector.get_model(model_id)


class _EngineWeights(StateReceiver):
    """In place of the module of a policy with an engine."""

    def __init__(self, acting: ActingPolicy) -> None:
        self._acting = acting

    def receive(self, state: State) -> None:
        """See :class:`StateReceiver`."""
        self._acting.update_engine(state)
