"""CollectorWeights: weights that a collector receives, in every form and from every source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rollwright.collectors.weights.updates import pick_weights
from rollwright.weight_update import WeightSyncScheme, WeightUpdaterBase
from rollwright.weight_update.feed import HasModels
from rollwright.weight_update.receiving import receive_all, register_receivers
from rollwright.weight_update.updaters import check_updater

__all__ = ["CollectorWeights"]


class CollectorWeights(ABC):
    """Takes updates of weights; subclasses apply them here, or publish them to workers.

    Attributes:
        updater: of the user, or None.
        receiver_schemes: by model; None: there are none.
    """

    def __init__(self) -> None:
        self.updater: WeightUpdaterBase | None = None
        self.receiver_schemes: dict[str, WeightSyncScheme] | None = None

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of updates so far."""

    @abstractmethod
    def apply(
        self,
        given: Any,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """Apply an update, without asking the updater; returns its version."""

    @abstractmethod
    def count_update(self) -> int:
        """Count an update that the user has made; returns the new version."""

    @abstractmethod
    def receiving(self) -> AbstractContextManager[HasModels]:
        """What schemes write into; inside the ``with`` block, no model of this process acts in another thread."""

    @abstractmethod
    def received(self, models: Sequence[str]) -> None:
        """Schemes have brought new weights for models."""

    def pushed(self, before: int) -> int:
        """The updater has pushed weights; returns their version.

        Args:
            before: the version before.
        """
        return max(before, self.version)

    def update(
        self, given: Any, *, weights_dict: Mapping[str, Any] | None, model_id: str | None, worker_ids: Any
    ) -> int:
        """Apply an update, through the updater if there is one; returns the version."""
        if self.updater is not None and weights_dict is None and model_id in (None, "policy"):
            before = self.version
            self.updater.push_weights(given, worker_ids)
            return self.pushed(before)
        return self.apply(given, weights_dict=weights_dict, model_id=model_id, worker_ids=worker_ids)

    def use_updater(self, updater: Any, collector: Any) -> None:
        """Use an updater of the user's, or one that a function makes.

        Args:
            updater: of the user; None: none.
            collector: which it is to be registered in.

        Raises:
            TypeError: it is none.
        """
        if updater is None:
            return
        check_updater(updater)
        made = updater if isinstance(updater, WeightUpdaterBase) else updater()
        if not isinstance(made, WeightUpdaterBase):
            raise TypeError(
                f"weight_updater: expected a function that makes a WeightUpdaterBase, and it made {made!r}. Return an "
                "updater, or pass one."
            )
        made.register_collector(collector)
        self.updater = made

    def register_schemes(self, schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool) -> None:
        """Take weights from schemes whose senders are elsewhere."""
        with self.receiving() as end:
            self.receiver_schemes = register_receivers(end, schemes, synchronize_weights=synchronize_weights)
            brought = [model_id for model_id, scheme in self.receiver_schemes.items() if scheme.sends]
            if synchronize_weights and brought:
                self.received(brought)

    def receive(self, policy_or_weights: Any, weights: Any, policy: Any) -> None:
        """Take weights: those that schemes have brought, or those that are passed.

        Raises:
            ValueError: weights were passed, and schemes are registered.
        """
        given = pick_weights(policy_or_weights, weights, policy)
        if self.receiver_schemes is None:
            self.update(given, weights_dict=None, model_id=None, worker_ids=None)
        elif given is not None:
            raise ValueError(
                f"receive_weights: got weights, and schemes bring those of {', '.join(self.receiver_schemes)}. Call "
                "it without arguments."
            )
        else:
            with self.receiving():
                if new := receive_all(self.receiver_schemes):
                    self.received(new)
