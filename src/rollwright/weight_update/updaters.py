"""Updaters: the older interface by which weights reach workers; existing programs subclass them.

New programs use :class:`~rollwright.weight_update.WeightSyncScheme`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from rollwright.weight_update.forms import tensordict_of

Worker = int | torch.device


class Pushes(Protocol):
    """The collector that an updater is registered in, as it needs it."""

    def push_to_workers(self, weights: Any, worker_ids: Sequence[Worker] | None) -> int:
        """Publish weights to workers, without asking the updater again; returns the version."""


class WeightUpdaterBase(ABC):
    """Sends weights to the places where policies act.

    A collector that is given one calls :meth:`push_weights` in its ``update_policy_weights_``. That asks, in this
    order: :meth:`_get_server_weights` where no weights were passed, :meth:`_maybe_map_weights`, and for each worker
    :meth:`_skip_update` and :meth:`_sync_weights_with_worker`; then it calls the hooks. Subclasses define how.

    Example:
        >>> class Counts(WeightUpdaterBase):
        ...     pushed = 0
        ...     def _sync_weights_with_worker(self, *, worker_id=None, server_weights):
        ...         self.pushed += 1
        ...     def all_worker_ids(self):
        ...         return [0, 1]
        >>> updater = Counts()
        >>> updater.push_weights({"weight": torch.zeros(1)})
        >>> updater.pushed
        2
    """

    _collector_ref: weakref.ref[Any] | None = None
    _hooks: list[Callable[[], None]] | None = None

    @classmethod
    def from_policy(cls, policy: nn.Module) -> WeightUpdaterBase | None:
        """An updater for a policy, where the class knows how to make one."""
        return None

    def init(self, *args: Any, **kwargs: Any) -> None:  # noqa: B027 - may be left out
        """Called with the arguments of the collector's ``init_updater``."""

    def register_collector(self, collector: Any) -> None:
        """Called by the collector that is given this updater.

        Raises:
            RuntimeError: another collector has it.
        """
        held = self.collector
        if held is not None and held is not collector:
            raise RuntimeError("register_collector: this updater belongs to another collector. Make one for each.")
        self._collector_ref = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The collector that this updater is registered in, or None."""
        return None if self._collector_ref is None else self._collector_ref()

    @property
    def post_hooks(self) -> list[Callable[[], None]]:
        """Called after each update."""
        if self._hooks is None:
            self._hooks = []
        return self._hooks

    def register_post_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` after each update."""
        self.post_hooks.append(hook)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Send weights to workers, and call the hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a dictionary; None: those of :meth:`_get_server_weights`.
            worker_ids: an index or a device, or several of them; None: :meth:`all_worker_ids`.

        Raises:
            ValueError: there are no weights.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        for hook in self.post_hooks:
            hook()

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if weights is None:
            raise ValueError(
                f"{type(self).__name__}: no weights were passed, and there is no server to ask. Pass some."
            )
        weights = self._maybe_map_weights(weights)
        if worker_ids is None:
            worker_ids = self.all_worker_ids()
        elif isinstance(worker_ids, int | str | torch.device):
            worker_ids = [worker_ids]
        if worker_ids is None:
            self._sync_weights_with_worker(server_weights=weights)
            return
        for worker in worker_ids:
            if not self._skip_update(worker):
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)

    def _get_server_weights(self) -> Any:
        """The weights to send when none are passed; None where nobody knows."""
        return None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Weights in the form in which they are sent; by default a module becomes a TensorDict of its tensors."""
        if isinstance(policy_or_weights, nn.Module):
            return tensordict_of(policy_or_weights).data
        return policy_or_weights

    def _skip_update(self, worker_id: Worker) -> bool:
        """Whether a worker keeps what it has."""
        return False

    def all_worker_ids(self) -> Sequence[Worker] | None:
        """The workers, for weights that are sent to one after the other; None: to all in one go."""
        return None

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Worker | None = None, server_weights: Any) -> None:
        """Send weights to one worker.

        Args:
            worker_id: its index or device; left out where :meth:`all_worker_ids` is None: to all in one go.
            server_weights: in the form that :meth:`_maybe_map_weights` gives them.
        """


class LocalWeightsUpdaterBase(WeightUpdaterBase):
    """Updates a policy that acts in this process. Subclasses define where weights come from, and what they become."""

    def _sync_weights_with_worker(self, *, worker_id: Worker | None = None, server_weights: Any) -> None:
        """Copy the weights into the collector's policy."""
        _pusher(self).push_to_workers(server_weights, None)


class RemoteWeightsUpdaterBase(WeightUpdaterBase):
    """Updates policies that act in workers. Subclasses may define which workers there are, and what each gets."""

    def _sync_weights_with_worker(self, *, worker_id: Worker | None = None, server_weights: Any) -> None:
        """Publish the weights to the worker; to all if it is None."""
        _pusher(self).push_to_workers(server_weights, None if worker_id is None else [worker_id])


