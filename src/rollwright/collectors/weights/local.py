"""LocalWeights: weights of a policy that acts in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rollwright.collectors.delivery.background import Background
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.collectors.weights.receiving import CollectorWeights
from rollwright.collectors.weights.targets import WeightTargets
from rollwright.collectors.weights.updates import parse_update, prepare, snapshot
from rollwright.weight_update.feed import HasModels
from rollwright.weight_update.forms import unsaved_buffers
from rollwright.weight_update.policy_weights import weights_of

__all__ = ["LocalWeights"]


class LocalWeights(CollectorWeights):
    """Applies updates from the next batch on; while a thread collects, from its next step on.

    Args:
        collector: has the models, by id.
        rollout: has the policy.
        background: the thread, if there is one.
        worker_idx: gives the index of the collector among its siblings.
    """

    def __init__(
        self, collector: HasModels, rollout: Rollout, background: Background, worker_idx: Callable[[], int | None]
    ) -> None:
        super().__init__()
        self._collector, self._rollout, self._background = collector, rollout, background
        self._worker_idx = worker_idx

    @property
    def version(self) -> int:
        """See :class:`CollectorWeights`."""
        return self._background.version

    def apply(
        self,
        given: Any,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """See :class:`CollectorWeights`.

        Raises:
            RuntimeError: a thread collects, nothing was given, and there is no module in the policy to read again.
        """
        rollout, acting = self._rollout, self._rollout.acting
        self._background.raise_error()
        update = parse_update(
            given,
            weights_dict=weights_dict,
            model_id=model_id,
            worker_ids=worker_ids,
            own={self._worker_idx() or 0, rollout.devices.policy},
            fallback=acting.source,
        )
        if self._background.running:
            if not update and acting.has_no_weights:
                raise RuntimeError(
                    f"update_policy_weights_: found no module in the policy ({type(acting.policy).__name__}) whose "
                    "weights could be published to the thread of start(). Pass an nn.Module or a TensorDictModule "
                    "as policy, or call increment_version() to count an update of your own."
                )
            update = {name: snapshot(new, self._unsaved(name)) for name, new in update.items()}
        return self._background.publish({name: self._prepared(name, new) for name, new in update.items()})

    def _unsaved(self, name: str) -> set[str]:
        """Buffers of a model that a ``state_dict`` leaves out."""
        module = weights_of(self._collector.get_model(name))
        return set() if module is None else unsaved_buffers(module)

    def _prepared(self, name: str, new: Any) -> Callable[[], None]:
        acting = self._rollout.acting
        if name == "policy" and acting.engine is not None:
            return partial(acting.update_engine, new)
        return prepare(self._collector.get_model(name), new, name)

    def count_update(self) -> int:
        """See :class:`CollectorWeights`."""
        return self._background.publish({})

    @contextmanager
    def receiving(self) -> Iterator[HasModels]:
        """See :class:`CollectorWeights`."""
        with self._background.pause():
            yield WeightTargets(self._collector, self._rollout.acting, self._worker_idx())

    def pushed(self, before: int) -> int:
        """See :class:`CollectorWeights`; an updater that has not passed weights on has written them in place."""
        return self.version if self.version > before else self.count_update()

    def received(self, models: Sequence[str]) -> None:
        """See :class:`CollectorWeights`."""
        self._background.publish({})
