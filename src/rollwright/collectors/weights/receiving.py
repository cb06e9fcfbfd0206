"""WeightDoor: the ways by which weights come to a collector."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from rollwright.collectors.weights.updates import pick_weights
from rollwright.weight_update import WeightSyncScheme, WeightUpdaterBase
from rollwright.weight_update.feed import HasModels
from rollwright.weight_update.receiving import receive_all, register_receivers
from rollwright.weight_update.updaters import check_updater

__all__ = ["WeightDoor"]


class WeightDoor:
    """The part of a collector that takes weights, in every form, from whoever has them."""

    _updater: WeightUpdaterBase | None = None
    _receiver_schemes: dict[str, WeightSyncScheme] | None = None

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        policy_weights: Any = None,
        weights_dict: Mapping[str, Any] | None = None,
        model_id: str | None = None,
        worker_ids: Any = None,
    ) -> int:
        """Give the policy new weights.

        Args:
            policy_or_weights: a module, a ``state_dict``, a TensorDict or a nested dictionary of weights; or a
                dictionary from worker indices to any of these. Without any weights, the policy that was given at
                construction is read again (which matters when a copy of it acts elsewhere).
            weights: same, by name.
            policy: same, by name.
            policy_weights: same, by the name that older programs use.
            weights_dict: weights by the model that they are for: all are applied, or none.
            model_id: ``"policy"``, or a path from the collector such as ``"env.transform[0]"``.
            worker_ids: the workers (indices, or devices) to update; None for all.

        Returns:
            The version of the weights, one more than before.

        Raises:
            ValueError: arguments contradict one another, or weights do not fit; nothing was changed.
            TypeError: weights of an unknown form, or for something that has none.
        """
        given = pick_weights(policy_or_weights, weights, policy, policy_weights)
        if self._updater is not None and weights_dict is None and model_id in (None, "policy"):
            before = self._version_now()
            self._updater.push_weights(given, worker_ids)
            return max(before, self._version_now())
        return self._update_weights(given, weights_dict=weights_dict, model_id=model_id, worker_ids=worker_ids)

    @abstractmethod
    def _update_weights(
        self, given: Any, *, weights_dict: Mapping[str, Any] | None, model_id: str | None, worker_ids: Any
    ) -> int:
        """Apply an update, in this collector or in its workers; returns its version."""

    @abstractmethod
    def _version_now(self) -> int:
        """Number of updates so far."""

    def push_to_workers(self, weights: Any, worker_ids: Sequence[Any] | None) -> int:
        """For weight updaters: publish weights to workers without asking the updater again; returns the version."""
        return self._update_weights(weights, weights_dict=None, model_id=None, worker_ids=worker_ids)

    def _take_updater(self, updater: Any) -> None:
        """Use an updater of the user's, or one that a function makes.

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
        made.register_collector(self)
        self._updater = made

    @property
    def weight_updater(self) -> WeightUpdaterBase | None:
        """The updater that the collector was given, or None."""
        return self._updater

    def init_updater(self, *args: Any, **kwargs: Any) -> None:
        """Pass arguments to the weight updater's ``init``; without an updater, do nothing."""
        if self._updater is not None:
            self._updater.init(*args, **kwargs)

    # The receiving end ------------------------------------------------------------------------

    def register_scheme_receiver(
        self, weight_recv_schemes: dict[str, WeightSyncScheme], *, synchronize_weights: bool = True
    ) -> None:
        """Take weights from schemes whose senders are elsewhere; see :meth:`receive_weights`.

        Args:
            weight_recv_schemes: by model.
            synchronize_weights: wait for the first weights of each, and take them.

        Raises:
            TypeError: one is no scheme.
            TimeoutError: a sender has sent nothing.
        """
        with self._not_acting():
            self._receiver_schemes = register_receivers(
                self._receiving_end(), weight_recv_schemes, synchronize_weights=synchronize_weights
            )
            if synchronize_weights:
                self._received(list(self._receiver_schemes))

    def receive_weights(self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None) -> None:
        """Take weights: those that schemes have brought (:meth:`register_scheme_receiver`), or those that are passed.

        Raises:
            ValueError: weights were passed, and schemes are registered.
        """
        given = pick_weights(policy_or_weights, weights, policy)
        if self._receiver_schemes is None:
            self.update_policy_weights_(given)
        elif given is not None:
            raise ValueError(
                f"receive_weights: got weights, and schemes bring those of {', '.join(self._receiver_schemes)}. Call "
                "it without arguments."
            )
        else:
            with self._not_acting():
                if new := receive_all(self._receiver_schemes):
                    self._received(new)

    def _not_acting(self) -> AbstractContextManager[None]:
        """Inside the ``with`` block, no model of this process acts in another thread."""
        return nullcontext()

    def _receiving_end(self) -> HasModels:
        """What has the models that schemes write into."""
        return cast(HasModels, self)

    @abstractmethod
    def _received(self, models: Sequence[str]) -> None:
        """Schemes have brought new weights for models."""