class VanillaWeightUpdater(LocalWeightsUpdaterBase):
    """Copies weights into a TensorDict of those of a policy in this process.

    Args:
        weight_getter: is called for the weights when none are passed.
        policy_weights: those of the policy; None: the collector's policy takes them.

    Example:
        >>> from torch import nn
        >>> policy, trained = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> updater = VanillaWeightUpdater.from_policy(policy)
        >>> updater.push_weights(trained)
        >>> torch.equal(policy.weight, trained.weight)
        True
    """

    def __init__(
        self,
        *,
        weight_getter: Callable[[], Any] | None = None,
        policy_weights: TensorDictBase | None = None,
    ) -> None:
        self.weight_getter, self.policy_weights = weight_getter, policy_weights

    @classmethod
    def from_policy(cls, policy: nn.Module) -> VanillaWeightUpdater:
        """An updater for a policy."""
        return cls(policy_weights=tensordict_of(policy))

    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    def _sync_weights_with_worker(self, *, worker_id: Worker | None = None, server_weights: Any) -> None:
        if self.policy_weights is None:
            super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)
        else:
            _copy_into(self.policy_weights, server_weights)


class MultiProcessedWeightUpdater(RemoteWeightsUpdaterBase):
    """Publishes weights to the workers of a collector.

    Workers read what is published, whole, between two steps; no tensor of theirs is written from here.

    Args:
        get_server_weights: is called for the weights when none are passed.
        policy_weights: TensorDicts by worker or device, which follow what was sent to it; None: none do.
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], Any] | None = None,
        policy_weights: Mapping[Any, TensorDictBase] | None = None,
    ) -> None:
        self.get_server_weights = get_server_weights
        self.policy_weights = dict(policy_weights or {})

    def all_worker_ids(self) -> Sequence[Worker] | None:
        """Those that ``policy_weights`` names; None (all) where it names none."""
        return list(self.policy_weights) or super().all_worker_ids()

    def _get_server_weights(self) -> Any:
        return None if self.get_server_weights is None else self.get_server_weights()

    def _sync_weights_with_worker(self, *, worker_id: Worker | None = None, server_weights: Any) -> None:
        if worker_id in self.policy_weights:
            _copy_into(self.policy_weights[worker_id], server_weights)
        if self.collector is not None or worker_id not in self.policy_weights:
            super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)


class RemoteModuleWeightUpdater(RemoteWeightsUpdaterBase):
    """Publishes weights that are passed, and knows no others: for workers that make their policies themselves."""


class vLLMUpdater(RemoteModuleWeightUpdater):
    """Gives the engines of a collector, such as those of vLLM, the weights that are passed.

    Args:
        master_address, master_port, model_metadata, vllm_tp_size: for programs that name them; the engine knows how
            weights reach its processes, and checks their names and shapes.
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: Any = None,
        vllm_tp_size: int | None = None,
    ) -> None:
        super().__init__()


class vLLMUpdaterV2(RemoteModuleWeightUpdater):
    """Gives an engine the weights that are passed; through a collector, where it is registered in one.

    Args:
        vllm_engine: has ``update_weights(weights)``.
    """

    def __init__(self, vllm_engine: Any) -> None:
        if not hasattr(vllm_engine, "update_weights"):
            raise TypeError(
                f"vllm_engine: expected an engine with update_weights(), got {type(vllm_engine).__name__}. Pass an "
                "AsyncVLLM."
            )
        self.vllm_engine = vllm_engine

    def _sync_weights_with_worker(self, *, worker_id: Worker | None = None, server_weights: Any) -> None:
        if self.collector is None:
            self.vllm_engine.update_weights(server_weights)
        else:
            super()._sync_weights_with_worker(worker_id=worker_id, server_weights=server_weights)


def check_updater(name: str, updater: Any) -> Any:
    """Check a ``weight_updater``, and return it; what a function makes is checked when it is made.

    Raises:
        TypeError: it is neither an updater nor a function that makes one.
    """
    if updater is None or isinstance(updater, WeightUpdaterBase) or callable(updater):
        return updater
    raise TypeError(
        f"{name}: expected a WeightUpdaterBase, or a function that makes one, got {type(updater).__name__}: "
        f"{updater!r}."
    )


def _pusher(updater: WeightUpdaterBase) -> Pushes:
    collector = updater.collector
    if not hasattr(collector, "push_to_workers"):
        raise RuntimeError(
            f"{type(updater).__name__}: no collector to send weights to. Pass it to one as weight_updater=."
        )
    return cast(Pushes, collector)


def _copy_into(mine: TensorDictBase, weights: Any) -> None:
    if not isinstance(weights, TensorDictBase):
        weights = TensorDict(dict(weights))
    if not any("." in key for key in mine.keys()):  # noqa: SIM118 - a TensorDict iterates over its first dimension
        weights = weights.unflatten_keys(".")
    with torch.no_grad():
        mine.data.update_(weights.data)
